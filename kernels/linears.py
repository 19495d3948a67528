"""NVFP4 linear layers as the selected kernel reads them.

What a checkpoint holds (packed codes, row-major block scales, a scalar scale a part) is not what a kernel multiplies
with: it wants padding, swizzled or permuted scales, and the scalars already multiplied together. One function a
layout takes the loaded tensors and gives the finished ones; the result has names and shapes of its own, so that
nothing can be prepared twice.

Scalars, common to all layouts (vLLM 0.32 ``ModelOptNvFp4LinearMethod``): with p fused parts (q, k, v or gate, up),
weight_global_scale = max of weight_scale_2, input_global_scale = max of input_scale, input_global_scale_inv its
inverse, alpha their product; all 0-D fp32. Block scales are *not* rescaled when parts differ: the engine does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from weightcache.kernels import marlin, shuffles, swizzles

__all__ = ["LAYOUTS", "LoadedLinear", "prepare", "prepared_shapes", "requirement_not_met"]


class LoadedLinear(NamedTuple):
    """One layer after loading. ``weight`` uint8 [N, K/2]; ``weight_scale`` e4m3 [N, K/16]; ``weight_scale_2`` and
    ``input_scale`` fp32 [parts] (``input_scale`` None for W4A16)."""

    weight: torch.Tensor
    weight_scale: torch.Tensor
    weight_scale_2: torch.Tensor
    input_scale: torch.Tensor | None

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K."""
        return self.weight.shape[0], 2 * self.weight.shape[1]


Prepared = dict[str, torch.Tensor]


def prepare(layout: str, layer: LoadedLinear, dtype: torch.dtype) -> Prepared:
    """The finished tensors of a layer by parameter name. ``dtype``: the model's activation dtype. Pure.

    Raises KeyError for a layout that is not in :data:`LAYOUTS`, ValueError for sizes it cannot take.
    """
    fault = requirement_not_met(layout, *layer.sizes)
    if fault:
        raise ValueError(fault)
    return LAYOUTS[layout](layer, dtype)


def requirement_not_met(layout: str, n: int, k: int) -> str:
    """Why a layout cannot take a layer of N outputs and K inputs, naming size and multiple; empty if it can. Pure."""
    multiples = {"trtllm": (128, 64), "marlin": (1, 16), "padded_swizzled": (1, 16), "emulation": (1, 16)}[layout]
    for name, size, multiple in (("N", n, multiples[0]), ("K", k, multiples[1])):
        if size % multiple:
            return f"layout {layout} needs {name} a multiple of {multiple}, the layer has {name} {size}"
    return ""


def prepared_shapes(layout: str, n: int, k: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype (safetensors name) and shape of the two big tensors, from the sizes alone. Pure."""
    if layout == "padded_swizzled":
        weight = ("U8", (swizzles.round_up(n, 32), swizzles.round_up(k, 32) // 2))
        return {"weight": weight, "weight_scale": ("F8_E4M3", _swizzled(n, k))}
    if layout == "marlin":
        padded_n, padded_k = marlin.padded_linear(n, k)
        return {
            "weight": ("I32", (padded_k // 16, 2 * padded_n)),
            "weight_scale": ("F8_E4M3", (padded_k // 16, padded_n)),
        }
    return {"weight": ("U8", (n, k // 2)), "weight_scale": ("F8_E4M3", (n, k // 16))}


def _scalars(layer: LoadedLinear) -> Prepared:
    weight_global_scale = layer.weight_scale_2.max().to(torch.float32)
    if layer.input_scale is None:
        return {"weight_global_scale": weight_global_scale}
    input_global_scale = layer.input_scale.max().to(torch.float32)
    return {
        "weight_global_scale": weight_global_scale,
        "input_global_scale": input_global_scale,
        "input_global_scale_inv": 1.0 / input_global_scale,
        "alpha": input_global_scale * weight_global_scale,
    }


def _emulation(layer: LoadedLinear, _: torch.dtype) -> Prepared:
    return {"weight": layer.weight, "weight_scale": layer.weight_scale, **_scalars(layer)}


def _padded_swizzled(layer: LoadedLinear, _: torch.dtype) -> Prepared:
    """Weights zero-padded to [up(N, 32), up(K, 32) / 2]; scales swizzled from their unpadded form."""
    n, k = layer.sizes
    return {
        "weight": pad(layer.weight, swizzles.round_up(n, 32), swizzles.round_up(k, 32) // 2),
        "weight_scale": swizzles.swizzle_block_scales(layer.weight_scale),
        **_scalars(layer),
    }


def _trtllm(layer: LoadedLinear, _: torch.dtype) -> Prepared:
    """Rows of weights and scales by the TRT-LLM shuffle, scales then swizzled; no padding."""
    n, k = layer.sizes
    order = shuffles.shuffled_rows(n)
    scales = swizzles.swizzle_block_scales(shuffles.gather_rows(layer.weight_scale, order))
    return {
        "weight": shuffles.gather_rows(layer.weight, order),
        "weight_scale": scales.reshape(n, k // 16),
        **_scalars(layer),
    }


def _marlin(layer: LoadedLinear, dtype: torch.dtype) -> Prepared:
    """Codes and scales in Marlin's order; the global scale carries the exponents; no input scale is used."""
    n, k = layer.sizes
    padded_n, padded_k = marlin.padded_linear(n, k)
    scales = pad(layer.weight_scale, padded_n, padded_k // 16)
    factor = marlin.scale_factor(scales, dtype)
    prepared = _scalars(layer)
    prepared["weight_global_scale"] = marlin.global_scale(prepared["weight_global_scale"], dtype, factor)
    return {
        **prepared,
        "weight": marlin.repack_weights(pad(layer.weight, padded_n, padded_k // 2)),
        "weight_scale": marlin.scales(scales, dtype, factor),
    }


def pad(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``[..., R, C]`` -> ``[..., rows, columns]``, new elements zero (as bytes). Pure."""
    *lead, old_rows, old_columns = matrix.shape
    if (old_rows, old_columns) == (rows, columns):
        return matrix
    raw = matrix.view(torch.uint8)
    size = matrix.element_size()
    out = raw.new_zeros(*lead, rows, columns * size)
    out[..., :old_rows, : old_columns * size] = raw
    return out.view(matrix.dtype)


def _swizzled(n: int, k: int) -> tuple[int, int]:
    return swizzles.round_up(n, swizzles.TILE_ROWS), swizzles.round_up(k // 16, swizzles.TILE_COLUMNS)


#: Layout -> the one function that makes it.
LAYOUTS: dict[str, Callable[[LoadedLinear, torch.dtype], Prepared]] = {
    "emulation": _emulation,
    "padded_swizzled": _padded_swizzled,
    "trtllm": _trtllm,
    "marlin": _marlin,
}
