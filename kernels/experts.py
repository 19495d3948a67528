"""NVFP4 mixture-of-experts layers as the selected backend reads them.

Each MoE kernel wants the experts' rows in its own order, its own padding and its own scalars. One function a backend
takes the loaded stack of this rank's experts and gives the finished one, with the padded sizes that the kernel object
must be told. Sources: vLLM 0.32 ``fused_moe/oracle/nvfp4.py``, ``flashinfer_fp4_moe.py``, ``marlin_utils_fp4.py``.

Common to all: w13_weight_scale_2 is w1's column (the engine ignores w3's); and where a backend multiplies the weight's
and the activation's global scale into one alpha, the product is made here, once: the result is called
``w13_weight_scale_2`` by the engine and holds g1_alphas, which is why a prepared layer must never be prepared again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from weightcache.kernels import linears, marlin, shuffles, swizzles

__all__ = ["BACKENDS", "LoadedExperts", "PreparedExperts", "prepare", "requirement_not_met"]


class LoadedExperts(NamedTuple):
    """One rank's experts after loading; E local experts, X all experts of the layer.

    ``w13_weight`` uint8 [E, 2I, H/2] rows [gate; up]; ``w2_weight`` uint8 [E, H, I/2]; scales e4m3 [E, 2I, H/16] and
    [E, H, I/16]; ``w13_weight_scale_2`` fp32 [E, 2]; ``w2_weight_scale_2`` fp32 [E]; ``w13_input_scale`` fp32 [X, 2];
    ``w2_input_scale`` fp32 [X]; ``local``: the global ids of the E local experts, in order.
    """

    w13_weight: torch.Tensor
    w13_weight_scale: torch.Tensor
    w13_weight_scale_2: torch.Tensor
    w13_input_scale: torch.Tensor
    w2_weight: torch.Tensor
    w2_weight_scale: torch.Tensor
    w2_weight_scale_2: torch.Tensor
    w2_input_scale: torch.Tensor
    local: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, I (of this rank) and H."""
        return self.w2_weight.shape[0], 2 * self.w2_weight.shape[2], self.w2_weight.shape[1]


class PreparedExperts(NamedTuple):
    """Finished tensors by parameter name, and what a kernel object is told: padded I and H."""

    tensors: dict[str, torch.Tensor]
    intermediate_size: int
    hidden_size: int


