"""A daemon's days: gate, verify, drain, release, resume, several groups, bounded memory. Real processes throughout."""

import asyncio
import dataclasses
import fcntl
import json
import os
import struct
import time
from pathlib import Path

import msgspec
import pytest

from tests.support import checkpoints, daemons, servers
from weightcache.arenas import host
from weightcache.daemon import caches, ranks, settings, states, supervising
from weightcache.engine import attaching, claims
from weightcache.wire import manifests, protocol, reasons


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = checkpoints.make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", "nvfp4", num_shards=2)
    time.sleep(2.1)
    return made


# --- verification ---------------------------------------------------------------------------------------------------
def verify(arena):
    async def run():
        supervisor = supervising.Supervisor(2)
        try:
            return await supervisor.verify(arena)
        finally:
            supervisor.close()

    return asyncio.run(run())


def replaced(arena, change):
    """The same arena with other bytes in it, sealed like the first: what a fault of memory would leave."""
    data = bytearray(os.pread(arena.descriptors[0], sum(arena.chunk_sizes), 0))
    change(data)
    descriptor = os.memfd_create("damaged", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, host.SEALS)
    os.close(arena.descriptors[0])
    return dataclasses.replace(arena, descriptors=(descriptor,))


def made_arena():
    tensors = [(f"layer.{index}.weight", "U8", [3000], os.urandom(3000)) for index in range(5)]
    return servers.make_arena(tensors)


def test_a_byte_in_the_padding_counts_as_damage():
    """Padding is part of what is digested: nobody may hide bytes there."""
    damaged = replaced(made_arena(), lambda data: data.__setitem__(3001, 1))
    assert [damage.tensor for damage in verify(damaged).damaged] == ["layer.0.weight"]
    os.close(damaged.descriptors[0])


def test_a_damaged_rank_is_given_up_named_and_loaded_again(tmp_path, checkpoint):
    """Deep verification finds it, the group is not ready at once, and then whole again without a restart."""
    spec, ref = settings.read_document(daemons.write_spec(tmp_path / "c.json", checkpoint))
    config = settings.Settings(spec=spec, cache=ref, root=tmp_path / "root", host_slots=1, reader_threads=2)
    seen = []

    async def run():
        cache = caches.Cache(
            ref=ref, spec=spec, model=str(checkpoint), version="0", instance="i", clock=time.time, started_at=0.0
        )
        supervisor = supervising.Supervisor(4)
        keeper = ranks.Ranks(config, cache, supervisor, lambda event, **fields: seen.append((event, fields)))
        from weightcache.daemon import holdings

        with holdings.Holding(config) as holding:
            holding.lock()
            await keeper.plan(holding)
            keeper.start()
            await until(lambda: cache.state == states.READY)
            (rank,) = cache.groups[0].ranks
            first = manifests.decode(rank.arena.manifest)
            rank.arena = replaced(
                rank.arena, lambda data: data.__setitem__(first.offsets[7], data[first.offsets[7]] ^ 1)
            )
            verdict = await keeper.verify(deep=True)
            assert not verdict.sound and verdict.damaged == [f"host-0 {first.names[7]}"]
            assert cache.groups[0].state != states.READY and rank.reason == "Damaged"
            await until(lambda: cache.state == states.READY)
            assert (await keeper.verify(deep=True)).sound and rank.reason == ""
            await keeper.close()
        supervisor.close()

    asyncio.run(run())
    assert ("rank-failed", "Damaged") in [(event, fields.get("reason")) for event, fields in seen]


async def until(check, seconds=30.0):
    limit = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < limit, "it did not become so"
        await asyncio.sleep(0.02)


# --- gate -----------------------------------------------------------------------------------------------------------
def test_the_gate_is_the_nodes_and_waiting_names_its_holder(tmp_path, checkpoint):
    """Two caches, one slot: the second waits, visibly, and goes on when the first's loader is killed (answers W38)."""
    root = tmp_path / "root"
    first = daemons.write_spec(tmp_path / "first.json", checkpoint, name="first")
    second = daemons.write_spec(tmp_path / "second.json", checkpoint, name="second")
    with daemons.DaemonProcess(first, root, hold=states.READING) as holder:
        holder.wait_for(lambda status: status.groups and status.groups[0].ranks[0].state == states.READING, "reading")
        with daemons.DaemonProcess(second, root) as waiter:
            status = waiter.wait_for(
                lambda status: status.groups and "slot 0" in status.groups[0].ranks[0].message, "waiting at the gate"
            )
            (rank,) = status.groups[0].ranks
            assert rank.state == states.WAITING_FOR_GATE and "default/first group 0 rank 0" in rank.message
            holder.kill()
            waiter.wait_ready()


