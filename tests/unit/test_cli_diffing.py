"""Which fields two keys differ in, and what is known of the bytes behind them."""

import msgspec

from weightcache.cli import diffing
from weightcache.wire import evidence, keys

KEY = keys.Key(
    layout_version=1,
    content="",
    config="c" * 32,
    architecture="Qwen3MoeForCausalLM",
    dtype="bfloat16",
    quantization="modelopt",
    quantization_config="",
    tensor_size=2,
    linear_layout="loaded",
    preparer="Native",
)
SECOND = 10**9
STAT = evidence.FileStat(inode=7, size_bytes=100, mtime_ns=5 * SECOND, ctime_ns=5 * SECOND)


def side(name="a", key=KEY, stat=STAT, blob="", taken_at=100.0, **fields):
    files = evidence.Evidence(files=[evidence.FileEvidence("model.safetensors", stat, blob)]) if stat else None
    return diffing.Side(name, msgspec.structs.replace(key, **fields), files, taken_at)


def test_equal_specs_over_the_same_files_differ_in_nothing():
    """The same inode, size and times, long settled, are the same bytes."""
    assert diffing.compare(side(), side("b")) == ([], "Same: equal stat or hub blob of every file")


def test_every_field_that_differs_is_named_with_both_values_and_advice():
    """One field at a time would cost one restart a field (answers W4, W5)."""
    found, _ = diffing.compare(side(), side("b", tensor_size=4, expert_parallel=True, expert_placement="round_robin"))
    assert [(part.field, part.wanted, part.held) for part in found] == [
        ("tensor_size", "2", "4"),
        ("expert_parallel", "False", "True"),
        ("expert_placement", "(none)", "round_robin"),
    ]
    assert all(part.advice for part in found)


def test_files_of_another_size_are_other_content():
    """Proof of difference needs no digest."""
    found, content = diffing.compare(side(), side("b", stat=msgspec.structs.replace(STAT, size_bytes=101)))
    assert [part.field for part in found] == ["content"]
    assert content == "Different: model.safetensors: 100 bytes, held 101"


def test_files_that_only_look_alike_are_not_called_equal():
    """A copy has another inode: two fine-tunes would look just like it (answers W3)."""
    found, content = diffing.compare(side(), side("b", stat=msgspec.structs.replace(STAT, inode=8)))
    assert found == []
    assert content.startswith("Unproven: ") and content.endswith("not compared; use --digest")


def test_a_file_that_was_written_a_moment_ago_proves_nothing():
    """It may change again under the same ctime."""
    _, content = diffing.compare(side(), side("b", taken_at=6.0))
    assert content.startswith("Unproven: ")


def test_a_daemon_without_digest_is_not_compared_by_content():
    """Its files are not at hand, and its word for a path proves nothing."""
    daemon = side("daemon", stat=None, content="d" * 32)
    assert diffing.compare(side(), daemon) == ([], "Unproven: not compared; use --digest")


def test_digests_decide_over_stats():
    """With --digest both ends are exact."""
    daemon = side("daemon", stat=None, content="d" * 32)
    assert diffing.compare(side(content="d" * 32), daemon) == ([], "Same: equal content digests")
    found, content = diffing.compare(side(content="e" * 32), daemon)
    assert [(part.field, part.wanted, part.held) for part in found] == [("content", "e" * 32, "d" * 32)]
    assert content == "Different: different content digests"


def test_equal_hub_blobs_are_the_same_bytes_whatever_their_stat():
    """The hub names a blob by the SHA-256 of its content."""
    other = msgspec.structs.replace(STAT, inode=8, ctime_ns=6 * SECOND)
    assert diffing.compare(side(blob="a" * 64), side("b", stat=other, blob="a" * 64))[1].startswith("Same")
    assert diffing.compare(side(blob="a" * 64), side("b", stat=other, blob="b" * 64))[1].startswith("Different")