class _Stack(NamedTuple):
    """The four big tensors on their way."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


def prepare(backend: str, layer: LoadedExperts, dtype: torch.dtype) -> PreparedExperts:
    """The finished experts. ``dtype``: the model's activation dtype. Pure.

    Raises KeyError for a backend that is not in :data:`BACKENDS`, ValueError for sizes it cannot take.
    """
    fault = requirement_not_met(backend, *layer.sizes[1:])
    if fault:
        raise ValueError(fault)
    return BACKENDS[backend](layer, dtype)


def requirement_not_met(backend: str, intermediate: int, hidden: int) -> str:
    """Why a backend cannot take experts of rank-local I and H, naming the multiple; empty if it can. Pure."""
    if intermediate % 16 or hidden % 16:
        return f"NVFP4 needs I and H multiples of 16, the layer has I {intermediate} and H {hidden}"
    if backend in ("FLASHINFER_CUTLASS", "VLLM_CUTLASS") and 2 * intermediate % 128:
        return f"{backend} needs I a multiple of 64, the layer has I {intermediate} on each rank"
    if backend == "MARLIN" and hidden % 64:
        return f"MARLIN needs H a multiple of 64, the layer has H {hidden}"
    return ""


def _flashinfer_trtllm(layer: LoadedExperts, _: torch.dtype) -> PreparedExperts:
    """[up; gate] interleaved, then the TRT-LLM shuffle; H padded to 256, I to 64; scales gathered alike, swizzled."""
    stack, intermediate, hidden = _padded(_up_first(_stack(layer)), intermediate=64, hidden=256)
    rows = 2 * intermediate
    gemm1 = shuffles.gated_rows(rows)[shuffles.shuffled_rows(rows)]
    gemm2 = shuffles.shuffled_rows(hidden)
    ready = _Stack(
        shuffles.gather_rows(stack.w13, gemm1),
        swizzles.swizzle_block_scales(shuffles.gather_rows(stack.w13_scale, gemm1)),
        shuffles.gather_rows(stack.w2, gemm2),
        swizzles.swizzle_block_scales(shuffles.gather_rows(stack.w2_scale, gemm2)),
    )
    scalars = _global_scalars(layer)
    scalars["g1_scale_c"] = scalars["w13_weight_scale_2"] * (1.0 / scalars["w2_input_scale"])
    return PreparedExperts({**_named(ready), **scalars}, intermediate, hidden)


def _flashinfer_cutedsl(layer: LoadedExperts, _: torch.dtype) -> PreparedExperts:
    """[up; gate] interleaved in groups of 64 rows; I padded to 64, H to 256; scales alike, swizzled."""
    stack, intermediate, hidden = _padded(_up_first(_stack(layer)), intermediate=64, hidden=256)
    order = shuffles.interleaved_rows(2 * intermediate)
    ready = _Stack(
        shuffles.gather_rows(stack.w13, order),
        swizzles.swizzle_block_scales(shuffles.gather_rows(stack.w13_scale, order)),
        stack.w2,
        swizzles.swizzle_block_scales(stack.w2_scale),
    )
    return PreparedExperts({**_named(ready), **_global_scalars(layer)}, intermediate, hidden)


def _flashinfer_cutlass(layer: LoadedExperts, _: torch.dtype) -> PreparedExperts:
    """[up; gate]; scales swizzled; no padding."""
    return _cutlass(_up_first(_stack(layer)), layer, _global_scalars(layer))


def _vllm_cutlass(layer: LoadedExperts, _: torch.dtype) -> PreparedExperts:
    """Rows as loaded; scales swizzled; input scales per local expert instead of one for all."""
    local = torch.tensor(layer.local)
    a13 = layer.w13_input_scale[local].max(dim=1).values.to(torch.float32)
    return _cutlass(_stack(layer), layer, _alphas(layer, a13, layer.w2_input_scale[local].to(torch.float32)))


def _cutlass(stack: _Stack, layer: LoadedExperts, scalars: dict[str, torch.Tensor]) -> PreparedExperts:
    ready = stack._replace(
        w13_scale=swizzles.swizzle_block_scales(stack.w13_scale),
        w2_scale=swizzles.swizzle_block_scales(stack.w2_scale),
    )
    return PreparedExperts({**_named(ready), **scalars}, *layer.sizes[1:])


def _marlin(layer: LoadedExperts, dtype: torch.dtype) -> PreparedExperts:
    """Codes and scales in Marlin's order per expert; one scale factor for all local experts of a matrix."""
    _, intermediate, hidden = layer.sizes
    multiple = 64 if hidden % 128 == 0 else 128
    stack, intermediate, hidden = _padded(_stack(layer), intermediate=multiple, hidden=1)
    factors = [marlin.scale_factor(scales, dtype) for scales in (stack.w13_scale, stack.w2_scale)]
    tensors = {
        "w13_weight": marlin.repack_weights(stack.w13),
        "w13_weight_scale": marlin.scales(stack.w13_scale, dtype, factors[0]),
        "w13_weight_scale_2": marlin.global_scale(layer.w13_weight_scale_2[:, 0], dtype, factors[0]),
        "w2_weight": marlin.repack_weights(stack.w2),
        "w2_weight_scale": marlin.scales(stack.w2_scale, dtype, factors[1]),
        "w2_weight_scale_2": marlin.global_scale(layer.w2_weight_scale_2, dtype, factors[1]),
    }
    return PreparedExperts(tensors, intermediate, hidden)


