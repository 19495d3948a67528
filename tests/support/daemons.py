"""Real daemons for tests: started as a user starts them, watched over their own status socket, killed by pid."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil

from weightcache.cli import asking
from weightcache.wire import protocol, reasons

PATIENCE_SECONDS = 40.0


def write_spec(path, checkpoint, name="cache", namespace="default", **spec):
    """A WeightCache document at ``path``; ``spec`` overrides its fields."""
    body = {"model": {"hostPath": str(checkpoint)}, "memory": "Host", **spec}
    document = {
        "apiVersion": "weightcache.dev/v1alpha1",
        "kind": "WeightCache",
        "metadata": {"name": name, "namespace": namespace},
        "spec": body,
    }
    path.write_text(json.dumps(document))
    return path


class DaemonProcess:
    """``weightcache daemon`` as a process. A context manager: whatever is left of it at the end is killed.

    ``hold``: phase at which its loaders stop for ever (``WEIGHTCACHE_HOLD_AT``).
    """

    def __init__(self, spec, root, *arguments, hold="", host_slots=4, **environment):
        self.spec, self.root = spec, root
        self._number = len(list(spec.parent.glob(f"{spec.stem}.*.log")))
        self.status_socket = spec.parent / f"{spec.stem}.{self._number}.status"
        self.log_path = spec.parent / f"{spec.stem}.{self._number}.log"
        self._command = [
            *(sys.executable, "-m", "weightcache.cli.main", "daemon", "--spec", str(spec), "--root", str(root)),
            *("--status-socket", str(self.status_socket), "--host-slots", str(host_slots), *map(str, arguments)),
        ]
        self._environment = {**os.environ, "WEIGHTCACHE_HOLD_AT": hold, **environment}

    def __enter__(self):
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def __exit__(self, *_):
        children = self.children()
        self.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    @property
    def log(self):
        """Everything it said."""
        return self.log_path.read_text()

    def kill(self):
        """kill -9, and wait."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)

    def stop(self):
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_SECONDS)

    def children(self, module="weightcache.daemon"):
        """Its loaders and verifiers."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in found if any(module in part for part in _command_of(child))]

    def ask(self, request, wanted=protocol.DaemonStatus):
        """One question on the private socket."""
        return asking.ask(self.status_socket, request, wanted, timeout_seconds=10.0)

    def status(self):
        """Its status, None while it does not answer."""
        try:
            return self.ask(protocol.Status())
        except reasons.Refusal:
            return None

    def wait_for(self, check, what):
        """The first status for which ``check`` holds; fails with the log when the daemon ends or time runs out."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while True:
            status = self.status()
            if status is not None and check(status):
                return status
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.log}"
            assert time.monotonic() < limit, f"never {what}:\n{self.log}"
            time.sleep(0.02)

    def wait_ready(self):
        """Wait until every group is ready."""
        return self.wait_for(lambda status: status.state == "Ready", "Ready")

    def wait_ended(self):
        """The exit code of a daemon that ends by itself."""
        return self.process.wait(PATIENCE_SECONDS)

    @property
    def directory(self):
        """The cache's socket directory, by name."""
        document = json.loads(self.spec.read_text())["metadata"]
        return self.root / "s" / "by-name" / document["namespace"] / document["name"]


def _command_of(process):
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def gone_within(processes, seconds):
    """Whether every process ended within that time."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
