"""Arenas in GPU memory: the two classes of ``memory`` over CUDA virtual memory (``allocations``).

A loader must be able to fill at the speed of the bus from many threads, and must not be able to change a byte once
its arena is proven; an engine must see the weights at the same address after every restart, read-only, and must never
have them unmapped under a living tensor. So copies are only ordered here and awaited when their reader buffer is used
again or the arena is sealed; sealing unmaps; and a mapping lives as long as its ``Range`` is referred to.

Not guaranteed: a hostile process that holds the descriptor can give itself write access (``cuMemSetAccess``); socket
permissions are the boundary. MIG and MPS are untested.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from weightcache.arenas import allocations, contexts, digesting, driver, extents, pinning

__all__ = ["VmmArena", "VmmMapping"]


class VmmArena:
    """A writable arena on one GPU. See ``memory.Arena`` for what each method promises."""

    def __init__(
        self,
        context: contexts.Context,
        mapped: allocations.Range,
        handles: Sequence[Any],
        size_bytes: int,
        sizes: Sequence[int],
    ) -> None:
        self._context = context
        self._range = mapped
        self._handles = handles
        self._size_bytes = size_bytes
        self._chunk_sizes = tuple(sizes)
        self._stagings: list[pinning.PinnedStaging] = []
        self._digester = digesting.Digester(context)
        mapped.stack.callback(self._digester.close)

    @classmethod
    def create(cls, size_bytes: int, device_uuid: str, chunk_bytes: int = allocations.CHUNK_BYTES) -> VmmArena:
        """A zeroed arena of ``size_bytes`` (> 0) rounded up to 2 MiB, in allocations of at most ``chunk_bytes``.

        Raises ``Refusal``: GPUNotFound, InsufficientGPUMemory (need, free). Other failures: ``driver.DriverError``.
        """
        sizes = allocations.split(size_bytes, chunk_bytes)
        with ExitStack() as stack:
            context = contexts.Context(device_uuid)
            stack.callback(context.close)
            handles = [allocations.allocate(stack, context, size, sum(sizes)) for size in sizes]
            address = allocations.map_side_by_side(stack, context, handles, sizes, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
            allocations.zero(context, address, sizes)
            return cls(context, allocations.Range(address, sum(sizes), stack.pop_all()), handles, size_bytes, sizes)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return self._chunk_sizes

    @property
    def address(self) -> int:
        return self._range.address

    @property
    def buffer(self) -> allocations.Range:
        return self._range

    def put(self, offset: int, source: memoryview) -> None:
        """Contiguous copy, as ``memory.Arena.put``."""
        self.put_rows(offset, source, 1, source.nbytes, source.nbytes)

    def put_rows(self, offset: int, source: memoryview, num_rows: int, row_bytes: int, source_stride: int) -> None:
        """Strided source, packed destination: one order to the copy engine."""
        extents.check_rows(source.nbytes, num_rows, row_bytes, source_stride)
        extents.check_within([extents.Extent(offset, num_rows * row_bytes)], self._size_bytes)
        if not self._range.free.alive:
            raise ValueError("this arena was closed or sealed")
        if not num_rows or not row_bytes:
            return
        host_address = _address_of(source)
        found = self._locate(host_address, source.nbytes)
        with self._context.current():
            if found is None:  # ordinary memory: nobody would know when it may be reused, so wait
                host = _Copy(False, host_address, self.address + offset, num_rows, row_bytes, source_stride)
                host.start(allocations.LEGACY_STREAM)
                driver.call("cuStreamSynchronize", allocations.LEGACY_STREAM)
            else:
                on_device = found.device_address != 0
                begin = found.device_address or host_address
                _Copy(on_device, begin, self.address + offset, num_rows, row_bytes, source_stride).start(found.stream)

    def put_all(self, source: memoryview, parts: Sequence[extents.Rows]) -> None:
        """Many copies out of one buffer, as ``memory.Arena.put_all``.

        Finding the buffer and entering the context cost more than ordering a copy, and give up the interpreter's lock
        each time: 14 us a ``put`` in one thread, 55 us in each of 16 (H200 host). Here both are done once.
        """
        extents.check_parts(parts, source.nbytes, self._size_bytes)
        if not self._range.free.alive:
            raise ValueError("this arena was closed or sealed")
        host_address = _address_of(source) if source.nbytes else 0
        found = self._locate(host_address, source.nbytes)
        if found is None:
            for part in parts:
                stride = max(part.row_stride, part.row_bytes)
                self.put_rows(part.offset, source[part.source_offset :], part.num_rows, part.row_bytes, stride)
            return
        on_device = found.device_address != 0
        begin, target = found.device_address or host_address, self.address
        with self._context.current():
            for part in parts:
                if part.num_rows and part.row_bytes:
                    source_address, target_address = begin + part.source_offset, target + part.offset
                    _Copy(
                        on_device, source_address, target_address, part.num_rows, part.row_bytes, part.row_stride
                    ).start(found.stream)

    def digests(self, spans: Sequence[extents.Extent]) -> list[bytes]:
        extents.check_within(spans, sum(self._chunk_sizes), extents.ALIGNMENT_BYTES)
        self._context.synchronize()
        return self._digester.digests(self.address, spans)

    def staging(self, num_buffers: int, buffer_bytes: int, mirrored: bool = False) -> pinning.PinnedStaging:
        """Page-locked reader buffers; ``mirrored`` ones take the same room on the GPU until they are closed."""
        digester = self._digester if mirrored else None
        made = pinning.PinnedStaging(self._context, num_buffers, buffer_bytes, digester)
        self._range.stack.callback(made.close)
        self._stagings.append(made)
        return made

    def seal(self) -> list[int]:
        """Wait, export, unmap. RuntimeError, and nothing changed, while a reader buffer is out.

        A kernel that still writes through ``buffer`` afterwards faults instead of changing bytes that are served.
        """
        out = sum(pool.num_out for pool in self._stagings)
        if out:
            raise RuntimeError(f"sealing an arena while {out} reader buffers are out: release them first")
        for pool in self._stagings:
            pool.wait()
        self._context.synchronize()
        with ExitStack() as on_error:
            fds = []
            for handle in self._handles:
                fds.append(allocations.export(handle))
                on_error.callback(os.close, fds[-1])
            self.close()
            on_error.pop_all()
        return fds

    def close(self) -> None:
        """Free everything, in reverse order of making; exported memory lives on in its descriptors."""
        self._stagings.clear()
        self._range.free()

    def _locate(self, address: int, size_bytes: int) -> pinning.Place | None:
        for pool in self._stagings:
            found = pool.locate(address, size_bytes)
            if found is not None:
                return found
        return None


class VmmMapping:
    """A sealed arena mapped read-only on one GPU. See ``memory.Mapping`` for what each method promises."""

    def __init__(self, context: contexts.Context, mapped: allocations.Range) -> None:
        self._range: allocations.Range | None = mapped
        self._address = mapped.address
        self._size_bytes = mapped.size_bytes
        self._context = context
        self._digester = digesting.Digester(context)
        mapped.stack.callback(self._digester.close)

    @classmethod
    def map_readonly(cls, fds: Sequence[int], chunk_sizes: Sequence[int], device_uuid: str) -> VmmMapping:
        """Import and map the descriptors side by side. The GPU is named by UUID; ordinals never travel.

        Raises ``Refusal``: GPUNotFound; ArenaInvalid when a descriptor is no VMM allocation, of another GPU, or of
        another size. Other failures: ``driver.DriverError``.
        """
        allocations.check_announced(fds, chunk_sizes)
        with ExitStack() as stack, ExitStack() as imports:
            context = contexts.Context(device_uuid)
            stack.callback(context.close)
            handles = [allocations.import_shared(imports, context, descriptor) for descriptor in fds]
            try:
                address = allocations.map_side_by_side(
                    stack, context, handles, chunk_sizes, "CU_MEM_ACCESS_FLAGS_PROT_READ"
                )
            except driver.DriverError as error:
                if error.function != "cuMemMap" or error.error == allocations.OUT_OF_MEMORY:
                    raise
                raise allocations.invalid(
                    f"the allocations are not of the announced sizes {tuple(chunk_sizes)}: {error}"
                ) from error
            return cls(context, allocations.Range(address, sum(chunk_sizes), stack.pop_all()))

    @property
    def address(self) -> int:
        return self._address

    @property
    def is_at_hint(self) -> bool:
        """Whether the address asked for was granted, so that pointers equal those of other processes."""
        return self._address == allocations.ADDRESS_HINT

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def buffer(self) -> allocations.Range:
        """What torch wraps; keeps the mapping. ValueError after ``close``."""
        if self._range is None:
            raise ValueError("this mapping was closed")
        return self._range

    def digests(self, spans: Sequence[extents.Extent]) -> list[bytes]:
        extents.check_within(spans, self._size_bytes, extents.ALIGNMENT_BYTES)
        return self._digester.digests(self.buffer.address, spans)

    def close(self) -> None:
        """Drop our reference: unmapped when the last tensor over ``buffer`` is gone."""
        self._range = None


class _Copy(NamedTuple):
    """Rows of host or device memory, ``stride`` bytes apart, packed to ``target`` in device memory."""

    on_device: bool
    begin: int
    target: int
    num_rows: int
    row_bytes: int
    stride: int

    def start(self, stream: Any) -> None:
        """Order it on ``stream``; the context must be current."""
        if self.num_rows == 1 or self.stride == self.row_bytes:
            function = "cuMemcpyDtoDAsync" if self.on_device else "cuMemcpyHtoDAsync"
            driver.call(function, self.target, self.begin, self.num_rows * self.row_bytes, stream)
            return
        types = driver.bindings().CUmemorytype
        order = driver.bindings().CUDA_MEMCPY2D()
        if self.on_device:
            order.srcMemoryType, order.srcDevice = types.CU_MEMORYTYPE_DEVICE, self.begin
        else:
            order.srcMemoryType, order.srcHost = types.CU_MEMORYTYPE_HOST, self.begin
        order.srcPitch = self.stride
        order.dstMemoryType, order.dstDevice, order.dstPitch = types.CU_MEMORYTYPE_DEVICE, self.target, self.row_bytes
        order.WidthInBytes, order.Height = self.row_bytes, self.num_rows
        driver.call("cuMemcpy2DAsync", order, stream)


def _address_of(source: memoryview) -> int:
    import numpy as np  # here: a verifier, which never puts, starts without it

    address: int = np.frombuffer(source, np.uint8).__array_interface__["data"][0]
    return address
