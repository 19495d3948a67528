"""GPU arenas with the real driver: filled here, mapped read-only in other processes, free when the last one goes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from weightcache.arenas import allocations, contexts, driver, extents, memory, vmm
from weightcache.wire import reasons

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_memory_left")]

MIB = 1 << 20
GIB = 1 << 30
Child = Callable[..., str]


def random_bytes(size: int) -> bytes:
    """The same at every run and in every process."""
    return np.random.default_rng(size).bytes(size)


def independent_digest(data: bytes) -> bytes:
    """The written rule (wire.digests), with nothing of ours."""
    pieces = [data[begin : begin + 4 * MIB] for begin in range(0, len(data), 4 * MIB)]
    return xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces))


def read_back(context: contexts.Context, address: int, size_bytes: int) -> bytes:
    """What the device memory holds, by way of the driver alone."""
    data = (ctypes.c_char * size_bytes)()
    with context.current():
        driver.call("cuMemcpyDtoH", ctypes.addressof(data), address, size_bytes)
    return data.raw


def first_difference(found: bytes, expected: bytes) -> str:
    """Where two byte strings of equal length part, in words."""
    assert len(found) == len(expected)
    where = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8))
    if not len(where):
        return "none"
    at = int(where[0])
    return f"{len(where)} bytes, the first at {at}: {found[at : at + 8].hex()}, {expected[at : at + 8].hex()} expected"


def sealed(device_uuid: str, data: bytes, chunk_bytes: int = 4 * MIB) -> tuple[list[int], tuple[int, ...]]:
    """Descriptors and sizes of a sealed arena with those bytes."""
    arena = vmm.VmmArena.create(len(data), device_uuid, chunk_bytes)
    arena.put(0, memoryview(data))
    sizes = arena.chunk_sizes
    return arena.seal(), sizes


def close_all(fds: list[int]) -> None:
    """Close each."""
    for descriptor in fds:
        os.close(descriptor)


ATTACH = """
import json
from weightcache.arenas import driver, extents, memory
sizes, uuid = json.loads(arguments[0]), arguments[1]
mapping = memory.map_readonly("GPU", fds, sizes, device_uuid=uuid)
whole = [extents.Extent(0, mapping.size_bytes)]
before = mapping.digests(whole)[0].hex()
refused = []
for function, rest in (("cuMemcpyHtoD", (id(b""), 16)), ("cuMemsetD8", (0, 16))):
    try:
        with mapping._context.current():
            driver.call(function, mapping.address, *rest)
    except driver.DriverError as error:
        refused.append(error.error)
api = driver.bindings()
location = api.CUmemLocation()
location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
location.id = mapping._context.ordinal
access = int(driver.call("cuMemGetAccess", location, mapping.address))
print(json.dumps({"before": before, "after": mapping.digests(whole)[0].hex(), "refused": refused, "access": access,
                  "at_hint": mapping.is_at_hint, "size": mapping.size_bytes}))
mapping.close()
"""


def test_a_fresh_process_reads_every_byte_and_cannot_write_one(device_uuid: str, run_child: Child) -> None:
    """Three allocations become one range at the wished address, readable, with the writes of the driver refused."""
    data = random_bytes(10 * MIB)
    fds, sizes = sealed(device_uuid, data)
    told = json.loads(run_child(ATTACH, fds, json.dumps(sizes), device_uuid))
    close_all(fds)
    expected = independent_digest(data).hex()
    assert told == {
        "before": expected,
        "after": expected,
        "refused": ["CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_VALUE"],
        "access": 1,
        "at_hint": True,
        "size": 10 * MIB,
    }


TORCH = """
import gc, json
import torch
from weightcache.arenas import extents, memory
sizes, uuid = json.loads(arguments[0]), arguments[1]
mapping = memory.map_readonly("GPU", fds, sizes, device_uuid=uuid)
tensor = torch.as_tensor(mapping.buffer, device="cuda")
in_place = tensor.data_ptr() == mapping.address
mapping.close()
del mapping
gc.collect()
total = int(tensor.sum(dtype=torch.int64))
try:
    tensor[:16].fill_(7)
    torch.cuda.synchronize()
    write = "no error"
except RuntimeError as error:
    write = str(error).splitlines()[0]
