"""Attaching to a real daemon: the engine's and the loader's idea of which bytes are meant agree, from both sides."""

import shutil
import time

import msgspec
import pytest
import safetensors.torch
import torch

from tests.support import checkpoints, daemons
from weightcache.engine import attaching, leases, proving
from weightcache.wire import evidence


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A dense model in two shards, old enough that the daemon trusts the files' stats."""
    made = checkpoints.make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_shards=2)
    time.sleep(2.1)
    return made


@pytest.fixture(scope="module")
def daemon(tmp_path_factory, checkpoint):
    """One daemon for all of these tests: none of them changes it."""
    place = tmp_path_factory.mktemp("daemon")
    with daemons.DaemonProcess(daemons.write_spec(place / "cache.json", checkpoint), place / "root") as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def key(daemon):
    """The daemon's key as an engine would build it: without the content, which evidence has to prove."""
    return msgspec.structs.replace(daemon.status().key, content="")


def test_the_engines_own_checkpoint_is_proven_without_reading_it(daemon, key, checkpoint, monkeypatch):
    """The usual start: one stat a file, and the norm's bytes are those of the file."""
    monkeypatch.setattr(proving.Prover, "strengthen", None)
    with attaching.attach(daemon.directory, key, checkpoint=checkpoint) as attached:
        files = [safetensors.torch.load_file(path) for path in checkpoint.glob("*.safetensors")]
        (wanted,) = [found["model.norm.weight"] for found in files if "model.norm.weight" in found]
        assert torch.equal(attached.tensors["model.norm.weight"].view(torch.int16), wanted.view(torch.int16))


def test_a_copy_of_the_checkpoint_is_proven_by_the_digest_that_the_loader_found_too(daemon, key, checkpoint, tmp_path):
    """Ranks digest blocks while they load, engines digest files: both must come to one number (answers W3)."""
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    store = evidence.DigestStore(tmp_path / "store")
    with attaching.attach(daemon.directory, key, checkpoint=copy, digest_store=store) as attached:
        assert attached.state is leases.State.Held


def test_a_copy_with_one_other_byte_is_refused(daemon, key, checkpoint, tmp_path):
    """A fine-tune with equal names, shapes and headers must never attach (answers W3)."""
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    shard = max(copy.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(attaching.KeyMismatch) as caught:
        attaching.attach(daemon.directory, key, checkpoint=copy, digest_store=evidence.DigestStore(tmp_path / "store"))
    assert [row.field for row in caught.value.differences] == ["content"]


def test_an_engine_without_weight_files_needs_only_the_caches_uid(daemon, key):
    """Configuration and tokenizer come from the cache's own model/, which the daemon filled from the same files."""
    uid = daemon.status().cache.uid
    with attaching.attach(daemon.directory, key, cache_uid=uid) as attached:
        assert (daemon.directory / "model" / "config.json").is_file()
        assert len(attached.tensors) == daemon.status().groups[0].ranks[0].num_tensors


def test_what_the_loader_digested_is_what_the_engine_maps(daemon, key, checkpoint):
    """Every digest of the manifest, recomputed in this process over its own mapping (answers W28)."""
    with attaching.attach(daemon.directory, key, checkpoint=checkpoint, verify=True) as attached:
        assert attached.timings.verify > 0 and attached.damaged() == []


def test_the_lease_is_gone_at_the_daemon_when_it_is_closed(daemon, key, checkpoint):
    """Free at once for the next engine, without a time limit that has to pass (answers W36)."""
    for _ in range(3):
        with attaching.attach(daemon.directory, key, checkpoint=checkpoint, wait_seconds=5) as attached:
            (lease,) = daemon.status().groups[0].ranks[0].leases
            assert lease.lease == attached.lease.identity
