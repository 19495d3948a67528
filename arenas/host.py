"""Weights in sealed anonymous files (memfds): the backend for hosts without a GPU, and the test bed of everything.

The shared bytes must be impossible to change once they are proven, even for their writer. ``F_SEAL_WRITE`` is that
promise, given by the kernel: it is refused while any writable mapping exists, and afterwards nobody can make one.
The reader therefore trusts the seal that it sees on the descriptor, not the sender.

Two traps. Python cannot unmap memory while a view of it is alive (BufferError), so no view is kept longer than a
call. And kernels before 6.7 refuse a *shared* mapping of a write-sealed file even for reading; a private one shows
the same pages and is allowed everywhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from weightcache.arenas import extents, staging
from weightcache.wire import digests, reasons

__all__ = ["HostArena", "HostMapping", "HostStaging"]

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MFD_NOEXEC_SEAL = 0x0008  # linux/memfd.h; kernels from 6.3 on, which may be set to refuse memfds without it
MAX_THREADS = 16
WRITTEN_BYTES = 64 << 10
INLINE_BYTES = 16 << 20  # below this, starting threads costs more than one thread's hashing (15 GB/s measured)


class HostStaging(staging.Pool):
    """Plain anonymous memory. Copies out of it are done when ``put`` returns, digests when ``digest`` does."""

    def __init__(self, num_buffers: int, buffer_bytes: int) -> None:
        staging.check_sizes(num_buffers, buffer_bytes)
        super().__init__(memoryview(mmap.mmap(-1, num_buffers * buffer_bytes)), num_buffers, buffer_bytes)

    def digest(
        self, buffer: staging.Buffer, spans: Sequence[extents.Extent], deliver: Callable[[list[bytes]], None]
    ) -> None:
        """See ``memory.Staging``."""
        extents.check_within(spans, self.buffer_bytes)
        deliver([digests.digest_block(buffer.view[span.offset : span.end]) for span in spans])

    def close(self) -> None:
        """Let go of the memory; a view that someone still uses keeps its pages until it is gone."""
        self._drop_views()


class HostArena:
    """A writable memfd. See ``memory.Arena`` for what each method promises."""

    def __init__(self, descriptor: int, pages: mmap.mmap, size_bytes: int) -> None:
        self._descriptor = descriptor
        self._pages = pages
        self._size_bytes = size_bytes
        self._stagings: list[HostStaging] = []

    @classmethod
    def create(cls, size_bytes: int) -> HostArena:
        """A zeroed arena of ``size_bytes`` (> 0) rounded up to a page.

        Pages are taken when they are first written. Raises ``Refusal`` InsufficientHostMemory.
        """
        if size_bytes <= 0:
            raise ValueError(f"an arena of {size_bytes} bytes")
        file_bytes = extents.padded(size_bytes, mmap.PAGESIZE)
        descriptor = _memfd()
        try:
            os.ftruncate(descriptor, file_bytes)
            pages = mmap.mmap(descriptor, file_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, OverflowError) as error:
            os.close(descriptor)
            raise reasons.Refusal(
                reasons.Reason.InsufficientHostMemory, f"no address range for an arena of {file_bytes} bytes: {error}"
            ) from error
        _advise_huge_pages(pages)
        return cls(descriptor, pages, size_bytes)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return (extents.padded(self._size_bytes, mmap.PAGESIZE),)

    @property
    def address(self) -> int:
        return _address(self._pages)

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._pages)[: self._size_bytes]

    def put(self, offset: int, source: memoryview) -> None:
        """Contiguous copy. numpy's copy, unlike a slice assignment, lets other threads run.

        Large ones are written: a page that is written whole needs no fault and no zeroing first, and new pages are
        what a load is made of (1.2 GB/s instead of 0.6 in one thread of a virtual machine with 4 KiB pages).
        """
        extents.check_within([extents.Extent(offset, source.nbytes)], self._size_bytes)
        if source.nbytes >= WRITTEN_BYTES and self._descriptor >= 0:
            self._write(offset, source)
        elif source.nbytes:
            np.copyto(self._bytes(offset, source.nbytes), np.frombuffer(source, np.uint8))

    def put_rows(self, offset: int, source: memoryview, num_rows: int, row_bytes: int, source_stride: int) -> None:
        """Strided source, packed destination."""
        extents.check_rows(source.nbytes, num_rows, row_bytes, source_stride)
        extents.check_within([extents.Extent(offset, num_rows * row_bytes)], self._size_bytes)
        if num_rows and row_bytes:
            rows = np.lib.stride_tricks.as_strided(
                np.frombuffer(source, np.uint8), (num_rows, row_bytes), (source_stride, 1), writeable=False
            )
            np.copyto(self._bytes(offset, num_rows * row_bytes).reshape(num_rows, row_bytes), rows)

    def put_all(self, source: memoryview, parts: Sequence[extents.Rows]) -> None:
        """One after the other: the CPU copies anyway."""
        extents.check_parts(parts, source.nbytes, self._size_bytes)
        for part in parts:
            rows = source[part.source_offset :]
            self.put_rows(part.offset, rows, part.num_rows, part.row_bytes, max(part.row_stride, part.row_bytes))

    def digests(self, spans: Sequence[extents.Extent]) -> list[bytes]:
        extents.check_within(spans, self.chunk_sizes[0], extents.ALIGNMENT_BYTES)
        return _digests(self._pages, spans)

    def staging(self, num_buffers: int, buffer_bytes: int, mirrored: bool = False) -> HostStaging:
        """Reader buffers; ``mirrored`` means nothing here."""
        pool = HostStaging(num_buffers, buffer_bytes)
        self._stagings.append(pool)
        return pool

    def seal(self) -> list[int]:
        """Unmap, seal, give the descriptor away. RuntimeError, and nothing changed, while anyone could write."""
        out = sum(pool.num_out for pool in self._stagings)
        if out:
            raise RuntimeError(f"sealing an arena while {out} reader buffers are out: release them first")
        try:
            self._pages.close()
        except BufferError as error:
            raise RuntimeError("sealing an arena while a view of it is alive: let go of it first") from error
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
        descriptor, self._descriptor = self._descriptor, -1
        self.close()
        return [descriptor]

    def close(self) -> None:
        """Free everything; memory that a view still shows goes with that view."""
        for pool in self._stagings:
            pool.close()
        self._stagings.clear()
        with contextlib.suppress(BufferError):
            self._pages.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, offset: int, source: memoryview) -> None:
        with source.cast("B") as view:
            done = 0
            while done < len(view):
                with view[done:] as rest:
                    done += os.pwrite(self._descriptor, rest, offset + done)

    def _bytes(self, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._pages, np.uint8, size_bytes, offset)


class HostMapping:
    """A sealed memfd mapped read-only. See ``memory.Mapping`` for what each method promises."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages: mmap.mmap | None = pages
        self._size_bytes = len(pages)
        self._address = _address(pages)

    @classmethod
    def map_readonly(cls, fds: Sequence[int], chunk_sizes: Sequence[int]) -> HostMapping:
        """Map the one descriptor of a host arena. Raises ``Refusal`` ArenaInvalid, naming what differs."""
        if len(fds) != 1 or len(chunk_sizes) != 1:
            raise _invalid(f"a host arena is one memfd; got {len(fds)} descriptors and {len(chunk_sizes)} sizes")
        _check_sealed(fds[0], chunk_sizes[0])
        return cls(_map_sealed(fds[0], chunk_sizes[0]))

    @property
    def address(self) -> int:
        return self._address

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def buffer(self) -> memoryview:
        """Read-only; whatever wraps it keeps the mapping. ValueError after ``close``."""
        return memoryview(self._open())

    def digests(self, spans: Sequence[extents.Extent]) -> list[bytes]:
        extents.check_within(spans, self._size_bytes, extents.ALIGNMENT_BYTES)
        return _digests(self._open(), spans)

    def close(self) -> None:
        """Drop our reference. Not ``mmap.close``: torch does not count as a view, and would read unmapped memory."""
        self._pages = None

    def _open(self) -> mmap.mmap:
        if self._pages is None:
            raise ValueError("this mapping was closed")
        return self._pages


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("weightcache", flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create("weightcache", flags)


def _advise_huge_pages(pages: mmap.mmap) -> None:
    """Best effort: honoured where /sys/kernel/mm/transparent_hugepage/shmem_enabled allows it."""
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)


