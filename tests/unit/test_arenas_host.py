"""Host arenas: sealed memfds, filled here, read-only everywhere else. Real descriptors, real second process."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcache.arenas import extents, host, memory, staging
from weightcache.wire import reasons

MIB = 1 << 20
PAGE = mmap.PAGESIZE
F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; a writable mapping made before it stays writable


def independent_digest(data: bytes) -> bytes:
    """The written rule (wire.digests), with nothing of ours: pieces of 4 MiB, then the digest of their digests."""
    pieces = [data[begin : begin + 4 * MIB] for begin in range(0, len(data), 4 * MIB)]
    return xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces))


def random_bytes(size: int, seed: int = 0) -> bytes:
    """The same at every run."""
    return np.random.default_rng(seed).bytes(size)


def open_memory() -> tuple[int, int]:
    """(open descriptors, mappings of memfds or of shared zero pages) of this process."""
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("/memfd:weightcache") + maps.count("/dev/zero")


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Every test here also promises: no descriptor and no mapping is left."""
    before = open_memory()
    yield
    assert open_memory() == before


@pytest.fixture
def sealed() -> Iterator[tuple[int, bytes]]:
    """The descriptor of a sealed arena of three pages, and its bytes."""
    data = random_bytes(3 * PAGE)
    arena = host.HostArena.create(len(data))
    arena.put(0, memoryview(data))
    (descriptor,) = arena.seal()
    yield descriptor, data
    os.close(descriptor)


CHILD = """
import mmap, os, socket, sys
from weightcache.arenas import extents, memory
_, fds, _, _ = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 4)
mapping = memory.map_readonly("Host", fds, [int(sys.argv[2])])
print(mapping.digests([extents.Extent(0, mapping.size_bytes)])[0].hex())
try:
    mmap.mmap(fds[0], 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
except PermissionError:
    print("mmap refused")
try:
    os.pwrite(fds[0], b"x", 0)
except PermissionError:
    print("write refused")
try:
    mapping.buffer[0] = 1
except TypeError:
    print("view is read-only")
print("cuda" in sys.modules)
"""


def test_another_process_reads_the_bytes_and_cannot_change_them(sealed: tuple[int, bytes]) -> None:
    """A fresh process that gets the descriptor sees every byte, and no way to write one: map, write or view."""
    descriptor, data = sealed
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [descriptor])
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(theirs.fileno()), str(len(data))],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert child.stdout.split("\n") == [
        independent_digest(data).hex(),
        "mmap refused",
        "write refused",
        "view is read-only",
        "False",
        "",
    ], child.stderr


def test_the_memory_outlives_the_arena_and_the_descriptor() -> None:
    """Answers W25: no counting; a mapping alone keeps the bytes."""
    arena = host.HostArena.create(PAGE)
    arena.put(0, memoryview(b"weights"))
    (descriptor,) = arena.seal()
    arena.close()
    mapping = host.HostMapping.map_readonly([descriptor], [PAGE])
    os.close(descriptor)
    assert bytes(mapping.buffer[:7]) == b"weights"
    mapping.close()


def test_closing_a_mapping_never_unmaps_under_a_living_view(sealed: tuple[int, bytes]) -> None:
    """An engine's tensor outlives our mapping object; reading it must not be a segmentation fault."""
    descriptor, data = sealed
    mapping = host.HostMapping.map_readonly([descriptor], [len(data)])
    array = np.frombuffer(mapping.buffer, np.uint8)
    mapping.close()
    mapping.close()
    assert array.tobytes() == data
    with pytest.raises(ValueError, match="closed"):
        _ = mapping.buffer
    del array
    assert "/memfd:weightcache" not in Path("/proc/self/maps").read_text()


