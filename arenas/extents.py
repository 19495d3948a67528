"""Byte ranges of an arena, and how they are cut for digests.

Loader, verifier and engine must judge exactly the same bytes in exactly the same pieces, on a CPU or a GPU; one of
them rounding differently would call sound weights damaged. So the rule is written once, here, and is pure:
tensors start at multiples of 256 bytes, their tail is zero up to the next multiple, and a digest covers that padded
extent in pieces of 4 MiB (``wire.digests``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from weightcache.wire import digests

__all__ = [
    "ALIGNMENT_BYTES",
    "PIECE_BYTES",
    "Extent",
    "Rows",
    "check_parts",
    "check_rows",
    "check_within",
    "combined",
    "padded",
    "pieces",
]

ALIGNMENT_BYTES = 256
PIECE_BYTES = digests.BLOCK_BYTES


class Extent(NamedTuple):
    """``size_bytes`` bytes from ``offset`` on, both in bytes."""

    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The offset of the first byte behind it."""
        return self.offset + self.size_bytes


class Rows(Protocol):
    """Rows to copy: ``num_rows`` of ``row_bytes``, ``row_stride`` bytes apart from ``source_offset`` of a buffer on;
    packed at ``offset`` of an arena."""

    @property
    def source_offset(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def row_stride(self) -> int: ...
    @property
    def offset(self) -> int: ...


def padded(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """``size_bytes`` rounded up to a multiple of ``alignment_bytes``. Pure."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def pieces(extents: Iterable[Extent], piece_bytes: int = PIECE_BYTES) -> list[Extent]:
    """Every extent cut into pieces of ``piece_bytes`` (the last of each may be shorter), in order. Pure.

    An empty extent has no piece.
    """
    return [
        Extent(begin, min(piece_bytes, extent.end - begin))
        for extent in extents
        for begin in range(extent.offset, extent.end, piece_bytes)
    ]


def combined(extents: Sequence[Extent], piece_digests: Iterable[bytes], piece_bytes: int = PIECE_BYTES) -> list[bytes]:
    """One digest (16 bytes) per extent from the digests of ``pieces(extents, piece_bytes)``, in order. Pure."""
    remaining: Iterator[bytes] = iter(piece_digests)
    result = []
    for extent in extents:
        num_pieces = -(-extent.size_bytes // piece_bytes)
        result.append(digests.combine([next(remaining) for _ in range(num_pieces)]))
    return result


def check_within(extents: Iterable[Extent], size_bytes: int, alignment_bytes: int = 1) -> None:
    """Raise ValueError at the first extent that leaves ``size_bytes`` or breaks the alignment. Pure."""
    for extent in extents:
        if extent.offset < 0 or extent.size_bytes < 0 or extent.end > size_bytes:
            raise ValueError(f"bytes [{extent.offset}, {extent.end}) are outside of {size_bytes} bytes")
        if extent.offset % alignment_bytes or extent.size_bytes % alignment_bytes:
            raise ValueError(f"{extent} is not aligned to {alignment_bytes} bytes")


def check_rows(source_bytes: int, num_rows: int, row_bytes: int, source_stride: int) -> None:
    """Raise ValueError unless ``num_rows`` rows that start ``source_stride`` bytes apart lie in the source. Pure."""
    if num_rows < 0 or row_bytes < 0 or source_stride < row_bytes:
        raise ValueError(f"{num_rows} rows of {row_bytes} bytes, {source_stride} apart, are not rows")
    needed = (num_rows - 1) * source_stride + row_bytes if num_rows else 0
    if needed > source_bytes:
        raise ValueError(
            f"{num_rows} rows of {row_bytes} bytes, {source_stride} apart, need {needed} bytes of source, "
            f"which has {source_bytes}"
        )


def check_parts(parts: Iterable[Rows], source_bytes: int, size_bytes: int) -> None:
    """Raise ValueError at the first part that leaves ``source_bytes`` of buffer or ``size_bytes`` of arena. Pure."""
    for part in parts:
        rows, row_bytes, stride = part.num_rows, part.row_bytes, part.row_stride
        if (
            min(rows, row_bytes, part.source_offset, part.offset) < 0
            or (rows > 1 and stride < row_bytes)
            or part.source_offset + max(0, rows - 1) * stride + row_bytes > source_bytes
            or part.offset + rows * row_bytes > size_bytes
        ):
            raise ValueError(f"{part} does not fit {source_bytes} bytes of source and an arena of {size_bytes}")