def test_two_slots_let_two_loaders_read_at_once(tmp_path, checkpoint):
    """The size of the gate is the installation's setting."""
    spec = daemons.write_spec(tmp_path / "c.json", checkpoint, parallelism={"tensor": 2})
    with daemons.DaemonProcess(spec, tmp_path / "root", "--gate-slots", 2, hold=states.READING) as daemon:
        daemon.wait_for(
            lambda status: (
                [rank.state for rank in status.groups[0].ranks] == [states.READING] * 2 if status.groups else 0
            ),
            "both reading",
        )


# --- several groups, drain, release ---------------------------------------------------------------------------------
def test_several_groups_serve_several_engines_and_a_release_names_whom_it_hit(tmp_path, checkpoint):
    """Two copies on four slots; drain, forced release, resume: each as it says."""
    spec = daemons.write_spec(
        tmp_path / "c.json",
        checkpoint,
        parallelism={"tensor": 2, "expert": {"enabled": True}},
        gpus={"perNode": 4},
    )
    with daemons.DaemonProcess(spec, tmp_path / "root") as daemon:
        status = daemon.wait_ready()
        assert [[rank.gpu for rank in group.ranks] for group in status.groups] == [
            ["host-0", "host-1"],
            ["host-2", "host-3"],
        ]
        key = status.key
        experts = [
            msgspec.structs.replace(key.position, tensor_rank=r, expert_rank=r, experts=f"{4 * r}-{4 * r + 3}")
            for r in (0, 1)
        ]
        with claims.claim(daemon.directory, key, checkpoint=checkpoint) as claim:
            parts = [
                attaching.attach(
                    daemon.directory, msgspec.structs.replace(key, position=place), checkpoint=checkpoint, claim=claim
                )
                for place in experts
            ]
            assert claim.group == 0 and [part.gpu for part in parts] == ["host-0", "host-1"]
            with claims.claim(daemon.directory, key, checkpoint=checkpoint) as other:
                assert other.group == 1
            assert daemon.ask(protocol.Drain()).state == states.DRAINING
            with pytest.raises(reasons.Refusal, match="Draining"):
                claims.claim(daemon.directory, key, checkpoint=checkpoint)
            with pytest.raises(reasons.Refusal, match="2 leases are open") as caught:
                daemon.ask(protocol.Release(key_digest=status.key_digest), protocol.Released)
            assert caught.value.reason is reasons.Reason.LeasesOpen
            forced = protocol.Release(key_digest=status.key_digest, force=True, grace_seconds=0.2)
            released = daemon.ask(forced, protocol.Released)
            assert len(released.clients) >= 2 and all(f"pid {os.getpid()}" in name for name in released.clients)
            assert released.bytes_freed == status.resident_bytes
            assert daemon.status().resident_bytes == 0 and daemon.status().state == states.DRAINING
            assert [part.damaged() for part in parts] == [[], []], "the engine's bytes outlive a forced release"
            for part in parts:
                part.close()
        daemon.ask(protocol.Resume())
        assert daemon.wait_ready().key.content == key.content


def test_a_checkpoint_that_changed_is_loaded_after_a_release_without_a_restart(tmp_path):
    """Release, new files, resume: the plan of the old files is given up, the new ones are served."""
    model = checkpoints.make_checkpoint(tmp_path / "model", "qwen3", seed=1)
    spec = daemons.write_spec(tmp_path / "c.json", model)
    with daemons.DaemonProcess(spec, tmp_path / "root") as daemon:
        before = daemon.wait_ready()
        daemon.ask(protocol.Release(key_digest=before.key_digest), protocol.Released)
        checkpoints.make_checkpoint(model, "qwen3", seed=2)
        daemon.ask(protocol.Resume())
        after = daemon.wait_for(
            lambda s: s.state == states.READY and s.key.content != before.key.content, "new content"
        )
        assert after.reason == "" and "reason=CheckpointChanged" in daemon.log


