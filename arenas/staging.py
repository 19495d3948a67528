"""Reader buffers that are made once and used again and again.

Host memory while loading must be bounded by buffers, not by shards or models, and pinned memory is dear to make
(0.3 s a GiB measured on an H200 host). So a fixed number of equal buffers circulates between reader threads; a buffer
comes back while copies out of it may still be under way, and whoever acquires it next waits for those.
"""

from __future__ import annotations

import contextlib
import queue
from dataclasses import dataclass

__all__ = ["Buffer", "Pool"]

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Buffer:
    """A buffer that its holder may fill: ``view`` is writable, ``index`` tells the buffers of one pool apart."""

    index: int
    view: memoryview


class Pool:
    """Equal buffers over one writable ``memory`` and the queue of those that nobody has.

    A subclass says in ``_finish`` how to wait for a buffer's copies. Buffers start at multiples of a page, so that
    O_DIRECT reads work.
    """

    def __init__(self, memory: memoryview, num_buffers: int, buffer_bytes: int) -> None:
        self._memory = memory
        self._num_buffers = num_buffers
        self._buffer_bytes = buffer_bytes
        self._buffers = [
            Buffer(index, memory[index * buffer_bytes : (index + 1) * buffer_bytes]) for index in range(num_buffers)
        ]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(num_buffers):
            self._free.put(index)

    @property
    def num_buffers(self) -> int:
        return self._num_buffers

    @property
    def buffer_bytes(self) -> int:
        return self._buffer_bytes

    @property
    def num_out(self) -> int:
        """How many buffers are in someone's hands."""
        return self._num_buffers - self._free.qsize()

    def acquire(self, timeout_seconds: float | None = None) -> Buffer:
        """The buffer that came back longest ago, its copies done. TimeoutError: see ``memory.Staging``."""
        try:
            index = self._free.get(timeout=timeout_seconds)
        except queue.Empty:
            raise TimeoutError(f"none of {self._num_buffers} reader buffers came back in {timeout_seconds} s") from None
        try:
            self._finish(index)
        except BaseException:
            self._free.put(index)
            raise
        return self._buffers[index]

    def release(self, buffer: Buffer) -> None:
        """Give it back without waiting."""
        self._free.put(buffer.index)

    def wait(self) -> None:
        """Return when every buffer's copies are done."""
        for index in range(self._num_buffers):
            self._finish(index)

    def _finish(self, index: int) -> None:
        """Wait for the copies out of one buffer. Plain memory has none under way."""

    def _drop_views(self) -> None:
        for view in [*(buffer.view for buffer in self._buffers), self._memory]:
            with contextlib.suppress(BufferError):  # an export of that very view is alive; the memory's owner decides
                view.release()


def check_sizes(num_buffers: int, buffer_bytes: int) -> None:
    """Raise ValueError unless there is a buffer and each is a positive multiple of a page. Pure."""
    if num_buffers < 1 or buffer_bytes < 1 or buffer_bytes % PAGE_BYTES:
        raise ValueError(f"{num_buffers} buffers of {buffer_bytes} bytes: at least one, multiples of {PAGE_BYTES}")
