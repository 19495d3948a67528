"""NVFP4 linear layers as the selected kernel reads them.

What a checkpoint holds (packed codes, row-major block scales, a scalar scale a part) is not what a kernel multiplies
with: it wants padding, swizzled or permuted scales, and the scalars already multiplied together. The matrices are
moved as :mod:`weightcache.kernels.layouts` says, the scalars are computed here; the result has names and shapes of its
own, so that nothing can be prepared twice.

Scalars, common to all layouts (vLLM 0.32 ``KNvfp4Static``, ``KNvfp4Dynamic``, ``maybe_fuse_global_scales``): with p
fused parts (q, k, v or gate, up), weight_global_scale = max of weight_scale_2, input_global_scale = max of input_scale,
input_global_scale_inv its inverse, alpha their product; all 0-D fp32. Block scales are *not* rescaled when parts
differ: the engine does not. compressed-tensors stores the inverses: there the maximum is taken of the inverses, and
input_global_scale_inv is that maximum itself (``compressed_tensors_w4a4_nvfp4.py``); in bits it is not 1 / (1 / x).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from weightcache.kernels import backends, layouts, marlin, moving

__all__ = ["LoadedLinear", "prepare", "requirement_not_met"]

Prepared = dict[str, torch.Tensor]
_MULTIPLES = {row.layout: row.multiples for row in backends.LINEAR.values()}


class LoadedLinear(NamedTuple):
    """One layer after loading. ``weight`` uint8 [N, K/2]; ``weight_scale`` e4m3 [N, K/16]; ``weight_scale_2`` and
    ``input_scale`` fp32 [parts] (``input_scale`` None for W4A16); ``bias`` [N], if any. ``divisors``: both scalars are
    what compressed-tensors stores, to be divided by.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None = None
    divisors: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K."""
        return self.weight.shape[0], 2 * self.weight.shape[1]


def prepare(
    layout: str, layer: LoadedLinear, dtype: torch.dtype, into: Mapping[str, torch.Tensor] | None = None
) -> Prepared:
    """The finished tensors of a layer by parameter name. ``dtype``: the model's activation dtype. Pure.

    ``into``: contiguous tensors to write, by name; names it does not hold are made new, and what changes nothing is the
    loaded tensor itself. The sizes are those of :func:`weightcache.kernels.backends.linear_tensors`. Raises KeyError
    for an unknown layout, ValueError for sizes, dtype or scales that it cannot take.
    """
    fault = requirement_not_met(layout, *layer.sizes)
    if fault:
        raise ValueError(fault)
    into = into or {}
    prepared = _scalars(layer)
    factor = 1.0
    if layout == "marlin":
        factor = marlin.scale_factor(layer.weight_scale, dtype)
        prepared["weight_global_scale"] = marlin.global_scale(prepared["weight_global_scale"], dtype, factor)
    made = layouts.LINEAR[layout](*layer.sizes)
    if layer.bias is not None:
        bias = layer.bias
        prepared["bias"] = marlin.permute_bias(bias, made["weight"].num_rows) if layout == "marlin" else bias
    prepared = {name: moving.placed(tensor, into.get(name)) for name, tensor in prepared.items()}
    for name, source in (("weight", layer.weight), ("weight_scale", layer.weight_scale)):
        prepared[name] = moving.move(source, made[name], factor=factor, out=into.get(name))
    return prepared


def requirement_not_met(layout: str, n: int, k: int) -> str:
    """Why a layout cannot take a layer of N outputs and K inputs, naming size and multiple; empty if it can. Pure."""
    for name, size, multiple in zip("NK", (n, k), _MULTIPLES[layout], strict=True):
        if size % multiple:
            return f"layout {layout} needs {name} a multiple of {multiple}, the layer has {name} {size}"
    return ""


def _scalars(layer: LoadedLinear) -> Prepared:
    weight = layer.weight_scale_2.max().to(torch.float32)
    weight = 1.0 / weight if layer.divisors else weight
    if layer.input_scale is None:
        return {"weight_global_scale": weight}
    largest = layer.input_scale.max().to(torch.float32)
    inverse = 1.0 / largest
    scale, inverse = (inverse, largest) if layer.divisors else (largest, inverse)
    return {
        "weight_global_scale": weight,
        "input_global_scale": scale,
        "input_global_scale_inv": inverse,
        "alpha": scale * weight,
    }
