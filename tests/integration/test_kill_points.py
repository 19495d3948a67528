"""kill -9 at every stage of a load, of everyone who takes part; then a clean start, and nothing left behind.

The table: who dies x where. After each: no lock is held, no child lives, no socket answers wrongly, a new daemon of the
same cache reaches Ready on the same slots, and a rank that is not whole was never served.
"""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.support import checkpoints, daemons
from weightcache.daemon import locks, states
from weightcache.engine import attaching
from weightcache.wire import protocol, reasons

STAGES = [states.WAITING_FOR_GATE, states.READING, states.DIGESTING, states.SEALING, states.VERIFYING]
SLOTS = ("host-0", "host-1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = checkpoints.make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", "nvfp4", num_shards=2)
    time.sleep(2.1)  # so that no load has to wait until its files' stats can be trusted
    return made


@pytest.fixture
def spec(tmp_path, checkpoint):
    return daemons.write_spec(tmp_path / "cache.json", checkpoint, parallelism={"tensor": 2})


def all_free(root):
    """Whether every lock below the root can be taken: what the kernel says, not what the files say."""
    for path in [*(root / "gpu").glob("*.lock"), *(root / "gate").glob("*.lock")]:
        found = locks.try_lock(path, locks.Holder(detail="test"))
        if not isinstance(found, locks.HeldLock):
            return False
        found.close()
    return True


def eventually(check, what, seconds=5.0):
    limit = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


def at_stage(status, stage):
    return any(rank.state == stage for group in status.groups for rank in group.ranks)


@pytest.mark.parametrize("stage", STAGES)
def test_a_daemon_killed_while_loading_leaves_nothing_and_the_next_one_is_ready(tmp_path, spec, stage):
    """Its children die with it, the locks are free, and the same slots load again (answers W35, W38)."""
    root = tmp_path / "root"
    with daemons.DaemonProcess(spec, root, hold=stage) as daemon:
        daemon.wait_for(lambda status: at_stage(status, stage), f"at {stage}")
        children = daemon.children()
        assert children, "somebody was loading"
        daemon.kill()
        assert daemons.gone_within(children, 5.0), "a child outlived its daemon"
        eventually(lambda: all_free(root), "a lock is still held")
        with daemons.DaemonProcess(spec, root) as successor:
            status = successor.wait_ready()
            assert [rank.gpu for rank in status.groups[0].ranks] == list(SLOTS)
            assert successor.ask(protocol.Verify(), protocol.Verified).sound


@pytest.mark.parametrize("stage", STAGES)
def test_a_child_killed_at_any_stage_is_reported_and_loaded_again(tmp_path, spec, stage):
    """The rank fails with the signal's name, the group is not served, the gate is free for the others (answers W37)."""
    with daemons.DaemonProcess(spec, tmp_path / "root", hold=stage) as daemon:
        daemon.wait_for(lambda status: at_stage(status, stage), f"at {stage}")
        kind = "weightcache.daemon.verifying" if stage == states.VERIFYING else "weightcache.daemon.loading"
        victims = daemon.children(kind)
        for victim in victims:
            victim.kill()
        status = daemon.wait_for(
            lambda status: any(rank.reason for rank in status.groups[0].ranks), "failed with a reason"
        )
        failed = next(rank for rank in status.groups[0].ranks if rank.reason)
        wanted = "VerifyImpossible" if stage == states.VERIFYING else "LoaderDied"
        assert failed.reason == wanted and "was killed by SIGKILL" in failed.message
        assert status.groups[0].state != states.READY and status.groups[0].ranks[failed.rank].arena_bytes == 0
        daemon.wait_for(lambda status: status.groups[0].ranks[failed.rank].attempts >= 2, "tried again")
        assert daemon.children(), "a new child is at work"


def test_a_child_killed_once_does_not_keep_the_group_from_becoming_ready(tmp_path, spec):
    """Back-off, then whole: nobody has to restart the daemon."""
    with daemons.DaemonProcess(spec, tmp_path / "root", "--read-limit", "200KiB/s") as daemon:
        daemon.wait_for(lambda status: at_stage(status, states.READING), "reading")
        daemon.children("weightcache.daemon.loading")[0].kill()
        daemon.wait_for(
            lambda status: any(rank.reason == "LoaderDied" for rank in status.groups[0].ranks), "LoaderDied"
        )
        status = daemon.wait_ready()
        assert all(rank.reason == "" and rank.attempts == 0 for rank in status.groups[0].ranks)


