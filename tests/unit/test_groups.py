"""Which group an engine gets: whole, visible, free; and why not, in words that name the holder."""

import pytest

from weightcache.daemon import devices, groups, states
from weightcache.wire import evidence, keys, protocol, reasons

KEY = keys.Key(
    layout_version=1,
    content="",
    config="",
    architecture="",
    dtype="",
    quantization="",
    quantization_config="",
    linear_layout="loaded",
    preparer="Native",
)
CONTENT = evidence.HeldContent(digest="1" * 32, files=[], cache_uid="u")


def device(name):
    return devices.Device(
        uuid=name, kind="Host", index=0, name=name, capability="", total_bytes=1, free_bytes=1, mig=False
    )


def group(index, rank_states, content=CONTENT):
    made = [
        groups.Rank(index=rank, group=index, device=device(f"host-{2 * index + rank}"), key=KEY, state=state)
        for rank, state in enumerate(rank_states)
    ]
    return groups.Group(index=index, ranks=made, content=content)


def lease(name, index=0):
    client = protocol.Client(name=name, namespace="default")
    return groups.Lease(identity=name, client=client, pid=1, uid=0, gid=0, since=0.0, generation="g", group=index)


READY = (states.READY, states.READY)


def test_a_group_with_one_rank_that_is_not_ready_is_not_ready():
    """Half a model must never be served (answers W37, W39)."""
    for state in (states.FAILED, states.READING, states.PENDING, states.VERIFYING, states.RELEASED):
        assert group(0, (states.READY, state)).state != states.READY


def test_a_group_without_proven_content_is_not_ready():
    """All bytes may be there; whose they are must be proven too."""
    assert group(0, READY, content=None).state == states.LOADING
    assert group(0, READY).state == states.READY


def test_the_first_free_ready_group_is_taken():
    """Two engines in a row get two groups, not one twice."""
    both = [group(0, READY), group(1, READY)]
    assert groups.choose_group(both, None, None, False) is both[0]
    both[0].claims["t"] = lease("engine-a")
    assert groups.choose_group(both, None, None, False) is both[1]
    both[0].claims.clear()
    both[0].ranks[1].leases["l"] = lease("engine-a")
    assert groups.choose_group(both, None, None, False) is both[1], "a lease without a claim holds the group as well"


def test_a_taken_group_is_refused_by_the_holders_name_unless_sharing():
    """Sharing is explicit; the message says whom to ask."""
    only = group(0, READY)
    only.claims["t"] = lease("engine-a")
    with pytest.raises(reasons.Refusal, match=r"default/engine-a \(pid 1, uid 0\)") as caught:
        groups.choose_group([only], None, None, False)
    assert caught.value.reason is reasons.Reason.GroupTaken
    assert groups.choose_group([only], None, None, True) is only


def test_only_groups_wholly_on_visible_gpus_count():
    """An engine that sees half a group must not map the other half by chance (answers W2)."""
    both = [group(0, READY), group(1, READY)]
    assert groups.choose_group(both, ["host-2", "host-3"], None, False) is both[1]
    with pytest.raises(reasons.Refusal, match=r"sees host-1, host-2 .* group 0: host-0, host-1") as caught:
        groups.choose_group(both, ["host-1", "host-2"], None, False)
    assert caught.value.reason is reasons.Reason.GPUsNotVisible


def test_a_loading_group_is_waited_for_with_its_progress():
    """The engine is told how far it is and when to ask again."""
    loading = group(0, (states.READY, states.READING))
    loading.ranks[1].progress = protocol.Progress(bytes_done=5, bytes_total=15, bytes_per_second=2.0, seconds_left=5.0)
    answer = groups.choose_group([loading], None, None, False)
    assert isinstance(answer, protocol.NotReady)
    assert (answer.state, answer.progress.bytes_done, answer.progress.bytes_total) == (states.LOADING, 5, 15)
    assert answer.progress.seconds_left == pytest.approx(5.0) and answer.retry_after_seconds == pytest.approx(2.5)


def test_a_failed_group_says_why():
    """Waiting without a reason is guessing."""
    failed = group(0, (states.READY, states.FAILED))
    failed.ranks[1].reason, failed.ranks[1].message = "ScaleInvalid", "x.weight_scale_2 is nan"
    answer = groups.choose_group([failed], None, None, False)
    assert (answer.reason, answer.message) == ("ScaleInvalid", "x.weight_scale_2 is nan")


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([], states.STARTING),
        ([states.READY, states.READY], states.READY),
        ([states.READY, states.LOADING], states.LOADING),
        ([states.READY, states.FAILED], states.FAILED),
        ([states.RELEASED], states.RELEASED),
    ],
)
def test_the_daemons_state_is_its_worst_groups(found, wanted):
    """One word at the top must not hide a broken group."""
    assert states.daemon_state(found, draining=False, refused=False) == wanted
    assert states.daemon_state(found, draining=True, refused=False) == states.DRAINING
    assert states.daemon_state(found, draining=True, refused=True) == states.REFUSED
