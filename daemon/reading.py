"""Reading a rank's bytes through a few reused buffers, as fast as the memory bus allows.

Host memory while loading must be bounded by buffers, never by shards or the model; and one thread reads 6 GB/s where
sixteen reach 40. So reader threads take a unit each, read it into a buffer, have the owned blocks digested, copy the
segments into the arena and give the buffer back. The first error stops all.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import NamedTuple

from weightcache.arenas import extents, memory
from weightcache.daemon import orders, pieces, reads
from weightcache.wire import digests, reasons

__all__ = ["Buffers", "Outcome", "coalesce", "divide_buffers", "read_all"]

LARGEST_BUFFER_BYTES = 16 << 20
_ACQUIRE_SECONDS = 600.0
_PROGRESS_SECONDS = 0.2


class Buffers(NamedTuple):
    """How a budget is cut: threads, buffers (a quarter more than threads: their copies are under way), their size.

    More buffers are slower, not faster: 16 threads on an H200 host read 47 GB/s through 20 buffers of 8 MiB and 36
    through 32 of 16 MiB, because what was just read has left the CPU's cache before it is copied.
    """

    num_threads: int
    num_buffers: int
    buffer_bytes: int


class Outcome(NamedTuple):
    """What came of reading: digests of the owned blocks, the table of scales (float32), bytes read."""

    blocks: list[orders.BlockDigest]
    scales: bytearray
    bytes_read: int


def divide_buffers(budget_bytes: int, num_threads: int, needed_bytes: int) -> Buffers:
    """Cut a budget into buffers of whole 4 MiB blocks, at most 16 MiB each, and no more than are needed. Pure.

    Raises Refusal ``SettingsInvalid`` for a budget of less than one block.
    """
    block = digests.BLOCK_BYTES
    affordable, useful = budget_bytes // block, max(1, -(-needed_bytes // block))
    if not affordable:
        raise reasons.Refusal(
            reasons.Reason.SettingsInvalid, f"a load buffer of {budget_bytes} bytes, at least {block} are needed"
        )
    threads = max(1, min(num_threads, affordable, useful))
    buffers = min(threads + max(1, threads // 4), affordable)
    size = min(LARGEST_BUFFER_BYTES, affordable // buffers * block, -(-useful // threads) * block)
    return Buffers(threads, buffers, size)


def coalesce(segments: Iterable[pieces.Segment]) -> list[pieces.Segment]:
    """Join segments that follow each other in the buffer and in the arena: gate and up of an expert. Pure."""
    joined: list[pieces.Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.num_rows == segment.num_rows == 1
            and last.source_offset + last.row_bytes == segment.source_offset
            and last.offset + last.row_bytes == segment.offset
        ):
            joined[-1] = pieces.Segment(last.source_offset, 1, last.row_bytes + segment.row_bytes, 0, last.offset)
        else:
            joined.append(segment)
    return joined


class _Throttle:
    """At most ``bytes_per_second`` over all threads; 0 for no limit. ``stop`` ends all waiting."""

    def __init__(self, bytes_per_second: int, stop: threading.Event) -> None:
        self._rate = bytes_per_second
        self._stop = stop
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, size_bytes: int) -> None:
        """Wait for this many bytes' turn."""
        if not self._rate:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / self._rate
            until = self._free_at
        self._stop.wait(max(0.0, until - time.monotonic()))


class _Work:
    """What the reader threads share."""

    def __init__(self, arena: memory.Arena, staging: memory.Staging, files: Mapping[str, int], rate: int) -> None:
        self.arena = arena
        self.staging = staging
        self.files = files
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.throttle = _Throttle(rate, self.stop)
        self.blocks: list[orders.BlockDigest] = []
        self.bytes_read = 0


def read_all(  # noqa: PLR0913 - one call, each argument a different thing
    units: list[reads.Read],
    arena: memory.Arena,
    staging: memory.Staging,
    files: Mapping[str, int],
    scales: bytearray,
    *,
    num_threads: int,
    bytes_per_second: int = 0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Outcome:
    """Read every unit into the arena. ``files``: open descriptor by name. ``scales``: table to fill.

    ``on_progress``: bytes read so far, in this thread, at the beginning, at most five times a second, and at the end.
    Raises Refusal ``CheckpointChanged`` for a file that is shorter than its header said, ``CheckpointIncomplete`` for
    one that cannot be read, and what a copy raises. No thread reads any more then.
    """
    work = _Work(arena, staging, files, bytes_per_second)
    waiting = iter(units)

    def reader() -> None:
        try:
            while not work.stop.is_set():
                with work.lock:
                    unit = next(waiting, None)
                if unit is None:
                    return
                _read_one(work, unit, scales)
        except BaseException:
            work.stop.set()
            raise

    on_progress(0)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="reader") as pool:
        pending = {pool.submit(reader) for _ in range(num_threads)}
        try:
            while pending:
                finished, pending = wait(pending, timeout=_PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
                for future in finished:
                    future.result()
                if pending:
                    on_progress(work.bytes_read)
        finally:
            work.stop.set()
    staging.wait()
    on_progress(work.bytes_read)
    return Outcome(work.blocks, scales, work.bytes_read)


def _read_one(work: _Work, unit: reads.Read, scales: bytearray) -> None:
    work.throttle.take(unit.size_bytes)
    if work.stop.is_set():
        return
    buffer = work.staging.acquire(_ACQUIRE_SECONDS)
    try:
        view = buffer.view[: unit.size_bytes]
        _fill(work.files[unit.file], view, unit)
        if unit.blocks:
            spans = [extents.Extent(block.source_offset, block.size_bytes) for block in unit.blocks]
            work.staging.digest(buffer, spans, _deliver(work, unit))
        work.arena.put_all(view, coalesce(unit.segments))
        for part in unit.scales:
            scales[part.table_offset : part.table_offset + part.size_bytes] = view[
                part.source_offset : part.source_offset + part.size_bytes
            ]
    finally:
        work.staging.release(buffer)
    with work.lock:
        work.bytes_read += unit.size_bytes


def _deliver(work: _Work, unit: reads.Read) -> Callable[[list[bytes]], None]:
    def deliver(found: list[bytes]) -> None:
        rows = [
            orders.BlockDigest(unit.file, block.block, digest) for block, digest in zip(unit.blocks, found, strict=True)
        ]
        with work.lock:
            work.blocks.extend(rows)

    return deliver


def _fill(descriptor: int, view: memoryview, unit: reads.Read) -> None:
    filled = 0
    while filled < len(view):
        try:
            count = os.preadv(descriptor, [view[filled:]], unit.begin + filled)
        except OSError as error:
            raise reasons.Refusal(
                reasons.Reason.CheckpointIncomplete,
                f"{unit.file} cannot be read at byte {unit.begin + filled}: {error}",
            ) from error
        if count == 0:
            raise reasons.Refusal(
                reasons.Reason.CheckpointChanged,
                f"{unit.file} ends at byte {unit.begin + filled}, {unit.begin + len(view)} expected by its header",
            )
        filled += count
