"""Loaders and verifiers as the daemon starts them, one at a time, with every event in the test's hands."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from weightcache.crds import specs
from weightcache.daemon import checkpoints, orders
from weightcache.wire import frames, manifests, reasons

PATIENCE_SECONDS = 60.0
_EVENTS = msgspec.msgpack.Decoder(orders.Event)


class Child:
    """A child process that got its order. A context manager: it is killed at the end, and what it sent is closed.

    ``module``: ``loading`` or ``verifying``. ``hold``: phase at which it stops for ever. ``inherited``: descriptors
    it keeps open, such as a lock. ``environment``: more variables.
    """

    def __init__(self, module, order, descriptors=(), *, hold="", inherited=(), **environment):
        self.events = []
        self.descriptors = []
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"weightcache.daemon.{module}", "--socket", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *inherited),
                env={**os.environ, "WEIGHTCACHE_HOLD_AT": hold, **environment},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        self.socket = ours
        frames.send(ours, frames.encode(order), time.monotonic() + PATIENCE_SECONDS, descriptors)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.stderr.close()
        self.process.wait(PATIENCE_SECONDS)
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def next_event(self):
        """The next event; fails when there is none in time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        body, descriptors = frames.receive(self.socket, deadline, frames.ANSWER_LIMIT_BYTES)
        self.descriptors += descriptors
        self.events.append(_EVENTS.decode(body))
        return self.events[-1]

    def wait_for(self, kind, check=lambda event: True):
        """The first event of that kind for which ``check`` holds. An earlier ``Failed`` is raised as its Refusal."""
        while True:
            event = self.next_event()
            if isinstance(event, kind) and check(event):
                return event
            if isinstance(event, orders.Failed):
                raise reasons.Refusal(reasons.Reason(event.reason), event.message)

    def wait_phase(self, name):
        """Wait until it says that it entered a phase."""
        return self.wait_for(orders.Phase, lambda event: event.name == name)

    def finish(self):
        """Its outcome, after it ended by itself; raises its Refusal instead where it failed."""
        event = self.wait_for(orders.SealedArena | orders.Verdict)
        assert self.process.wait(PATIENCE_SECONDS) == 0
        return event

    def refusal(self):
        """The Refusal it ends with, after it ended with that reason's exit code."""
        try:
            event = self.wait_for(orders.SealedArena | orders.Verdict)
        except reasons.Refusal as refusal:
            assert self.process.wait(PATIENCE_SECONDS) == reasons.exit_code(refusal.reason)
            return refusal
        raise AssertionError(f"it did not fail: {event}")

    @property
    def phases(self):
        """The names of the phases so far, each once."""
        names = [event.name for event in self.events if isinstance(event, orders.Phase)]
        return list(dict.fromkeys(names))


def make_order(checkpoint, gate, *, memory="Host", device="host-0", rank=0, parallelism=None, **fields):
    """A LoadOrder as the daemon makes it: with the stats of now. ``fields`` override the rest."""
    gate = Path(gate)
    gate.mkdir(exist_ok=True)
    spec = {"model": {"hostPath": str(checkpoint)}, "memory": memory, "parallelism": parallelism or {}}
    values = {
        "spec": specs.parse(spec),
        "checkpoint": str(checkpoint),
        "stats": dict(checkpoints.read(checkpoint).stats),
        "rank": rank,
        "device": device,
        "gate_directory": str(gate),
        "gate_slots": 1,
        "buffer_bytes": 64 << 20,
        "num_threads": 4,
        "holder": "test",
        **fields,
    }
    return orders.LoadOrder(**values)


def make_verify_order(sealed, memory="Host", device="host-0"):
    """The VerifyOrder for what a loader sealed; send its descriptors with it."""
    return orders.VerifyOrder(memory=memory, device=device, chunk_sizes=sealed.chunk_sizes, manifest=sealed.manifest)


def tensors_of(sealed, read):
    """Every tensor of a sealed arena as (dtype, shape, bytes), by name; ``read(offset, size_bytes)`` reads it."""
    manifest = manifests.decode(sealed.manifest)
    return {
        name: (
            manifest.dtype_names[manifest.dtypes[index]],
            tuple(manifest.shapes[index]),
            read(manifest.offsets[index], manifest.size_bytes_of(index)),
        )
        for index, name in enumerate(manifest.names)
    }