print(json.dumps({"in_place": in_place, "total": total, "write": write}))
import os, sys
sys.stdout.flush()
os._exit(0)  # the context is lost by the write that faulted: nothing more can be freed in it
"""


def test_torch_reads_in_place_and_a_stray_kernel_write_changes_nothing(device_uuid: str, run_child: Child) -> None:
    """A tensor keeps the mapping after ``close``; a write faults in its own process, and others read the same bytes."""
    pytest.importorskip("torch")
    data = random_bytes(4 * MIB)
    fds, sizes = sealed(device_uuid, data)
    told = json.loads(run_child(TORCH, fds, json.dumps(sizes), device_uuid))
    assert told["in_place"] is True
    assert told["total"] == int(np.frombuffer(data, np.uint8).sum(dtype=np.int64))
    assert "illegal memory access" in told["write"], told["write"]
    mapping = vmm.VmmMapping.map_readonly(fds, sizes, device_uuid)
    close_all(fds)
    assert mapping.digests([extents.Extent(0, 4 * MIB)]) == [independent_digest(data)]
    mapping.close()


CREATE = """
import json, os, socket, sys, time
import numpy as np
from weightcache.arenas import memory
back = socket.socket(fileno=int(arguments[0]))
size = int(arguments[1])
arena = memory.create("GPU", size, device_uuid=arguments[2], chunk_bytes=4 << 20)
arena.put(0, memoryview(np.random.default_rng(size).bytes(size)))
sizes = arena.chunk_sizes
socket.send_fds(back, [json.dumps(sizes).encode()], arena.seal())
time.sleep(600)
"""


def test_the_memory_outlives_a_creator_that_was_killed(
    context: contexts.Context, device_uuid: str, run_child: Child
) -> None:
    """Weights outlive their loader: kill -9 it, and a mapping made before and an engine that comes later read right."""
    size = 12 * MIB + 512
    ours, theirs = socket.socketpair()
    with ours, theirs:
        program = CREATE.replace("arguments", "sys.argv[1:]")
        creator = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), str(size), device_uuid], pass_fds=[theirs.fileno()]
        )
        try:
            ours.settimeout(60)
            message, fds, _flags, _address = socket.recv_fds(ours, 1000, 16)
            sizes = json.loads(message)
            mapping = vmm.VmmMapping.map_readonly(fds, sizes, device_uuid)
        finally:
            creator.send_signal(signal.SIGKILL)
            creator.wait(30)
    expected = random_bytes(size) + bytes(sum(sizes) - size)
    assert first_difference(read_back(context, mapping.address, mapping.size_bytes), expected) == "none"
    told = json.loads(run_child(ATTACH, fds, json.dumps(sizes), device_uuid))
    assert told["before"] == independent_digest(expected).hex()
    mapping.close()
    close_all(list(fds))


def test_copies_land_where_numpy_puts_them(context: contexts.Context, device_uuid: str) -> None:
    """Rows of odd widths, across allocations, from ordinary, pinned and mirrored memory; all else is zero."""
    arena = vmm.VmmArena.create(24 * MIB, device_uuid, 2 * MIB)
    expected = np.zeros(24 * MIB, np.uint8)
    random = np.random.default_rng(5)
    shapes = [(1, MIB, MIB), (7, 13, 13), (1000, 130, 514), (3, 700_001, 900_000), (5000, 2, 6), (64, 4096, 65_536)]
    plain, mirrored = arena.staging(2, 8 * MIB), arena.staging(2, 8 * MIB, mirrored=True)
    offset = 2 * MIB - 777  # the first copies straddle the border of two allocations
    for num_rows, row_bytes, stride in shapes:
        matrix = random.integers(0, 256, num_rows * stride, np.uint8)
        for kind in ("ordinary", "plain", "mirrored"):
            source, pool = memoryview(matrix.tobytes()), {"plain": plain, "mirrored": mirrored}.get(kind)
            buffer = pool.acquire() if pool else None
            if pool and buffer:
                buffer.view[: len(source)] = source
                source = buffer.view[: len(source)]
                if kind == "mirrored":
                    pool.digest(buffer, [extents.Extent(0, extents.padded(len(source)))], lambda _found: None)
            arena.put_rows(offset, source, num_rows, row_bytes, stride)
            if pool and buffer:
                pool.release(buffer)
            packed = matrix.reshape(num_rows, stride)[:, :row_bytes].reshape(-1)
            expected[offset : offset + packed.size] = packed
            offset += packed.size + 1
    plain.wait()
    mirrored.wait()
    found = read_back(context, arena.address, 24 * MIB)
    arena.close()
    assert first_difference(found, expected.tobytes()) == "none"


def test_many_readers_fill_one_arena(device_uuid: str) -> None:
    """Sixteen threads, eight buffers: each block arrives once, and its content digest is its own."""
    data = random_bytes(192 * MIB)
    block = 4 * MIB
    arena = vmm.VmmArena.create(len(data), device_uuid)
    pool = arena.staging(8, block, mirrored=True)
    digests: dict[int, bytes] = {}
    work = iter(range(0, len(data), block))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def read() -> None:
        try:
            while True:
                with lock:
                    begin = next(work, None)
                if begin is None:
                    return
                buffer = pool.acquire(timeout_seconds=60)
                buffer.view[:] = data[begin : begin + block]
                deliver = lambda found, begin=begin: digests.__setitem__(begin, found[0])  # noqa: E731  # a closure
                pool.digest(buffer, [extents.Extent(0, block)], deliver)
                for quarter in range(0, block, block // 4):
                    arena.put(begin + quarter, buffer.view[quarter : quarter + block // 4])
                pool.release(buffer)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    pool.wait()
    assert digests == {
        begin: xxhash.xxh3_128_digest(data[begin : begin + block]) for begin in range(0, len(data), block)
    }
    assert arena.digests([extents.Extent(0, len(data))]) == [independent_digest(data)]
    close_all(arena.seal())


def assert_refused(reason: reasons.Reason, match: str, attempt: Callable[[], Any]) -> None:
    """The attempt is refused for that reason, and says so."""
    with pytest.raises(reasons.Refusal, match=match) as caught:
        attempt()
    assert caught.value.reason == reason, str(caught.value)


def test_shared_memory_that_is_not_what_it_claims_is_refused(device_uuid: str) -> None:
    """Answers W1: wrong size, wrong number, wrong kind of descriptor, wrong GPU; and a right one works afterwards."""
    data = random_bytes(4 * MIB)
    fds, sizes = sealed(device_uuid, data)
    invalid = reasons.Reason.ArenaInvalid
    attempt = vmm.VmmMapping.map_readonly
    for announced in ([2 * MIB], [6 * MIB], [GIB]):
        assert_refused(invalid, "announced sizes", lambda announced=announced: attempt(fds, announced, device_uuid))
    assert_refused(invalid, "multiples", lambda: attempt(fds, [4 * MIB - 256], device_uuid))
    assert_refused(invalid, "descriptors", lambda: attempt(fds, [2 * MIB, 2 * MIB], device_uuid))
    other = os.memfd_create("other", os.MFD_CLOEXEC)
    os.ftruncate(other, 4 * MIB)
    assert_refused(invalid, "no allocation of a GPU", lambda: attempt([other], [4 * MIB], device_uuid))
    os.close(other)
    assert_refused(invalid, "no allocation of a GPU", lambda: attempt([other], [4 * MIB], device_uuid))
    stranger = f"GPU-{uuid.UUID(int=1)}"
    assert_refused(reasons.Reason.GPUNotFound, stranger, lambda: attempt(fds, sizes, stranger))
    assert_refused(reasons.Reason.GPUNotFound, stranger, lambda: memory.create("GPU", MIB, device_uuid=stranger))
    mapping = attempt(fds, sizes, device_uuid)
    close_all(fds)
    assert mapping.digests([extents.Extent(0, 4 * MIB)]) == [independent_digest(data)]
    mapping.close()


def test_an_arena_that_does_not_fit_is_refused_and_leaves_nothing(context: contexts.Context, device_uuid: str) -> None:
    """The allocations made before the one that failed are given back; need and free are told."""
    needed = (context.memory_bytes()[1] // (2 * MIB)) * 2 * MIB + 16 * GIB
    assert_refused(
        reasons.Reason.InsufficientGPUMemory,
        f"{needed} bytes on {device_uuid}",
        lambda: vmm.VmmArena.create(needed, device_uuid),
    )


def test_an_arena_is_zero_until_put_and_gone_when_closed(context: contexts.Context, device_uuid: str) -> None:
    """Memory that held other bytes just before comes back as zeros; 2 GiB taken are 2 GiB free again."""
    size = 2 * GIB
    free = context.memory_bytes()[0]
    if free < 3 * GIB:
        pytest.skip(f"needs 3 GiB of free GPU memory, has {free} bytes")
    zeros = [extents.Extent(0, size)]
    expected = independent_digest(bytes(4 * MIB) * (size // (4 * MIB)))
    for _turn in range(2):
        arena = vmm.VmmArena.create(size, device_uuid, GIB)
        assert arena.digests(zeros) == [expected]
        assert free - context.memory_bytes()[0] >= size
        with context.current():
            driver.call("cuMemsetD8", arena.address, 0xFF, GIB)
        arena.close()
        assert free - context.memory_bytes()[0] < GIB


def test_two_arenas_at_once_and_the_first_one_at_the_wished_address(device_uuid: str) -> None:
    """A second arena in one engine (a draft model) works, at another address."""
    fds, sizes = sealed(device_uuid, random_bytes(2 * MIB))
    first = vmm.VmmMapping.map_readonly(fds, sizes, device_uuid)
    second = vmm.VmmMapping.map_readonly(fds, sizes, device_uuid)
    close_all(fds)
    assert first.address == allocations.ADDRESS_HINT and first.is_at_hint
    assert second.address != first.address and not second.is_at_hint
    whole = [extents.Extent(0, 2 * MIB)]
    assert first.digests(whole) == second.digests(whole) == [independent_digest(random_bytes(2 * MIB))]
    first.close()
    second.close()