def _invalid(what: str) -> reasons.Refusal:
    return reasons.Refusal(reasons.Reason.ArenaInvalid, what)


def _check_sealed(descriptor: int, size_bytes: int) -> None:
    """Raise ``Refusal`` ArenaInvalid unless it is a memfd of exactly that size that nobody can change any more."""
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        raise _invalid(f"descriptor {descriptor} is not open: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise _invalid(f"descriptor {descriptor} has mode {stat.filemode(status.st_mode)}, a memfd is a regular file")
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise _invalid(f"descriptor {descriptor} is a file that cannot be sealed, so not a memfd: {error}") from error
    if seals & SEALS != SEALS:
        raise _invalid(
            f"descriptor {descriptor} has seals {seals:#x}, {SEALS:#x} needed (write, shrink, grow, seal): "
            "its bytes could still change"
        )
    if status.st_size != size_bytes or size_bytes <= 0:
        raise _invalid(f"descriptor {descriptor} has {status.st_size} bytes, {size_bytes} announced")


def _map_sealed(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Shared where the kernel allows it: only shared pages can later be pinned in place for a GPU's copy engine."""
    try:
        return mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except PermissionError:
        return mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ)


def _address(pages: mmap.mmap) -> int:
    address: int = np.frombuffer(pages, np.uint8).__array_interface__["data"][0]
    return address


def _digests(pages: mmap.mmap, spans: Sequence[extents.Extent]) -> list[bytes]:
    """One digest per extent, hashed by as many threads as this process may run on (xxhash lets go of the GIL)."""
    pieces = extents.pieces(spans)
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(pieces))
    with memoryview(pages) as view:

        def digest(some: Sequence[extents.Extent]) -> list[bytes]:
            found = []
            for piece in some:
                with view[piece.offset : piece.end] as data:
                    found.append(digests.digest_block(data))
            return found

        if num_threads < 2 or sum(piece.size_bytes for piece in pieces) < INLINE_BYTES:
            return extents.combined(spans, digest(pieces))
        with ThreadPoolExecutor(num_threads) as threads:
            found = [one for some in threads.map(digest, _shares(pieces)) for one in some]
        return extents.combined(spans, found)


def _shares(pieces: Sequence[extents.Extent], share_bytes: int = 32 << 20) -> Iterator[Sequence[extents.Extent]]:
    """Runs of pieces of about ``share_bytes``: neither many small nor few large ones starve a thread. Pure."""
    begin, held_bytes = 0, 0
    for index, piece in enumerate(pieces):
        held_bytes += piece.size_bytes
        if held_bytes >= share_bytes:
            yield pieces[begin : index + 1]
            begin, held_bytes = index + 1, 0
    if begin < len(pieces):
        yield pieces[begin:]
