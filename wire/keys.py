"""The key: everything that decides which bytes are in an arena, and in which layout.

Equal keys mean interchangeable weights. A key that leaves something out lets an engine map weights that are fluent
garbage (expert placement), another fine-tune (content), or a layout its kernel does not read (backend). So the key
holds values as they took effect, never the word ``auto``, and a mismatch names every field with both values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from weightcache.wire import digests

__all__ = ["LAYOUT_VERSION", "Difference", "Key", "Position", "differences", "format_experts", "key_digest"]

#: Version of the bytes that the ``Native`` preparer writes. Raise it whenever the same checkpoint and settings would
#: give other bytes, another packing, or other metadata.
LAYOUT_VERSION = 1


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank stands in its group. ``experts``: the global expert ids it holds, as :func:`format_experts`."""

    tensor_rank: int = 0
    pipeline_rank: int = 0
    data_rank: int = 0
    expert_rank: int = 0
    experts: str = ""


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's key. Strings are empty, sizes 1, where a field has no meaning (no experts, no KV scales).

    ``content``: checkpoint digest (32 hex), empty in a request that proves sameness by evidence instead.
    ``data_size`` and ``position.data_rank`` stay 1 and 0 unless experts are spread over data-parallel ranks: replicas
    hold equal weights. ``linear_layout`` and ``moe_layout`` name the bytes that the *selected* kernel reads.
    ``libraries``: versions that shaped the bytes (``Native``: none but the layout version).
    ``options``: switches that change a layout (per-token activation scales, LoRA).
    ``capability``: compute capability such as ``9.0``, or empty where the layout does not depend on the device.
    """

    layout_version: int
    content: str
    config: str
    architecture: str
    dtype: str
    quantization: str
    quantization_config: str
    tensor_size: int = 1
    pipeline_size: int = 1
    data_size: int = 1
    expert_parallel: bool = False
    expert_placement: str = ""
    linear_layout: str
    moe_layout: str = ""
    kv_cache_dtype: str = ""
    preparer: str
    libraries: dict[str, str] = {}
    options: dict[str, str] = {}
    capability: str = ""
    role: str = "target"
    position: Position = Position()


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One field in which two keys differ: what the engine wants, what the daemon holds, how to make them equal."""

    field: str
    wanted: str
    held: str
    advice: str


_ADVICE = {
    "layout_version": "run the same weightcache version at both ends",
    "content": "point both ends at the same checkpoint files",
    "config": "the model's sizes differ: point both ends at the same config.json and overrides",
    "architecture": "point both ends at the same model",
    "dtype": "start the engine with the daemon's dtype (vLLM: --dtype)",
    "quantization": "use the same quantization method at both ends",
    "quantization_config": "point both ends at the same quantization_config",
    "tensor_size": "make parallelism.tensor and the engine's tensor-parallel size equal",
    "pipeline_size": "make parallelism.pipeline and the engine's pipeline-parallel size equal",
    "data_size": "make parallelism.data and the engine's data-parallel size equal",
    "expert_parallel": "set parallelism.expert.enabled as the engine's --enable-expert-parallel",
    "expert_placement": "set parallelism.expert.placement as the placement that the engine uses",
    "linear_layout": "select a linear backend that reads the same layout at both ends",
    "moe_layout": "select a MoE backend that reads the same layout at both ends",
    "kv_cache_dtype": "use the same KV-cache dtype at both ends",
    "preparer": "use the preparer that the engine's plugin expects",
    "libraries": "use the engine's own versions in the loader",
    "options": "start the engine with the daemon's options",
    "capability": "the weights were prepared for another GPU generation",
    "role": "a draft model and its target have caches of their own",
}


def format_experts(experts: Iterable[int]) -> str:
    """Expert ids as text: runs as ``0-3``, others joined by commas, in the order they lie in memory. Pure."""
    runs: list[list[int]] = []
    for expert in experts:
        if runs and expert == runs[-1][1] + 1:
            runs[-1][1] = expert
        else:
            runs.append([expert, expert])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def key_digest(key: Key) -> str:
    """32 hex characters that name a key in logs and status. Pure."""
    return digests.digest_of_value(key)


def differences(wanted: Key, held: Key, *, same_group: bool = False) -> list[Difference]:
    """Every field in which the keys differ; empty means interchangeable. Pure.

    ``same_group`` leaves the rank's position out: for claims, which are about a whole group. The content field is
    compared only when ``wanted`` carries one; otherwise evidence has to decide (:mod:`weightcache.wire.evidence`).
    """
    pairs = list(_flat(wanted, held, same_group))
    return [
        Difference(field, _text(left), _text(right), _ADVICE.get(field.split(".", 1)[0], "the ranks do not line up"))
        for field, left, right in pairs
        if left != right and not (field == "content" and not wanted.content)
    ]


def _flat(wanted: Key, held: Key, same_group: bool) -> Iterable[tuple[str, Any, Any]]:
    for field in Key.__struct_fields__:
        left, right = getattr(wanted, field), getattr(held, field)
        if field == "position":
            if not same_group:
                for name in Position.__struct_fields__:
                    yield f"position.{name}", getattr(left, name), getattr(right, name)
        elif isinstance(left, Mapping):
            for name in sorted({*left, *right}):
                yield f"{field}.{name}", left.get(name), right.get(name)
        else:
            yield field, left, right


def _text(value: object) -> str:
    return "(none)" if value is None or value == "" else str(value)
