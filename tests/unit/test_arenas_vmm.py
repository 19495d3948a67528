"""GPU arenas against a driver made of memfds: our side of the contract, on a machine without a GPU.

The same promises are kept by the real driver in tests/gpu.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash

from weightcache.arenas import allocations, contexts, driver, extents, memory, staging, vmm
from weightcache.wire import reasons

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: its types are used even here")

MIB = 1 << 20
UUIDS = [uuid.UUID(int=0x11), uuid.UUID(int=0x22)]
FIRST, SECOND = (f"GPU-{number}" for number in UUIDS)


def load_stand_in() -> Any:
    """The module beside this one."""
    spec = importlib.util.spec_from_file_location("cuda_on_memfds", Path(__file__).with_name("cuda_on_memfds.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two GPUs of 1 GiB. Every test also promises: all that was made is freed, and no descriptor is left."""
    fake = load_stand_in().Driver([number.bytes for number in UUIDS])
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    driver.initialize.cache_clear()
    before = len(os.listdir("/proc/self/fd"))
    yield fake
    gc.collect()
    assert fake.leaks() == []
    assert len(os.listdir("/proc/self/fd")) == before
    driver.initialize.cache_clear()


def random_bytes(size: int) -> bytes:
    """The same at every run."""
    return np.random.default_rng(size).bytes(size)


def independent_digest(data: bytes) -> bytes:
    """The written rule (wire.digests), with nothing of ours."""
    pieces = [data[begin : begin + 4 * MIB] for begin in range(0, len(data), 4 * MIB)]
    return xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces))


def bytes_at(address: int, size: int) -> bytes:
    """What the mapped memory holds, by way of the machine and not of our code."""
    import ctypes

    return ctypes.string_at(address, size)


def close_all(fds: list[int]) -> None:
    """Close each."""
    for descriptor in fds:
        os.close(descriptor)


def filled(size: int, chunk_bytes: int = 2 * MIB) -> tuple[tuple[int, ...], list[int], bytes]:
    """Chunk sizes, descriptors and bytes of a sealed arena on the first GPU."""
    data = random_bytes(size)
    arena = vmm.VmmArena.create(size, FIRST, chunk_bytes)
    arena.put(0, memoryview(data))
    return arena.chunk_sizes, arena.seal(), data


@pytest.mark.parametrize(
    ("size", "chunk", "expected"),
    [
        (1, 16 * MIB, (2 * MIB,)),
        (2 * MIB, 16 * MIB, (2 * MIB,)),
        (16 * MIB + 1, 16 * MIB, (16 * MIB, 2 * MIB)),
        (34 << 30, 16 << 30, (16 << 30, 16 << 30, 2 << 30)),
    ],
)
def test_an_arena_is_few_allocations_of_whole_granules(size: int, chunk: int, expected: tuple[int, ...]) -> None:
    """64 GiB are four descriptors, not thousands."""
    assert allocations.split(size, chunk) == expected


@pytest.mark.parametrize(("size", "chunk"), [(0, 2 * MIB), (1, 0), (1, 3 * MIB), (-1, 2 * MIB)])
def test_chunks_that_the_driver_could_not_make_are_refused(size: int, chunk: int) -> None:
    """3 MiB would be CUDA_ERROR_INVALID_VALUE, late."""
    with pytest.raises(ValueError, match="a multiple of"):
        allocations.split(size, chunk)


def test_what_was_put_is_what_a_mapping_shows(cuda: Any) -> None:
    """Across chunk borders, through descriptors; everything else is zero although fresh memory is not."""
    size = 5 * MIB + 256
    data = random_bytes(3 * MIB)
    matrix = np.random.default_rng(3).integers(0, 256, (700, 900), np.uint8)
    arena = memory.create(memory.GPU, size, device_uuid=FIRST, chunk_bytes=2 * MIB)
    arena.put(MIB, memoryview(data))
    arena.put_rows(4 * MIB + 512, memoryview(matrix.tobytes()), 700, 130, 900)
    assert arena.address == allocations.ADDRESS_HINT
    sizes, fds = arena.chunk_sizes, arena.seal()
    assert sizes == (2 * MIB, 2 * MIB, 2 * MIB) and cuda.leaks() == []
    assert not any(os.get_inheritable(descriptor) for descriptor in fds)

    mapping = memory.map_readonly(memory.GPU, fds, sizes, device_uuid=FIRST)
    close_all(fds)
    expected = bytearray(6 * MIB)
    expected[MIB : 4 * MIB] = data
    expected[4 * MIB + 512 : 4 * MIB + 512 + 700 * 130] = matrix[:, :130].tobytes()
    assert bytes_at(mapping.address, mapping.size_bytes) == expected
    assert "handle" not in str(cuda.leaks()), "a mapping holds the memory by itself"
    mapping.close()


