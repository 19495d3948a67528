"""What a benchmark of attaching asks for, and how it sums up."""

import json

import msgspec
import pytest

from tests.support import checkpoints
from weightcache.cli import benching, timing
from weightcache.crds import specs
from weightcache.daemon import checkpoints as reading
from weightcache.daemon import keying
from weightcache.wire import protocol, reasons


def status_of(key, world):
    rank = protocol.RankStatus(
        rank=0,
        gpu="host-0",
        state="Ready",
        progress=protocol.Progress(),
        arena_bytes=1,
        num_tensors=1,
        generation="g",
        attempts=0,
        reason="",
        message="",
        phases={},
        leases=[],
    )
    ranks = [msgspec.structs.replace(rank, rank=number) for number in range(world)]
    return protocol.DaemonStatus(
        protocol=1,
        version="0",
        instance="i",
        cache=protocol.CacheRef(namespace="n", name="c", uid="u"),
        state="Ready",
        reason="",
        message="",
        draining=False,
        started_at=0.0,
        model="/m",
        memory="Host",
        key=key,
        key_digest="",
        resident_bytes=0,
        groups=[protocol.GroupStatus(group=0, state="Ready", ranks=ranks, claims=[])],
        verification=None,
        misses={},
        attaches=0,
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(
    "parallelism",
    [
        {},
        {"tensor": 2},
        {"tensor": 2, "pipeline": 3},
        {"tensor": 2, "data": 2},
        {"tensor": 2, "expert": {"enabled": True}},
        {"tensor": 2, "data": 2, "expert": {"enabled": True, "placement": "round_robin"}},
        {"data": 3, "expert": {"enabled": True}},
    ],
    ids=str,
)
def test_the_keys_of_all_ranks_follow_from_that_of_rank_0(tmp_path, architecture, parallelism):
    """The status tells one key; an attach with a wrong guess for another rank would be refused by the daemon."""
    checkpoint = reading.read(checkpoints.make_checkpoint(tmp_path, architecture))
    spec = specs.parse({"model": {"hostPath": str(tmp_path)}, "parallelism": parallelism})
    wanted = [msgspec.structs.replace(key, content="d" * 32) for key in keying.build_keys(spec, checkpoint)]
    assert benching.rank_keys(status_of(wanted[0], len(wanted)), tmp_path) == wanted


def test_without_proven_content_nothing_is_attached(tmp_path):
    """A benchmark of half a load would be a figure of nothing."""
    with pytest.raises(reasons.Refusal) as refusal:
        benching.rank_keys(status_of(None, 1), tmp_path)
    assert refusal.value.reason is reasons.Reason.NotReady


def test_a_configuration_that_is_gone_is_named(tmp_path):
    """With expert parallelism the number of experts comes from model/config.json."""
    checkpoint = reading.read(checkpoints.make_checkpoint(tmp_path, "qwen3_moe"))
    parallelism = {"tensor": 2, "expert": {"enabled": True}}
    spec = specs.parse({"model": {"hostPath": str(tmp_path)}, "parallelism": parallelism})
    key = msgspec.structs.replace(keying.build_keys(spec, checkpoint)[0], content="d" * 32)
    with pytest.raises(reasons.Refusal, match=r"nowhere/config\.json"):
        benching.rank_keys(status_of(key, 2), tmp_path / "nowhere")


def test_the_summary_is_over_all_ranks_and_runs():
    """Median and extremes, in milliseconds."""
    measured = [
        timing.Measurement(
            rank=0,
            gpu="host-0",
            memory="Host",
            arena_bytes=1,
            num_tensors=1,
            import_seconds=9.0,
            context_seconds=0.0,
            socket_seconds=seconds,
            decode_seconds=0.0,
            map_seconds=0.0,
            views_seconds=0.0,
            total_seconds=2 * seconds,
        )
        for seconds in (0.001, 0.010, 0.002)
    ]
    found = benching.summarize(measured)
    assert found["socket"] == pytest.approx({"min": 1.0, "median": 2.0, "max": 10.0})
    assert found["total"] == pytest.approx({"min": 2.0, "median": 4.0, "max": 20.0})
    assert json.loads(msgspec.json.encode(measured[0]))["type"] == "Measurement"
