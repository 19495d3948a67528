"""The command line against real daemons: what it shows, what it orders, and how it ends."""

import contextlib
import errno
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from tests.support import checkpoints, daemons, servers
from weightcache.daemon import states
from weightcache.engine import claims
from weightcache.wire import protocol

COMMAND = (sys.executable, "-m", "weightcache.cli.main")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run(*line, **environment):
    return subprocess.run(
        [*COMMAND, *map(str, line)],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


class Terminal:
    """A command on a terminal of its own. A context manager: what still runs at the end is killed."""

    def __init__(self, *line, rows=40, columns=120, **environment):
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (rows, columns))
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, line)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**inherited, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        os.close(slave)
        self.said = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        os.close(self._master)

    def wait_for(self, text, seconds=30.0):
        """Read until ``text`` was shown, control codes left out."""
        limit = time.monotonic() + seconds
        while text not in ANSI.sub("", self.said):
            assert time.monotonic() < limit, f"never showed {text!r}:\n{self.said}"
            self._read(0.1)
        return self.said

    def ended(self, seconds=20.0):
        """The exit code, once it ended."""
        limit = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < limit, f"did not end:\n{self.said}"
            self._read(0.1)
        self._read(0.1)
        return self.process.returncode

    def drain(self):
        """Take what was written up to now."""
        self._read(0.0)

    def _read(self, seconds):
        while select.select([self._master], [], [], seconds)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError as error:
                if error.errno == errno.EIO:  # the last process on the other side is gone
                    return
                raise
            self.said += data.decode(errors="replace")
            seconds = 0.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = checkpoints.make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", "nvfp4")
    time.sleep(2.1)  # stats count as evidence from then on
    return made


@pytest.fixture
def spec(tmp_path, checkpoint):
    return daemons.write_spec(
        tmp_path / "cache.json", checkpoint, parallelism={"tensor": 2, "expert": {"enabled": True}}
    )


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def ready(spec, root):
    with daemons.DaemonProcess(spec, root) as daemon:
        daemon.wait_ready()
        yield daemon


def status_of(root, *line):
    ended = run("status", "--root", root, "--output", "json", *line)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@contextlib.contextmanager
def claimed(daemon):
    """A group held by an engine that maps nothing."""
    status = daemon.status()
    with claims.claim(
        daemon.directory, status.key, client=protocol.Client(name="engine-0", namespace="prod", pid=os.getpid())
    ) as claim:
        yield claim


# --- status ---------------------------------------------------------------------------------------------------------
def test_status_shows_a_daemon_by_name_by_socket_and_among_all(ready, root):
    """One status, however it is asked for; a list where none was named."""
    (among_all,) = status_of(root)
    by_name, by_socket = status_of(root, "default/cache"), status_of(root, "--socket", ready.status_socket)
    assert by_name == by_socket == among_all
    assert (by_name["state"], by_name["cache"]["name"]) == ("Ready", "cache")
    ranks = by_name["groups"][0]["ranks"]
    assert [rank["gpu"] for rank in ranks] == ["host-0", "host-1"]
    assert all(type(rank["arena_bytes"]) is int and rank["arena_bytes"] > 0 for rank in ranks)


def test_a_table_in_a_pipe_has_no_control_codes_and_is_not_cut(ready, root):
    """A log or a grep gets whole lines of text."""
    ended = run("status", "--root", root, COLUMNS="20")
    assert ended.returncode == 0
    assert "\x1b" not in ended.stdout
    (row,) = [line for line in ended.stdout.splitlines() if "rank 1" in line]
    assert row.split()[2:4] == ["host-1", "Ready"] and row.split()[-3] == "66", row


def test_a_dead_daemon_is_called_dead_with_its_exit_code(ready, root):
    """Its socket file is still there, and proves nothing (answers W36)."""
    ready.kill()
    ended = run("status", "--root", root)
    assert ended.returncode == 42
    assert "no daemon answers (stale socket)" in ended.stdout
    named = run("status", "cache", "--root", root, "--output", "json")
    assert (named.returncode, named.stdout) == (42, "")
    assert named.stderr.startswith("weightcache: DaemonUnreachable: ")
    for order in (("verify",), ("drain",), ("resume",), ("release", "--key", "x")):
        ended = run(*order, "--root", root)
        assert (ended.returncode, ended.stdout) == (42, ""), order