def _emulation(layer: LoadedExperts, _: torch.dtype) -> PreparedExperts:
    """Everything as loaded; the input scales of the local experts become one inverse, 0-D."""
    local = torch.tensor(layer.local)
    scalars = {
        "w13_weight_scale_2": layer.w13_weight_scale_2[:, 0].contiguous(),
        "w2_weight_scale_2": layer.w2_weight_scale_2,
        "w13_input_scale": 1.0 / layer.w13_input_scale[local].max().to(torch.float32),
        "w2_input_scale": 1.0 / layer.w2_input_scale[local].max().to(torch.float32),
    }
    return PreparedExperts({**_named(_stack(layer)), **scalars}, *layer.sizes[1:])


def _stack(layer: LoadedExperts) -> _Stack:
    return _Stack(layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale)


def _up_first(stack: _Stack) -> _Stack:
    """[gate; up] -> [up; gate]."""
    return stack._replace(w13=_swap_halves(stack.w13), w13_scale=_swap_halves(stack.w13_scale))


def _swap_halves(matrix: torch.Tensor) -> torch.Tensor:
    half = matrix.shape[1] // 2
    raw = matrix.view(torch.uint8)
    return torch.cat((raw[:, half:], raw[:, :half]), dim=1).view(matrix.dtype)


def _padded(stack: _Stack, *, intermediate: int, hidden: int) -> tuple[_Stack, int, int]:
    """Zero-pad I (each half of w13 by itself) and H to multiples; returns the stack and the padded I and H."""
    old_i, old_h = 2 * stack.w2.shape[2], stack.w2.shape[1]
    new_i, new_h = swizzles.round_up(old_i, intermediate), swizzles.round_up(old_h, hidden)
    return (
        _Stack(
            _pad_halves(stack.w13, new_i, new_h // 2),
            _pad_halves(stack.w13_scale, new_i, new_h // 16),
            linears.pad(stack.w2, new_h, new_i // 2),
            linears.pad(stack.w2_scale, new_h, new_i // 16),
        ),
        new_i,
        new_h,
    )


def _pad_halves(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    experts, both, old_columns = matrix.shape
    halves = matrix.reshape(experts, 2, both // 2, old_columns)
    return linears.pad(halves, rows, columns).reshape(experts, 2 * rows, columns)


def _global_scalars(layer: LoadedExperts) -> dict[str, torch.Tensor]:
    """One input scale for all experts of the layer, also those of other ranks."""
    experts = layer.sizes[0]
    a13 = layer.w13_input_scale.max().to(torch.float32).repeat(experts)
    a2 = layer.w2_input_scale.max().to(torch.float32).repeat(experts)
    return _alphas(layer, a13, a2)


def _alphas(layer: LoadedExperts, a13: torch.Tensor, a2: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "w13_weight_scale_2": layer.w13_weight_scale_2[:, 0] * a13,
        "w2_weight_scale_2": layer.w2_weight_scale_2 * a2,
        "w13_input_scale": a13,
        "w2_input_scale": a2,
    }


def _named(stack: _Stack) -> dict[str, torch.Tensor]:
    return {
        "w13_weight": stack.w13,
        "w13_weight_scale": stack.w13_scale,
        "w2_weight": stack.w2,
        "w2_weight_scale": stack.w2_scale,
    }


#: Backend, by the engine's name -> the one function that prepares for it.
BACKENDS: dict[str, Callable[[LoadedExperts, torch.dtype], PreparedExperts]] = {
    "FLASHINFER_TRTLLM": _flashinfer_trtllm,
    "FLASHINFER_CUTEDSL": _flashinfer_cutedsl,
    "FLASHINFER_CUTLASS": _flashinfer_cutlass,
    "VLLM_CUTLASS": _vllm_cutlass,
    "MARLIN": _marlin,
    "EMULATION": _emulation,
}
