"""Pieces: bytes of a file that lie together in an arena, and the arithmetic of cutting them.

A row-parallel matrix gives each rank a few hundred bytes of every row. Reading them row by row costs one system call
each; reading the rows whole costs bytes that are thrown away. So neighbouring needs are merged into spans, and what
was read is cut back into pieces, which may begin or end in the middle of a row. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

__all__ = ["GAP_BYTES", "Piece", "Segment", "Span", "clip", "merge", "spans_of"]

#: Needs at most this far apart are read as one. A page-cache read moves 128 KiB in about the time of a system call and
#: a seek of readahead; farther apart, the bytes between cost more than the call.
GAP_BYTES = 128 << 10


class Piece(msgspec.Struct, frozen=True, gc=False):
    """Bytes of one checkpoint tensor that lie together in the arena. ``begin``: absolute byte in ``file``;
    ``num_rows`` rows of ``row_bytes``, ``row_stride`` bytes apart in the file; ``offset``: byte in the arena.
    """

    source: str
    file: str
    begin: int
    row_bytes: int
    num_rows: int
    row_stride: int
    offset: int

    @property
    def end(self) -> int:
        """One past the last byte of the file that is needed."""
        return self.begin + (self.num_rows - 1) * self.row_stride + self.row_bytes


class Span(NamedTuple):
    """Consecutive bytes of a file."""

    begin: int
    end: int


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A part of a piece inside a buffer: rows from ``source_offset`` on, ``row_stride`` apart, go to ``offset``
    of the arena, one after the other.
    """

    source_offset: int
    num_rows: int
    row_bytes: int
    row_stride: int
    offset: int


def spans_of(pieces: Iterable[Piece]) -> dict[str, list[Span]]:
    """The bytes of each file that have to be read for ``pieces``, merged and in order."""
    needs: dict[str, list[tuple[int, int]]] = {}
    for piece in pieces:
        spans = needs.setdefault(piece.file, [])
        if piece.num_rows == 1 or piece.row_stride - piece.row_bytes <= GAP_BYTES:
            spans.append((piece.begin, piece.end))
        else:
            starts = range(piece.begin, piece.end, piece.row_stride)
            spans.extend((start, start + piece.row_bytes) for start in starts)
    return {file: merge(spans) for file, spans in needs.items()}


def merge(spans: Iterable[tuple[int, int]]) -> list[Span]:
    """Spans (begin, end) in order, joined where at most :data:`GAP_BYTES` lie between."""
    merged: list[Span] = []
    first = last = -1
    for begin, end in sorted(spans):
        if last >= 0 and begin - last <= GAP_BYTES:
            last = max(last, end)
            continue
        if last >= 0:
            merged.append(Span(first, last))
        first, last = begin, end
    if last >= 0:
        merged.append(Span(first, last))
    return merged


def clip(piece: Piece, begin: int, end: int) -> Iterator[Segment]:
    """The segments of a piece in bytes ``begin`` to ``end`` of its file, which start at 0 of a buffer.

    At most three: the rest of a row, whole rows, the beginning of a row.
    """
    row_bytes, stride = piece.row_bytes, piece.row_stride
    first = max(0, (begin - piece.begin - row_bytes) // stride + 1)
    last = min(piece.num_rows - 1, (end - piece.begin - 1) // stride)
    if first > last:
        return
    head = _row_part(piece, first, begin, end)
    if head.row_bytes < row_bytes:
        yield head
        first += 1
    tail = _row_part(piece, last, begin, end) if first <= last else None
    if tail is not None and tail.row_bytes < row_bytes:
        last -= 1
    else:
        tail = None
    if first <= last:
        start = piece.begin + first * stride - begin
        yield Segment(start, last - first + 1, row_bytes, stride, piece.offset + first * row_bytes)
    if tail is not None:
        yield tail


def _row_part(piece: Piece, row: int, begin: int, end: int) -> Segment:
    start = piece.begin + row * piece.row_stride
    low, high = max(start, begin), min(start + piece.row_bytes, end)
    offset = piece.offset + row * piece.row_bytes + low - start
    return Segment(low - begin, 1, high - low, high - low, offset)
