"""Waiting and refusing: how long an engine waits, for what, and that each answer of a daemon reads as what it is."""

import pytest

from weightcache.engine import answers, claims, connecting
from weightcache.wire import keys, protocol, reasons

NOT_READY = answers.Later(reasons.Reason.NotReady, "loading", retry_after_seconds=0.5)


class Clock:
    """Time that passes only while someone sleeps."""

    def __init__(self):
        self.now, self.slept = 100.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def patience(wait_seconds):
    """A Patience on a clock of its own."""
    clock = Clock()
    return connecting.Patience(wait_seconds, clock, clock.sleep), clock


def test_waiting_ends_exactly_with_its_time():
    """Three seconds are three seconds: the last pause is cut, then the last refusal stands."""
    waiting, clock = patience(3.0)
    while clock.now < 103.0:
        waiting.pause(NOT_READY)
    with pytest.raises(reasons.Refusal) as caught:
        waiting.pause(NOT_READY)
    assert caught.value is NOT_READY and clock.now == pytest.approx(103.0)


def test_the_daemons_wish_is_respected_when_it_is_longer():
    """A daemon that loads for an hour is not asked 20 times a second."""
    waiting, clock = patience(60.0)
    for _ in range(20):
        waiting.pause(NOT_READY)
    assert all(seconds >= 0.5 for seconds in clock.slept)


def test_pauses_grow_to_a_bound():
    """Quick at first, never a busy loop, never asleep for long when the daemon comes back."""
    steps = [connecting.backoff_seconds(attempt, 1.0, spread=lambda: 0.5) for attempt in range(12)]
    assert steps[:5] == [0.05, 0.1, 0.2, 0.4, 0.8] and set(steps[5:]) == {1.0}


def test_pauses_are_spread():
    """The engines of a node must not come back in step."""
    low, high = (connecting.backoff_seconds(3, 1.0, spread=lambda at=at: at) for at in (0.0, 0.999))
    assert low == pytest.approx(0.32) and high == pytest.approx(0.48, rel=1e-2)


@pytest.mark.parametrize(
    "reason", ["KeyMismatch", "ContentUnproven", "PeerNotTrusted", "GPUsNotVisible", "SocketPathTooLong", "Forbidden"]
)
def test_what_time_cannot_mend_is_refused_at_once(reason):
    """Waiting an hour for other weights helps nobody."""
    waiting, clock = patience(3600.0)
    with pytest.raises(reasons.Refusal):
        waiting.pause(reasons.Refusal(reasons.Reason(reason), ""))
    assert clock.slept == []


@pytest.mark.parametrize(
    ("answer", "reason", "text"),
    [
        (protocol.Draining(retry_after_seconds=5), "Draining", "no new leases"),
        (protocol.ContentUnproven(message="a.safetensors: another inode"), "ContentUnproven", "another inode"),
        (protocol.Refused(reason="GroupTaken", message="by prod/x"), "GroupTaken", "by prod/x"),
        (protocol.Refused(reason="NewInVersionNine", message="?"), "ProtocolViolated", "'NewInVersionNine'"),
        (protocol.Released(bytes_freed=1, clients=[]), "ProtocolViolated", "Released is no answer to this"),
    ],
)
def test_each_answer_becomes_a_refusal_with_its_reason_and_place(answer, reason, text):
    """The person on call reads one reason, the figures, and which socket said it."""
    found = answers.refusal_of(answer, "/run/x.sock")
    assert str(found.reason) == reason and text in found.message and "/run/x.sock" in found.message


def test_a_load_that_fails_is_told_with_its_cause():
    """Not only that it is not ready, but that the loader died, and of what."""
    answer = protocol.NotReady(
        state="Failed", progress=protocol.Progress(), retry_after_seconds=1, reason="LoaderDied", message="was killed"
    )
    assert "state Failed; LoaderDied: was killed" in answers.refusal_of(answer, "x").message


def test_the_table_of_a_mismatch_is_aligned_and_complete():
    """Every field with both values and a remedy, one line each (answers W4)."""
    found = answers.KeyMismatch(
        [
            keys.Difference("dtype", "float16", "bfloat16", "change it"),
            keys.Difference("tensor_size", "2", "4", "equal"),
        ],
        "/run/x",
    )
    assert found.message.splitlines()[1:] == [
        "  field        wanted   held      what to do",
        "  dtype        float16  bfloat16  change it",
        "  tensor_size  2        4         equal",
    ]


@pytest.mark.parametrize(
    ("position", "rank"),
    [((0, 0, 0), 0), ((1, 0, 0), 1), ((0, 1, 0), 2), ((1, 2, 0), 5), ((0, 0, 1), 6), ((1, 2, 1), 11)],
)
def test_ranks_are_numbered_tensor_first_then_pipeline_then_data(position, rank):
    """The order in which a group's sockets are listed; another order maps another rank's weights (answers W1)."""
    tensor, pipeline, data = position
    key = keys.Key(
        layout_version=1,
        content="",
        config="",
        architecture="",
        dtype="",
        quantization="",
        quantization_config="",
        tensor_size=2,
        pipeline_size=3,
        data_size=2,
        linear_layout="",
        preparer="Native",
        position=keys.Position(tensor_rank=tensor, pipeline_rank=pipeline, data_rank=data),
    )
    assert claims.rank_index(key) == rank
