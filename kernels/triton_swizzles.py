"""The block-scale swizzle on a GPU, with the row gather before it in the same pass.

Four scales are one 32-bit word, so a tile of 128 rows x 4 columns is 128 words, and swizzling is a transposition of
words: word j of a tile comes from row j % 4 * 32 + j // 4. The rows are *read* in that order, which costs nothing, and
what is left is a plain ``tl.trans``. On an H200 a prototype with 64 words a block and 16 warps reached 99.5 % of a copy
of the same bytes (2 GiB of scales), a three-dimensional ``tl.permute`` 64 %, a byte-wise ``torch.permute`` 16 %.
Gathering rows first changes only which rows are read. Reference: :mod:`weightcache.kernels.swizzles`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton gives annotations of kernels a meaning of its own.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightcache.kernels import triton_launches

__all__ = ["swizzle_block_scales"]


@triton.jit
def _swizzle(  # noqa: PLR0913 - a kernel takes what it takes
    source,
    index,
    out,
    num_source_rows,
    row_units,
    num_row_tiles,
    num_column_tiles,
    HAS_INDEX: tl.constexpr,  # noqa: N803 - constants are upper case in Triton
    WORDS: tl.constexpr,  # noqa: N803
    UNIT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One tile of 128 rows of one matrix of the stack, BLOCK words of each row."""
    row_elements = row_units * UNIT
    tile = tl.program_id(0)
    matrix = tile // num_row_tiles
    word = tl.arange(0, 128)
    row = tile % num_row_tiles * 128 + word % 4 * 32 + word // 4
    if HAS_INDEX:  # noqa: SIM108 - decided when compiling: only one branch may exist
        row = tl.load(index + row)
    else:
        row = tl.where(row < num_source_rows, row, -1)
    begin = (matrix.to(tl.int64) * num_source_rows + row) * row_elements
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = (row >= 0)[:, None]
    if WORDS:
        place = source + begin[:, None] + column[None, :]
        values = tl.load(place, mask=held & (column < row_elements)[None, :], other=0)
    else:
        values = tl.zeros((128, BLOCK), dtype=tl.int32)
        for byte in tl.static_range(4):
            at = column * 4 + byte
            place = source + begin[:, None] + at[None, :]
            found = tl.load(place, mask=held & (at < row_elements)[None, :], other=0)
            values |= found.to(tl.int32) << (8 * byte)
    to = (tile.to(tl.int64) * num_column_tiles + column)[:, None] * 128 + word[None, :]
    tl.store(out + to, tl.trans(values), mask=(column < num_column_tiles)[:, None])


def swizzle_block_scales(
    source: torch.Tensor, index: torch.Tensor | None, out: torch.Tensor, *, block: int = 64, warps: int = 0
) -> None:
    """Rows of ``source`` ``[..., R, C]`` by ``index`` (int32 beside it, -1: zeros; None: all), swizzled into ``out``.

    ``out``: ``[..., R', C']``, all of it written. Both one-byte and contiguous. ``block``: words of a row a program
    takes at most; ``warps``: 0 chooses for the block.
    """
    source, target = triton_launches.stacked(source), triton_launches.stacked(out).view(torch.uint8).view(torch.int32)
    stack, num_rows, num_words = target.shape
    wide = triton_launches.words(source, torch.int32)
    given = source.view(torch.uint8) if wide is None else wide
    block = triton_launches.power_of_two(num_words, 4, block)
    unit = triton_launches.unit(given.shape[2])
    grid = (stack * num_rows // 128, triton.cdiv(num_words, block))
    with triton_launches.device_of(source):
        _swizzle[grid](
            given,
            index,
            target,
            source.shape[1],
            given.shape[2] // unit,
            num_rows // 128,
            num_words,
            HAS_INDEX=index is not None,
            WORDS=wide is not None,
            UNIT=unit,
            BLOCK=block,
            num_warps=warps or max(block // 4, 4),
        )
