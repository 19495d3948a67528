"""What a loader has to do, one buffer at a time.

A loader should be dull: read these bytes, copy those rows, digest these blocks. This module turns a rank's plan into
such units. A unit never crosses a multiple of the buffer size, and buffers are whole blocks, so that a block to be
digested always lies whole in one unit. Everything here is pure.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from weightcache.daemon import pieces, plans
from weightcache.wire import digests, reasons

__all__ = ["SCALE_BYTES", "OwnedBlock", "Read", "ScaleSegment", "build_reads", "refuse_invalid_scales", "scale_sources"]

SCALE_BYTES = 4


class OwnedBlock(NamedTuple):
    """A block of the file to digest: ``size_bytes`` from ``source_offset`` of the buffer on."""

    block: int
    source_offset: int
    size_bytes: int


class ScaleSegment(NamedTuple):
    """Bytes of the buffer to copy into the table of scales as well, at byte ``table_offset``."""

    source_offset: int
    size_bytes: int
    table_offset: int


class Read(msgspec.Struct, frozen=True, gc=False):
    """One unit: read ``size_bytes`` of ``file`` from byte ``begin`` on, copy the segments, digest the blocks."""

    file: str
    begin: int
    size_bytes: int
    segments: tuple[pieces.Segment, ...]
    scales: tuple[ScaleSegment, ...]
    blocks: tuple[OwnedBlock, ...]


class _Unit(NamedTuple):
    span: pieces.Span
    segments: list[pieces.Segment]
    scales: list[ScaleSegment]
    blocks: list[OwnedBlock]


def build_reads(plan: plans.RankPlan, buffer_bytes: int) -> list[Read]:
    """The units of a rank, in the order of files and bytes. ``buffer_bytes``: of one buffer; only whole blocks count.

    Raises Refusal ``SettingsInvalid`` when a buffer cannot hold a block of 4 MiB.
    """
    window = buffer_bytes // digests.BLOCK_BYTES * digests.BLOCK_BYTES
    if not window:
        raise reasons.Refusal(
            reasons.Reason.SettingsInvalid,
            f"a reader buffer of {buffer_bytes} bytes cannot hold a block of {digests.BLOCK_BYTES}: give more buffer "
            f"memory or fewer threads",
        )
    units = _units(plan, window)
    for file, found in units.items():
        begins = [unit.span.begin for unit in found]
        for block in plan.blocks:
            if block.file == file:
                unit = found[bisect.bisect_right(begins, block.begin) - 1]
                unit.blocks.append(OwnedBlock(block.block, block.begin - unit.span.begin, block.size_bytes))
    _fill(plan, units)
    return [
        Read(
            file=file,
            begin=unit.span.begin,
            size_bytes=unit.span.end - unit.span.begin,
            segments=tuple(unit.segments),
            scales=tuple(unit.scales),
            blocks=tuple(unit.blocks),
        )
        for file, found in units.items()
        for unit in found
    ]


def _units(plan: plans.RankPlan, window: int) -> dict[str, list[_Unit]]:
    spans = pieces.spans_of(piece for tensor in plan.tensors for piece in tensor.pieces)
    for block in plan.blocks:
        spans.setdefault(block.file, []).append(pieces.Span(block.begin, block.begin + block.size_bytes))
    return {
        file: [_Unit(span, [], [], []) for whole in pieces.merge(spans[file]) for span in _windows(whole, window)]
        for file in sorted(spans)
    }


def _windows(span: pieces.Span, window: int) -> Iterator[pieces.Span]:
    begin = span.begin
    while begin < span.end:
        end = min(span.end, (begin // window + 1) * window)
        yield pieces.Span(begin, end)
        begin = end


def _fill(plan: plans.RankPlan, units: dict[str, list[_Unit]]) -> None:
    begins = {file: [unit.span.begin for unit in found] for file, found in units.items()}
    table_offset = 0
    for tensor in plan.tensors:
        for piece in tensor.pieces:
            found = units[piece.file]
            index = bisect.bisect_right(begins[piece.file], piece.begin) - 1
            end = piece.end
            while index < len(found) and found[index].span.begin < end:
                unit = found[index]
                segments = list(pieces.clip(piece, *unit.span))
                unit.segments.extend(segments)
                if tensor.is_scale:
                    unit.scales.extend(
                        ScaleSegment(part.source_offset, part.row_bytes, table_offset + part.offset - piece.offset)
                        for part in segments
                    )
                index += 1
            table_offset += SCALE_BYTES if tensor.is_scale else 0


def scale_sources(plan: plans.RankPlan) -> list[str]:
    """The checkpoint's names of the scales, in the order of the table (float32, little-endian, 4 bytes each)."""
    return [piece.source for tensor in plan.tensors if tensor.is_scale for piece in tensor.pieces]


def refuse_invalid_scales(plan: plans.RankPlan, table: bytes | bytearray | memoryview) -> None:
    """Refuse scales that are not finite and positive: a kernel divides by them. Pure.

    Raises Refusal ``ScaleInvalid`` with the names and values of the first ones.
    """
    sources = scale_sources(plan)
    values = struct.unpack(f"<{len(sources)}f", table)
    bad = [pair for pair in zip(sources, values, strict=True) if not (math.isfinite(pair[1]) and pair[1] > 0)]
    if bad:
        listed = ", ".join(f"{name} is {value}" for name, value in bad[:5])
        raise reasons.Refusal(
            reasons.Reason.ScaleInvalid, f"{len(bad)} of {len(values)} scales are not finite and positive: {listed}"
        )
