"""The daemon's sockets: which there are, how they appear, and that only their owner takes them away.

A socket file proves nothing and outlives its listener, and a daemon that unlinks one before it owns the GPU takes it
from a live one. So sockets are bound only under the GPU's lock, appear by rename, and leftovers in the cache's
directory are removed by whoever holds the cache's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from weightcache.daemon import caches, connections, groups, roots, sessions
from weightcache.wire import reasons, sockets

__all__ = ["Server"]

_LOG = logging.getLogger("weightcache.daemon")


class Server:
    """Every listener and every open session of one daemon."""

    def __init__(self, cache: caches.Cache, operations: sessions.Operations) -> None:
        self._cache = cache
        self._operations = operations
        self._listeners: dict[Path, tuple[socket.socket, asyncio.Task[None]]] = {}
        self._sessions: dict[sessions.Session, asyncio.Task[None]] = {}

    def open_private(self, path: Path) -> None:
        """Serve status and control at ``path`` (0600). Raises OSError."""
        self._listen(path, 0o600, sessions.Scope("private"))

    def open_public(self, directory: Path, ranks: Iterable[groups.Rank], socket_group: int) -> None:
        """Serve ``daemon.sock`` and a socket for each rank (0660, of ``socket_group``). The locks must be held.

        Raises Refusal ``RootInvalid`` when a socket cannot be made; those made so far go with :meth:`close_public`.
        """
        scopes = {sockets.DAEMON_SOCKET: sessions.Scope("daemon")}
        scopes |= {roots.rank_socket_name(rank.device.uuid): sessions.Scope("rank", rank) for rank in ranks}
        try:
            for leftover in directory.glob("*.sock*"):
                if leftover.name not in scopes:
                    leftover.unlink(missing_ok=True)
            for name, scope in scopes.items():
                self._listen(directory / name, 0o660, scope, socket_group)
        except OSError as error:
            raise reasons.Refusal(reasons.Reason.RootInvalid, f"sockets in {directory}: {error}") from error

    def close_public(self) -> None:
        """Take the public sockets away and end their sessions; call it while the locks are still held."""
        for path in [path for path, (_, task) in self._listeners.items() if task.get_name() != "private"]:
            self._close_listener(path)
        for session in [session for session in self._sessions if session.scope_name != "private"]:
            session.cut()

    async def close(self) -> None:
        """Close everything and wait for the sessions to end."""
        for path in list(self._listeners):
            self._close_listener(path)
        tasks = list(self._sessions.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut_leases(self) -> list[str]:
        """End every connection that holds a lease or claim; returns who was cut off."""
        holders = [session for session in self._sessions if session.lease]
        for session in holders:
            session.cut()
        return [session.describe() for session in holders]

    def _listen(self, path: Path, mode: int, scope: sessions.Scope, group: int = -1) -> None:
        listener = connections.listen(str(path), mode, group)
        task = asyncio.create_task(
            sessions.accept_for_ever(listener, lambda found: self._start(found, scope), _complain), name=scope.name
        )
        self._listeners[path] = (listener, task)

    def _start(self, connection: connections.Connection, scope: sessions.Scope) -> None:
        session = sessions.Session(self._cache, self._operations, connection, scope)
        task = asyncio.create_task(session.run())
        self._sessions[session] = task
        task.add_done_callback(lambda done: self._ended(session, done))

    def _ended(self, session: sessions.Session, task: asyncio.Task[None]) -> None:
        self._sessions.pop(session, None)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("a session ended with a fault of weightcache", exc_info=task.exception())

    def _close_listener(self, path: Path) -> None:
        listener, task = self._listeners.pop(path)
        task.cancel()
        listener.close()
        with contextlib.suppress(OSError):
            os.unlink(path)


def _complain(error: OSError) -> None:
    _LOG.warning("accept failed: %s", error)
