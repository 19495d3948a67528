"""The child's end: how a loader or verifier starts, speaks, fails and dies.

A child that outlives its daemon holds memory that nobody counts; one that dies of an exception nobody hears leaves
the daemon guessing. So a child dies with its parent (the kernel's PR_SET_PDEATHSIG, and the end of the order socket,
which also covers a parent that died before the first of them was set), and every exception becomes a ``Failed`` event
with a fixed reason.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

import msgspec

from weightcache.daemon import orders, states
from weightcache.wire import frames, reasons

__all__ = ["HOLD_VARIABLE", "Child", "main"]

#: Names a phase (or ``phase:rank``) at which a child stops for ever after reporting it: how tests kill at each stage.
HOLD_VARIABLE = "WEIGHTCACHE_HOLD_AT"
_PR_SET_PDEATHSIG = 1
_ORDER_SECONDS = 60.0
_EVENT_SECONDS = 600.0
_ORDERS: msgspec.msgpack.Decoder[orders.Order] = msgspec.msgpack.Decoder(orders.Order)


class Child:
    """The connection to the daemon. Events may be sent from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._phase, self._began = states.STARTING, time.monotonic()
        self._rank = ""
        self.phases: dict[str, float] = {}

    def order(self) -> tuple[orders.Order, list[int]]:
        """The order and the descriptors that came with it."""
        body, descriptors = frames.receive(self._socket, time.monotonic() + _ORDER_SECONDS, frames.ANSWER_LIMIT_BYTES)
        threading.Thread(target=self._die_with_the_socket, daemon=True).start()
        order = _ORDERS.decode(body)
        self._rank = str(order.rank) if isinstance(order, orders.LoadOrder) else ""
        return order, descriptors

    def send(self, event: orders.Event, descriptors: Sequence[int] = ()) -> None:
        """Tell the daemon. Raises Refusal when it is gone."""
        with self._lock:
            frames.send(self._socket, frames.encode(event), time.monotonic() + _EVENT_SECONDS, descriptors)

    def enter(self, phase: str, detail: str = "") -> None:
        """Report a phase and account the seconds of the one before."""
        self.begin(phase)
        self.send(orders.Phase(name=phase, detail=detail))
        if os.environ.get(HOLD_VARIABLE, "") in (phase, f"{phase}:{self._rank}"):
            while True:
                time.sleep(3600)

    def begin(self, phase: str) -> None:
        """Account the seconds of the phase before; the daemon is not told."""
        self.account()
        self._phase = phase

    def account(self) -> None:
        """Add the seconds since the last phase began to it."""
        now = time.monotonic()
        self.phases[self._phase] = self.phases.get(self._phase, 0.0) + now - self._began
        self._began = now

    def _die_with_the_socket(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        poller.poll()
        os._exit(1)


def main(run: Callable[[Child], None]) -> int:
    """Run a child to its end: parse ``--socket FD``, follow the order, turn every failure into an event."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    arguments = parser.parse_args()
    _die_with_the_parent()
    child = Child(socket.socket(fileno=arguments.socket))
    try:
        run(child)
    except reasons.Refusal as refusal:
        return _fail(child, refusal.reason, refusal.message)
    except MemoryError:
        return _fail(child, reasons.Reason.InsufficientHostMemory, "the process could not allocate memory")
    except Exception as error:
        traceback.print_exc()
        return _fail(child, reasons.Reason.InternalError, f"{type(error).__name__}: {error}")
    return 0


def _fail(child: Child, reason: reasons.Reason, message: str) -> int:
    try:
        child.send(orders.Failed(reason=str(reason), message=message))
    except reasons.Refusal:
        print(f"{reason}: {message}", file=sys.stderr)
    return reasons.exit_code(reason)


def _die_with_the_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
