"""Which quantization a checkpoint has, and which of its layers.

A checkpoint says so in ``quantization_config`` of config.json, in hf_quant_config.json, or in both; and it says which
layers it left alone by a list of patterns. Read one pattern otherwise than the engine does, and a layer is sliced as
packed 4-bit data that holds bf16. So the engine's rules are followed (vLLM 0.32, ``ModelOptQuantConfigBase``), what
they do not cover is refused by name, and :mod:`weightcache.daemon.parameters` compares the outcome with the tensors.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from weightcache.wire import reasons

__all__ = ["NONE", "NVFP4", "NVFP4_WEIGHTS", "SUPPORTED", "Quantization", "is_ignored", "parse"]

NONE = "none"
NVFP4 = "NVFP4"
NVFP4_WEIGHTS = "W4A16_NVFP4"
SUPPORTED = "unquantized, or quant_method modelopt with quant_algo NVFP4 or W4A16_NVFP4 and group_size 16"
GROUP_SIZE = 16

_CONFIG = "config.json"
_LEGACY = "hf_quant_config.json"


@dataclass(frozen=True)
class Quantization:
    """``name``: ``none`` or ``modelopt``. ``algorithm``: empty, ``NVFP4`` or ``W4A16_NVFP4`` (no input scales).
    ``kv_cache``: empty or ``fp8``. ``ignore``: patterns of modules left unquantized. ``config``: the untouched source.
    """

    name: str = NONE
    algorithm: str = ""
    kv_cache: str = ""
    ignore: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None


def parse(config: Mapping[str, Any], legacy: Mapping[str, Any] | None) -> Quantization:
    """The quantization from config.json and, if there is one, hf_quant_config.json. Pure.

    Raises Refusal ``UnsupportedQuantization`` (file, field, value, what is supported) or ``CheckpointInvalid`` (the
    two files contradict each other).
    """
    inline = config.get("quantization_config")
    if inline is not None and not isinstance(inline, Mapping):
        _refuse(_CONFIG, "quantization_config", inline)
    found = [_parse_one(_CONFIG, inline)] if inline else []
    if legacy is not None:
        found.append(_parse_one(_LEGACY, legacy))
    if not found:
        return Quantization()
    if len(found) == 2:
        _refuse_contradiction(*found)
    return found[0]


def _parse_one(file: str, source: Mapping[str, Any]) -> Quantization:
    method = source.get("quant_method", "modelopt" if file == _LEGACY else "")
    if not (isinstance(method, str) and method.lower() in ("modelopt", "modelopt_fp4")):
        _refuse(file, "quant_method", method)
    nested = source.get("quantization")
    fields: Mapping[str, Any]
    if isinstance(nested, Mapping):
        fields, ignore_field = nested, "exclude_modules"
        kv_cache = _kv_cache_algorithm(file, nested.get("kv_cache_quant_algo"))
    else:
        fields, ignore_field = source, "ignore"
        kv_cache = _kv_cache_scheme(file, source.get("kv_cache_scheme"))
    algorithm = fields.get("quant_algo")
    if not (isinstance(algorithm, str) and algorithm.upper() in (NVFP4, NVFP4_WEIGHTS)):
        _refuse(file, "quant_algo", algorithm)
    if (size := fields.get("group_size", GROUP_SIZE)) is not None and size != GROUP_SIZE:
        _refuse(file, "group_size", size)
    ignore = fields.get(ignore_field) or []
    if not (isinstance(ignore, list) and all(isinstance(pattern, str) for pattern in ignore)):
        _refuse(file, ignore_field, ignore)
    name = NVFP4_WEIGHTS if _is_weight_only(source) else algorithm.upper()
    return Quantization("modelopt", name, kv_cache, tuple(ignore), source)


def _is_weight_only(source: Mapping[str, Any]) -> bool:
    """Whether every group leaves activations alone: then ``NVFP4`` has no input scales (as vLLM decides it)."""
    groups = source.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return False
    return all(isinstance(group, Mapping) and group.get("input_activations") is None for group in groups.values())


def _kv_cache_algorithm(file: str, value: Any) -> str:
    if value in (None, ""):
        return ""
    if not (isinstance(value, str) and value.upper() == "FP8"):
        _refuse(file, "kv_cache_quant_algo", value)
    return "fp8"


def _kv_cache_scheme(file: str, value: Any) -> str:
    if value is None:
        return ""
    if not (isinstance(value, Mapping) and value.get("type") == "float" and value.get("num_bits") == 8):
        _refuse(file, "kv_cache_scheme", value)
    return "fp8"


def _refuse(file: str, field: str, value: Any) -> NoReturn:
    later = " (compressed-tensors is not read yet)" if value == "compressed-tensors" else ""
    raise reasons.Refusal(
        reasons.Reason.UnsupportedQuantization,
        f"{file}: {field} is {value!r:.200}{later}; supported: {SUPPORTED}, with an FP8 KV cache or none",
    )


def _refuse_contradiction(inline: Quantization, legacy: Quantization) -> None:
    for field in ("algorithm", "kv_cache"):
        left, right = getattr(inline, field), getattr(legacy, field)
        if left != right and not (field == "algorithm" and inline.algorithm == NVFP4_WEIGHTS):
            raise reasons.Refusal(
                reasons.Reason.CheckpointInvalid,
                f"{_CONFIG} says {field} {left or 'none'}, {_LEGACY} says {right or 'none'}: make them equal",
            )


def is_ignored(quantization: Quantization, module: str, parts: Sequence[str]) -> bool | None:
    """Whether the engine leaves a module unquantized; None when its parts disagree, which no engine can hold. Pure.

    ``module``: the engine's name (``...qkv_proj``), ``parts``: the checkpoint's (``...q_proj`` and so on; for experts,
    none). Rules, in order: exact names (a fused module by all of its parts, experts by any pattern below them);
    substrings; wildcards, where ``x*`` means ``x`` and ``x.*``.
    """
    patterns = _expand(quantization.ignore)
    if not parts:
        exact: bool | None = any(module in pattern for pattern in patterns if "experts" in pattern)
    elif module in patterns:
        exact = True
    else:
        hits = {part in patterns for part in parts}
        exact = hits.pop() if len(hits) == 1 else None
    if exact is not False:
        return exact
    return any((pattern != module and pattern in module) or fnmatch.fnmatch(module, pattern) for pattern in patterns)


def _expand(patterns: Sequence[str]) -> list[str]:
    """``x*`` becomes ``x`` and ``x.*`` (``ModelOptQuantConfigBase.apply_vllm_mapper``)."""
    found: list[str] = []
    for pattern in patterns:
        if len(pattern) >= 2 and pattern[-1] == "*" and pattern[-2] != ".":
            found += [pattern[:-1], pattern[:-1] + ".*"]
        else:
            found.append(pattern)
    return found
