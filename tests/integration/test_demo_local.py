"""``make demo-local``, as a user runs it: every step, in time, and nothing left behind."""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from demo import local, processes

STEPS = [
    "make a Qwen3-MoE NVFP4 checkpoint with nvidia-modelopt",
    "start the daemon: two expert-parallel ranks in host memory",
    "weightcache status",
    "a second daemon on the same slots is refused",
    "attach from a second process, compare every byte",
    "restart that process: it maps the same arenas",
    "an engine with another expert placement is refused",
    "kill -9 the daemon under the living client",
    "start the daemon again",
    "the client's leases come back by themselves",
    "attach a new client beside the old one (shared group)",
    "end the clients and the daemon",
]


@pytest.fixture
def temporary():
    """A directory for everything that the demo writes, short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="wc-") as directory:
        yield Path(directory)


def run(temporary, *arguments):
    """Run the demo to its end, its temporary files below the directory."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "demo.local", *arguments]
    return subprocess.run(
        command, cwd=processes.TREE, env=environment, capture_output=True, text=True, timeout=320, check=False
    )


def left_running(temporary):
    """Command lines of processes that name the directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(temporary) in line]


@pytest.mark.skipif(not local.EXPORTER.exists(), reason="no exporter environment: run scripts/setup exporter")
@pytest.mark.timeout(340)
def test_the_demo_shows_every_step_and_leaves_nothing(temporary):
    """What the demo promises its reader happened, in this order; no process, socket or file of it is left."""
    done = run(temporary)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    table = done.stdout[done.stdout.rindex("\nstep ") :].splitlines()
    assert [line[: len(name)] for line, name in zip(table[2:], STEPS, strict=False)] == STEPS
    assert table[-1] == "every check held"
    assert left_running(temporary) == []
    assert list(temporary.iterdir()) == []


def test_a_demo_whose_step_fails_says_so_and_leaves_nothing(temporary):
    """A demo that cannot fail shows nothing: exit code 1, the step is marked, everything is cleared away."""
    done = run(temporary, "--exporter", "/bin/false")
    assert done.returncode == 1
    assert "FAILED: CheckFailed: the exporter failed" in done.stdout
    assert left_running(temporary) == []
    assert list(temporary.iterdir()) == []
