"""Reader buffers for a GPU: page-locked host memory, a stream a buffer, and room for their bytes on the device.

The bus gives 55 GB/s only from page-locked memory and only in large copies; tensors are cut into rows and experts
that may be small. So a *mirrored* buffer is uploaded once, whole, when its digests are asked for; the kernel digests
the file's blocks there, and the many small copies into the arena are made by the device at its own speed. What a
buffer's stream still has to do when the buffer is released is awaited by whoever acquires it next.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from weightcache.arenas import contexts, digesting, driver, extents, staging
from weightcache.wire import digests

__all__ = ["PinnedStaging", "Place"]

MEMHOSTALLOC_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: page-locked for every context of the process
SMALLEST_SPAN_BYTES = 64 << 10  # bounds the table: a buffer has at most this many bytes a span, on average

Deliver = Callable[[list[bytes]], None]


class Place(NamedTuple):
    """The ``stream`` to copy a buffer's bytes on, and their ``device_address``, 0 when they were not uploaded."""

    stream: Any
    device_address: int


class PinnedStaging(staging.Pool):
    """See ``memory.Staging``. ``close`` it before the context ends."""

    def __init__(
        self,
        context: contexts.Context,
        num_buffers: int,
        buffer_bytes: int,
        digester: digesting.Digester | None = None,
    ) -> None:
        """Mirrored when there is a ``digester``. Raises ``driver.DriverError`` and leaves nothing."""
        staging.check_sizes(num_buffers, buffer_bytes)
        if digester is not None:
            digester.load()  # here, in one thread; reader threads only launch
        self._context = context
        self._digester = digester
        self._total_bytes = num_buffers * buffer_bytes
        self._pending: list[Callable[[], None] | None] = [None] * num_buffers
        self._uploaded_bytes = [0] * num_buffers
        self._mirror_address = 0
        self._tables: list[digesting.Table] = []
        with context.current(), ExitStack() as stack:
            self._address = _pinned(stack, self._total_bytes)
            self._streams = [_stream(stack) for _ in range(num_buffers)]
            if digester is not None:
                self._mirror_address = int(driver.call("cuMemAlloc", self._total_bytes))
                stack.callback(driver.call, "cuMemFree", self._mirror_address)
                self._tables = _tables(stack, num_buffers, 1 + buffer_bytes // SMALLEST_SPAN_BYTES)
            view = memoryview((ctypes.c_ubyte * self._total_bytes).from_address(self._address)).cast("B")
            self._stack = stack.pop_all()
        super().__init__(view, num_buffers, buffer_bytes)

    def locate(self, address: int, size_bytes: int) -> Place | None:
        """How to copy the host bytes at ``address``, or None when they are not in one of the buffers."""
        offset = address - self._address
        if offset < 0 or offset + size_bytes > self._total_bytes:
            return None
        index, within = divmod(offset, self.buffer_bytes)
        if within + size_bytes <= self._uploaded_bytes[index]:
            return Place(self._streams[index], self._mirror_address + offset)
        return Place(self._streams[index], 0)

    def digest(self, buffer: staging.Buffer, spans: Sequence[extents.Extent], deliver: Deliver) -> None:
        """Upload the buffer up to the last span's end, start the kernel. See ``memory.Staging``.

        Spans the kernel cannot take (short, or not at a multiple of 16 bytes) are digested here, by the CPU.
        RuntimeError when the staging is not mirrored; ValueError for spans outside or too many (64 KiB each allowed).
        """
        extents.check_within(spans, self.buffer_bytes)
        if self._digester is None:
            raise RuntimeError("digesting reader buffers on the GPU needs staging(..., mirrored=True)")
        index, base = buffer.index, buffer.index * self.buffer_bytes
        mirror, table, stream = self._mirror_address + base, self._tables[index], self._streams[index]
        on_cpu = {
            position: digests.digest_block(buffer.view[span.offset : span.end])
            for position, span in enumerate(spans)
            if not digesting.is_digestible(mirror + span.offset, span.size_bytes)
        }
        on_gpu = [(mirror + s.offset, s.size_bytes) for position, s in enumerate(spans) if position not in on_cpu]
        self._settle(index)  # the kernel may still read the table for an earlier call
        table.fill(on_gpu)
        self._upload(index, max((span.end for span in spans), default=0))
        with self._context.current():
            self._digester.launch(table.spans_address, table.digests_address, len(on_gpu), stream)

        def finish() -> None:
            found = iter(table.read(len(on_gpu)))
            deliver([on_cpu[position] if position in on_cpu else next(found) for position in range(len(spans))])

        self._pending[index] = finish

    def wait(self) -> None:
        """Return when every copy so far is done and every digest delivered; at once when closed."""
        if self._streams:
            super().wait()

    def close(self) -> None:
        """Wait for copies, then free streams, pinned memory and mirror; undelivered digests are lost. Twice is once.

        The buffers' views raise ValueError from now on; an array made from one must not be touched any more.
        """
        self._drop_views()
        with self._context.current(), self._stack:
            for stream in self._streams:
                driver.call("cuStreamSynchronize", stream)
            self._streams = []
            self._total_bytes = 0

    def _upload(self, index: int, size_bytes: int) -> None:
        if size_bytes <= self._uploaded_bytes[index]:
            return
        base = index * self.buffer_bytes
        with self._context.current():
            driver.call(
                "cuMemcpyHtoDAsync", self._mirror_address + base, self._address + base, size_bytes, self._streams[index]
            )
        self._uploaded_bytes[index] = size_bytes

    def _settle(self, index: int) -> None:
        """Wait for the buffer's stream and hand out the digests it computed."""
        with self._context.current():
            driver.call("cuStreamSynchronize", self._streams[index])
        finish, self._pending[index] = self._pending[index], None
        if finish is not None:
            finish()

    def _finish(self, index: int) -> None:
        self._settle(index)
        self._uploaded_bytes[index] = 0


def _stream(stack: ExitStack) -> Any:
    stream = driver.call("cuStreamCreate", digesting.STREAM_NON_BLOCKING)
    stack.callback(driver.call, "cuStreamDestroy", stream)
    return stream


def _pinned(stack: ExitStack, size_bytes: int) -> int:
    address = int(driver.call("cuMemHostAlloc", size_bytes, MEMHOSTALLOC_PORTABLE))
    stack.callback(driver.call, "cuMemFreeHost", address)
    return address


def _tables(stack: ExitStack, num_buffers: int, capacity: int) -> list[digesting.Table]:
    step = digesting.Table.size_bytes(capacity)
    address = _pinned(stack, num_buffers * step)
    return [digesting.Table(address + index * step, capacity) for index in range(num_buffers)]
