"""Reader buffers: within the budget, whole blocks, and enough of them; segments that lie side by side become one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcache.daemon import pieces, reading
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