def test_one_dead_daemon_does_not_hide_a_living_one(ready, root, tmp_path, checkpoint):
    """Both are shown, and the exit code says that one is silent."""
    other = daemons.write_spec(tmp_path / "other.json", checkpoint, name="other")
    with daemons.DaemonProcess(other, root) as second:
        second.wait_ready()
        second.kill()
        ended = run("status", "--root", root)
    assert ended.returncode == 42
    assert "default/cache  Ready" in ended.stdout and "default/other  DaemonUnreachable" in ended.stdout


def test_a_rank_that_waits_for_the_gate_names_whom_it_waits_for(spec, root):
    """Progress of a load is seen from outside (answers W38)."""
    with daemons.DaemonProcess(spec, root, hold=states.READING) as daemon:
        daemon.wait_for(
            lambda status: any(
                rank.state == "WaitingForGate" and rank.message for group in status.groups for rank in group.ranks
            ),
            "waiting for the gate",
        )
        said = run("status", "--root", root).stdout
    found = re.search(r"group 0 rank (\d) \(host-\1\): slot 0: default/cache group 0 rank (\d) on host-\2", said)
    assert found and found[1] != found[2], said
    assert "provisional" in said


def test_who_uses_the_weights_is_in_the_status(ready, root):
    """Before weights are freed one must know whom it hits."""
    with claimed(ready):
        said = run("status", "--root", root).stdout
    assert re.search(rf"used by prod/engine-0: group 0, pid {os.getpid()}, for \d", said)
    assert "used by" not in run("status", "--root", root).stdout


def test_watching_redraws_in_place_and_ends_on_interrupt(ready, root):
    """The live view follows the daemon, its death included, and Ctrl-C is 130."""
    with Terminal("status", "--root", root, "--watch", "--interval", "0.1") as terminal:
        said = terminal.wait_for("Ready")
        assert "\x1b[32mReady" in said, "a state that is well is green"
        ready.kill()
        said = terminal.wait_for("no daemon answers")
        assert re.search(r"\x1b\[\d*A|\x1b\[H", said), "it has to go back up, not scroll"
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ended() == 130
        assert "Traceback" not in terminal.said


def test_watching_begins_before_there_is_anything(root):
    """Whoever starts the watch first wants to see the daemon come."""
    with Terminal("status", "--root", root, "--watch", "--interval", "0.1") as terminal:
        terminal.wait_for("no cache below")
        assert terminal.process.poll() is None


def test_no_color_is_respected_on_a_terminal(ready, root):
    """https://no-color.org: colour codes off, the rest as it is."""
    with Terminal("status", "--root", root, NO_COLOR="1") as terminal:
        assert terminal.ended() == 0
        assert "Ready" in terminal.said
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", terminal.said)


