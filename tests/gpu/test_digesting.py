"""The digest kernel on a real GPU, against the xxhash library over the same bytes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import xxhash

from weightcache.arenas import contexts, digesting, driver, extents, vmm

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_memory_left")]

MIB = 1 << 20
GIB = 1 << 30


def read_back(context: contexts.Context, address: int, size_bytes: int) -> bytes:
    """What the device memory holds, by way of the driver alone."""
    data = (ctypes.c_char * size_bytes)()
    with context.current():
        driver.call("cuMemcpyDtoH", ctypes.addressof(data), address, size_bytes)
    return data.raw


def independent_digest(data: bytes | memoryview) -> bytes:
    """The written rule (wire.digests), with nothing of ours."""
    pieces = [data[begin : begin + 4 * MIB] for begin in range(0, len(data), 4 * MIB)]
    return xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces))


def assert_same(names: Sequence[object], found: Sequence[bytes], expected: Sequence[bytes]) -> None:
    """Compare, and show up to ten differences with both digests."""
    wrong = [
        f"{name}: {ours.hex()} on the GPU, {theirs.hex()} by xxhash"
        for name, ours, theirs in zip(names, found, expected, strict=True)
        if ours != theirs
    ]
    assert not wrong, f"{len(wrong)} of {len(found)} digests differ:\n" + "\n".join(wrong[:10])


@pytest.fixture(scope="module")
def data() -> bytes:
    """Random bytes, the same at every run."""
    return np.random.default_rng(7).bytes(96 * MIB)


@pytest.fixture
def arena(device_uuid: str, data: bytes) -> Iterator[vmm.VmmArena]:
    """An arena that holds ``data``, in allocations of 32 MiB."""
    made = vmm.VmmArena.create(len(data), device_uuid, 32 * MIB)
    made.put(0, memoryview(data))
    yield made
    made.close()


def digests_of(context: contexts.Context, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """The kernel alone, over (address, size) pairs."""
    digester = digesting.Digester(context)
    digester.load()
    try:
        with digesting.Batch(context, digester, spans) as batch:
            batch.launch()
            return batch.results()
    finally:
        digester.close()


def test_every_multiple_of_256_up_to_64_kib(context: contexts.Context, arena: vmm.VmmArena, data: bytes) -> None:
    """Each number of stripes in the last block, each number of blocks in the ring of loads, at many starts."""
    sizes = [256 * n for n in range(1, 257)]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    found = digests_of(context, [(arena.address + a, n) for a, n in zip(starts, sizes, strict=True)])
    expected = [xxhash.xxh3_128_digest(data[a : a + n]) for a, n in zip(starts, sizes, strict=True)]
    assert_same([f"{n} bytes at {a}" for a, n in zip(starts, sizes, strict=True)], found, expected)


def test_odd_lengths_and_large_ones(context: contexts.Context, arena: vmm.VmmArena, data: bytes) -> None:
    """The last block of a file may have any length; the tail is then unaligned and overlaps."""
    random = np.random.default_rng(11)
    sizes = [*range(241, 1100), *random.integers(1100, 200_000, 300).tolist()]
    sizes += [4 * MIB, 4 * MIB - 1, 4 * MIB - 63, 4 * MIB - 1023, 4 * MIB + 1, 9 * MIB + 77, 64 * MIB + 13]
    starts = [int(start) * 16 for start in random.integers(0, 20 * MIB // 16, len(sizes))]
    found = digests_of(context, [(arena.address + a, n) for a, n in zip(starts, sizes, strict=True)])
    expected = [xxhash.xxh3_128_digest(data[a : a + n]) for a, n in zip(starts, sizes, strict=True)]
    assert_same([f"{n} bytes at {a}" for a, n in zip(starts, sizes, strict=True)], found, expected)


def test_ten_thousand_tensors_in_one_launch(arena: vmm.VmmArena, data: bytes) -> None:
    """A real model's table: many small tensors, some of several pieces, none forgotten or exchanged."""
    random = np.random.default_rng(13)
    sizes = [256 * int(n) for n in random.integers(0, 60, 10_000)]
    sizes[::2500] = [9 * MIB, 4 * MIB, 4 * MIB + 256, 256]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    spans = [extents.Extent(a, n) for a, n in zip(starts, sizes, strict=True) if a + n <= len(data)]
    assert len(spans) > 9000
    view = memoryview(data)
    expected = [independent_digest(view[span.offset : span.end]) for span in spans]
    assert_same(spans, arena.digests(spans), expected)
    assert_same(spans, arena.digests(spans), expected)