def test_a_ready_group_is_served_on_when_another_one_meets_changed_files(tmp_path):
    """Good weights are not taken from engines because the files behind them were replaced."""
    model = checkpoints.make_checkpoint(tmp_path / "model", "qwen3", seed=1)
    spec = daemons.write_spec(tmp_path / "c.json", model, gpus={"perNode": 2})
    with daemons.DaemonProcess(spec, tmp_path / "root", "--read-limit", "100KiB/s") as daemon:
        first = daemon.wait_for(
            lambda s: s.groups and any(g.state == states.READY for g in s.groups), "one group ready"
        )
        late = next(group.group for group in first.groups if group.state != states.READY)
        checkpoints.make_checkpoint(model, "qwen3", seed=2)
        status = daemon.wait_for(
            lambda s: s.groups and s.groups[late].ranks[0].reason == "CheckpointChanged", "refused"
        )
        assert status.groups[1 - late].state == states.READY
        claims.claim(daemon.directory, first.key, cache_uid=first.cache.uid).close()


# --- memory ---------------------------------------------------------------------------------------------------------
def big_checkpoint(path, mebibytes):
    """A Llama whose embedding and head are holes of this size each: bytes to read, none on disk."""
    made = checkpoints.make_config("llama", "none", num_hidden_layers=1)
    rows = mebibytes * 2**20 // (2 * made["hidden_size"])
    entries, position, parts = {}, 0, []
    for name, (dtype, shape, data) in checkpoints.make_tensors(made).items():
        is_hole = shape[0] == made["vocab_size"]
        full = (rows, *shape[1:]) if is_hole else shape
        size = 2 * rows * shape[1] if is_hole else len(data)
        entries[name] = {"dtype": dtype, "shape": list(full), "data_offsets": [position, position + size]}
        parts.append((position, b"" if is_hole else data))
        position += size
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**made, "vocab_size": rows}))
    text = json.dumps(entries).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
        for begin, data in parts:
            file.seek(8 + len(text) + begin)
            file.write(data)
    return path


def private_bytes(process):
    """RssAnon: what a process has for itself; the arena's pages are shared memory and count apart."""
    try:
        text = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon")), 0)


def test_a_loaders_own_memory_is_bounded_by_its_buffers_not_by_the_model(tmp_path):
    """400 MiB of weights through 16 MiB of buffers: the loader itself stays small."""
    spec = daemons.write_spec(tmp_path / "c.json", big_checkpoint(tmp_path / "model", 200))
    peak = 0
    with daemons.DaemonProcess(spec, tmp_path / "root", "--load-buffer", "16MiB") as daemon:
        limit = time.monotonic() + 60
        while (status := daemon.status()) is None or status.state != states.READY:
            peak = max([peak, *(private_bytes(child) for child in daemon.children("weightcache.daemon.loading"))])
            assert time.monotonic() < limit and daemon.process.poll() is None, daemon.log
        assert status.groups[0].ranks[0].arena_bytes > 400 << 20
        assert 0 < peak < (16 + 96) << 20, f"{peak >> 20} MiB"
        assert private_bytes(daemon.process) < 160 << 20, "the serving process holds descriptors, not weights"


def test_the_loader_ends_and_the_serving_process_has_no_children_when_ready(tmp_path, checkpoint):
    """Transients of loading end with a process (answers W32)."""
    spec = daemons.write_spec(tmp_path / "c.json", checkpoint)
    with daemons.DaemonProcess(spec, tmp_path / "root") as daemon:
        daemon.wait_ready()
        limit = time.monotonic() + 5
        while daemon.children():
            assert time.monotonic() < limit
            time.sleep(0.02)
        maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
        assert "libcuda" not in maps and "libtorch" not in maps, "no CUDA context, no torch in the serving process"


def test_progress_is_told_with_rate_and_time_left(tmp_path, checkpoint):
    """A person who waits sees how long: in the status and in the log."""
    spec = daemons.write_spec(tmp_path / "c.json", checkpoint)
    with daemons.DaemonProcess(spec, tmp_path / "root", "--read-limit", "200KiB/s", "--load-buffer", "4MiB") as daemon:
        status = daemon.wait_ready()
        assert status.groups[0].ranks[0].progress.bytes_done == status.groups[0].ranks[0].progress.bytes_total > 0
        assert "done_bytes=" in daemon.log and "per_second_bytes=" in daemon.log and "left_seconds=" in daemon.log
