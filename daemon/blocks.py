"""Who digests which block of a checkpoint.

The content digest covers every byte of every file, but no rank needs every byte. Each 4 MiB block is therefore given to
one rank: to the one that reads most of it anyway, so that little is read twice; where several read as much (replicas,
or blocks that nobody needs), to the one with the least so far. Pure and deterministic, so that loaders that never
meet agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weightcache.daemon import pieces
from weightcache.wire import digests

__all__ = ["Block", "assign"]


class Block(NamedTuple):
    """Block number ``block`` of a checkpoint file: its bytes from ``begin`` on; the last one may be short."""

    file: str
    block: int
    begin: int
    size_bytes: int


def assign(
    sizes: Mapping[str, int], needs: Sequence[Mapping[str, Sequence[pieces.Span]]]
) -> tuple[tuple[Block, ...], ...]:
    """Every block of every file, each to one rank. ``sizes``: bytes by file; ``needs``: spans by file, for each rank.

    Result: for each rank its blocks, in the order of file names and bytes.
    """
    owned: list[list[Block]] = [[] for _ in needs]
    loads = [0] * len(needs)
    for file in sorted(sizes):
        covers = [_cover(rank.get(file, ()), sizes[file]) for rank in needs]
        for index in range(digests.num_blocks(sizes[file])):
            begin = index * digests.BLOCK_BYTES
            size_bytes = min(digests.BLOCK_BYTES, sizes[file] - begin)
            owner = min(range(len(needs)), key=lambda rank: (-covers[rank][index], loads[rank], rank))
            loads[owner] += size_bytes
            owned[owner].append(Block(file, index, begin, size_bytes))
    return tuple(tuple(blocks) for blocks in owned)


def _cover(spans: Sequence[pieces.Span], size_bytes: int) -> array[int]:
    """How many bytes of each block a rank reads anyway."""
    cover = array("q", bytes(8 * digests.num_blocks(size_bytes)))
    for begin, end in spans:
        for index in range(begin // digests.BLOCK_BYTES, -(-end // digests.BLOCK_BYTES)):
            low, high = index * digests.BLOCK_BYTES, (index + 1) * digests.BLOCK_BYTES
            cover[index] += min(end, high) - max(begin, low)
    return cover
