"""Marlin's layout on a GPU: weights and block scales, padding included, in one pass each.

A word of the result takes four bytes, two from each of two rows. A program reads 64 rows, so that every word it writes
is whole, and 8 bytes of a row at a time: a k-tile. The words of a run are *computed* in the order in which they are
stored, each from two 8-byte loads; four words share them, but that costs cache reads where exchanging words between
lanes would cost more. What is left is a plain ``tl.trans``, as in :mod:`weightcache.kernels.triton_swizzles`. Block
scales are looked up in a table of 256 bytes that the reference makes. Reference: :mod:`weightcache.kernels.marlin`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton gives annotations of kernels a meaning of its own.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weightcache.kernels import triton_launches

__all__ = ["repack_weights", "scales"]


@triton.jit
def _repack(  # noqa: PLR0913 - a kernel takes what it takes
    source,
    index,
    out,
    num_source_rows,
    source_units,
    num_runs,
    num_tiles,
    HAS_INDEX: tl.constexpr,  # noqa: N803 - constants are upper case in Triton
    UNIT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One run of 64 rows n of one matrix of the stack, BLOCK k-tiles of 16 codes."""
    num_source_tiles = source_units * UNIT
    run = tl.program_id(0)
    matrix = run // num_runs
    word = tl.arange(0, 128)
    row = run % num_runs * 64 + word % 4 * 16 + word // 16
    if HAS_INDEX:
        low_row, high_row = tl.load(index + row), tl.load(index + row + 8)
    else:
        low_row, high_row = row, row + 8
    tile = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (tile < num_source_tiles)[None, :]
    begin = source + matrix.to(tl.int64) * num_source_rows * num_source_tiles + tile[None, :]
    low_place = begin + low_row.to(tl.int64)[:, None] * num_source_tiles
    high_place = begin + high_row.to(tl.int64)[:, None] * num_source_tiles
    low = tl.load(low_place, mask=inside & (low_row >= 0)[:, None], other=0)
    high = tl.load(high_place, mask=inside & (high_row >= 0)[:, None], other=0)
    # Bytes p and p + 4 of both rows, in the order n, n (k + 8), n + 8, n + 8 (k + 8).
    shift = (word // 4 % 4 * 8)[:, None]
    codes = (low.to(tl.int32) >> shift) & 0xFF
    codes |= (((low >> 32).to(tl.int32) >> shift) & 0xFF) << 8
    codes |= ((high.to(tl.int32) >> shift) & 0xFF) << 16
    codes |= ((high >> 32).to(tl.int32) >> shift) << 24
    # Nibbles 0..7 to 0, 2, 4, 6, 1, 3, 5, 7: exchange 1 and 2 of each four, then the middle bytes.
    swap = (codes ^ (codes >> 4)) & 0x00F000F0
    codes ^= swap ^ (swap << 4)
    swap = (codes ^ (codes >> 8)) & 0x0000FF00
    codes ^= swap ^ (swap << 8)
    to = ((matrix.to(tl.int64) * num_tiles + tile) * num_runs + run % num_runs)[:, None] * 128 + word[None, :]
    tl.store(out + to, tl.trans(codes), mask=(tile < num_tiles)[:, None])


@triton.jit
def _scales(  # noqa: PLR0913
    source,
    index,
    table,
    out,
    num_source_rows,
    source_units,
    num_runs,
    num_groups,
    HAS_INDEX: tl.constexpr,  # noqa: N803
    UNIT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One run of 64 rows n of one matrix of the stack, BLOCK groups."""
    num_source_groups = source_units * UNIT
    run = tl.program_id(0)
    matrix = run // num_runs
    place = tl.arange(0, 64)
    ordered = place // 4 * 4 + place % 2 * 2 + place % 4 // 2
    row = run % num_runs * 64 + ordered // 8 + ordered % 8 * 8
    if HAS_INDEX:
        row = tl.load(index + row)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = (matrix.to(tl.int64) * num_source_rows + row) * num_source_groups
    held = (row >= 0)[:, None] & (group < num_source_groups)[None, :]
    found = tl.load(source + begin[:, None] + group[None, :], mask=held, other=0)
    values = tl.load(table + found.to(tl.int32))
    to = ((matrix.to(tl.int64) * num_groups + group) * num_runs + run % num_runs)[:, None] * 64 + place[None, :]
    tl.store(out + to, tl.trans(values), mask=(group < num_groups)[:, None])


def repack_weights(
    source: torch.Tensor, index: torch.Tensor | None, out: torch.Tensor, *, block: int = 32, warps: int = 8
) -> None:
    """Rows of ``source`` uint8 ``[..., R, C]`` by ``index`` (int32 beside it, -1: zeros; None: all) into ``out``.

    ``out``: int32 ``[..., K/16, 2 N]``, all of it written; K may be more than 2 C, the rest is zeros. ``block``:
    k-tiles a program takes. A source that does not start at a multiple of 8 bytes is copied. N is a multiple of 64.
    """
    source, out = triton_launches.stacked(source), triton_launches.stacked(out)
    given = triton_launches.words(source, torch.int64)
    given = triton_launches.words(source.clone(), torch.int64) if given is None else given
    if given is None:
        raise ValueError(f"Marlin takes K a multiple of 16, not {2 * source.shape[2]}")
    stack, num_tiles, width = out.shape
    num_runs = width // 128
    block = triton_launches.power_of_two(num_tiles, 4, block)
    unit = triton_launches.unit(given.shape[2])
    with triton_launches.device_of(source):
        _repack[(stack * num_runs, triton.cdiv(num_tiles, block))](
            given,
            index,
            out,
            given.shape[1],
            given.shape[2] // unit,
            num_runs,
            num_tiles,
            HAS_INDEX=index is not None,
            UNIT=unit,
            BLOCK=block,
            num_warps=warps,
        )


def scales(
    source: torch.Tensor,
    index: torch.Tensor | None,
    table: torch.Tensor,
    out: torch.Tensor,
    *,
    block: int = 64,
    warps: int = 4,
) -> None:
    """Rows of ``source`` ``[..., R, C]`` by ``index`` (int32 beside it, -1: zeros; None: all) into ``out``.

    ``out``: ``[..., C', N]``, all of it written. All one-byte and contiguous. ``table``: uint8 [256], what becomes of
    each byte; of 0: 0.
    """
    source, out = triton_launches.stacked(source).view(torch.uint8), triton_launches.stacked(out).view(torch.uint8)
    stack, num_groups, num_rows = out.shape
    block = triton_launches.power_of_two(num_groups, 4, block)
    unit = triton_launches.unit(source.shape[2])
    with triton_launches.device_of(source):
        _scales[(stack * num_rows // 64, triton.cdiv(num_groups, block))](
            source,
            index,
            table,
            out,
            source.shape[1],
            source.shape[2] // unit,
            num_rows // 64,
            num_groups,
            HAS_INDEX=index is not None,
            UNIT=unit,
            BLOCK=block,
            num_warps=warps,
        )
