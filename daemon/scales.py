"""Scales, which are four bytes each and as many as there are expert matrices.

A quantized mixture of experts has tens of thousands of float32 scalars (37,000 in Qwen3-30B-A3B). Copied one by one
into GPU memory they would take longer than the weights. They pass through a table in host memory anyway, where they
are checked; so they are copied from there, each tensor at once, after the check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from weightcache.arenas import memory
from weightcache.daemon import plans, reads

__all__ = ["Run", "put", "runs", "set_apart"]


class Run(NamedTuple):
    """Scales that lie together in the table and in the arena: bytes."""

    table_offset: int
    offset: int
    size_bytes: int


def set_apart(units: Sequence[reads.Read]) -> list[reads.Read]:
    """The same units without the segments that :func:`put` copies: those that go to the table of scales. Pure."""
    return [_without_scales(unit) if unit.scales else unit for unit in units]


def _without_scales(unit: reads.Read) -> reads.Read:
    # Tensors do not overlap in a file, so what begins where a scale begins is that scale.
    taken = {part.source_offset for part in unit.scales}
    kept = tuple(segment for segment in unit.segments if segment.source_offset not in taken)
    return msgspec.structs.replace(unit, segments=kept)


def runs(plan: plans.RankPlan) -> Iterator[Run]:
    """Where the table's scales belong in the arena, joined where both sides are adjacent. Pure."""
    table_offset = 0
    begin, offset, size_bytes = 0, -1, 0
    for tensor in plan.tensors:
        for piece in tensor.pieces if tensor.is_scale else ():
            if size_bytes and offset + size_bytes == piece.offset:
                size_bytes += reads.SCALE_BYTES
            else:
                if size_bytes:
                    yield Run(begin, offset, size_bytes)
                begin, offset, size_bytes = table_offset, piece.offset, reads.SCALE_BYTES
            table_offset += reads.SCALE_BYTES
    if size_bytes:
        yield Run(begin, offset, size_bytes)


def put(arena: memory.Arena, plan: plans.RankPlan, table: bytearray) -> None:
    """Copy the table's scales to their places in the arena."""
    with memoryview(table) as view:
        for run in runs(plan):
            with view[run.table_offset : run.table_offset + run.size_bytes] as part:
                arena.put(run.offset, part)
