"""Who owns what on a node: real processes race for real locks, are killed, and real strangers try the sockets."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from weightcache.daemon import connections, devices, gates, locks, modelfiles, ownership, roots
from weightcache.wire import protocol, reasons

REF = protocol.CacheRef(namespace="default", name="qwen", uid="01234567-89ab-cdef-0123-456789abcdef")
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="another uid or owner needs root")


@pytest.fixture
def root(tmp_path):
    return roots.prepare(tmp_path / "root")


def holder(name="a", **more):
    return locks.Holder(namespace="default", name=name, uid="u", pid=os.getpid(), since=time.time(), **more)


def slots(count):
    return devices.list_host_slots(count)


OWNER = """
import sys, time
from pathlib import Path
from weightcache.daemon import devices, locks, ownership, roots
from weightcache.wire import reasons
root = roots.open_root(sys.argv[1])
who = locks.Holder(namespace="default", name=sys.argv[2], pid=0, pod="pod-" + sys.argv[2], since=time.time())
sys.stdin.readline()
try:
    owned = ownership.choose_and_lock(root, devices.list_host_slots(int(sys.argv[3])), int(sys.argv[4]), who)
except reasons.Refusal as refusal:
    print(refusal.reason, flush=True)
else:
    print("owns " + " ".join(device.uuid for device in owned.devices), flush=True)
    sys.stdin.readline()
"""


class Owner:
    """A process that asks for slots when told to, and keeps what it got."""

    def __init__(self, root, name, num_slots, count):
        command = [sys.executable, "-c", OWNER, str(root.path), name, str(num_slots), str(count)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self):
        return self.process.stdout.readline().strip()

    def end(self):
        self.process.kill()
        self.process.communicate()


def test_many_processes_race_for_slots_and_each_gets_all_or_none(root):
    """Sixteen want two of four at once: two win, whole; nobody holds one and waits for another (answers W35)."""
    racers = [Owner(root, f"racer-{index}", 4, 2) for index in range(16)]
    try:
        for racer in racers:
            racer.go()
        answers = [racer.answer() for racer in racers]
        won = [set(answer.split()[1:]) for answer in answers if answer.startswith("owns")]
        assert sorted(map(sorted, won)) == [["host-0", "host-1"], ["host-2", "host-3"]]
        assert answers.count("GPUOwnedByAnother") == 14
    finally:
        for racer in racers:
            racer.end()


def test_a_killed_owner_frees_at_once_and_the_message_named_it(root):
    """kill -9 is enough; until then the next one is told pod, cache and since when (answers W35, W36)."""
    first = Owner(root, "first", 2, 2)
    first.go()
    assert first.answer() == "owns host-0 host-1"
    with pytest.raises(reasons.Refusal, match=r"host-0 by cache default/first .*pod pod-first.* since 20") as caught:
        ownership.choose_and_lock(root, slots(2), 1, holder())
    assert caught.value.reason is reasons.Reason.GPUOwnedByAnother
    first.process.send_signal(signal.SIGKILL)
    first.process.communicate()
    with ownership.choose_and_lock(root, slots(2), 2, holder()) as owned:
        assert [device.uuid for device in owned.devices] == ["host-0", "host-1"]


def test_a_child_that_inherited_the_lock_keeps_it_after_its_parent(root):
    """A loader may still hold GPU memory when its daemon is gone: the lock is not free before (answers W35)."""
    owned = ownership.choose_and_lock(root, slots(1), 1, holder())
    child = subprocess.Popen(["sleep", "60"], pass_fds=[owned.descriptor_of("host-0")])
    owned.close()
    try:
        with pytest.raises(reasons.Refusal, match="host-0 by"):
            ownership.choose_and_lock(root, slots(1), 1, holder("next"))
    finally:
        child.kill()
        child.wait()
    ownership.choose_and_lock(root, slots(1), 1, holder("next")).close()


def test_preferred_devices_come_first_and_the_rest_in_order(root):
    """A deposit's GPU before others; host-10 after host-9, by number and not by text."""
    found = slots(12)
    owned = ownership.choose_and_lock(root, found, 3, holder(), preferred=["host-10", "host-77", "host-4"])
    assert [device.uuid for device in owned.devices] == ["host-10", "host-4", "host-0"]
    owned.close()
    assert [device.uuid for device in ownership.order(found)][-3:] == ["host-9", "host-10", "host-11"]


def test_nothing_but_lock_files_is_opened_before_the_locks_are_held(root):
    """An audit of every open: below the root only files that end in .lock (answers W35)."""
    script = (
        "import os, sys\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "from weightcache.daemon import devices, locks, ownership, roots\n"
        "root = roots.open_root(sys.argv[1])\n"
        "ownership.choose_and_lock(root, devices.list_host_slots(2), 2, locks.Holder())\n"
        "print('\\n'.join(path for path in opened if path.startswith(sys.argv[1] + '/')))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(root.path)], check=True, capture_output=True, text=True, timeout=60
    )
    opened = set(run.stdout.split())
    assert opened and all(path.endswith(".lock") for path in opened), opened