def test_torch_sees_the_bytes_in_place_and_keeps_them(sealed: tuple[int, bytes]) -> None:
    """torch lets go of the buffer it was given and keeps only the object; that must be enough to keep the mapping."""
    torch = pytest.importorskip("torch")
    descriptor, data = sealed
    mapping = host.HostMapping.map_readonly([descriptor], [len(data)])
    with pytest.warns(UserWarning, match="not writable"):
        tensor = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
    assert tensor.data_ptr() == mapping.address
    mapping.close()
    assert tensor.numpy().tobytes() == data
    del tensor


def test_a_kernel_that_refuses_shared_maps_of_sealed_files_is_served_too(
    sealed: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 6.7, MAP_SHARED of a write-sealed file is EPERM even for reading."""
    descriptor, data = sealed
    tried = []

    class OldKernel(mmap.mmap):
        def __new__(cls, descriptor: int, size: int, flags: int, prot: int) -> OldKernel:
            tried.append(flags)
            if flags == mmap.MAP_SHARED:
                raise PermissionError(1, "Operation not permitted")
            return super().__new__(cls, descriptor, size, flags, prot)

    monkeypatch.setattr(mmap, "mmap", OldKernel)
    mapping = host.HostMapping.map_readonly([descriptor], [len(data)])
    assert bytes(mapping.buffer) == data
    assert tried == [mmap.MAP_SHARED, mmap.MAP_PRIVATE]
    with pytest.raises(TypeError):
        mapping.buffer[0] = 1


def descriptor_with(seals: int = host.SEALS, size: int = PAGE) -> int:
    """A memfd with those seals and no others."""
    descriptor = os.memfd_create("weightcache-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("make", "announced", "says"),
    [
        (lambda: descriptor_with(size=PAGE), 2 * PAGE, f"{PAGE} bytes, {2 * PAGE} announced"),
        (lambda: descriptor_with(size=2 * PAGE), PAGE, f"{2 * PAGE} bytes, {PAGE} announced"),
        (lambda: descriptor_with(size=0), 0, "0 bytes"),
        (lambda: descriptor_with(fcntl.F_SEAL_SHRINK), PAGE, "could still change"),
        (lambda: descriptor_with(F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK), PAGE, "could still change"),
        (lambda: descriptor_with(host.SEALS & ~fcntl.F_SEAL_SHRINK), PAGE, "could still change"),
        (lambda: os.open(sys.executable, os.O_RDONLY), PAGE, "cannot be sealed|could still change"),
        (lambda: os.open("/dev/null", os.O_RDONLY), PAGE, "regular file"),
        (lambda: os.open("/", os.O_RDONLY), PAGE, "regular file"),
    ],
)
def test_a_descriptor_that_is_not_what_it_claims_is_refused(make: object, announced: int, says: str) -> None:
    """A shrinkable file is a bus error later, a writable one is changing weights: refused before mapping."""
    descriptor = make()  # type: ignore[operator]
    try:
        with pytest.raises(reasons.Refusal, match=says) as caught:
            memory.map_readonly(memory.HOST, [descriptor], [announced])
        assert caught.value.reason == reasons.Reason.ArenaInvalid
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(("fds", "sizes"), [([], []), ([0, 1], [PAGE, PAGE]), ([0], [])])
def test_the_wrong_number_of_descriptors_is_refused(fds: list[int], sizes: list[int]) -> None:
    """A truncated descriptor message must not map half an arena."""
    with pytest.raises(reasons.Refusal, match="one memfd"):
        host.HostMapping.map_readonly(fds, sizes)


def test_a_closed_descriptor_is_refused() -> None:
    """EBADF becomes the reason that the caller knows."""
    descriptor = descriptor_with()
    os.close(descriptor)
    with pytest.raises(reasons.Refusal, match="not open"):
        host.HostMapping.map_readonly([descriptor], [PAGE])


def test_padding_and_gaps_are_zero() -> None:
    """Digests cover padding; two loads of the same checkpoint must agree on it."""
    arena = host.HostArena.create(1000)
    arena.put(256, memoryview(b"\xff" * 100))
    assert arena.size_bytes == 1000 and arena.chunk_sizes == (PAGE,)
    (descriptor,) = arena.seal()
    assert os.pread(descriptor, 2 * PAGE, 0) == bytes(256) + b"\xff" * 100 + bytes(PAGE - 356)
    os.close(descriptor)


@given(
    num_rows=st.integers(0, 20),
    row_bytes=st.integers(1, 300),
    gap=st.integers(0, 300),
    begin=st.integers(0, 50),
    offset=st.integers(0, 500),
)
@settings(max_examples=60, deadline=None)
def test_strided_rows_arrive_as_numpy_slices_them(
    num_rows: int, row_bytes: int, gap: int, begin: int, offset: int
) -> None:
    """A row-parallel slice is the columns of the tensor, packed; checked against numpy's own slicing."""
    stride = row_bytes + gap
    matrix = np.random.default_rng(1).integers(0, 256, (num_rows, stride), np.uint8)
    source = memoryview(bytes(begin) + matrix.tobytes())[begin:]
    arena = host.HostArena.create(16 * PAGE)
    arena.put_rows(offset, source, num_rows, row_bytes, stride)
    expected = bytes(offset) + matrix[:, :row_bytes].tobytes()
    assert bytes(arena.buffer[: len(expected) + 64]) == expected + bytes(64)
    arena.close()


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (PAGE, 1), (PAGE - 1, 2)])
def test_a_copy_that_would_leave_the_arena_is_refused(offset: int, size: int) -> None:
    """A plan that disagrees with its arena stops the load, and changes nothing."""
    arena = host.HostArena.create(PAGE)
    with pytest.raises(ValueError, match="outside"):
        arena.put(offset, memoryview(b"x" * size))
    with pytest.raises(ValueError, match="outside"):
        arena.put_rows(offset, memoryview(b"x" * size), size, 1, 1)
    assert bytes(arena.buffer) == bytes(PAGE)
    arena.close()


