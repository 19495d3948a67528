"""Content digests that are exact, cheap, and the same on a CPU and a GPU.

Two fine-tunes of one model share shapes, sizes and headers, so only the bytes tell them apart; and hundreds of GB
have to be judged in the time they take to be read. The algorithm is XXH3-128 (seed 0, canonical big-endian bytes, as
``xxhash.xxh3_128_digest``; specified at https://github.com/Cyan4973/xxHash, BSD-2-Clause): exact against accident,
not against malice. Blocks make it parallel, and let ranks share the work:

    file       digest of each 4 MiB block -> XXH3-128 of those digests, joined
    tensor     its extent, padded with zeros to 256 bytes, in 4 MiB pieces -> XXH3-128 of the pieces' digests, joined
    checkpoint XXH3-128 of the canonical table (name, size, file digest), sorted by name
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import xxhash

__all__ = [
    "ALGORITHM",
    "BLOCK_BYTES",
    "DIGEST_BYTES",
    "FileDigest",
    "combine",
    "digest_block",
    "digest_of_checkpoint",
    "digest_of_file",
    "digest_of_value",
    "num_blocks",
]

ALGORITHM = "xxh3-128/4MiB"
BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 16


class FileDigest(NamedTuple):
    """One file of a checkpoint: its name relative to the checkpoint, size in bytes, digest (16 bytes)."""

    name: str
    size_bytes: int
    digest: bytes


def digest_block(data: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of one block or piece (at most 4 MiB by convention), 16 bytes. Pure."""
    return xxhash.xxh3_128_digest(data)


def combine(digests: Iterable[bytes]) -> bytes:
    """The digest of a file or tensor from the digests of its blocks, in order. Pure."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def num_blocks(size_bytes: int) -> int:
    """How many 4 MiB blocks a file of that size has; an empty file has none. Pure."""
    return -(-size_bytes // BLOCK_BYTES)


def digest_of_file(path: str | os.PathLike[str], num_threads: int = 4) -> bytes:
    """The digest of a whole file (16 bytes). Reads it once; raises OSError, and OSError when it shrinks meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(descriptor).st_size

        def block(index: int) -> bytes:
            want = min(BLOCK_BYTES, size_bytes - index * BLOCK_BYTES)
            data = os.pread(descriptor, want, index * BLOCK_BYTES)
            if len(data) != want:
                raise OSError(f"{os.fspath(path)}: {len(data)} bytes at block {index}, {want} expected: file changed")
            return digest_block(data)

        with ThreadPoolExecutor(num_threads) as pool:
            return combine(pool.map(block, range(num_blocks(size_bytes))))
    finally:
        os.close(descriptor)


def digest_of_checkpoint(files: Sequence[FileDigest]) -> str:
    """The content digest of a checkpoint as 32 hex characters: which bytes, under which names. Pure."""
    rows = sorted([file.name, file.size_bytes, file.digest] for file in files)
    return digest_of_value([ALGORITHM, rows])


def digest_of_value(value: object) -> str:
    """32 hex characters over a value's canonical msgpack form (keys sorted): for configurations and keys. Pure."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(value, order="sorted"))
