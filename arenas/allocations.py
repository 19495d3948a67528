"""CUDA virtual memory: allocations that other processes map through a file descriptor.

CUDA's older IPC handles die with their maker and need shared namespaces; a VMM allocation is exported as a descriptor
that any process may hold, with or without a GPU, and that outlives its maker. Facts that shape this module (H200,
driver 580): sizes are multiples of 2 MiB; a mapping takes a whole allocation, so an arena is few large ones, laid
side by side in one reserved address range; an imported handle cannot be exported again, but its descriptor can be
passed on; ``PROT_READ`` makes a stray kernel write fault without changing a byte. Creating, exporting and importing
need no context, only ``cuInit``; mapping does.

What a function makes it hands to an ``ExitStack``, so that everything is freed in reverse order, on errors too.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from weightcache.arenas import contexts, driver, extents
from weightcache.wire import reasons

__all__ = [
    "ADDRESS_HINT",
    "CHUNK_BYTES",
    "GRANULARITY_BYTES",
    "Range",
    "allocate",
    "check_announced",
    "export",
    "import_shared",
    "invalid",
    "map_side_by_side",
    "split",
    "zero",
]

GRANULARITY_BYTES = 2 << 20
CHUNK_BYTES = 16 << 30
# Asking for one high address keeps weight pointers equal across restarts; granted beside torch's own ranges too, but
# never for a range below some tens of MiB (seen: 10 MiB no, 64 MiB yes), so at least this much address space is taken.
ADDRESS_HINT = 0x600000000000
RESERVED_BYTES = 64 << 20
LEGACY_STREAM = 0
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class Range:
    """A contiguous address range with allocations mapped into it, and what a framework wraps without a copy.

    ``torch.as_tensor(range, device="cuda")`` keeps it, and so the memory, alive: it is unmapped by ``free``, or when
    nothing refers to it any more. At interpreter exit the driver cleans up, not this.
    """

    def __init__(self, address: int, size_bytes: int, stack: ExitStack) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.stack = stack  # what is pushed here later is undone before the unmapping
        self.free = weakref.finalize(self, stack.close)  # callable once; later calls do nothing
        self.free.atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, bytes. torch refuses the read-only flag, so it is False even where the pages are read-only."""
        return {
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


def split(size_bytes: int, chunk_bytes: int) -> tuple[int, ...]:
    """Sizes of the allocations for an arena: multiples of 2 MiB, at most ``chunk_bytes`` each. Pure.

    ValueError for an empty arena or a chunk size that is no positive multiple of 2 MiB.
    """
    if size_bytes <= 0 or chunk_bytes <= 0 or chunk_bytes % GRANULARITY_BYTES:
        raise ValueError(
            f"an arena of {size_bytes} bytes in chunks of {chunk_bytes}, a multiple of {GRANULARITY_BYTES}"
        )
    whole, rest = divmod(extents.padded(size_bytes, GRANULARITY_BYTES), chunk_bytes)
    return (chunk_bytes,) * whole + ((rest,) if rest else ())


def export(handle: Any) -> int:
    """A descriptor of the allocation, close-on-exec, owned by the caller. Needs no context."""
    kind = driver.bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    descriptor = int(driver.call("cuMemExportToShareableHandle", handle, kind, 0))
    os.set_inheritable(descriptor, False)
    return descriptor


def allocate(stack: ExitStack, context: contexts.Context, size_bytes: int, total_bytes: int) -> Any:
    """An exportable allocation. Raises ``Refusal`` InsufficientGPUMemory, naming the whole arena's need."""
    api = driver.bindings()
    properties = api.CUmemAllocationProp()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = context.ordinal
    try:
        handle = driver.call("cuMemCreate", size_bytes, properties, 0)
    except driver.DriverError as error:
        if error.error != OUT_OF_MEMORY:
            raise
        free, total = context.memory_bytes()
        raise reasons.Refusal(
            reasons.Reason.InsufficientGPUMemory,
            f"an arena of {total_bytes} bytes on {context.device_uuid}: allocating {size_bytes} of them failed with "
            f"{free} of {total} bytes free",
        ) from error
    stack.callback(driver.call, "cuMemRelease", handle)
    return handle


def check_announced(fds: Sequence[int], chunk_sizes: Sequence[int]) -> None:
    """Raise ``Refusal`` ArenaInvalid unless descriptors and sizes can be those of an arena. Pure."""
    if not fds or len(fds) != len(chunk_sizes):
        raise invalid(f"{len(fds)} descriptors and {len(chunk_sizes)} sizes: one size a descriptor needed")
    for size in chunk_sizes:
        if size <= 0 or size % GRANULARITY_BYTES:
            raise invalid(f"a chunk of {size} bytes is announced; chunks are multiples of {GRANULARITY_BYTES}")


def import_shared(stack: ExitStack, context: contexts.Context, descriptor: int) -> Any:
    """The allocation behind a received descriptor, released with ``stack``: a mapping keeps the memory by itself."""
    kind = driver.bindings().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    try:
        os.fstat(descriptor)
        handle = driver.call("cuMemImportFromShareableHandle", descriptor, kind)
    except (OSError, driver.DriverError) as error:
        if getattr(error, "error", "") == OUT_OF_MEMORY:
            raise
        # The driver's own word for any other descriptor is CUDA_ERROR_UNKNOWN.
        raise invalid(f"descriptor {descriptor} is no allocation of a GPU visible here: {error}") from error
    stack.callback(driver.call, "cuMemRelease", handle)
    ordinal = driver.call("cuMemGetAllocationPropertiesFromHandle", handle).location.id
    if ordinal != context.ordinal:
        seen = contexts.visible_uuids()
        held = seen[ordinal] if 0 <= ordinal < len(seen) else f"device {ordinal}"
        raise invalid(f"descriptor {descriptor} is memory of {held}, announced for {context.device_uuid}")
    return handle


def map_side_by_side(
    stack: ExitStack, context: contexts.Context, handles: Sequence[Any], sizes: Sequence[int], access: str
) -> int:
    """Map the allocations side by side; ``stack`` undoes it after waiting for the GPU. Returns the address."""
    api = driver.bindings()
    total_bytes = sum(sizes)
    rights = api.CUmemAccessDesc()
    rights.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    rights.location.id = context.ordinal
    rights.flags = getattr(api.CUmemAccess_flags, access)
    with context.current():
        reserved_bytes = max(total_bytes, RESERVED_BYTES)
        address = int(driver.call("cuMemAddressReserve", reserved_bytes, 0, ADDRESS_HINT, 0))
        stack.callback(driver.call, "cuMemAddressFree", address, reserved_bytes)
        begin = address
        for handle, size in zip(handles, sizes, strict=True):
            driver.call("cuMemMap", begin, size, 0, handle, 0)
            stack.callback(driver.call, "cuMemUnmap", begin, size)
            begin += size
        driver.call("cuMemSetAccess", address, total_bytes, [rights], 1)
    stack.callback(context.synchronize)
    return address


def zero(context: contexts.Context, address: int, sizes: Sequence[int]) -> None:
    """Padding is digested, and the driver does not promise fresh memory to be zero."""
    with context.current():
        for size in sizes:
            driver.call("cuMemsetD8Async", address, 0, size, LEGACY_STREAM)
            address += size
    context.synchronize()


def invalid(what: str) -> reasons.Refusal:
    """The refusal of shared memory that is not what it claims. Pure."""
    return reasons.Refusal(reasons.Reason.ArenaInvalid, what)