@pytest.mark.parametrize("size", [(64 << 10) - 1, 64 << 10, MIB + 17])
def test_small_and_large_copies_arrive_alike(size: int) -> None:
    """Large ones are written to the file, small ones stored through the mapping: both show at once, in both."""
    data = random_bytes(size)
    arena = host.HostArena.create(2 * MIB)
    arena.put(333, memoryview(data))
    assert bytes(arena.buffer[: size + 1000]) == bytes(333) + data + bytes(667)
    arena.put(333 + size, memoryview(array.array("H", data[:32])))
    (descriptor,) = arena.seal()
    assert os.pread(descriptor, size + 32, 333) == data + data[:32]
    os.close(descriptor)


def test_a_write_that_takes_only_a_part_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes at most 2 GiB at a time, and may take less."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:1000], offset))
    data, arena = random_bytes(MIB), host.HostArena.create(2 * MIB)
    arena.put(256, memoryview(data))
    assert bytes(arena.buffer) == bytes(256) + data + bytes(MIB - 256)
    arena.close()


class Part(NamedTuple):
    """``extents.Rows`` as a test writes them."""

    source_offset: int
    num_rows: int
    row_bytes: int
    row_stride: int
    offset: int


def test_many_parts_of_a_buffer_arrive_as_one_by_one() -> None:
    """Runs, rows that are apart, rows that touch, and nothing."""
    data = np.random.default_rng(2).bytes(2 * PAGE)
    parts = [Part(0, 1, 1000, 0, 512), Part(4000, 7, 100, 300, 2048), Part(7000, 3, 64, 64, 3000), Part(0, 0, 0, 0, 0)]
    arena = host.HostArena.create(PAGE)
    arena.put_all(memoryview(data), parts)
    expected = bytearray(PAGE)
    expected[512:1512] = data[:1000]
    expected[2048:2748] = b"".join(data[4000 + 300 * row : 4100 + 300 * row] for row in range(7))
    expected[3000:3192] = data[7000:7192]
    assert bytes(arena.buffer) == expected
    arena.close()


