"""The two memories that can hold weights, behind one interface.

Everything above the arenas (loading, serving, attaching, verifying) must be testable without a GPU and must not ask
which memory it talks to. So this module states what an arena, its reader buffers and a read-only mapping promise,
and picks the backend by name: ``Host`` (sealed memfds, ``host``) or ``GPU`` (CUDA virtual memory, ``vmm``).
Importing it needs neither CUDA nor numpy; a backend is imported when it is first asked for.

Life of an arena::

    create -> put, put_rows, put_all (any thread) -> digests -> seal -> descriptors -> map_readonly, anywhere, often

Guarantees of both backends: bytes that nobody put are zero; once sealed, the loader cannot write any more; memory
lives exactly as long as a descriptor or a mapping of it.
Not guaranteed: on a GPU, a hostile process that holds a descriptor can raise its own rights and write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from weightcache.arenas import extents, staging
from weightcache.wire import reasons

__all__ = ["GPU", "HOST", "Arena", "Mapping", "Staging", "create", "map_readonly"]

_T = TypeVar("_T")

HOST = "Host"
GPU = "GPU"


class Staging(Protocol):
    """A fixed set of equal reader buffers: plain memory for the host, pinned memory for a GPU. Any thread may call."""

    @property
    def num_buffers(self) -> int: ...

    @property
    def buffer_bytes(self) -> int: ...

    def acquire(self, timeout_seconds: float | None = None) -> staging.Buffer:
        """A buffer that nobody else has and whose earlier copies are done; waits for one.

        TimeoutError when none was given back in time (None: wait for ever).
        """
        ...

    def digest(
        self,
        buffer: staging.Buffer,
        spans: Sequence[extents.Extent],
        deliver: Callable[[list[bytes]], None],
    ) -> None:
        """XXH3-128 of each span of the filled buffer (whole, not in pieces), handed to ``deliver`` once known.

        Call it after filling the buffer and before its puts. Host: ``deliver`` runs at once. GPU (``mirrored``
        staging only): the spans are uploaded once, puts then come from that copy, and ``deliver`` runs in whichever
        thread next acquires this buffer or calls ``wait``.
        """
        ...

    def release(self, buffer: staging.Buffer) -> None:
        """Give it back. Does not wait: copies may be under way, the next ``acquire`` waits for them."""
        ...

    def wait(self) -> None:
        """Return when every copy so far is done and every digest delivered. Call it when no buffer is out."""
        ...

    def close(self) -> None:
        """Free the buffers; their views must not be used any more. Twice is once."""
        ...


class Arena(Protocol):
    """The shared memory of one rank while its loader fills it."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Bytes of each descriptor that ``seal`` returns; their sum is at least ``size_bytes``."""
        ...

    @property
    def address(self) -> int: ...

    @property
    def buffer(self) -> Any:
        """What numpy or torch wraps without a copy, writable: a memoryview, or ``__cuda_array_interface__``.

        Let it go before ``seal``: the host refuses to seal while it lives, a GPU faults at its next use.
        """
        ...

    def put(self, offset: int, source: memoryview) -> None:
        """Copy contiguous bytes to ``offset``. Threads may put side by side into disjoint ranges.

        From a staging buffer of a GPU arena the copy is under way when this returns (see ``Staging.release``);
        from any other memory it is done. ValueError when it would leave the arena.
        """
        ...

    def put_rows(self, offset: int, source: memoryview, num_rows: int, row_bytes: int, source_stride: int) -> None:
        """Copy ``num_rows`` rows of ``row_bytes`` that start ``source_stride`` bytes apart; packed at ``offset``."""
        ...

    def put_all(self, source: memoryview, parts: Sequence[extents.Rows]) -> None:
        """``put`` and ``put_rows`` of many parts of one buffer, in one order to the device where it takes one."""
        ...

    def digests(self, spans: Sequence[extents.Extent]) -> list[bytes]:
        """The digest (16 bytes) of each extent, in 4 MiB pieces (``wire.digests``), after all puts so far."""
        ...

    def staging(self, num_buffers: int, buffer_bytes: int, mirrored: bool = False) -> Staging:
        """Reader buffers, freed with the arena at the latest. ``mirrored``: with room on the device for digests."""
        ...

    def seal(self) -> list[int]:
        """Wait for all copies, end writing for good, close the arena; descriptors in order, owned by the caller.

        RuntimeError (and an open arena) while a staging buffer is out or, on the host, a view is alive.
        """
        ...

    def close(self) -> None:
        """Free everything. Twice is once."""
        ...


class Mapping(Protocol):
    """A sealed arena mapped read-only. The descriptors stay the caller's."""

    @property
    def address(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def buffer(self) -> Any:
        """What numpy or torch wraps without a copy: a read-only memoryview, or ``__cuda_array_interface__``.

        It keeps the memory mapped for as long as anything refers to it, even after ``close``.
        """
        ...

    def digests(self, spans: Sequence[extents.Extent]) -> list[bytes]:
        """As ``Arena.digests``."""
        ...

    def close(self) -> None:
        """Let go: unmapped now, or when the last user of ``buffer`` is gone. Twice is once."""
        ...


def create(memory: str, size_bytes: int, *, device_uuid: str = "", chunk_bytes: int | None = None) -> Arena:
    """A zeroed arena of ``size_bytes`` in the named memory (on a GPU: of that UUID, in chunks of ``chunk_bytes``).

    Raises ``Refusal``: SettingsInvalid, GPUNotFound, InsufficientGPUMemory, InsufficientHostMemory.
    """
    return _pick(_CREATE, memory)(size_bytes, device_uuid, chunk_bytes)


def map_readonly(memory: str, fds: Sequence[int], chunk_sizes: Sequence[int], *, device_uuid: str = "") -> Mapping:
    """Map received descriptors read-only, in one contiguous range, after checking that they are what they claim.

    Raises ``Refusal``: SettingsInvalid, GPUNotFound, ArenaInvalid (with both values). Nothing stays mapped then.
    """
    return _pick(_MAP, memory)(fds, chunk_sizes, device_uuid)


def _pick(table: dict[str, _T], memory: str) -> _T:
    if memory not in table:
        raise reasons.Refusal(
            reasons.Reason.SettingsInvalid, f"memory is {memory!r}, which is none of {', '.join(sorted(table))}"
        )
    return table[memory]


# The imports are inside so that a process needs only the libraries of the memory it uses.
def _create_host(size_bytes: int, device_uuid: str, chunk_bytes: int | None) -> Arena:
    from weightcache.arenas import host

    return host.HostArena.create(size_bytes)


def _create_gpu(size_bytes: int, device_uuid: str, chunk_bytes: int | None) -> Arena:
    from weightcache.arenas import allocations, vmm

    return vmm.VmmArena.create(size_bytes, device_uuid, chunk_bytes or allocations.CHUNK_BYTES)


def _map_host(fds: Sequence[int], chunk_sizes: Sequence[int], device_uuid: str) -> Mapping:
    from weightcache.arenas import host

    return host.HostMapping.map_readonly(fds, chunk_sizes)


def _map_gpu(fds: Sequence[int], chunk_sizes: Sequence[int], device_uuid: str) -> Mapping:
    from weightcache.arenas import vmm

    return vmm.VmmMapping.map_readonly(fds, chunk_sizes, device_uuid)


_CREATE: dict[str, Callable[[int, str, int | None], Arena]] = {HOST: _create_host, GPU: _create_gpu}
_MAP: dict[str, Callable[[Sequence[int], Sequence[int], str], Mapping]] = {HOST: _map_host, GPU: _map_gpu}
