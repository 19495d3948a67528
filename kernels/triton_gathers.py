"""The row gather on a GPU: padding, swapping, interleaving and shuffling in one pass.

``torch.index_select`` over a stack needs an index of the whole stack or a call for each expert, and padding needs a
second copy. Here a program copies some rows, wherever they come from, 16 bytes a thread where the rows allow it; a row
without a source, and what lies beyond a source row's end, is zeros. Reference:
:func:`weightcache.kernels.shuffles.gather_rows`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton gives annotations of kernels a meaning of its own.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightcache.kernels import triton_launches

__all__ = ["gather_rows"]

_BLOCK_BYTES = 16 << 10


@triton.jit
def _gather(  # noqa: PLR0913 - a kernel takes what it takes
    source,
    index,
    out,
    num_source_rows,
    source_units,
    num_rows,
    row_units,
    total_rows,
    HAS_INDEX: tl.constexpr,  # noqa: N803 - constants are upper case in Triton
    UNIT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """ROWS rows of the result, counted over the whole stack, COLUMNS elements of each."""
    source_elements, row_elements = source_units * UNIT, row_units * UNIT
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = place < total_rows
    matrix, row = place // num_rows, place % num_rows
    if HAS_INDEX:
        row = tl.load(index + row, mask=inside, other=-1)
    else:
        row = tl.where(inside & (row < num_source_rows), row, -1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = (matrix.to(tl.int64) * num_source_rows + row) * source_elements
    held = (row >= 0)[:, None] & (column < source_elements)[None, :]
    values = tl.load(source + begin[:, None] + column[None, :], mask=held, other=0)
    to = place.to(tl.int64)[:, None] * row_elements + column[None, :]
    tl.store(out + to, values, mask=inside[:, None] & (column < row_elements)[None, :])


def gather_rows(
    source: torch.Tensor,
    index: torch.Tensor | None,
    out: torch.Tensor,
    *,
    block: int = _BLOCK_BYTES,
    warps: int = 8,
) -> None:
    """Rows of ``source`` ``[..., R, C]`` by ``index`` (int32 beside it, -1: zeros; None: all) into ``out``.

    ``out``: ``[..., R', C']``, all of it written. Both one-byte and contiguous. ``block``: bytes a program copies.
    """
    source, out = triton_launches.stacked(source), triton_launches.stacked(out)
    given, target = triton_launches.words(source, torch.int32), triton_launches.words(out, torch.int32)
    if given is None or target is None:
        given, target = source.view(torch.uint8), out.view(torch.uint8)
    stack, num_rows, row_elements = target.shape
    columns = _columns(row_elements)
    rows = max(block // (columns * target.element_size()), 1)
    unit = triton_launches.unit(given.shape[2], row_elements)
    grid = (triton.cdiv(stack * num_rows, rows), triton.cdiv(row_elements, columns))
    with triton_launches.device_of(source):
        _gather[grid](
            given,
            index,
            target,
            given.shape[1],
            given.shape[2] // unit,
            num_rows,
            row_elements // unit,
            stack * num_rows,
            HAS_INDEX=index is not None,
            UNIT=unit,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
        )


def _columns(row_elements: int) -> int:
    """Elements of a row that a program takes: a power of two that divides the row, if that is 32 or more. Pure."""
    divisor = row_elements & -row_elements
    return min(divisor, 1024) if divisor >= 32 else triton_launches.power_of_two(row_elements, 4, 1024)
