"""The loader as the daemon starts it: exact bytes, refusals by name, and nothing left of one that was killed."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.support import checkpoints, loaders, slices
from weightcache.arenas import memory
from weightcache.daemon import gates, orders, states
from weightcache.wire import digests, manifests, reasons

MIB = 1 << 20
TREE = Path(__file__).resolve().parent.parent.parent
PHASES = [states.WAITING_FOR_GATE, states.READING, states.DIGESTING, states.SEALING]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = checkpoints.make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", "nvfp4", num_shards=2)
    time.sleep(2.1)  # so that no load has to wait until its files' stats can be trusted
    return made


def read_from(mapping):
    return lambda offset, size_bytes: bytes(mapping.buffer[offset : offset + size_bytes])


def load(order):
    """One load to its end: the sealed arena's event, its tensors by name, and all its bytes."""
    with loaders.Child("loading", order) as loader:
        sealed = loader.finish()
        assert loader.phases == PHASES
        mapping = memory.map_readonly("Host", loader.descriptors, sealed.chunk_sizes)
        tensors = loaders.tensors_of(sealed, read_from(mapping))
        return sealed, tensors, bytes(mapping.buffer)


# --- bytes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_holds_exactly_the_bytes_that_numpy_cuts(tmp_path, checkpoint, size):
    """Names, bytes, digests; and together the ranks digest every block of every file once (answers W3, W22)."""
    blocks = {}
    for rank in range(size):
        order = loaders.make_order(checkpoint, tmp_path / "gate", rank=rank, parallelism={"tensor": size})
        sealed, tensors, _ = load(order)
        assert {name: data for name, (_, _, data) in tensors.items()} == slices.rank_of(checkpoint, rank, size)
        manifest = manifests.decode(sealed.manifest)
        assert set(manifest.kind_names) == {"loaded"} and manifest.aliases == {}
        for index, name in enumerate(manifest.names):
            data = tensors[name][2]
            piece = digests.digest_block(data + bytes(-len(data) % 256))
            assert manifest.digest_of(index) == digests.combine([piece]), name
        for row in sealed.blocks:
            assert (row.file, row.block) not in blocks
            blocks[row.file, row.block] = row.digest
    files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert sorted(blocks) == [(file, 0) for file in files], "these files have one block each"
    for file in files:
        assert digests.combine([blocks[file, 0]]) == digests.digest_of_file(checkpoint / file)


def test_what_no_tensor_covers_is_zero(tmp_path, checkpoint):
    """Padding is digested: junk in it would make equal weights unequal, and hide anything."""
    sealed, tensors, data = load(loaders.make_order(checkpoint, tmp_path / "gate"))
    manifest, rest = manifests.decode(sealed.manifest), bytearray(data)
    for offset, (_, _, found) in zip(manifest.offsets, tensors.values(), strict=True):
        rest[offset : offset + len(found)] = bytes(len(found))
    assert rest == bytes(len(data))


def test_rows_across_buffers_and_blocks_arrive_whole(tmp_path):
    """Tens of MiB through one buffer of one block a thread: the same arena as through large buffers."""
    path = checkpoints.make_checkpoint(
        tmp_path / "model", "llama", hidden_size=512, intermediate_size=4096, vocab_size=4001, head_dim=128
    )
    found = []
    for budget, threads in ((4 * MIB, 1), (12 * MIB, 3), (256 * MIB, 4)):
        order = loaders.make_order(
            path,
            tmp_path / "gate",
            rank=1,
            parallelism={"tensor": 2},
            buffer_bytes=budget,
            num_threads=threads,
        )
        sealed, _, data = load(order)
        found.append((data, sorted(sealed.blocks, key=lambda row: row.block)))
    assert found[0] == found[1] == found[2]
    content = (path / "model.safetensors").read_bytes()
    assert len(found[0][1]) > 4
    for row in found[0][1]:
        assert row.digest == digests.digest_block(content[row.block * 4 * MIB : (row.block + 1) * 4 * MIB])


