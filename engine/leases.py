"""A lease: the open connection that says an engine uses an arena, kept open whatever happens to the daemon.

Process ids mean nothing across namespaces and zombies look alive, so the connection itself is the lease. When the
daemon dies the engine's mapping stays valid and it goes on serving; but the next daemon must learn that the memory is
in use. So a thread (which sleeps in the kernel until the connection ends) comes back in the background and rejoins.

    Held ──connection ends──► Lost ──► Rejoined     the daemon holds the same arena as before
                               ▲  └──► Superseded   it holds another one; this mapping stays valid
                               └── each ends in Lost again, when its connection does
    any ──close()──► Closed
"""

from __future__ import annotations

import enum
import logging
import os
import socket
import threading
from collections.abc import Callable

from weightcache.engine import connecting
from weightcache.wire import protocol, reasons

__all__ = ["Lease", "State"]

_LOG = logging.getLogger("weightcache.engine")
_LONGEST_PAUSE_SECONDS = 5.0


class State(enum.StrEnum):
    """What a lease is; see the module's drawing."""

    Held = "Held"
    Lost = "Lost"
    Rejoined = "Rejoined"
    Superseded = "Superseded"
    Closed = "Closed"


class Lease:
    """One rank's lease. ``identity``: the daemon's name for it. ``generation``: of the arena that is mapped.

    ``daemon_generation``: of the arena that the daemon holds now, as far as is known. ``trouble``: why the last
    attempt to rejoin failed, empty while the lease counts. ``descriptors``: of the arena, kept open as long as the
    lease: any process that still has them can hand the memory to its next holder.
    """

    def __init__(
        self,
        connection: socket.socket,
        attached: protocol.Attached,
        descriptors: list[int],
        rejoin: Callable[[], connecting.Conversation],
        on_change: Callable[[State], None] | None = None,
    ) -> None:
        """Takes the connection and the descriptors over.

        ``rejoin`` connects anew and asks; ``on_change`` is called in the watching thread.
        """
        self.identity = attached.lease
        self.generation = attached.generation
        self.daemon_generation = attached.generation
        self.trouble = ""
        self.descriptors = descriptors
        self._state = State.Held
        self._connection = connection
        self._rejoin = rejoin
        self._on_change = on_change
        self._guard = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"weightcache-lease-{self.identity}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> State:
        """What the lease is now."""
        return self._state

    def close(self) -> None:
        """End the lease and close the descriptors. Twice is once. What is mapped stays mapped."""
        with self._guard:
            self._closed.set()
            self._state = State.Closed
            # A plain close would leave the thread asleep in recv, and the peer without an end of stream.
            _shut_down(self._connection)
            while self.descriptors:
                os.close(self.descriptors.pop())

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._wait_for_end()
            self._connection.close()
            if self._enter(State.Lost):
                self._come_back()

    def _wait_for_end(self) -> None:
        """A daemon says nothing on a lease: whatever can be read, even data, is its end."""
        try:
            self._connection.settimeout(None)
            self._connection.recv(1)
        except OSError:
            return

    def _come_back(self) -> None:
        attempt = 0
        while not self._closed.wait(connecting.backoff_seconds(attempt, _LONGEST_PAUSE_SECONDS)):
            attempt += 1
            try:
                found = self._rejoin()
            except reasons.Refusal as refusal:
                self.trouble = str(refusal)
                continue
            if self._take(found):
                return

    def _take(self, found: connecting.Conversation) -> bool:
        """Whether the answer makes the new connection the lease, or there is none to make any more."""
        answer = found.answer
        if not isinstance(answer, protocol.Rejoined | protocol.Superseded):
            self.trouble = str(found.refusal())
            return False
        with self._guard:
            if self._closed.is_set():
                found.close()
                return True
            self._connection = found.keep_connection()
        self.identity, self.daemon_generation, self.trouble = answer.lease, answer.generation, ""
        self._enter(State.Rejoined if isinstance(answer, protocol.Rejoined) else State.Superseded)
        return True

    def _enter(self, state: State) -> bool:
        with self._guard:
            if self._closed.is_set():
                return False
            self._state = state
        _LOG.info("lease %s of generation %s: %s", self.identity, self.generation, state)
        if self._on_change is not None:
            try:
                self._on_change(state)
            except Exception:  # a fault of the engine's callback must not end the lease
                _LOG.exception("the callback for a changed lease failed")
        return True


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
