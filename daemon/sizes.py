"""The sizes that config.json states, checked once, so that nothing behind them multiplies a string or a negative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from weightcache.daemon import architectures
from weightcache.wire import configs, reasons

__all__ = ["Sizes", "read_sizes"]

_LIMIT = 2**31


class Sizes(dict[str, Any]):
    """Sizes and switches by name. Asking for one that config.json lacks is a Refusal ``CheckpointInvalid``."""

    def __missing__(self, name: str) -> NoReturn:
        raise reasons.Refusal(reasons.Reason.CheckpointInvalid, f"config.json: {name} is missing")


def read_sizes(config: Mapping[str, Any], architecture: architectures.Architecture) -> Sizes:
    """The values of config.json that this architecture's tables name, and :data:`architectures.PRODUCTS`. Pure.

    Absent ones are left out: whether they are needed depends on the others. Raises Refusal ``CheckpointInvalid`` with
    the field and its value.
    """
    resolved = configs.resolve(config)
    resolved.setdefault("num_experts", 0)
    resolved.setdefault("decoder_sparse_step", 1)
    resolved.setdefault("mlp_only_layers", [])
    counts, switches = _named(architecture)
    sizes = Sizes()
    for name in sorted(counts & resolved.keys()):
        value, least = resolved[name], int(name != "num_experts")
        if type(value) is not int or not least <= value < _LIMIT:
            _refuse(name, value, f"a whole number from {least}")
        sizes[name] = value
    for name in sorted(switches & resolved.keys()):
        if not isinstance(resolved[name], bool):
            _refuse(name, resolved[name], "true or false")
        sizes[name] = resolved[name]
    layers = resolved["mlp_only_layers"]
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        _refuse("mlp_only_layers", layers, "a list of layer numbers")
    sizes["mlp_only_layers"] = frozenset(layers)
    for name, (left, right) in architectures.PRODUCTS.items():
        sizes[name] = sizes[left] * sizes[right]
    return sizes


def _named(architecture: architectures.Architecture) -> tuple[set[str], set[str]]:
    """The fields that the tables name: counts, switches."""
    modules = (*architecture.layer, *architecture.dense, *architecture.sparse, *architecture.outside)
    counts = {"num_hidden_layers", "num_experts", "decoder_sparse_step"}
    counts.update(*architectures.PRODUCTS.values())
    counts.update(module.columns for module in modules)
    counts.update(name for module in modules for part in module.parts for name in (part.rows, part.heads))
    return counts - {""}, {module.bias for module in modules if module.bias} | {"tie_word_embeddings"}


def _refuse(name: str, value: Any, wanted: str) -> NoReturn:
    raise reasons.Refusal(
        reasons.Reason.CheckpointInvalid, f"config.json: {name} is {value!r:.100}, {wanted} is expected"
    )