def test_digests_are_the_rule_over_the_device_bytes(cuda: Any) -> None:
    """Many pieces of different lengths come back in the order asked, from the arena and from a mapping of it."""
    data = random_bytes(11 * MIB)
    spans = [
        extents.Extent(256, 512),
        extents.Extent(0, 256),
        extents.Extent(MIB, 9 * MIB + 256),
        extents.Extent(512, 0),
        extents.Extent(4 * MIB, 4 * MIB),
    ]
    expected = [independent_digest(data[span.offset : span.end]) for span in spans]
    arena = vmm.VmmArena.create(len(data), FIRST, 4 * MIB)
    arena.put(0, memoryview(data))
    assert arena.digests(spans) == expected
    assert arena.digests([]) == []
    sizes, fds = arena.chunk_sizes, arena.seal()
    mapping = vmm.VmmMapping.map_readonly(fds, sizes, FIRST)
    close_all(fds)
    assert mapping.digests(spans) == expected
    assert mapping.digests(spans) == expected
    assert cuda.calls.count("cuModuleLoadData") == 2
    mapping.close()


class Part(NamedTuple):
    """``extents.Rows`` as a test writes them."""

    source_offset: int
    num_rows: int
    row_bytes: int
    row_stride: int
    offset: int


def uploaded_buffer(arena: vmm.VmmArena, data: bytes, mirrored: bool) -> staging.Buffer:
    """A reader buffer of the arena that holds ``data``."""
    pool = arena.staging(1, len(data), mirrored=mirrored)
    buffer = pool.acquire()
    buffer.view[:] = data
    if mirrored:
        pool.digest(buffer, [extents.Extent(0, len(data))], lambda found: None)
    pool.release(buffer)
    return buffer


@pytest.mark.parametrize("where", ["mirror", "pinned", "ordinary"])
def test_many_parts_of_a_buffer_arrive_as_one_by_one(cuda: Any, where: str) -> None:
    """Runs, rows that are apart, rows that touch, and nothing: whatever memory they come from."""
    data = random_bytes(MIB)
    parts = [Part(0, 1, 1000, 0, 512), Part(4096, 7, 100, 300, 8192), Part(8192, 3, 64, 64, 2048), Part(0, 0, 0, 0, 0)]
    arena = vmm.VmmArena.create(2 * MIB, FIRST)
    buffer = None if where == "ordinary" else uploaded_buffer(arena, data, where == "mirror")
    arena.put_all(buffer.view if buffer else memoryview(data), parts)
    sizes, fds = arena.chunk_sizes, arena.seal()
    mapping = vmm.VmmMapping.map_readonly(fds, sizes, FIRST)
    close_all(fds)
    expected = bytearray(2 * MIB)
    expected[512:1512] = data[:1000]
    expected[8192 : 8192 + 700] = b"".join(data[4096 + 300 * row : 4196 + 300 * row] for row in range(7))
    expected[2048 : 2048 + 192] = data[8192 : 8192 + 192]
    assert bytes_at(mapping.address, 2 * MIB) == expected
    assert cuda.calls.count("cuMemcpyDtoDAsync") == (2 if where == "mirror" else 0)
    mapping.close()


def test_a_part_that_leaves_the_buffer_stops_all_copies(cuda: Any) -> None:
    """One wrong row would write over another tensor, or read another buffer."""
    arena = vmm.VmmArena.create(2 * MIB, FIRST)
    buffer = uploaded_buffer(arena, random_bytes(MIB), mirrored=False)
    before = len(cuda.calls)
    with pytest.raises(ValueError, match="does not fit"):
        arena.put_all(buffer.view, [Part(0, 1, 16, 0, 0), Part(MIB - 10, 1, 11, 0, 0)])
    assert not [call for call in cuda.calls[before:] if "Memcpy" in call]
    arena.close()


