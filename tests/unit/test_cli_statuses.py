"""What a person sees of a daemon's status: complete, true, and whole at any width."""

import io
from pathlib import Path

import msgspec
import pytest
from rich import console

from weightcache.cli import statuses, targets
from weightcache.wire import keys, protocol, reasons

NOW = 1_800_000_000.0
GIB = 2**30
GPU = "GPU-5f6a1234-1111-2222-3333-444455556666"
KEY = keys.Key(
    layout_version=1,
    content="d" * 32,
    config="c" * 32,
    architecture="Qwen3MoeForCausalLM",
    dtype="bfloat16",
    quantization="modelopt",
    quantization_config="",
    tensor_size=2,
    expert_parallel=True,
    expert_placement="round_robin",
    linear_layout="loaded",
    preparer="Native",
)


def lease(name="engine-0", pid=4242, since=NOW - 192, generation="g1", group=0):
    client = protocol.Client(name=name, namespace="default", pid=1)
    return protocol.LeaseStatus(
        lease="l", client=client, pid=pid, uid=0, gid=0, since=since, generation=generation, group=group
    )


READY = protocol.RankStatus(
    rank=0,
    gpu=GPU,
    state="Ready",
    progress=protocol.Progress(bytes_done=GIB, bytes_total=GIB),
    arena_bytes=12 * GIB,
    num_tensors=9876,
    generation="g1",
    attempts=0,
    reason="",
    message="",
    phases={"Reading": 3.0, "Digesting": 0.7},
    leases=[],
)
READING = msgspec.structs.replace(
    READY,
    rank=1,
    state="Reading",
    progress=protocol.Progress(bytes_done=5 * GIB, bytes_total=12 * GIB, bytes_per_second=2.2 * GIB, seconds_left=3.3),
    arena_bytes=0,
    num_tensors=0,
    generation="",
    phases={},
)


def status(*ranks, claims=(), **fields):
    known = {
        "protocol": 1,
        "version": "0.1.0",
        "instance": "i",
        "cache": protocol.CacheRef(namespace="default", name="qwen3", uid="u"),
        "state": "Loading",
        "reason": "",
        "message": "",
        "draining": False,
        "started_at": NOW - 4000,
        "model": "/models/qwen3",
        "memory": "GPU",
        "key": KEY,
        "key_digest": "0123456789abcdef" * 2,
        "resident_bytes": 12 * GIB,
        "groups": [protocol.GroupStatus(group=0, state="Loading", ranks=list(ranks), claims=list(claims))],
        "verification": None,
        "misses": {},
        "attaches": 0,
    }
    return protocol.DaemonStatus(**{**known, **fields})


def lines_of(*findings, width=200):
    stream = io.StringIO()
    page = statuses.build_page(findings, NOW, width)
    console.Console(file=stream, width=width, markup=False, highlight=False).print(page)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def page_of(found, width=200):
    return "\n".join(lines_of(statuses.Finding(targets.Target("default/qwen3", Path("s")), found), width=width))


def test_a_ready_rank_shows_what_it_holds():
    """Which GPU, how much, how many tensors, since which load: the figures that are compared when something is odd."""
    page = page_of(status(READY, state="Ready"))
    (row,) = [line for line in page.splitlines() if "rank 0" in line]
    assert " ".join(row.split()) == "rank 0 GPU-5f6a1234 Ready loaded in 3.7 s 12.00 GiB 9876 g1 -"
    assert "up 1 h 06 m" in page and "12.00 GiB resident" in page
    assert "tensor 2, experts round_robin" in page


def test_a_reading_rank_shows_bar_rate_and_time_left():
    """Whoever waits wants to know for how long."""
    (row,) = [line for line in page_of(status(READING)).splitlines() if "rank 1" in line]
    assert "━━━━━━──────────  42 % 2.20 GiB/s 3.3 s left" in row


@pytest.mark.parametrize("state", ["Failed", "Released"])
def test_a_rank_that_holds_nothing_has_no_full_bar(state):
    """100 % beside weights that are gone would be read as weights."""
    full = protocol.Progress(bytes_done=GIB, bytes_total=GIB)
    assert "━" not in page_of(status(msgspec.structs.replace(READING, state=state, progress=full)))


def test_who_holds_the_gate_is_said_below_the_table():
    """A rank that waits has to name whom it waits for (answers W38)."""
    waiting = msgspec.structs.replace(
        READING, state="WaitingForGate", progress=protocol.Progress(), message="slot 0: default/llama group 0 rank 0"
    )
    assert f"group 0 rank 1 ({GPU}): slot 0: default/llama group 0 rank 0" in page_of(status(waiting))


def test_a_failed_rank_is_told_once_with_its_next_step():
    """The one line that matters must neither be missing nor drown in repetitions."""
    fault = {"reason": "LoaderDied", "message": "loading process 7 was killed by SIGKILL"}
    failed = msgspec.structs.replace(READING, state="Failed", attempts=3, **fault)
    page = page_of(status(READY, failed, state="Failed", **fault))
    assert page.count("was killed by SIGKILL") == 1
    assert "attempt 3: LoaderDied: loading process 7" in page
    assert f"next step: {reasons.MEANINGS[reasons.Reason.LoaderDied].next_step}" in page