def test_lock_files_are_never_deleted_and_a_torn_line_decides_nothing(root):
    """A deleted lock file is a second lock; the line in it is for people only."""
    path = root.gpu_directory / "host-0.lock"
    ownership.choose_and_lock(root, slots(1), 1, holder()).close()
    before = path.stat().st_ino
    path.write_bytes(b'{"namespace": "defa')
    ownership.choose_and_lock(root, slots(1), 1, holder("b")).close()
    assert path.stat().st_ino == before


def test_a_planted_link_in_place_of_a_lock_is_not_followed(root, tmp_path):
    """Locking a file of someone else's choice would truncate it."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (root.gpu_directory / "host-0.lock").symlink_to(victim)
    with pytest.raises(reasons.Refusal, match=r"host-0\.lock") as caught:
        ownership.choose_and_lock(root, slots(1), 1, holder())
    assert caught.value.reason is reasons.Reason.RootInvalid and victim.read_text() == "precious"


def test_too_few_devices_and_sliced_ones_have_their_own_reasons(root):
    """Waiting does not help there, and the message says what there is."""
    import dataclasses

    with pytest.raises(reasons.Refusal, match="3 devices wanted, 2 on the node") as caught:
        ownership.choose_and_lock(root, slots(2), 3, holder())
    assert caught.value.reason is reasons.Reason.NotEnoughGPUs
    sliced = [dataclasses.replace(slot, mig=True) for slot in slots(2)]
    with pytest.raises(reasons.Refusal, match="in MIG mode: host-0, host-1") as caught:
        ownership.choose_and_lock(root, sliced, 1, holder())
    assert caught.value.reason is reasons.Reason.MIGNotSupported


# --- the gate -------------------------------------------------------------------------------------------------------
GATE = """
import sys
from weightcache.daemon import gates
with gates.Gate(sys.argv[1], int(sys.argv[2]), sys.argv[3]).acquire():
    print("in", flush=True)
    sys.stdin.readline()
"""


def enter_gate(root, num_slots, name):
    command = [sys.executable, "-c", GATE, str(root.gate_directory), str(num_slots), name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "in"
    return process


def test_as_many_as_there_are_slots_are_in_and_a_killed_one_makes_room(root):
    """Two slots, two loaders of other processes inside; the third is told both, and enters when one dies (W38)."""
    inside = [enter_gate(root, 2, f"loader-{index}") for index in range(2)]
    told, entered = [], threading.Event()

    def third():
        with gates.Gate(root.gate_directory, 2, "third").acquire(told.append, poll_seconds=0.02):
            entered.set()

    thread = threading.Thread(target=third)
    thread.start()
    try:
        limit = time.monotonic() + 5
        while not told and time.monotonic() < limit:
            time.sleep(0.01)
        assert "loader-0" in told[0] and "loader-1" in told[0] and not entered.wait(0.3)
        inside[0].kill()
        assert entered.wait(5)
    finally:
        for process in inside:
            process.kill()
            process.communicate()
        thread.join(5)


def test_a_smaller_gate_does_not_count_the_slots_of_a_larger_one(root):
    """The setting was lowered: who still holds slot 1 does not keep slot 0's successor out."""
    larger = gates.Gate(root.gate_directory, 2, "larger")
    with larger.acquire(), larger.acquire(), pytest.raises(gates.Stopped):
        gates.Gate(root.gate_directory, 1, "c").acquire(poll_seconds=0.01, should_stop=_after(0.1))
    gates.Gate(root.gate_directory, 1, "c").acquire(poll_seconds=0.01).release()
    assert len(list(root.gate_directory.iterdir())) == 2, "files stay"


def _after(seconds):
    limit = time.monotonic() + seconds
    return lambda: time.monotonic() > limit


# --- the root on disk -----------------------------------------------------------------------------------------------
def test_preparing_twice_is_preparing_once(root):
    """An init container runs on every start."""
    before = {path: path.stat() for path in root.path.rglob("*")}
    again = roots.prepare(root.path)
    assert {path: path.stat().st_ino for path in again.path.rglob("*")} == {k: v.st_ino for k, v in before.items()}


