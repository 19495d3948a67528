"""Carrying out moves: the one place that chooses between a Triton kernel and the plain reference.

On a GPU the bulk of preparation is moving bytes, and plain torch moves them at a sixth of what the memory can do; on a
CPU there is no Triton. Every other module asks here: a CUDA tensor goes to Triton, any other to the reference, and both
give the same bytes (``tests/unit/test_triton.py``, ``tests/gpu/test_kernels.py``). Triton is imported only when it is
used. ``TRITON_INTERPRET=1`` sends CPU tensors through Triton's interpreter: for tests.
"""

from __future__ import annotations

import os

import torch

from weightcache.kernels import marlin, moves, shuffles, swizzles

__all__ = ["move", "placed"]

_Order = moves.Order
_DTYPES = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32}


def move(
    source: torch.Tensor, step: moves.Move, *, factor: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``[..., R, C]`` of a one-byte dtype -> ``[..., *step.shape]`` of ``step.dtype``. Pure.

    ``factor``: what Marlin's block scales are raised by. ``out``: a contiguous tensor to write instead of a new one; a
    move that changes nothing returns the source itself without it. Raises ValueError when source or ``out`` do not fit.
    """
    _check(source, step, out)
    if step.order is _Order.RowByRow and step.rows is None and step.num_columns == source.shape[-1]:
        return placed(source, out)
    if _is_for_triton(source):
        return _by_triton(source, step, factor, out)
    return _by_reference(source, step, factor, out)


def placed(tensor: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The tensor itself, or ``out`` with its values. Raises ValueError for another shape or dtype."""
    if out is None:
        return tensor
    if (out.shape, out.dtype) != (tensor.shape, tensor.dtype):
        raise ValueError(f"{tensor.dtype} {tuple(tensor.shape)} does not fit into {out.dtype} {tuple(out.shape)}")
    return out.copy_(tensor)


def _check(source: torch.Tensor, step: moves.Move, out: torch.Tensor | None) -> None:
    if source.element_size() != 1 or source.dim() < 2:
        raise ValueError(f"a matrix of one-byte elements is moved, not {source.dtype} {tuple(source.shape)}")
    *lead, rows, columns = source.shape
    wanted_rows = step.num_rows if step.rows is None else step.rows.num_source
    if rows != wanted_rows or columns > step.num_columns:
        raise ValueError(f"{rows} x {columns} bytes are given to a move of {wanted_rows} x {step.num_columns}")
    shape, dtype = (*lead, *step.shape), _DTYPES[step.dtype]
    if out is not None and (tuple(out.shape) != shape or out.dtype != dtype or not out.is_contiguous()):
        raise ValueError(f"the result is {dtype} {shape} and contiguous, not {out.dtype} {tuple(out.shape)}")


def _is_for_triton(source: torch.Tensor) -> bool:
    return source.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _by_triton(source: torch.Tensor, step: moves.Move, factor: float, out: torch.Tensor | None) -> torch.Tensor:
    from weightcache.kernels import triton_gathers, triton_launches, triton_marlin, triton_swizzles

    source = source.contiguous()
    if out is None:
        out = source.new_empty(*source.shape[:-2], *step.shape, dtype=_DTYPES[step.dtype])
    length = step.shape[0] if step.order is _Order.Swizzled else step.num_rows
    index = None if step.rows is None else triton_launches.index_on(source.device, step.rows, length)
    if step.order is _Order.RowByRow:
        triton_gathers.gather_rows(source, index, out)
    elif step.order is _Order.Swizzled:
        triton_swizzles.swizzle_block_scales(source, index, out)
    elif step.order is _Order.MarlinWeights:
        triton_marlin.repack_weights(source, index, out)
    else:
        triton_marlin.scales(source, index, triton_launches.scale_table(source.device, factor), out)
    return out


def _by_reference(source: torch.Tensor, step: moves.Move, factor: float, out: torch.Tensor | None) -> torch.Tensor:
    last = step.order is _Order.RowByRow
    if step.rows is not None or step.num_columns != source.shape[-1]:
        rows = step.rows or moves.Rows(moves.RowOrder.Stored, step.num_rows, step.num_rows)
        source = shuffles.gather_rows(source, shuffles.index_of(rows), step.num_columns, out if last else None)
    if step.order is _Order.Swizzled:
        return swizzles.swizzle_block_scales(source, out)
    if step.order is _Order.MarlinWeights:
        return marlin.repack_weights(source, out)
    return source if last else marlin.scales(source, factor, out)