@pytest.mark.parametrize(
    "part",
    [
        Part(2 * PAGE - 10, 1, 11, 0, 0),
        Part(0, 1, 11, 0, PAGE - 10),
        Part(-1, 1, 4, 0, 0),
        Part(0, 1, 4, 0, -1),
        Part(0, 1, -4, 0, 0),
        Part(0, 3, 100, 99, 0),
        Part(2 * PAGE - 1000, 11, 10, 100, 0),
        Part(0, 41, 100, 100, 0),
    ],
)
def test_a_part_that_leaves_buffer_or_arena_stops_all_copies(part: Part) -> None:
    """One wrong row would write over another tensor, or read another buffer."""
    arena = host.HostArena.create(PAGE)
    with pytest.raises(ValueError, match="does not fit"):
        arena.put_all(memoryview(b"x" * (2 * PAGE)), [Part(0, 1, 16, 0, 0), part])
    assert bytes(arena.buffer) == bytes(PAGE)
    arena.close()


def test_an_empty_copy_is_none() -> None:
    """Tensors without elements exist in real checkpoints."""
    arena = host.HostArena.create(PAGE)
    arena.put(PAGE, memoryview(b""))
    arena.put_rows(0, memoryview(b""), 0, 8, 8)
    assert bytes(arena.buffer) == bytes(PAGE)
    arena.close()


@pytest.mark.parametrize("num_tensors", [1, 700])
def test_digests_equal_xxhash_over_the_same_bytes(num_tensors: int) -> None:
    """One large tensor over several threads, or many small ones; before sealing and through a mapping."""
    data = random_bytes(21 * MIB + 256)
    step = len(data) // num_tensors // 256 * 256
    spans = [extents.Extent(i * step, step) for i in range(num_tensors - 1)]
    spans.append(extents.Extent((num_tensors - 1) * step, len(data) - (num_tensors - 1) * step))
    expected = [independent_digest(data[span.offset : span.end]) for span in spans]
    arena = host.HostArena.create(len(data))
    arena.put(0, memoryview(data))
    assert arena.digests(spans) == expected
    sizes, fds = arena.chunk_sizes, arena.seal()
    mapping = host.HostMapping.map_readonly(fds, sizes)
    os.close(fds[0])
    assert mapping.digests(spans) == expected
    mapping.close()


def test_one_flipped_bit_changes_one_digest() -> None:
    """What a verification is for."""
    arena = host.HostArena.create(8 * PAGE)
    arena.put(0, memoryview(random_bytes(8 * PAGE)))
    spans = [extents.Extent(i * PAGE, PAGE) for i in range(8)]
    before = arena.digests(spans)
    view = arena.buffer
    view[3 * PAGE + 77] ^= 1
    view.release()
    assert [i for i, (a, b) in enumerate(zip(before, arena.digests(spans), strict=True)) if a != b] == [3]
    arena.close()


def test_an_unaligned_digest_is_refused() -> None:
    """The GPU could not follow; the two backends accept the same extents."""
    arena = host.HostArena.create(PAGE)
    with pytest.raises(ValueError, match="aligned to 256"):
        arena.digests([extents.Extent(0, 100)])
    arena.close()


def test_sealing_is_refused_while_someone_could_still_write() -> None:
    """Answers W28: nothing half-written is published; the arena stays usable until the writer is gone."""
    arena = host.HostArena.create(PAGE)
    view = arena.buffer
    with pytest.raises(RuntimeError, match="view of it is alive"):
        arena.seal()
    pool = arena.staging(2, PAGE)
    buffer = pool.acquire()
    view.release()
    with pytest.raises(RuntimeError, match="1 reader buffers are out"):
        arena.seal()
    arena.put(0, buffer.view[:5])
    pool.release(buffer)
    (descriptor,) = arena.seal()
    with pytest.raises(ValueError, match="closed"):
        arena.put(0, memoryview(b"late"))
    os.close(descriptor)