def test_a_daemon_killed_while_serving_is_replaced_under_living_engines(tmp_path, spec, checkpoint):
    """The engine's tensors stay valid and its lease counts at the next daemon, under its old generation."""
    root = tmp_path / "root"
    with daemons.DaemonProcess(spec, root) as daemon:
        key = daemon.wait_ready().key
        engine = attaching.attach(daemon.directory, key, checkpoint=checkpoint)
        before = {name: tensor.clone() for name, tensor in engine.tensors.items() if tensor.element_size() > 1}
        daemon.kill()
        assert all(bool((engine.tensors[name] == kept).all()) for name, kept in before.items())
        with daemons.DaemonProcess(spec, root) as successor:
            successor.wait_ready()
            status = successor.wait_for(lambda status: status.groups[0].ranks[0].leases, "counting the old lease")
            (lease,) = status.groups[0].ranks[0].leases
            assert lease.generation == engine.generation != status.groups[0].ranks[0].generation
            with pytest.raises(reasons.Refusal) as caught:
                attaching.attach(successor.directory, key, checkpoint=checkpoint)
            assert caught.value.reason is reasons.Reason.GroupTaken, "the old engine still sits on the GPUs"
            assert all(bool((engine.tensors[name] == kept).all()) for name, kept in before.items())
            engine.close()
            successor.wait_for(lambda status: not status.groups[0].ranks[0].leases, "lease ended")
            attaching.attach(successor.directory, key, checkpoint=checkpoint).close()


CLIENT = """
import sys, time
from weightcache.engine import attaching
from weightcache.wire import keys
import msgspec
attached = attaching.attach(sys.argv[1], msgspec.json.decode(sys.argv[2], type=keys.Key), checkpoint=sys.argv[3])
print("attached", flush=True)
time.sleep(600)
"""


def test_a_killed_client_gives_its_group_back_at_once(tmp_path, spec, checkpoint):
    """The connection is the lease: no time-out has to pass, no PID has to be asked (answers W36)."""
    import msgspec

    with daemons.DaemonProcess(spec, tmp_path / "root") as daemon:
        key = daemon.wait_ready().key
        command = [sys.executable, "-c", CLIENT, daemon.directory, msgspec.json.encode(key).decode(), checkpoint]
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout.readline().strip() == "attached"
            (lease,) = daemon.status().groups[0].ranks[0].leases
            assert lease.pid == client.pid
            client.kill()
        daemon.wait_for(lambda status: not status.groups[0].ranks[0].leases, "free again")
        attaching.attach(daemon.directory, key, checkpoint=checkpoint).close()


def test_sigterm_ends_in_order_and_leaves_no_socket(tmp_path, spec):
    """A rollout's ordinary end: exit code 0, sockets away, locks free, arena memory back."""
    root = tmp_path / "root"
    with daemons.DaemonProcess(spec, root) as daemon:
        daemon.wait_ready()
        directory = daemon.directory.resolve()
        arenas = memfds_of(daemon.process.pid)
        assert len(arenas) == 2, "one arena a rank"
        assert daemon.stop() == 0
        assert not list(directory.glob("*.sock*")) and not daemon.status_socket.exists()
        assert all_free(root)
        assert not [pid for pid in psutil.pids() if memfds_of(pid) & arenas], "somebody still holds an arena"


def memfds_of(pid):
    """Inodes of the memfds that a process has open."""
    found = set()
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{descriptor}"
            if "/memfd:" in os.readlink(path):
                found.add(os.stat(path).st_ino)
    except OSError:
        pass
    return found


def test_a_daemon_killed_while_it_waits_for_its_gpus_leaves_the_owner_alone(tmp_path, spec, checkpoint):
    """Before its locks are held a daemon has touched nothing: not a weight byte, not a socket (answers W35)."""
    root = tmp_path / "root"
    other = daemons.write_spec(tmp_path / "other.json", checkpoint, name="other", parallelism={"tensor": 2})
    with daemons.DaemonProcess(spec, root, host_slots=2) as owner:
        owner.wait_ready()
        inodes = {path.name: path.stat().st_ino for path in owner.directory.resolve().glob("*.sock")}
        with daemons.DaemonProcess(other, root, "--on-owned", "wait", host_slots=2) as waiter:
            status = waiter.wait_for(lambda status: status.reason, "refused")
            assert (status.state, status.reason) == (states.REFUSED, "GPUOwnedByAnother")
            assert "default/cache" in status.message and f"pid {owner.process.pid}" in status.message
            assert not (root / "s" / "by-name" / "default" / "other").exists()
            assert not waiter.children()
            waiter.kill()
        with daemons.DaemonProcess(other, root, host_slots=2) as second:
            assert second.wait_ended() == reasons.exit_code(reasons.Reason.GPUOwnedByAnother)
        with daemons.DaemonProcess(spec, root, host_slots=2) as twin:
            assert twin.wait_ended() == reasons.exit_code(reasons.Reason.GPUOwnedByAnother), "the same cache, too"
        assert {path.name: path.stat().st_ino for path in owner.directory.resolve().glob("*.sock")} == inodes
        assert owner.wait_ready().groups[0].state == states.READY


def test_a_waiting_daemon_starts_when_the_owner_is_killed(tmp_path, spec, checkpoint):
    """The kernel frees the lock; nobody has to clean up."""
    root = tmp_path / "root"
    other = daemons.write_spec(tmp_path / "other.json", checkpoint, name="other", parallelism={"tensor": 2})
    with daemons.DaemonProcess(spec, root, host_slots=2) as owner:
        owner.wait_ready()
        with daemons.DaemonProcess(other, root, "--on-owned", "wait", host_slots=2) as waiter:
            waiter.wait_for(lambda status: status.reason == "GPUOwnedByAnother", "refused")
            owner.kill()
            assert waiter.wait_ready().cache.name == "other"