def test_watching_as_json_gives_one_object_a_line(ready, root):
    """A program follows a load without polling by itself."""
    process = subprocess.Popen(
        [*COMMAND, "status", "cache", "--root", str(root), "--watch", "--interval", "0.1", "--output", "json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    assert [line["state"] for line in lines] == ["Ready", "Ready"]


def test_a_reader_that_goes_away_is_no_fault(ready, root):
    """`weightcache ... | head -1` must end quietly."""
    command = " ".join([*COMMAND, "status", "--root", str(root), "--watch", "--interval", "0.01", "--output", "json"])
    ended = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1 >/dev/null; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (141, "")


# --- orders ---------------------------------------------------------------------------------------------------------
def test_verify_judges_and_its_verdict_is_kept(ready, root):
    """Deep recomputes; shallow tells the last verdict, and that there is none before the first."""
    assert run("verify", "--shallow", "--root", root).returncode == 52
    ended = run("verify", "--root", root)
    assert ended.returncode == 0 and "default/cache is sound: " in ended.stdout
    verdict = json.loads(run("verify", "--shallow", "--root", root, "--output", "json").stdout)
    assert verdict["sound"] is True and verdict["deep"] is True and verdict["bytes_checked"] > 0
    assert status_of(root, "cache")["verification"] == verdict


def test_damage_is_an_exit_code_and_names(tmp_path):
    """Whoever verifies by cron sees which tensors, and that it is damage."""
    arena = servers.make_arena([("w", "U8", [100], os.urandom(100))])

    async def verify(self, *, deep):
        return protocol.Verified(
            sound=False, deep=deep, damaged=["host-0 w", "host-0 v"], bytes_checked=256, seconds=0.1, at=0.0
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers.NoOperations, "verify", verify)
        with servers.ArenaServer(tmp_path / "root", [[arena]]):
            ended = run("verify", "--root", tmp_path / "root")
            as_json = run("verify", "--root", tmp_path / "root", "--output", "json")
    assert (ended.returncode, as_json.returncode) == (33, 33)
    assert "weightcache: Damaged: default/served: 2 tensors differ" in ended.stderr
    assert "host-0 w, host-0 v" in ended.stderr
    assert json.loads(as_json.stdout)["damaged"] == ["host-0 w", "host-0 v"]


def test_drain_and_resume_change_what_engines_get(ready, root):
    """A drained daemon gives no leases, and says how many are left."""
    with claimed(ready):
        ended = run("drain", "--root", root)
        assert ended.returncode == 0 and "0 leases and 1 claims are still open" in ended.stdout
    assert status_of(root, "cache")["state"] == "Draining"
    assert run("bench", "attach", "--root", root, "--runs", 1).returncode == 53
    ended = run("resume", "cache", "--root", root)
    assert ended.returncode == 0 and "it is Ready" in ended.stdout
    assert status_of(root, "cache")["state"] == "Ready"


def test_release_wants_the_right_key_frees_and_resume_loads_again(ready, root):
    """Nobody empties a cache by accident (answers W27)."""
    assert run("release", "--key", "0" * 32, "--root", root).returncode == 50
    before = status_of(root, "cache")
    assert before["resident_bytes"] > 0
    ended = run("release", "--key", before["key_digest"], "--root", root)
    assert ended.returncode == 0 and ended.stdout.startswith("default/cache released "), ended.stderr
    assert status_of(root, "cache")["resident_bytes"] == 0
    assert run("resume", "--root", root).returncode == 0
    assert ready.wait_ready().resident_bytes == before["resident_bytes"]


def test_release_of_weights_in_use_names_the_user_and_forcing_cuts_it_off(ready, root):
    """Who would lose the memory is told before, and when it happened (answers W27)."""
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(ready.directory)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    with engine:
        try:
            assert engine.stdout.readline() == "attached\n"
            key = status_of(root, "cache")["key_digest"]
            refused = run("release", "--key", key, "--root", root)
            assert refused.returncode == 58 and "prod/engine-7" in refused.stderr
            forced = run("release", "--key", key, "--force", "--grace", "0.2", "--root", root)
            assert forced.returncode == 0 and "cut off: prod/engine-7" in forced.stdout, forced.stderr
        finally:
            engine.kill()


ENGINE = """
import sys
from weightcache.cli import asking, benching, targets
from weightcache.engine import attaching
from weightcache.wire import protocol
from pathlib import Path

directory = Path(sys.argv[1])
status = asking.ask(directory / "daemon.sock", protocol.Status(), protocol.DaemonStatus, 10)
client = protocol.Client(name="engine-7", namespace="prod")
attached = attaching.attach(directory, status.key, client=client)
print("attached", flush=True)
sys.stdin.read()
"""


# --- diff and bench -------------------------------------------------------------------------------------------------
def test_diff_against_a_daemon_names_what_would_be_refused(ready, root, tmp_path, checkpoint, monkeypatch):
    """The same fields with the same values as the refusal that an engine would get (answers W5)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "store"))
    same = run("diff", ready.spec, "--root", root)
    assert same.returncode == 0 and "not compared; use --digest" in same.stdout
    exact = run("diff", ready.spec, "--root", root, "--cache", "cache", "--digest")
    assert exact.returncode == 0 and "Same: equal content digests" in exact.stdout
    parallelism = {"tensor": 2, "expert": {"enabled": True, "placement": "round_robin"}}
    other = daemons.write_spec(tmp_path / "other.json", checkpoint, parallelism=parallelism)
    ended = run("diff", other, "--root", root, "--output", "json")
    assert ended.returncode == 50
    assert {(row["field"], row["wanted"], row["held"]) for row in json.loads(ended.stdout)["differences"]} == {
        ("expert_placement", "round_robin", "linear"),
        ("position.experts", "0,2,4,6", "0-3"),
    }
    between = run("diff", other, ready.spec)
    assert between.returncode == 50 and "Same: equal stat" in between.stdout and "round_robin" in between.stdout


def test_bench_attaches_every_rank_by_fresh_processes_and_leaves_nothing(ready, root):
    """The path that is measured is the one that engines take: leases were counted, and are gone (answers W24)."""
    ended = run("bench", "attach", "--root", root, "--runs", 2, "--output", "json")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert [(one["rank"], one["gpu"]) for one in report["attaches"]] == [(0, "host-0"), (1, "host-1")] * 2
    assert set(report["milliseconds"]) == {"socket", "decode", "map", "views", "total"}
    for figures in report["milliseconds"].values():
        assert 0 < figures["min"] <= figures["median"] <= figures["max"]
    ready.wait_for(lambda status: not status.groups[0].claims, "without claims")
    status = ready.status()
    assert status.attaches == 4
    assert [rank.leases for rank in status.groups[0].ranks] == [[], []]
    assert "MEDIAN" in run("bench", "attach", "--root", root, "--runs", 1).stdout


def test_bench_does_not_disturb_an_engine(ready, root):
    """A group that is held is not shared by a measurement that nobody asked for."""
    with claimed(ready):
        ended = run("bench", "attach", "--root", root, "--runs", 1)
        assert ended.returncode == 55 and "prod/engine-0" in ended.stderr
        assert run("bench", "attach", "--root", root, "--runs", 1, "--share").returncode == 0


# --- daemon ---------------------------------------------------------------------------------------------------------
def test_a_daemon_on_a_terminal_shows_a_bar_for_each_rank(spec, root):
    """Loading takes minutes; a person sees how far each rank is, and Ctrl-C ends it cleanly."""
    line = ("daemon", "--spec", spec, "--root", root, "--host-slots", 2)
    with Terminal(*line, WEIGHTCACHE_HOLD_AT=states.DIGESTING) as terminal:
        said = ANSI.sub("", terminal.wait_for("group 0 rank 0 Digesting"))
        assert re.search(r"group 0 rank 0 Digesting +━{30} (\d+\.\d\d KiB) of \1", said), said
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.ended() == 0
        assert "stopped cache=cache" in terminal.said and "Traceback" not in terminal.said


def test_a_daemon_that_serves_draws_nothing(spec, root):
    """Weeks of control codes would fill the scroll-back, and keep a core awake."""
    with Terminal("daemon", "--spec", spec, "--root", root, "--host-slots", 2) as terminal:
        terminal.wait_for("group-ready")
        time.sleep(0.5)
        terminal.drain()
        before = len(terminal.said)
        time.sleep(1.0)
        terminal.drain()
        assert terminal.said[before:] == ""


def test_a_daemon_in_a_container_writes_lines(spec, root):
    """A log has no bars; as JSON, each line is an object."""
    process = subprocess.Popen(
        [*COMMAND, "daemon", "--spec", str(spec), "--root", str(root), "--log-format", "json"],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        events = []
        for text in process.stderr:
            events.append(json.loads(text))
            if events[-1]["event"] == "group-ready":
                process.terminate()
        assert process.wait(20) == 0
    names = [event["event"] for event in events]
    assert names[0] == "starting" and "progress" in names and names[-1] == "stopped"


def test_a_second_daemon_ends_with_its_own_exit_code(ready, root, spec):
    """12 means: somebody else has it, and who (answers W35)."""
    ended = run("daemon", "--spec", spec, "--root", root)
    assert ended.returncode == 12
    assert "GPUOwnedByAnother" in ended.stderr and f"pid {ready.process.pid}" in ended.stderr
    assert status_of(root, "cache")["state"] == "Ready"