def test_the_by_name_link_is_relative_and_replaced_not_rewritten(root):
    """Another mount path must not break it; a new cache of the same name replaces it at once (answers K9)."""
    first = roots.make_cache_directory(root, REF)
    link = root.by_name_directory / "default" / "qwen"
    assert not os.readlink(link).startswith("/") and link.resolve() == first.resolve()
    newer = protocol.CacheRef(namespace="default", name="qwen", uid="99999999-89ab-cdef-0123-456789abcdef")
    second = roots.make_cache_directory(root, newer)
    assert link.resolve() == second.resolve() != first.resolve()
    assert roots.remove_cache_directory(root, REF) and not first.exists()
    assert link.resolve() == second.resolve(), "removing the old cache leaves the new one's link alone"


def test_model_holds_the_small_files_and_no_weights(root, tmp_path):
    """An engine pod needs no checkpoint volume; weights never land on the tmpfs."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "old.bin"):
        (checkpoint / name).write_text(name)
    directory = roots.make_cache_directory(root, REF)
    model = modelfiles.fill_model_directory(directory, checkpoint)
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "tokenizer.json"]
    (checkpoint / "tokenizer.json").unlink()
    modelfiles.fill_model_directory(directory, checkpoint)
    assert [path.name for path in model.iterdir()] == ["config.json"], "exactly what the checkpoint has now"


STRANGER = """
import os, socket, sys
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[3])] * 3)
directory = sys.argv[1]
path = os.path.join(directory, "daemon.sock")
def attempt(name, action):
    try:
        action()
        print(name, "allowed")
    except OSError as error:
        print(name, type(error).__name__)
attempt("connect", lambda: socket.socket(socket.AF_UNIX).connect(path))
attempt("unlink", lambda: os.unlink(path))
attempt("rename", lambda: os.rename(path, path + ".old"))
attempt("plant", lambda: socket.socket(socket.AF_UNIX).bind(path + "2"))
attempt("replace", lambda: os.symlink("/tmp", os.path.join(directory, "x")))
attempt("locks", lambda: os.listdir(os.path.join(directory, "..", "..", "gpu")))
"""


@needs_root
def test_a_group_member_can_connect_but_neither_replace_nor_see_the_locks(tmp_path):
    """The socket's group may use a socket, not become its owner (answers W33, W35)."""
    group = 54321
    for path in (tmp_path, *tmp_path.parents):
        if str(path).startswith("/tmp/"):
            os.chmod(path, path.stat().st_mode | 0o055)
    root = roots.prepare(tmp_path / "root", socket_group=group)
    directory = roots.make_cache_directory(root, REF, group)
    listener = connections.listen(str(directory / "daemon.sock"), 0o660, group)
    try:

        def attempts(gid):
            command = [sys.executable, "-c", STRANGER, str(directory), str(gid), str(NOBODY)]
            run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
            return dict(line.split() for line in run.stdout.splitlines())

        member = attempts(group)
        assert member.pop("connect") == "allowed"
        assert set(member.values()) == {"PermissionError"}, member
        assert set(attempts(NOBODY).values()) == {"PermissionError"}, "not of the group: nothing at all"
    finally:
        listener.close()


@needs_root
def test_a_root_that_others_could_write_or_own_is_refused_with_both_values(tmp_path):
    """Whoever can write there can replace every lock."""
    for number, change in enumerate((lambda p: os.chmod(p, 0o777), lambda p: os.chown(p, NOBODY, -1))):
        path = roots.prepare(tmp_path / f"root-{number}").path
        change(path)
        with pytest.raises(reasons.Refusal, match=str(path)) as caught:
            roots.open_root(path)
        assert caught.value.reason is reasons.Reason.RootInvalid


@needs_root
def test_a_read_only_root_is_refused_as_such(tmp_path):
    """A mount with `ro` is a mistake in a manifest, not a missing directory."""
    path = roots.prepare(tmp_path / "root").path
    script = (
        "import subprocess, sys\n"
        "subprocess.run(['mount', '--bind', sys.argv[1], sys.argv[1]], check=True)\n"
        "subprocess.run(['mount', '-o', 'remount,bind,ro', sys.argv[1]], check=True)\n"
        "from weightcache.daemon import roots\n"
        "from weightcache.wire import reasons\n"
        "try:\n    roots.open_root(sys.argv[1])\nexcept reasons.Refusal as refusal:\n    print(refusal)\n"
    )
    run = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", script, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if run.returncode:
        pytest.skip(f"this machine allows no mounts: {run.stderr[-200:]}")
    assert run.stdout.startswith("RootInvalid") and "read-only" in run.stdout.lower(), run.stdout


def test_the_sockets_of_a_cache_never_share_a_path_with_anothers():
    """UIDs, not names: a deleted and re-created cache must not meet old sockets (answers K9)."""
    left, right = (
        roots.cache_directory(roots.Root(Path("/r")), uid)
        for uid in ("01234567-89ab-cdef-0123-456789abcdef", "01234567-99ab-cdef-0123-456789abcdef")
    )
    assert left != right
