"""Real GPUs. Everything here is skipped, with the reason, where there is none.

Needs numpy, xxhash, msgspec, cuda-bindings and pytest; torch only where a test says so::

    PYTHONPATH=.typing python -m pytest -c /dev/null -v tests/gpu
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from weightcache.arenas import contexts
from weightcache.wire import reasons

# What the driver keeps for itself (streams, modules) moves by a few MiB; an arena left behind would be more.
SLACK_BYTES = 32 << 20

Child = Callable[..., str]


def pytest_configure(config: pytest.Config) -> None:
    """Known here too, so that a run without pyproject.toml does not warn."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; skipped with the reason where there is none")


@pytest.fixture(scope="session")
def device_uuid() -> str:
    """The first GPU this process sees."""
    try:
        seen = contexts.visible_uuids()
    except reasons.Refusal as refusal:
        pytest.skip(refusal.message)
    if not seen:
        pytest.skip("the driver shows no GPU")
    return seen[0]


@pytest.fixture(scope="session")
def context(device_uuid: str) -> Iterator[contexts.Context]:
    """A context for the whole session, so that what a test leaves behind is not hidden by making one."""
    held = contexts.Context(device_uuid)
    yield held
    held.close()


@pytest.fixture
def no_memory_left(context: contexts.Context) -> Iterator[None]:
    """The test also promises: the GPU has as much free memory afterwards as before, and no descriptor stays open."""
    free_bytes, num_open = context.memory_bytes()[0], len(os.listdir("/proc/self/fd"))
    yield
    context.synchronize()
    kept_bytes = free_bytes - context.memory_bytes()[0]
    assert kept_bytes < SLACK_BYTES, f"{kept_bytes / 2**20:.1f} MiB of GPU memory are still taken"
    assert len(os.listdir("/proc/self/fd")) <= num_open + 8, "descriptors are left (the driver may open a few itself)"


@pytest.fixture
def run_child() -> Child:
    """Run a Python program in a fresh process that receives descriptors over a socket; returns what it printed.

    The program finds ``fds`` and ``arguments`` (list of str) defined.
    """

    def run(program: str, fds: Sequence[int], *arguments: object) -> str:
        head = (
            "import socket, sys\n"
            "fds = list(socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 64)[1])\n"
            "arguments = sys.argv[2:]\n"
        )
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(ours, [b"x"], list(fds))
            done = subprocess.run(
                [sys.executable, "-c", head + program, str(theirs.fileno()), *map(str, arguments)],
                pass_fds=[theirs.fileno()],
                capture_output=True,
                text=True,
                timeout=110,
                check=False,
            )
        assert done.returncode == 0, f"the child ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