def test_a_fresh_file_is_waited_for_until_its_stat_is_evidence(tmp_path):
    """A file written within the clock's granularity could change under an equal ctime."""
    path = checkpoints.make_checkpoint(tmp_path / "model", "llama")
    written = max(file.stat().st_ctime for file in path.glob("*.safetensors"))
    sealed, _, _ = load(loaders.make_order(path, tmp_path / "gate"))
    assert sealed.settled == {"model.safetensors": True}
    assert time.time() - written >= 2.0 and sealed.phases["Settling"] > 0.5


def test_neither_loader_nor_verifier_imports_torch(tmp_path, checkpoint):
    """A second of start-up and gigabytes of address space, for nothing: one that touched torch would fail here."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    search_path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    order = loaders.make_order(checkpoint, tmp_path / "gate")
    with loaders.Child("loading", order, PYTHONPATH=search_path) as loader:
        sealed = loader.finish()
        verify = loaders.make_verify_order(sealed)
        with loaders.Child("verifying", verify, loader.descriptors, PYTHONPATH=search_path) as verifier:
            assert verifier.finish().damaged == []


# --- progress and limits ----------------------------------------------------------------------------------------------
def test_progress_begins_at_nothing_ends_at_all_and_does_not_flood(tmp_path, checkpoint):
    """A bar that starts late or stops at 97 % makes people kill healthy loads."""
    total = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    order = loaders.make_order(checkpoint, tmp_path / "gate", bytes_per_second=total, num_threads=1)
    with loaders.Child("loading", order) as loader:
        began = time.monotonic()
        loader.finish()
        seconds = time.monotonic() - began
    seen = [event for event in loader.events if isinstance(event, orders.Progressed)]
    assert seen[0].bytes_done == 0 and seen[-1].bytes_done == seen[-1].bytes_total == total
    assert [event.bytes_done for event in seen] == sorted(event.bytes_done for event in seen)
    assert len(seen) <= 3 + 5 * seconds


def test_the_limit_of_bytes_a_second_is_kept_over_all_threads(tmp_path):
    """Shared storage is not drowned: eight threads together stay below the limit."""
    path = checkpoints.make_checkpoint(tmp_path / "model", "llama", hidden_size=1024, intermediate_size=2048)
    total = (path / "model.safetensors").stat().st_size
    order = loaders.make_order(path, tmp_path / "gate", num_threads=8, bytes_per_second=total)
    sealed, _, _ = load(order)
    assert sealed.bytes_read >= total and sealed.phases[states.READING] >= 0.95


# --- refusals ---------------------------------------------------------------------------------------------------------
def refused(order, *words, reason):
    """The refusal, after: nothing sent but words, and no descriptor."""
    with loaders.Child("loading", order) as loader:
        refusal = loader.refusal()
        assert refusal.reason is reason, refusal
        for word in words:
            assert word in refusal.message, refusal
        assert not loader.descriptors
        return loader.phases


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.5])
def test_a_scale_that_would_poison_a_kernel_is_refused_by_name(tmp_path, value):
    """Zero, negative and non-finite scales, with the checkpoint's tensor and the value (answers W23)."""
    tensors = checkpoints.make_tensors(checkpoints.make_config("qwen3_moe", "nvfp4"))
    name = "model.layers.1.mlp.experts.5.up_proj.weight_scale_2"
    dtype, shape, _ = tensors[name]
    path = checkpoints.make_checkpoint(tmp_path / "model", "qwen3_moe", "nvfp4")
    checkpoints.write_shards(path, {**tensors, name: (dtype, shape, struct.pack("<f", value))})
    phases = refused(loaders.make_order(path, tmp_path / "gate"), name, str(value), reason=reasons.Reason.ScaleInvalid)
    assert phases == [states.WAITING_FOR_GATE, states.READING], "not even digested"
    assert gate_is_free(tmp_path / "gate")


def test_a_file_that_changed_since_its_header_was_read_is_refused_with_both_values(tmp_path, checkpoint):
    """The plan no longer fits; the message says which field, what it is and what it was."""
    order = loaders.make_order(checkpoint, tmp_path / "gate")
    name, stat = next(iter(order.stats.items()))
    older = msgspec.structs.replace(stat, mtime_ns=stat.mtime_ns - 5)
    order = msgspec.structs.replace(order, stats={**order.stats, name: older})
    words = (name, f"mtime_ns is {stat.mtime_ns}, was {stat.mtime_ns - 5}", "wait until")
    assert refused(order, *words, reason=reasons.Reason.CheckpointChanged) == []


