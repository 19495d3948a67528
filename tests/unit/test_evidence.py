"""Evidence that two ends mean the same bytes: exact, or no verdict."""

import os
import time

import msgspec
import pytest

from weightcache.wire import digests, evidence

BLOB_A, BLOB_B = "a" * 64, "b" * 64
STAT = evidence.FileStat(inode=7, size_bytes=100, mtime_ns=1_000, ctime_ns=2_000)


def held(**change):
    file = evidence.HeldFile(name="m.safetensors", stat=STAT, settled=True, blob="", digest=bytes(16))
    return evidence.HeldContent(
        digest="1" * 32, files=[msgspec.structs.replace(file, **change)], cache_uid="11111111-2222"
    )


def offer(stat=STAT, blob="", name="m.safetensors"):
    return evidence.Evidence(files=[evidence.FileEvidence(name, stat, blob)])


def test_equal_stats_of_settled_files_prove_sameness():
    """The cheap way must work, or every start reads everything."""
    assert evidence.judge(offer(), held())[0] is evidence.Verdict.Same


@pytest.mark.parametrize("field", ["inode", "mtime_ns", "ctime_ns"])
def test_any_other_stat_proves_nothing(field):
    """A copy may be equal or not: only its bytes can tell (answers W3)."""
    stat = msgspec.structs.replace(STAT, **{field: 99})
    assert evidence.judge(offer(stat), held())[0] is evidence.Verdict.Unproven


def test_another_size_or_set_of_files_is_another_checkpoint():
    """No digest is needed to see that."""
    assert evidence.judge(offer(msgspec.structs.replace(STAT, size_bytes=101)), held())[0] is evidence.Verdict.Different
    assert evidence.judge(offer(name="other.safetensors"), held())[0] is evidence.Verdict.Different


def test_a_stat_younger_than_the_clocks_grain_is_no_evidence():
    """A second write within the grain leaves the ctime equal: such a file must not attach by stat."""
    assert evidence.judge(offer(), held(settled=False))[0] is evidence.Verdict.Unproven
    young = evidence.FileStat(1, 1, 0, int(time.time() * 1e9))
    assert not evidence.is_settled(young)
    assert evidence.is_settled(young, taken_at=young.ctime_ns / 1e9 + evidence.STAT_SETTLE_SECONDS)


def test_hub_blobs_decide_whatever_the_stats_say():
    """Blob names are digests: equal ones are equal bytes on any file system, others are other bytes."""
    moved = msgspec.structs.replace(STAT, inode=8)
    assert evidence.judge(offer(moved, BLOB_A), held(blob=BLOB_A))[0] is evidence.Verdict.Same
    assert evidence.judge(offer(STAT, BLOB_B), held(blob=BLOB_A))[0] is evidence.Verdict.Different
    assert evidence.judge(offer(moved, BLOB_A), held())[0] is evidence.Verdict.Unproven


def test_the_full_digest_decides():
    """The last resort is exact in both directions."""
    assert evidence.judge(evidence.Evidence(digest="1" * 32), held())[0] is evidence.Verdict.Same
    assert evidence.judge(evidence.Evidence(digest="2" * 32), held())[0] is evidence.Verdict.Different


def test_the_caches_uid_counts_only_without_files_of_ones_own():
    """An engine that reads its own files must prove those, whatever cache it was pointed at."""
    assert evidence.judge(evidence.Evidence(cache_uid="11111111-2222"), held())[0] is evidence.Verdict.Same
    assert evidence.judge(evidence.Evidence(cache_uid="3333"), held())[0] is evidence.Verdict.Different
    both = msgspec.structs.replace(offer(msgspec.structs.replace(STAT, inode=8)), cache_uid="11111111-2222")
    assert evidence.judge(both, held())[0] is evidence.Verdict.Unproven


def test_no_evidence_is_no_proof():
    """Silence must never attach."""
    assert evidence.judge(evidence.Evidence(), held())[0] is evidence.Verdict.Unproven


def test_blob_names_are_read_from_hub_links_only(tmp_path):
    """A link into `blobs` with a SHA-256 name counts; a git object's name or a plain file does not."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    for name in (BLOB_A, "c" * 40):
        (tmp_path / "blobs" / name).write_bytes(b"x")
        os.symlink(f"../blobs/{name}", tmp_path / "snapshots" / f"{name[0]}.safetensors")
    assert evidence.blob_name(tmp_path / "snapshots" / "a.safetensors") == BLOB_A
    assert evidence.blob_name(tmp_path / "snapshots" / "c.safetensors") == ""
    assert evidence.blob_name(tmp_path / "blobs" / BLOB_A) == ""


def test_a_changed_byte_under_equal_size_and_header_is_seen(tmp_path):
    """The failure this design exists for: same header, same size, other weights (answers W3)."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"header" + bytes(1000))
    before = evidence.gather(tmp_path, ["m.safetensors"])
    store = evidence.DigestStore(tmp_path / "store")
    first = evidence.checkpoint_digest(tmp_path, ["m.safetensors"], store)
    with open(path, "r+b") as file:
        file.seek(500)
        file.write(b"\1")
    os.utime(path, ns=(before.files[0].stat.mtime_ns, before.files[0].stat.mtime_ns))
    after = evidence.gather(tmp_path, ["m.safetensors"])
    assert after.files[0].stat.ctime_ns > before.files[0].stat.ctime_ns
    assert evidence.checkpoint_digest(tmp_path, ["m.safetensors"], store) != first


def test_the_digest_store_remembers_settled_files_and_nothing_else(tmp_path, monkeypatch):
    """Computed once; a fresh file is computed each time; a damaged entry counts as absent."""
    path = tmp_path / "file"
    path.write_bytes(b"weights")
    calls = []
    real = digests.digest_of_file
    monkeypatch.setattr(digests, "digest_of_file", lambda *args: (calls.append(1), real(*args))[1])
    store = evidence.DigestStore(tmp_path / "store")
    store.digest_of(path)
    store.digest_of(path)
    assert len(calls) == 2, "a file younger than the clock's grain is never believed"
    monkeypatch.setattr(evidence, "is_settled", lambda stat, taken_at=None: True)
    wanted = store.digest_of(path)
    assert store.digest_of(path) == wanted and len(calls) == 3
    for entry in (tmp_path / "store").iterdir():
        entry.write_bytes(b"\xc1 damaged")
    assert store.digest_of(path) == wanted and len(calls) == 4
