"""Reader buffers: within the budget, whole blocks, and enough of them; segments that lie side by side become one."""

import os
import random
import threading

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weightcache.arenas import host
from weightcache.daemon import pieces, reading, reads
from weightcache.wire import digests, reasons

MIB = 1 << 20


@given(st.integers(4 * MIB, 8 << 30), st.integers(1, 64), st.integers(0, 1 << 40))
def test_buffers_never_exceed_their_budget_and_always_hold_a_block(budget, threads, needed):
    """Host memory while loading is bounded by this setting, whatever the model's size."""
    cut = reading.divide_buffers(budget, threads, needed)
    assert cut.num_buffers * cut.buffer_bytes <= budget
    assert cut.buffer_bytes % digests.BLOCK_BYTES == 0 and 4 * MIB <= cut.buffer_bytes <= 16 * MIB
    assert 1 <= cut.num_threads <= threads and cut.num_buffers >= min(cut.num_threads, budget // (4 * MIB))


def test_a_small_checkpoint_takes_small_buffers():
    """A model of 10 MiB must not pin a gigabyte: by hand, three blocks need three threads of one block each."""
    assert reading.divide_buffers(1 << 30, 16, 10 * MIB) == (3, 4, 4 * MIB)
    assert reading.divide_buffers(1 << 30, 16, 100 << 30) == (16, 20, 16 * MIB)


def test_a_budget_below_one_block_is_refused():
    """The message names both values."""
    with pytest.raises(reasons.Refusal, match="1048576 bytes, at least 4194304"):
        reading.divide_buffers(MIB, 4, MIB)


def test_scalars_that_lie_side_by_side_are_copied_at_once():
    """Thousands of four-byte copies would cost more than the weights."""
    row = [pieces.Segment(4 * index, 1, 4, 0, 1000 + 4 * index) for index in range(100)]
    assert reading.coalesce(row) == [pieces.Segment(0, 1, 400, 0, 1000)]


def test_segments_with_a_gap_or_rows_stay_apart():
    """Joining what is not adjacent at both ends would copy bytes to another tensor."""
    apart = [
        pieces.Segment(0, 1, 4, 0, 0),
        pieces.Segment(4, 1, 4, 0, 8),
        pieces.Segment(16, 1, 4, 0, 12),
        pieces.Segment(20, 2, 4, 8, 16),
    ]
    assert reading.coalesce(apart) == apart


# --- reader threads ---------------------------------------------------------------------------------------------------
BLOCK = digests.BLOCK_BYTES


class Recorder:
    """An arena of plain bytes that can be told to fail at a copy."""

    def __init__(self, size_bytes, fail_at=None):
        self.data, self.fail_at = bytearray(size_bytes), fail_at

    def put_all(self, source, parts):
        for part in parts:
            if part.offset == self.fail_at:
                raise OSError("the copy failed")
            self.data[part.offset : part.offset + part.row_bytes] = source[
                part.source_offset : part.source_offset + part.row_bytes
            ]


@pytest.fixture
def file(tmp_path):
    """Ten blocks and a bit of known bytes, open."""
    path = tmp_path / "f"
    path.write_bytes(random.Random(1).randbytes(10 * BLOCK + 123))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def units_of(size_bytes):
    """The whole file, a block a unit, backwards into the arena; every block digested."""
    units = []
    for begin in range(0, size_bytes, BLOCK):
        size = min(BLOCK, size_bytes - begin)
        segment = pieces.Segment(0, 1, size, 0, size_bytes - begin - size)
        block = reads.OwnedBlock(begin // BLOCK, 0, size)
        units.append(reads.Read("f", begin, size, (segment,), (), (block,)))
    return units


def read_all(arena, file, units, **options):
    """Through three buffers and four threads. Also promises: every buffer is back, however it ended."""
    staging = host.HostStaging(3, BLOCK)
    try:
        return reading.read_all(units, arena, staging, {"f": file}, bytearray(), num_threads=4, **options)
    finally:
        assert staging.num_out == 0
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]
        staging.close()


def test_every_byte_is_read_once_and_every_block_digested(file):
    """More threads than buffers, in whatever order they come: bytes at their places, blocks under their numbers."""
    size = 10 * BLOCK + 123
    content, arena, told = os.pread(file, size, 0), Recorder(size), []
    outcome = read_all(arena, file, units_of(size), on_progress=told.append)
    expected = [content[begin : begin + BLOCK] for begin in range(0, size, BLOCK)]
    assert bytes(arena.data) == b"".join(reversed(expected))
    assert outcome.bytes_read == size and (told[0], told[-1]) == (0, size)
    found = {row.block: row.digest for row in outcome.blocks}
    assert found == {index: xxhash.xxh3_128_digest(data) for index, data in enumerate(expected)}


def test_a_copy_that_fails_stops_every_reader(file):
    """The error comes out, not a time-out, and no later unit is begun: the throttle would make them take 20 s."""
    size = 10 * BLOCK
    arena = Recorder(size, fail_at=size - BLOCK)  # where the first block goes
    with pytest.raises(OSError, match="the copy failed"):
        read_all(arena, file, units_of(size), bytes_per_second=size // 20)
    assert sum(1 for begin in range(0, size, BLOCK) if any(arena.data[begin : begin + 64])) < 5


def test_a_file_that_ends_early_is_named_with_the_byte(file):
    """The header promised more."""
    units = [reads.Read("f", 10 * BLOCK, BLOCK, (), (), ())]
    with pytest.raises(reasons.Refusal, match=f"f ends at byte {10 * BLOCK + 123}, {11 * BLOCK} expected") as caught:
        read_all(Recorder(0), file, units)
    assert caught.value.reason is reasons.Reason.CheckpointChanged


def test_a_file_that_cannot_be_read_is_named_with_the_error(tmp_path):
    """A failing disk or a lost mount is no fault of weightcache: a directory stands for it."""
    directory = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(reasons.Refusal, match=r"f cannot be read at byte 0: .*directory") as caught:
        read_all(Recorder(0), directory, [reads.Read("f", 0, BLOCK, (), (), ())])
    os.close(directory)
    assert caught.value.reason is reasons.Reason.CheckpointIncomplete


def test_a_daemon_that_is_gone_stops_the_readers(file):
    """Progress that cannot be told ends the load, not only the telling."""

    def gone(done):
        if done:
            raise reasons.Refusal(reasons.Reason.DaemonUnreachable, "gone")

    arena = Recorder(10 * BLOCK)
    with pytest.raises(reasons.Refusal, match="gone"):
        read_all(arena, file, units_of(10 * BLOCK), bytes_per_second=5 * BLOCK, on_progress=gone)
    assert not any(arena.data[:BLOCK]), "the last block, two seconds away, was not read any more"
