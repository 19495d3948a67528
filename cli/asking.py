"""One question to a daemon and its answer, or the reason why there is none.

A socket file outlives its daemon, so whether there is one is answered by asking, with a deadline. How to connect, and
who may be believed, is :mod:`weightcache.engine.connecting`'s; a person is an engine that holds nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from weightcache.engine import connecting
from weightcache.wire import protocol, reasons, versions

__all__ = ["ask"]

_T = TypeVar("_T", bound=msgspec.Struct)


def ask(path: Path, request: protocol.Request, wanted: type[_T], timeout_seconds: float) -> _T:
    """Ask over a connection of its own, at ``path``, and return the answer of the wanted type.

    Raises Refusal: the daemon's own reason for another answer, ``DaemonUnreachable``, ``Forbidden``,
    ``PeerNotTrusted``, ``SocketPathTooLong``, ``ProtocolVersionMismatch``, ``DeadlineExceeded``.
    """
    client = protocol.Client(name="weightcache-cli", pid=os.getpid(), version=versions.version())
    deadline = time.monotonic() + timeout_seconds
    try:
        found = connecting.converse(str(path.parent), path.name, client, request, deadline)
    except reasons.Refusal as refusal:
        raise _in_plain_words(refusal, path) from refusal
    if not isinstance(found.answer, wanted):
        raise found.refusal()
    found.close()
    return found.answer


def _in_plain_words(refusal: reasons.Refusal, path: Path) -> reasons.Refusal:
    """A dead daemon is the one failure that people look for by words."""
    cause = refusal.__cause__
    if isinstance(cause, ConnectionRefusedError):
        return reasons.Refusal(refusal.reason, f"{path}: no daemon answers (stale socket)")
    if isinstance(cause, FileNotFoundError | NotADirectoryError):
        return reasons.Refusal(refusal.reason, f"{path}: no daemon answers (no socket)")
    return refusal