def test_a_daemon_that_cannot_start_says_why():
    """Before it owns a GPU it has no ranks to show, only the reason (answers W35)."""
    refused = status(state="Refused", reason="GPUOwnedByAnother", message="GPU-1 by default/other", groups=[], key=None)
    page = page_of(msgspec.structs.replace(refused, key_digest=""))
    assert "Refused" in page and "GPUOwnedByAnother: GPU-1 by default/other" in page
    assert "next step: end the named holder" in page


def test_a_daemon_that_is_dead_is_not_shown_as_anything_else():
    """A stale socket must not read as a cache that is merely empty (answers W36)."""
    silence = reasons.Refusal(reasons.Reason.DaemonUnreachable, "/r/s/ab/daemon.sock: no daemon answers (stale socket)")
    dead = statuses.Finding(targets.Target("default/llama", Path("s")), refusal=silence)
    alive = statuses.Finding(targets.Target("default/qwen3", Path("s")), status(READY))
    lines = lines_of(dead, alive)
    assert lines[:2] == [
        "default/llama  DaemonUnreachable",
        "  /r/s/ab/daemon.sock: no daemon answers (stale socket)",
    ]
    assert lines[3] == "" and lines[4].startswith("default/qwen3  Loading")


def test_an_engine_is_one_line_with_all_its_ranks():
    """Eight ranks are eight processes of one engine; who holds the memory must be seen at a glance."""
    ranks = [msgspec.structs.replace(READY, rank=rank, leases=[lease(pid=100 + rank)]) for rank in range(8)]
    page = page_of(status(*ranks, claims=[lease(pid=99)]))
    pids = "99 100 101 102 103 104 105 106 and 1 more"
    assert f"used by default/engine-0: group 0, ranks 0-7, pid {pids}, for 3 m 12 s" in page
    assert page.count("used by") == 1


def test_a_lease_of_an_older_arena_is_marked():
    """Memory that was superseded stays until this engine ends: it is the one to restart."""
    held = msgspec.structs.replace(READY, leases=[lease(generation="g0")])
    assert "(older weights than the daemon's)" in page_of(status(held))
    current = msgspec.structs.replace(READY, leases=[lease()])
    assert "older" not in page_of(status(current))


def test_a_claim_without_leases_is_shown():
    """A group may be taken although nothing is mapped yet."""
    assert "used by default/engine-0: group 0, pid 4242, for 3 m 12 s (claimed, nothing attached yet)" in page_of(
        status(READY, claims=[lease(generation="")])
    )


def test_many_engines_are_counted_and_not_listed():
    """Two hundred clients must not push the ranks off the screen."""
    crowded = msgspec.structs.replace(READY, leases=[lease(name=f"e{n}", pid=n + 1) for n in range(200)])
    page = page_of(status(crowded))
    assert page.count("used by") == statuses.MAX_HOLDERS_SHOWN
    assert f"and {200 - statuses.MAX_HOLDERS_SHOWN} more engines" in page


def test_damage_is_shouted():
    """A verdict of unsound weights must catch the eye."""
    verdict = protocol.Verified(
        sound=False, deep=True, damaged=[f"{GPU} w"], bytes_checked=24 * GIB, seconds=0.42, at=NOW - 60
    )
    assert "1 tensors DAMAGED, 24.00 GiB in 0.42 s, 1 m 00 s ago" in page_of(status(READY, verification=verdict))


def test_a_key_without_proven_content_is_called_provisional():
    """`release --key` takes the final one; an early copy would be refused without a reason that anyone sees."""
    early = msgspec.structs.replace(KEY, content="")
    assert "(provisional: the content is not proven yet)" in page_of(status(READING, key=early))
    assert "provisional" not in page_of(status(READY))


def test_names_with_brackets_are_text():
    """A path such as /models/[new] must not vanish as markup."""
    assert "/models/[bold]x[/bold]" in page_of(status(READY, model="/models/[bold]x[/bold]"))


@pytest.mark.parametrize("width", [60, 80, 101, 102, 129, 130, 200])
def test_nothing_is_wider_than_the_terminal_and_states_stay_whole(width):
    """A table that breaks its rows cannot be read; a state that is cut cannot be told from another."""
    waiting = msgspec.structs.replace(READING, state="WaitingForGate", progress=protocol.Progress(), rank=2)
    slow = protocol.Progress(bytes_done=10 * GIB, bytes_total=999 * GIB, bytes_per_second=1e9, seconds_left=1000.0)
    page = page_of(status(READY, msgspec.structs.replace(READING, progress=slow), waiting), width=width)
    assert max(map(len, page.splitlines())) <= width
    if width >= 80:
        assert {"WaitingForGate", "Reading", "Ready", "GPU-5f6a1234"} <= set(page.split())
        assert "953.67 MiB/s 16 m 40 s left" in page
    assert ("TENSORS" in page) == (width >= statuses.WIDE_COLUMNS)
