"""The processes of the demo: daemons and engines, started as a user would, asked over their own channels.

A demo that leaves a daemon behind, or waits for a line that never comes, teaches the wrong thing. So every process is
entered into an ExitStack when it is started, which kills it by its handle if it is still there at the end, and what a
process did not do raises :class:`CheckFailed` with its log.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from weightcache.cli import asking
from weightcache.wire import protocol, reasons

__all__ = ["TREE", "CheckFailed", "Daemon", "Engine", "check"]

TREE = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.02


class CheckFailed(Exception):
    """A step did not show what it must show; the message says what was seen instead."""


def check(condition: bool, message: str) -> None:
    """Raise CheckFailed with the message unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


class Daemon:
    """A running ``weightcache daemon``."""

    def __init__(self, spec: Path, root: Path, host_slots: int, ends: contextlib.ExitStack) -> None:
        """Start it; log and private status socket lie beside the spec. ``ends``: kills it unless it has ended."""
        self.status_socket = spec.with_suffix(".sock")
        self.log = spec.with_suffix(".log")
        command = ["-m", "weightcache.cli.main", "daemon", "--spec", str(spec), "--root", str(root)]
        command += ["--status-socket", str(self.status_socket), "--host-slots", str(host_slots)]
        with self.log.open("a") as log:
            self.process = _start(command, ends, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def log_tail(self) -> str:
        """The end of its log, for messages."""
        return self.log.read_text()[-3000:]

    def status(self) -> protocol.DaemonStatus | None:
        """What the daemon says of itself on its private socket; None while it does not answer."""
        try:
            return asking.ask(self.status_socket, protocol.Status(), protocol.DaemonStatus, timeout_seconds=5.0)
        except reasons.Refusal:
            return None

    def wait_until_ready(self) -> protocol.DaemonStatus:
        """Ask until it is Ready. Raises CheckFailed when it ends before, with its log."""
        seen = ""
        while True:
            status = self.status()
            if status and status.state != seen:
                seen = status.state
                print(f"   status: {seen}", flush=True)
            if status and seen == "Ready":
                return status
            code = self.process.poll()
            check(code is None, f"the daemon ended with exit code {code}\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)


class Engine:
    """A running ``demo.client``."""

    def __init__(self, spec: Path, sockets: Path, ends: contextlib.ExitStack, *options: str) -> None:
        """Start it and read its first line. ``sockets``: the cache's directory. ``ends``: kills it at the end."""
        command = ["-m", "demo.client", "--spec", str(spec), "--directory", str(sockets), *options]
        self.process = _start(command, ends, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.first = self._read()

    def attached(self) -> dict[str, Any]:
        """What it attached, every byte compared. Raises CheckFailed when it was refused or a byte differs."""
        check(self.first["event"] == "attached", f"the client was refused: {self.first}")
        check(not self.first["faults"], f"{len(self.first['faults'])} tensors differ: {self.first['faults'][:5]}")
        return self.first

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command, return the answer."""
        assert self.process.stdin is not None, "it was started with a pipe"
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._read()

    def end(self) -> int:
        """Close its input, which ends it; returns its exit code."""
        assert self.process.stdin is not None, "it was started with a pipe"
        self.process.stdin.close()
        return self.process.wait(timeout=20)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None, "it was started with a pipe"
        line = self.process.stdout.readline()
        if not line:
            raise CheckFailed(f"client {self.process.pid} ended with exit code {self.process.wait(timeout=20)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _start(arguments: list[str], ends: contextlib.ExitStack, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, cwd=TREE, text=True, start_new_session=True, **options)
    ends.callback(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
