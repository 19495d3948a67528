"""The CUDA driver's memory functions on a machine without one: device memory is memfds, streams are lists.

The real driver is asked on real GPUs (tests/gpu). What can be proven everywhere is that our side of the contract
holds, and this stand-in is stricter about it than a driver: work on a stream is done only when someone waits for it,
fresh memory is full of junk, a call that needs a current context fails without one, every call must have as many
arguments as the real binding's signature, and whatever was made and not freed is listed by ``leaks``.
"""

# ruff: noqa: N802, N815  # the names are the driver's
from __future__ import annotations

import ctypes
import mmap
import os
import re
import types
from collections.abc import Callable
from typing import Any

import xxhash
from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS
INVALID = real.CUresult.CUDA_ERROR_INVALID_VALUE
GRANULE = 2 << 20
JUNK = 0xA5
PROT_NONE, MAP_FIXED, MAP_NORESERVE = 0, 0x10, 0x4000

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Driver:
    """Stands where the module ``cuda.bindings.driver`` stands; its types and enums are the real ones."""

    def __init__(self, uuids: list[bytes], memory_bytes: int = 1 << 30) -> None:
        self.uuids = uuids
        self.free_bytes = self.memory_bytes = memory_bytes
        self.live: dict[tuple[str, int], Any] = {}
        self.streams: dict[int, list[Callable[[], None]]] = {0: []}
        self.contexts: list[int] = []
        self.calls: list[str] = []
        self.fail_at: tuple[str, Any] | None = None
        self.hint_is_taken = False

    def leaks(self) -> list[str]:
        """What was made and not freed, and contexts left current."""
        return sorted(f"{kind} {number:#x}" for kind, number in self.live) + [f"current {c}" for c in self.contexts]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(real, name)
        action = getattr(type(self), f"do_{name}")
        signature = (getattr(real, name).__doc__ or "").split("\n", 1)[0]

        def called(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            assert len(arguments) == num_parameters(signature), (signature, arguments)
            if self.fail_at and self.fail_at[0] == name:
                return (self.fail_at[1], *[None] * 2)
            result = action(self, *arguments)
            return result if isinstance(result, tuple) else (result,)

        return called

    def made(self, kind: str, thing: Any = None, number: int | None = None) -> int:
        number = number or 1 + max((n for k, n in self.live if k == kind), default=0)
        self.live[kind, number] = thing
        return number

    def needs_context(self) -> None:
        assert self.contexts, f"{self.calls[-1]} without a current context"

    # devices and contexts
    def do_cuInit(self, flags: int) -> Any:
        return OK

    def do_cuDeviceGetCount(self) -> Any:
        return OK, len(self.uuids)

    def do_cuDeviceGet(self, ordinal: int) -> Any:
        return OK, ordinal

    def do_cuDeviceGetUuid(self, device: int) -> Any:
        return OK, types.SimpleNamespace(bytes=self.uuids[device])

    def do_cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        self.made("context", device)
        return OK, 100 + device

    def do_cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        del self.live[next(key for key, value in self.live.items() if key[0] == "context" and value == device)]
        return OK

    def do_cuCtxPushCurrent(self, context: int) -> Any:
        assert any(kind == "context" for kind, _ in self.live), "a context that was released"
        self.contexts.append(context)
        return OK

    def do_cuCtxPopCurrent(self) -> Any:
        return OK, self.contexts.pop()

    def do_cuCtxSynchronize(self) -> Any:
        self.needs_context()
        for stream in self.streams:
            self.run(stream)
        return OK

    def do_cuMemGetInfo(self) -> Any:
        self.needs_context()
        return OK, self.free_bytes, self.memory_bytes

    # allocations
    def do_cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:
        if size % GRANULE or properties.requestedHandleTypes != 1 or properties.type != 1:
            return INVALID, None
        if size > self.free_bytes:
            return real.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.free_bytes -= size
        descriptor = os.memfd_create(f"gpu-{properties.location.id}")
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, bytes([JUNK]) * size, 0)
        return OK, self.made("handle", descriptor)

    def do_cuMemRelease(self, handle: int) -> Any:
        descriptor = self.live.pop(("handle", handle))
        self.free_bytes += os.fstat(descriptor).st_size
        os.close(descriptor)
        return OK

    def do_cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> Any:
        return OK, os.dup(self.live["handle", handle])

    def do_cuMemImportFromShareableHandle(self, descriptor: int, kind: Any) -> Any:
        if "memfd:gpu-" not in os.readlink(f"/proc/self/fd/{descriptor}"):
            return real.CUresult.CUDA_ERROR_UNKNOWN, None
        self.free_bytes -= os.fstat(descriptor).st_size
        return OK, self.made("handle", os.dup(descriptor))

    def do_cuMemGetAllocationPropertiesFromHandle(self, handle: int) -> Any:
        name = os.readlink(f"/proc/self/fd/{self.live['handle', handle]}")
        found = real.CUmemAllocationProp()
        found.location.id = int(re.findall(r"gpu-(\d+)", name)[0])
        return OK, found

    # addresses
    def do_cuMemAddressReserve(self, size: int, alignment: int, hint: int, flags: int) -> Any:
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        address = libc.mmap(0 if self.hint_is_taken else hint, size, PROT_NONE, anonymous, -1, 0)
        return OK, real.CUdeviceptr(self.made("range", size, address))

    def do_cuMemAddressFree(self, address: int, size: int) -> Any:
        assert self.live.pop(("range", address)) == size
        assert not [n for kind, n in self.live if kind == "mapping" and address <= n < address + size], "still mapped"
        libc.munmap(address, size)
        return OK

    def do_cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        descriptor = self.live["handle", handle]
        if offset or size != os.fstat(descriptor).st_size:
            return (real.CUresult.CUDA_ERROR_NOT_SUPPORTED,)
        libc.mmap(address, size, PROT_NONE, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0)
        self.made("mapping", size, address)
        return OK

    def do_cuMemUnmap(self, address: int, size: int) -> Any:
        self.live.pop(("mapping", address))
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        libc.mmap(address, size, PROT_NONE, anonymous, -1, 0)
        return OK

    def do_cuMemSetAccess(self, address: int, size: int, rights: list[Any], count: int) -> Any:
        (right,) = rights
        writes = right.flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        libc.mprotect(address, size, mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0))
        return OK

    # other memory
    def allocated(self, kind: str, size: int) -> int:
        self.needs_context()
        pages = mmap.mmap(-1, size)
        pages[:] = bytes([JUNK]) * size
        return self.made(kind, pages, ctypes.addressof(ctypes.c_char.from_buffer(pages)))

    def do_cuMemHostAlloc(self, size: int, flags: int) -> Any:
        return OK, self.allocated("pinned", size)

    def do_cuMemFreeHost(self, address: int) -> Any:
        self.needs_context()
        del self.live["pinned", address]
        return OK

    def do_cuMemAlloc(self, size: int) -> Any:
        return OK, real.CUdeviceptr(self.allocated("memory", size))

    def do_cuMemFree(self, address: int) -> Any:
        self.needs_context()
        del self.live["memory", address]
        return OK

    # streams: what is ordered here happens when someone waits
    def do_cuStreamCreate(self, flags: int) -> Any:
        self.needs_context()
        stream = self.made("stream")
        self.streams[stream] = []
        return OK, stream

    def do_cuStreamDestroy(self, stream: int) -> Any:
        self.needs_context()
        assert not self.streams.pop(stream), "a stream with work was destroyed"
        del self.live["stream", stream]
        return OK

    def do_cuStreamSynchronize(self, stream: int) -> Any:
        self.needs_context()
        self.run(stream)
        return OK

    def run(self, stream: int) -> None:
        work, self.streams[stream] = self.streams[stream], []
        for step in work:
            step()

    def order(self, stream: int, step: Callable[[], Any]) -> Any:
        self.needs_context()
        self.streams[stream].append(step)
        return OK

    def do_cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> Any:
        return self.order(stream, lambda: ctypes.memset(address, value, size))

    def do_cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> Any:
        return self.order(stream, lambda: ctypes.memmove(target, source, size))

    do_cuMemcpyDtoDAsync = do_cuMemcpyDtoHAsync = do_cuMemcpyHtoDAsync

    def do_cuMemcpy2DAsync(self, order: Any, stream: int) -> Any:
        from_host = order.srcMemoryType == real.CUmemorytype.CU_MEMORYTYPE_HOST
        source, target = int(order.srcHost if from_host else order.srcDevice), int(order.dstDevice)
        steps = [
            (target + row * order.dstPitch, source + row * order.srcPitch, order.WidthInBytes)
            for row in range(order.Height)
        ]
        return self.order(stream, lambda: [ctypes.memmove(*step) for step in steps])

    # the kernel
    def do_cuModuleLoadData(self, image: int) -> Any:
        self.needs_context()
        assert b".entry xxh3_128" in ctypes.string_at(image)
        return OK, self.made("module")

    def do_cuModuleGetFunction(self, module: int, name: bytes) -> Any:
        return OK, name

    def do_cuModuleUnload(self, module: int) -> Any:
        del self.live["module", module]
        return OK

    def do_cuLaunchKernel(self, function: bytes, *rest: Any) -> Any:
        grid, block, (_shared, stream, parameters, _extra) = rest[:3], rest[3:6], rest[6:]
        (spans, output, count), _types = parameters
        assert function == b"xxh3_128" and block[0] == 32 and grid[0] * block[1] >= count > 0
        return self.order(stream, lambda: self.digest(spans, output, count))

    def digest(self, spans: int, output: int, count: int) -> None:
        table = (ctypes.c_uint64 * (2 * count)).from_address(spans)
        for i in range(count):
            data = ctypes.string_at(table[2 * i], table[2 * i + 1])
            assert len(data) > 240 and table[2 * i] % 16 == 0, "not for the kernel"
            ctypes.memmove(output + 16 * i, xxhash.xxh3_128_digest(data), 16)


def num_parameters(signature: str) -> int:
    """How many parameters the first line of a binding's docstring lists. Pure."""
    inner = re.sub(r"\[[^()]*\]", "", signature[signature.index("(") + 1 : signature.rindex(")")])
    return len(inner.split(",")) if inner.strip() else 0