def test_one_flipped_bit_changes_exactly_its_tensor(arena: vmm.VmmArena, data: bytes) -> None:
    """What a verification is for: each lane, first and last byte, both sides of a chunk border."""
    spans = [extents.Extent(begin, MIB) for begin in range(0, len(data), MIB)]
    before = arena.digests(spans)
    positions = [0, 15, 16, MIB - 1, 32 * MIB - 1, 32 * MIB, 50 * MIB + 777, len(data) - 1]
    positions += [70 * MIB + 16 * lane for lane in range(32)]
    for position in positions:
        arena.put(position, memoryview(bytes([data[position] ^ 0x10])))
        after = arena.digests(spans)
        changed = [index for index, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
        arena.put(position, memoryview(data[position : position + 1]))
        assert changed == [position // MIB], f"byte {position}"
    assert arena.digests(spans) == before


def test_8_gib_against_the_cpu_piece_by_piece(context: contexts.Context, device_uuid: str, data: bytes) -> None:
    """At the size of a real rank: every piece different, a sample compared with what the CPU reads back."""
    size_bytes = 8 * GIB
    if context.memory_bytes()[0] < size_bytes + GIB:
        pytest.skip(f"needs {size_bytes + GIB} bytes of free GPU memory, has {context.memory_bytes()[0]}")
    arena = vmm.VmmArena.create(size_bytes, device_uuid, 4 * GIB)
    try:
        pool = arena.staging(1, 64 * MIB)
        buffer = pool.acquire()
        buffer.view[:] = data[: 64 * MIB]
        for offset in range(0, size_bytes, 64 * MIB):
            arena.put(offset, buffer.view)
        pool.release(buffer)
        pool.wait()
        pieces = [extents.Extent(offset, 4 * MIB) for offset in range(0, size_bytes, 4 * MIB)]
        for index, piece in enumerate(pieces):
            arena.put(piece.offset + 8 * (index % 1000), memoryview(index.to_bytes(8, "little")))
        started = time.perf_counter()
        found = arena.digests(pieces)
        seconds = time.perf_counter() - started
        assert len(set(found)) == len(pieces), "two pieces that differ have one digest"
        sample = np.random.default_rng(17).choice(len(pieces), 48, replace=False).tolist()
        expected = [independent_digest(read_back(context, arena.address + pieces[i].offset, 4 * MIB)) for i in sample]
        assert_same([pieces[i] for i in sample], [found[i] for i in sample], expected)
        print(f"\n8 GiB in {len(pieces)} pieces, table and all: {seconds * 1e3:.1f} ms")
    finally:
        arena.close()


def test_content_digests_of_reader_buffers(device_uuid: str, data: bytes) -> None:
    """Blocks of files as they pass through: whole ones, a short last one, one the kernel cannot take."""
    spans = [
        extents.Extent(0, 4 * MIB),
        extents.Extent(4 * MIB, 4 * MIB),
        extents.Extent(8 * MIB, 1_234_567),
        extents.Extent(10 * MIB, 100),
        extents.Extent(11 * MIB + 8, 5000),
        extents.Extent(12 * MIB, 0),
    ]
    arena = vmm.VmmArena.create(64 * MIB, device_uuid)
    try:
        pool = arena.staging(2, 16 * MIB, mirrored=True)
        delivered: list[tuple[int, list[bytes]]] = []
        for turn in range(4):
            buffer = pool.acquire()
            buffer.view[:] = data[turn * 16 * MIB : (turn + 1) * 16 * MIB]
            pool.digest(buffer, spans, lambda found, turn=turn: delivered.append((turn, found)))
            arena.put(turn * 16 * MIB, buffer.view)
            pool.release(buffer)
        pool.wait()
        assert sorted(turn for turn, _ in delivered) == [0, 1, 2, 3]
        for turn, found in delivered:
            base = turn * 16 * MIB
            expected = [xxhash.xxh3_128_digest(data[base + span.offset : base + span.end]) for span in spans]
            assert_same([(turn, span) for span in spans], found, expected)
        whole = [extents.Extent(0, 64 * MIB)]
        assert_same(whole, arena.digests(whole), [independent_digest(data[: 64 * MIB])])
    finally:
        arena.close()