@pytest.mark.parametrize("mirrored", [False, True])
def test_copies_from_reader_buffers_are_awaited_before_reuse(cuda: Any, mirrored: bool) -> None:
    """Answers W28: one buffer carries 16 blocks in turn; a reuse too early would put later bytes in earlier places."""
    data = random_bytes(MIB)
    step = MIB // 16
    arena = vmm.VmmArena.create(2 * MIB, FIRST)
    pool = arena.staging(1, step, mirrored=mirrored)
    delivered: list[list[bytes]] = []
    for begin in range(0, MIB, step):
        buffer = pool.acquire()
        buffer.view[:] = data[begin : begin + step]
        if mirrored:
            pool.digest(buffer, [extents.Extent(0, step)], delivered.append)
        arena.put_rows(begin, buffer.view, 4, step // 4, step // 4)
        arena.put(MIB + begin, buffer.view[: step // 2])
        arena.put_rows(MIB + begin + step // 2, buffer.view[step // 2 :], 8, 100, 200)
        pool.release(buffer)
    sizes, fds = arena.chunk_sizes, arena.seal()
    mapping = vmm.VmmMapping.map_readonly(fds, sizes, FIRST)
    close_all(fds)
    expected = bytearray(data)
    for begin in range(0, MIB, step):
        rows = np.frombuffer(data, np.uint8)[begin + step // 2 : begin + step // 2 + 1600].reshape(8, 200)[:, :100]
        packed = data[begin : begin + step // 2] + rows.tobytes()
        expected += packed + bytes(step - len(packed))
    assert bytes_at(mapping.address, 2 * MIB) == expected
    digests = [[xxhash.xxh3_128_digest(data[begin : begin + step])] for begin in range(0, MIB, step)]
    assert delivered == (digests if mirrored else [])
    # Uploaded once: the copies into the arena are then the device's own.
    assert cuda.calls.count("cuMemcpyHtoDAsync") == (16 if mirrored else 32)
    assert cuda.calls.count("cuMemcpyDtoDAsync") == (32 if mirrored else 0)
    mapping.close()


def test_blocks_that_the_kernel_cannot_take_are_digested_all_the_same(cuda: Any) -> None:
    """The last block of a file has any length, and may follow another file's in the buffer."""
    data = random_bytes(64 << 10)
    spans = [extents.Extent(0, 240), extents.Extent(256, 1001), extents.Extent(1257, 30000), extents.Extent(40000, 0)]
    arena = vmm.VmmArena.create(2 * MIB, FIRST)
    pool = arena.staging(2, 256 << 10, mirrored=True)
    buffer = pool.acquire()
    buffer.view[: len(data)] = data
    delivered: list[list[bytes]] = []
    pool.digest(buffer, spans, delivered.append)
    pool.digest(buffer, spans[:2], delivered.append)
    assert len(delivered) == 1, "the first is known before its table is used again, the second not yet"
    pool.release(buffer)
    pool.wait()
    expected = [xxhash.xxh3_128_digest(data[span.offset : span.end]) for span in spans]
    assert delivered == [expected, expected[:2]]
    with pytest.raises(ValueError, match="spans for a table"):
        pool.digest(pool.acquire(), [extents.Extent(0, 256)] * 6, delivered.append)
    arena.close()


def test_plain_reader_buffers_do_not_pretend_to_digest(cuda: Any) -> None:
    """Answers W24: no silent slow path."""
    arena = vmm.VmmArena.create(2 * MIB, FIRST)
    pool = arena.staging(1, 4096)
    with pytest.raises(RuntimeError, match="mirrored=True"):
        pool.digest(pool.acquire(), [extents.Extent(0, 4096)], print)
    arena.close()


def test_an_arena_is_not_sealed_while_a_buffer_is_out(cuda: Any) -> None:
    """A reader that is still filling a buffer would write into a published arena."""
    arena = vmm.VmmArena.create(2 * MIB, FIRST)
    pool = arena.staging(1, 4096)
    buffer = pool.acquire()
    with pytest.raises(RuntimeError, match="1 reader buffers are out"):
        arena.seal()
    arena.put(0, buffer.view)
    pool.release(buffer)
    close_all(arena.seal())
    with pytest.raises(ValueError, match="closed or sealed"):
        arena.put(0, memoryview(b"late"))


def test_the_views_of_freed_pinned_memory_raise_instead_of_crashing(cuda: Any) -> None:
    """A reader that comes late gets an exception, not a segmentation fault; closing may be repeated."""
    arena = vmm.VmmArena.create(2 * MIB, FIRST)
    pool = arena.staging(1, 4096)
    buffer = pool.acquire()
    arena.put(0, buffer.view)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="released"):
        buffer.view[0] = 1
    pool.release(buffer)
    close_all(arena.seal())
    arena.close()
    arena.close()


def test_the_mapping_lives_as_long_as_what_wraps_it(cuda: Any) -> None:
    """A tensor keeps its ``Range``; the memory must stay until the last one is gone, and go then."""
    sizes, fds, data = filled(2 * MIB)
    mapping = vmm.VmmMapping.map_readonly(fds, sizes, FIRST)
    close_all(fds)
    base = mapping.buffer
    assert base.__cuda_array_interface__["data"] == (mapping.address, False)
    assert base.__cuda_array_interface__["shape"] == (2 * MIB,)
    mapping.close()
    mapping.close()
    assert bytes_at(base.address, 2 * MIB) == data
    with pytest.raises(ValueError, match="closed"):
        _ = mapping.buffer
    del base
    assert cuda.leaks() == []


def test_another_address_is_taken_and_told_when_the_wished_one_is_not_granted(cuda: Any) -> None:
    """Two arenas in one engine both work; code that relies on equal pointers can ask."""
    sizes, fds, data = filled(2 * MIB)
    first = vmm.VmmMapping.map_readonly(fds, sizes, FIRST)
    cuda.hint_is_taken = True
    second = vmm.VmmMapping.map_readonly(fds, sizes, FIRST)
    close_all(fds)
    assert (first.is_at_hint, second.is_at_hint) == (True, False)
    assert bytes_at(second.address, 2 * MIB) == data
    first.close()
    second.close()


def refused(reason: reasons.Reason, match: str) -> Any:
    """Expect a refusal for that reason."""

    class Check:
        def __enter__(self) -> None:
            self.raises = pytest.raises(reasons.Refusal, match=match)
            self.caught = self.raises.__enter__()

        def __exit__(self, *error: Any) -> Any:
            swallowed = self.raises.__exit__(*error)
            assert self.caught.value.reason == reason
            return swallowed

    return Check()


def test_a_gpu_that_is_not_here_is_refused_by_uuid(cuda: Any) -> None:
    """Answers W1 and W2: never another GPU because it has the expected number."""
    stranger = f"GPU-{uuid.UUID(int=0x33)}"
    with refused(reasons.Reason.GPUNotFound, f"{stranger} is not among.*{FIRST}, {SECOND}"):
        vmm.VmmArena.create(2 * MIB, stranger)
    with refused(reasons.Reason.GPUNotFound, "not the UUID of a GPU"):
        vmm.VmmArena.create(2 * MIB, "0")
    with refused(reasons.Reason.MIGNotSupported, "slice"):
        vmm.VmmArena.create(2 * MIB, f"MIG-{UUIDS[0]}")
    assert contexts.visible_uuids() == [FIRST, SECOND]


def test_memory_of_another_gpu_is_refused_by_both_uuids(cuda: Any) -> None:
    """Answers W1: descriptors that arrive under the wrong name are not mapped."""
    arena = vmm.VmmArena.create(2 * MIB, SECOND)
    sizes, fds = arena.chunk_sizes, arena.seal()
    with refused(reasons.Reason.ArenaInvalid, f"memory of {SECOND}, announced for {FIRST}"):
        vmm.VmmMapping.map_readonly(fds, sizes, FIRST)
    close_all(fds)


@pytest.mark.parametrize("announced", [(2 * MIB,), (8 * MIB,)])
def test_an_allocation_of_another_size_is_refused(cuda: Any, announced: tuple[int, ...]) -> None:
    """A manifest that promises more than there is would be read beyond the end."""
    _sizes, fds, _data = filled(4 * MIB, 4 * MIB)
    with refused(reasons.Reason.ArenaInvalid, "announced sizes"):
        vmm.VmmMapping.map_readonly(fds, announced, FIRST)
    close_all(fds)


@pytest.mark.parametrize(
    ("count", "sizes"), [(0, []), (1, [2 * MIB, 2 * MIB]), (1, [0]), (1, [3 * MIB]), (1, [-2 * MIB])]
)
def test_descriptors_and_sizes_that_cannot_be_an_arena_are_refused(cuda: Any, count: int, sizes: list[int]) -> None:
    """A truncated message must not map half an arena."""
    with refused(reasons.Reason.ArenaInvalid, "descriptors|multiples"):
        vmm.VmmMapping.map_readonly([0] * count, sizes, FIRST)


def test_a_descriptor_of_something_else_is_refused(cuda: Any) -> None:
    """The driver only says CUDA_ERROR_UNKNOWN."""
    other = os.memfd_create("other", os.MFD_CLOEXEC)
    with refused(reasons.Reason.ArenaInvalid, "no allocation of a GPU.*CUDA_ERROR_UNKNOWN"):
        vmm.VmmMapping.map_readonly([other], [2 * MIB], FIRST)
    os.close(other)
    with refused(reasons.Reason.ArenaInvalid, "no allocation of a GPU.*Bad file descriptor"):
        vmm.VmmMapping.map_readonly([other], [2 * MIB], FIRST)


def test_too_little_memory_is_refused_with_need_and_free(cuda: Any) -> None:
    """The user learns by how much it falls short; chunks made before the failure are freed."""
    with refused(reasons.Reason.InsufficientGPUMemory, f"{2 << 30} bytes on {FIRST}.* of {1 << 30} bytes free"):
        vmm.VmmArena.create(2 << 30, FIRST, 64 * MIB)


FAULTS = ["cuDevicePrimaryCtxRetain", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]


@pytest.mark.parametrize("function", [*FAULTS, "cuMemsetD8Async"])
@pytest.mark.parametrize("error", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"])
def test_a_failure_while_creating_leaves_nothing_and_names_the_call(cuda: Any, function: str, error: str) -> None:
    """Answers W26 in part: a failed attempt keeps no memory beside the next one."""
    cuda.fail_at = (function, getattr(cuda.CUresult, error))
    with pytest.raises((driver.DriverError, reasons.Refusal), match=r"cu\w+ answered|bytes free"):
        vmm.VmmArena.create(6 * MIB, FIRST, 2 * MIB)
    assert cuda.leaks() == []


@pytest.mark.parametrize("function", ["cuDevicePrimaryCtxRetain", "cuMemImportFromShareableHandle", *FAULTS[2:]])
def test_a_failure_while_mapping_leaves_nothing(cuda: Any, function: str) -> None:
    """An engine that could not attach holds no part of the arena."""
    sizes, fds, _data = filled(6 * MIB)
    cuda.fail_at = (function, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(driver.DriverError, match=f"{function} answered CUDA_ERROR_OUT_OF_MEMORY"):
        vmm.VmmMapping.map_readonly(fds, sizes, FIRST)
    close_all(fds)
    assert cuda.leaks() == []


@pytest.mark.parametrize("function", ["cuStreamCreate", "cuMemHostAlloc", "cuMemAlloc", "cuModuleLoadData"])
def test_a_failure_while_making_reader_buffers_leaves_the_arena_whole(cuda: Any, function: str) -> None:
    """The loader may try fewer buffers."""
    arena = vmm.VmmArena.create(2 * MIB, FIRST)
    before = cuda.leaks()
    cuda.fail_at = (function, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(driver.DriverError, match=function):
        arena.staging(2, 4096, mirrored=True)
    cuda.fail_at = None
    assert [one for one in cuda.leaks() if "module" not in one] == before
    arena.staging(1, 4096, mirrored=True)
    arena.close()


def test_an_export_that_fails_half_way_gives_no_descriptor_away(cuda: Any) -> None:
    """Descriptors that nobody owns would keep the memory for ever; the fixture counts them."""
    arena = vmm.VmmArena.create(6 * MIB, FIRST, 2 * MIB)
    real_export = type(cuda).do_cuMemExportToShareableHandle
    exported: list[int] = []

    def export_two(self: Any, handle: int, kind: Any, flags: int) -> Any:
        if len(exported) == 2:
            return cuda.CUresult.CUDA_ERROR_NOT_PERMITTED, None
        exported.append(handle)
        return real_export(self, handle, kind, flags)

    type(cuda).do_cuMemExportToShareableHandle = export_two
    with pytest.raises(driver.DriverError, match="cuMemExportToShareableHandle answered CUDA_ERROR_NOT_PERMITTED"):
        arena.seal()
    arena.close()


def test_an_arena_that_nobody_closed_is_freed_with_its_last_reference(cuda: Any) -> None:
    """An exception between making and closing must not keep 64 GiB."""
    arena = vmm.VmmArena.create(2 * MIB, FIRST)
    arena.staging(1, 4096)
    del arena
    gc.collect()
    assert cuda.leaks() == []


def test_without_a_driver_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the NVIDIA driver, or a container without its library, gets words and not a stack trace."""

    class NoDriver:
        def cuInit(self, flags: int) -> Any:  # noqa: N802  # the driver's name
            raise RuntimeError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "bindings", NoDriver)
    driver.initialize.cache_clear()
    with refused(reasons.Reason.GPUNotFound, r"does not answer here: libcuda\.so\.1"):
        memory.create(memory.GPU, 4096, device_uuid=FIRST)


def test_without_the_binding_the_reason_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is optional; who asks for a GPU without it learns its name."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    driver.bindings.cache_clear()
    driver.initialize.cache_clear()
    with refused(reasons.Reason.GPUNotFound, r"weightcache\[gpu\]"):
        memory.create(memory.GPU, 4096, device_uuid=FIRST)