def test_a_file_that_came_since_the_headers_were_read_is_refused(tmp_path, checkpoint):
    """The daemon's key does not speak of it."""
    order = loaders.make_order(checkpoint, tmp_path / "gate")
    stats = dict(order.stats)
    name = sorted(stats)[1]
    del stats[name]
    order = msgspec.structs.replace(order, stats=stats)
    assert refused(order, name, "is new", reason=reasons.Reason.CheckpointChanged) == []


def slow(tmp_path, seconds=3.0):
    """An order that reads a file of its own for about that long, and the file."""
    path = checkpoints.make_checkpoint(
        tmp_path / "model", "llama", hidden_size=1024, intermediate_size=4096, vocab_size=6000, head_dim=64
    )
    file = path / "model.safetensors"
    rate = int(file.stat().st_size / seconds)
    order = loaders.make_order(path, tmp_path / "gate", bytes_per_second=rate, num_threads=2, buffer_bytes=8 * MIB)
    return order, file


def test_a_file_that_shrinks_while_it_is_read_is_refused_where_it_ends(tmp_path):
    """A short read must not become an arena with zeros at its end."""
    order, file = slow(tmp_path)
    with loaders.Child("loading", order) as loader:
        loader.wait_phase(states.READING)
        os.truncate(file, 9 * MIB)
        refusal = loader.refusal()
        assert refusal.reason is reasons.Reason.CheckpointChanged and not loader.descriptors
        assert f"model.safetensors ends at byte {9 * MIB}" in refusal.message


def test_a_file_rewritten_during_a_load_is_refused_before_it_is_sealed(tmp_path):
    """Half old and half new bytes have digests that agree with themselves: only the stats tell (answers W3)."""
    order, file = slow(tmp_path, seconds=0.5)
    with loaders.Child("loading", order) as loader:
        loader.wait_phase(states.READING)
        with file.open("r+b") as rewritten:
            rewritten.seek(-100, os.SEEK_END)
            rewritten.write(b"new bytes")
        refusal = loader.refusal()
        assert refusal.reason is reasons.Reason.CheckpointChanged and not loader.descriptors
        assert "mtime_ns is" in refusal.message and ", was " in refusal.message


def test_the_first_error_stops_all_readers(tmp_path):
    """Eight readers wait for their turn, 1.5 s each: what is known after the first is not told after the last."""
    order, file = slow(tmp_path, seconds=40.0)
    order = msgspec.structs.replace(order, num_threads=8, buffer_bytes=40 * MIB)
    with loaders.Child("loading", order) as loader:
        loader.wait_phase(states.READING)
        os.truncate(file, 1 * MIB)
        began = time.monotonic()
        assert loader.refusal().reason is reasons.Reason.CheckpointChanged
        assert time.monotonic() - began < 7.0


def test_an_order_for_someone_else_is_an_internal_error_and_no_hang(tmp_path):
    """Whatever goes wrong comes as an event with a reason."""
    order = orders.VerifyOrder(memory="Host", device="host-0", chunk_sizes=[], manifest=b"")
    with loaders.Child("loading", order) as loader:
        assert loader.refusal().reason is reasons.Reason.InternalError


# --- deaths -----------------------------------------------------------------------------------------------------------
def gate_is_free(directory):
    """Whether the gate's one slot can be taken right now."""

    def occupied(holders):
        raise AssertionError(holders)

    try:
        gates.Gate(directory, 1, "test").acquire(occupied).release()
    except AssertionError:
        return False
    return True


