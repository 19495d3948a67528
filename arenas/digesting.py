"""XXH3-128 of device memory, by the device.

Copying 64 GiB to the CPU to prove it would take 1.2 s and most of a host; the GPU reads it in some 20 ms where it is.
``xxh3.cu`` is the kernel, compiled beforehand to ``xxh3.ptx`` (``scripts/build_ptx.py``), which the driver finishes at
load: no compiler and no torch are needed, so a verifier starts fast. Lengths of 240 bytes and less are another
algorithm, and unaligned starts would cost bandwidth: ``is_digestible`` tells them, and they are the CPU's.
"""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from weightcache.arenas import contexts, driver, extents
from weightcache.wire import digests

__all__ = ["Batch", "Digester", "Table", "is_digestible"]

PTX = pathlib.Path(__file__).with_name("xxh3.ptx")
KERNEL = b"xxh3_128"
LANES = 32
WARPS_PER_BLOCK = 1  # pieces differ in length, and a block's slot is free only when its longest is done
SHORTEST_BYTES = 241
START_ALIGNMENT = 16
STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no ties to the legacy stream, which torch works on
SPAN_BYTES = 16  # struct Span of the kernel: address and size, 64 bits each

Span = tuple[int, int]  # device address, bytes


def is_digestible(address: int, size_bytes: int) -> bool:
    """Whether the kernel can digest that piece. Pure."""
    return size_bytes >= SHORTEST_BYTES and address % START_ALIGNMENT == 0


class Table:
    """The kernel's input and output in page-locked host memory, which the GPU reads and writes itself.

    For few spans that change often: no device memory, no copies. Room for ``capacity`` spans at ``address``, which
    is the same for CPU and GPU (unified addressing). The owner allocates and frees.
    """

    def __init__(self, address: int, capacity: int) -> None:
        self.capacity = capacity
        self.spans_address = address
        self.digests_address = address + capacity * SPAN_BYTES
        self._spans = (ctypes.c_uint64 * (2 * capacity)).from_address(self.spans_address)
        self._digests = (ctypes.c_char * (digests.DIGEST_BYTES * capacity)).from_address(self.digests_address)

    @staticmethod
    def size_bytes(capacity: int) -> int:
        """How much memory a table of that capacity takes. Pure."""
        return capacity * (SPAN_BYTES + digests.DIGEST_BYTES)

    def fill(self, spans: Sequence[Span]) -> None:
        """Write the input. ValueError when there are more than ``capacity``."""
        if len(spans) > self.capacity:
            raise ValueError(f"{len(spans)} spans for a table of {self.capacity}")
        self._spans[: 2 * len(spans)] = [value for span in spans for value in span]

    def read(self, count: int) -> list[bytes]:
        """The output of the first ``count`` spans; the kernel must have finished."""
        return _split(self._digests.raw, count)


class Digester:
    """The kernel in one context, loaded when it is first needed. Close it before the context ends."""

    def __init__(self, context: contexts.Context, ptx: bytes | None = None) -> None:
        self._context = context
        self._ptx = ptx
        self._module: Any = None
        self._function: Any = None

    def load(self) -> None:
        """Let the driver finish the PTX (some tens of ms). Twice is once, but not from two threads at a time."""
        if self._module is None:
            # The driver reads up to a terminating zero, which a ctypes buffer adds.
            image = ctypes.create_string_buffer(self._ptx or PTX.read_bytes())
            with self._context.current():
                self._module = driver.call("cuModuleLoadData", ctypes.addressof(image))
                self._function = driver.call("cuModuleGetFunction", self._module, KERNEL)

    def launch(self, spans_address: int, digests_address: int, count: int, stream: Any) -> None:
        """Start the loaded kernel over ``count`` spans on ``stream``; the context must be current. Does not wait."""
        if not count:
            return
        num_blocks = -(-count // WARPS_PER_BLOCK)
        arguments = (
            (spans_address, digests_address, count),
            (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
        )
        driver.call(
            "cuLaunchKernel", self._function, num_blocks, 1, 1, LANES, WARPS_PER_BLOCK, 1, 0, stream, arguments, 0
        )

    def digests(self, address: int, spans: Sequence[extents.Extent]) -> list[bytes]:
        """The digest (16 bytes) of each extent of the memory at ``address``, in pieces of 4 MiB (``wire.digests``).

        Extents are multiples of 256 bytes. Waits. Raises ``driver.DriverError``; CUDA_ERROR_OUT_OF_MEMORY when there
        is no room for 32 bytes a piece.
        """
        self.load()
        pieces = extents.pieces(spans)
        with Batch(self._context, self, [(address + piece.offset, piece.size_bytes) for piece in pieces]) as batch:
            batch.launch()
            return extents.combined(spans, batch.results())

    def close(self) -> None:
        """Unload. Twice is once."""
        if self._module is not None:
            with self._context.current():
                driver.call("cuModuleUnload", self._module)
            self._module = None


class Batch:
    """Many spans, their table and their digests in device memory: for whole arenas.

    Use it in a ``with`` block, in one thread, which has the context current meanwhile. The longest spans go first, so
    that no long one starts when everything else has ended.
    """

    def __init__(self, context: contexts.Context, digester: Digester, spans: Sequence[Span]) -> None:
        for address, size_bytes in spans:
            if not is_digestible(address, size_bytes):
                raise ValueError(f"{size_bytes} bytes at {address:#x}: more than 240 needed, at a multiple of 16")
        self._context = context
        self._digester = digester
        self._count = len(spans)
        self._order = sorted(range(len(spans)), key=lambda index: -spans[index][1])
        self._input = (ctypes.c_uint64 * (2 * self._count))(*(value for i in self._order for value in spans[i]))
        self._output = (ctypes.c_char * (digests.DIGEST_BYTES * self._count))()
        self._stack = ExitStack()
        self._address = 0
        self.stream: Any = None

    def __enter__(self) -> Batch:
        with ExitStack() as stack:
            stack.enter_context(self._context.current())
            self.stream = driver.call("cuStreamCreate", STREAM_NON_BLOCKING)
            stack.callback(driver.call, "cuStreamDestroy", self.stream)
            if self._count:
                self._address = int(driver.call("cuMemAlloc", Table.size_bytes(self._count)))
                stack.callback(driver.call, "cuMemFree", self._address)
                source = ctypes.addressof(self._input)
                driver.call("cuMemcpyHtoDAsync", self._address, source, ctypes.sizeof(self._input), self.stream)
            self._stack = stack.pop_all()
        return self

    def launch(self) -> None:
        """Start over all spans; may be repeated. Does not wait."""
        self._digester.launch(self._address, self._digests_address, self._count, self.stream)

    def results(self) -> list[bytes]:
        """Wait, then one digest (16 bytes) per span, in the order given."""
        if self._count:
            target = ctypes.addressof(self._output)
            driver.call("cuMemcpyDtoHAsync", target, self._digests_address, len(self._output), self.stream)
        driver.call("cuStreamSynchronize", self.stream)
        found = [b""] * self._count
        for index, digest in zip(self._order, _split(self._output.raw, self._count), strict=True):
            found[index] = digest
        return found

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    @property
    def _digests_address(self) -> int:
        return self._address + self._count * SPAN_BYTES


def _split(joined: bytes, count: int) -> list[bytes]:
    size = digests.DIGEST_BYTES
    return [joined[begin : begin + size] for begin in range(0, count * size, size)]