def test_an_arena_may_be_closed_twice_and_unsealed() -> None:
    """Error paths close what they can, in any state."""
    arena = host.HostArena.create(PAGE)
    arena.staging(1, PAGE)
    arena.close()
    arena.close()


def test_buffers_circulate_and_are_never_in_two_hands() -> None:
    """Host memory while loading is bounded by the buffers, and no reader overwrites another's bytes."""
    arena = host.HostArena.create(64 * PAGE)
    pool = arena.staging(3, PAGE)
    expected = random_bytes(64 * PAGE)
    in_hands: set[int] = set()
    faults: list[int] = []
    work = iter(range(64))
    lock = threading.Lock()

    def read() -> None:
        while True:
            with lock:
                index = next(work, None)
            if index is None:
                return
            buffer = pool.acquire(timeout_seconds=30)
            with lock:
                faults.extend([index] if buffer.index in in_hands else [])
                in_hands.add(buffer.index)
            buffer.view[:] = expected[index * PAGE : (index + 1) * PAGE]
            arena.put(index * PAGE, buffer.view)
            with lock:
                in_hands.discard(buffer.index)
            pool.release(buffer)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert pool.num_out == 0 and (pool.num_buffers, pool.buffer_bytes) == (3, PAGE)
    view = arena.buffer
    assert bytes(view) == expected
    view.release()
    arena.close()


def test_waiting_for_a_buffer_that_never_comes_ends() -> None:
    """A reader that died with a buffer must not hang the loader for ever."""
    pool = host.HostStaging(1, PAGE)
    buffer = pool.acquire()
    with pytest.raises(TimeoutError, match="none of 1 reader buffers"):
        pool.acquire(timeout_seconds=0.01)
    pool.release(buffer)
    assert pool.acquire(timeout_seconds=0.01).index == buffer.index
    pool.close()


def test_content_digests_of_a_buffer_are_delivered_at_once() -> None:
    """The host form of what a GPU does with uploaded blocks: any length, any place in the buffer."""
    pool = host.HostStaging(1, 4 * PAGE)
    buffer = pool.acquire()
    data = random_bytes(4 * PAGE)
    buffer.view[:] = data
    delivered: list[list[bytes]] = []
    pool.digest(buffer, [extents.Extent(0, PAGE), extents.Extent(PAGE, 5), extents.Extent(7000, 241)], delivered.append)
    assert delivered == [[xxhash.xxh3_128_digest(data[a:b]) for a, b in ((0, PAGE), (PAGE, PAGE + 5), (7000, 7241))]]
    with pytest.raises(ValueError, match="outside"):
        pool.digest(buffer, [extents.Extent(3 * PAGE, PAGE + 1)], delivered.append)
    pool.close()


@pytest.mark.parametrize(("num_buffers", "buffer_bytes"), [(0, PAGE), (1, 0), (1, 1000), (-1, PAGE)])
def test_buffers_that_direct_reads_could_not_use_are_refused(num_buffers: int, buffer_bytes: int) -> None:
    """O_DIRECT needs whole pages."""
    with pytest.raises(ValueError, match="multiples of"):
        staging.check_sizes(num_buffers, buffer_bytes)


def test_an_arena_larger_than_the_address_space_is_refused_by_reason() -> None:
    """Not a stack trace: the reason that the user can look up."""
    with pytest.raises(reasons.Refusal) as caught:
        host.HostArena.create(1 << 60)
    assert caught.value.reason == reasons.Reason.InsufficientHostMemory
    with pytest.raises(ValueError, match="an arena of 0 bytes"):
        host.HostArena.create(0)


def test_no_descriptor_is_inherited_by_programs_that_the_loader_starts(sealed: tuple[int, bytes]) -> None:
    """An inherited descriptor would keep the weights alive in a process that knows nothing of them."""
    assert not os.get_inheritable(sealed[0])