def arenas_of(pid):
    """Inodes of the arenas (memfds) that a process maps or has open."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:weightcache" in line:
            found.add(int(line.split()[4]))
    return found


def held_anywhere(inodes):
    """Whether any process still maps one of these arenas or has it open: as long as one does, the memory is taken."""
    for pid in psutil.pids():
        try:
            if arenas_of(pid) & inodes:
                return True
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                if os.stat(f"/proc/{pid}/fd/{descriptor}").st_ino in inodes and "memfd:weightcache" in os.readlink(
                    f"/proc/{pid}/fd/{descriptor}"
                ):
                    return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize("phase", PHASES)
def test_a_loader_killed_in_any_phase_leaves_no_memory_and_a_free_gate(tmp_path, checkpoint, phase):
    """kill -9 while waiting, reading, digesting or sealing: the kernel takes all of it back (answers W32, W38)."""
    with loaders.Child("loading", loaders.make_order(checkpoint, tmp_path / "gate"), hold=phase) as loader:
        loader.wait_phase(phase)
        inodes = arenas_of(loader.process.pid)
        assert len(inodes) == 1
        assert gate_is_free(tmp_path / "gate") == (phase != states.READING), "held around reading only"
        loader.process.kill()
        loader.process.wait()
        assert not held_anywhere(inodes) and gate_is_free(tmp_path / "gate")


def test_a_hold_for_another_rank_stops_nobody(tmp_path, checkpoint):
    """The seam that kill tests use picks one rank of a group."""
    order = loaders.make_order(checkpoint, tmp_path / "gate", rank=1, parallelism={"tensor": 2})
    with loaders.Child("loading", order, hold=f"{states.READING}:0") as loader:
        loader.finish()
    with loaders.Child("loading", order, hold=f"{states.READING}:1") as loader:
        loader.wait_phase(states.READING)
        with pytest.raises(subprocess.TimeoutExpired):
            loader.process.wait(0.3)


def is_lockable(file):
    """Whether the lock can be taken; it then is."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def within_a_second(check, what):
    limit = time.monotonic() + 1.0
    while not check():
        assert time.monotonic() < limit, what
        time.sleep(0.01)


PARENT = """
import fcntl, os, sys, time
sys.path.insert(0, {tree!r})
from tests.support import loaders
lock = os.open({lock!r}, os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
order = loaders.make_order({checkpoint!r}, {gate!r})
loader = loaders.Child("loading", order, hold={phase!r}, inherited=[lock])
loader.wait_phase({phase!r})
print(loader.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("phase", [states.READING, states.SEALING])
def test_a_loader_does_not_outlive_its_daemon(tmp_path, checkpoint, phase):
    """kill -9 of the parent: within a second the loader is gone, and with it arena, gate and GPU lock (answers W35)."""
    names = {
        "tree": str(TREE),
        "lock": str(tmp_path / "gpu.lock"),
        "gate": str(tmp_path / "gate"),
        "checkpoint": str(checkpoint),
        "phase": phase,
    }
    script = textwrap.dedent(PARENT).format(**names)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        loader = psutil.Process(int(parent.stdout.readline()))
        inodes = arenas_of(loader.pid)
        with (tmp_path / "gpu.lock").open() as lock:
            assert not is_lockable(lock)
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            within_a_second(lambda: is_ended(loader), "the loader lives on")
            # A process counts as a zombie once its first thread has ended; its descriptors go with the last.
            within_a_second(lambda: is_lockable(lock), "the GPU's lock is held")
        within_a_second(lambda: not held_anywhere(inodes), "the arena is held")
        assert inodes and gate_is_free(tmp_path / "gate")


def test_a_loader_ends_when_its_socket_does(tmp_path, checkpoint):
    """Also without a death signal: a daemon that gave up on it need not find and kill it."""
    with loaders.Child("loading", loaders.make_order(checkpoint, tmp_path / "gate"), hold=states.READING) as loader:
        loader.wait_phase(states.READING)
        loader.socket.close()
        assert loader.process.wait(1.0) == 1


def test_ctrl_c_in_the_daemons_terminal_does_not_end_a_load(tmp_path, checkpoint):
    """The daemon decides when its loaders end; a signal to the whole terminal must not make a rank fail first."""
    with loaders.Child("loading", loaders.make_order(checkpoint, tmp_path / "gate"), hold=states.READING) as loader:
        loader.wait_phase(states.READING)
        loader.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            loader.process.wait(0.3)
