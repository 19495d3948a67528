"""An engine's end of a connection: find the socket, know who listens there, say what is wanted, within a deadline.

A socket path proves nothing. It may be left over from a dead daemon, be planted by a stranger who could write to the
directory, be too long for the kernel, or lie behind a label that denies what the mode bits allow; and each of these
looks like "cannot connect". So the directory is resolved first, the process behind the socket must own it (or be
root), and every fault says what it is. Hello and the first request leave in one send: one round trip, not two.
"""

from __future__ import annotations

import os
import random
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from weightcache.engine import answers
from weightcache.wire import frames, protocol, reasons, sockets

__all__ = ["Conversation", "Patience", "backoff_seconds", "converse", "resolve"]

#: The longest socket name in a cache's directory: 16 hex digits of a GPU's UUID.
_LONGEST_NAME = "0123456789abcdef.sock"
_BUSY_SECONDS = 0.005


@dataclass
class Conversation:
    """A greeted connection and the answer to its first request. The holder owns the socket and the descriptors."""

    sock: socket.socket
    path: str
    welcome: protocol.Welcome
    answer: protocol.Answer
    descriptors: list[int]

    def close(self) -> None:
        """Close the connection and the descriptors. Twice is once."""
        self.keep_connection().close()

    def keep_connection(self) -> socket.socket:
        """Close the descriptors that came with the answer; the connection is the caller's now."""
        _close_all(self.descriptors)
        self.descriptors.clear()
        return self.sock

    def refusal(self) -> reasons.Refusal:
        """Close everything; what the answer means to someone who wanted another one."""
        self.close()
        return answers.refusal_of(self.answer, self.path)


def resolve(directory: str | os.PathLike[str]) -> str:
    """The real path of a cache's socket directory, links (``by-name``) followed.

    Raises Refusal ``DaemonUnreachable`` (not there yet), ``Forbidden``, ``RootInvalid`` (not a directory),
    ``SocketPathTooLong``.
    """
    given = os.fspath(directory)
    try:
        real = os.path.realpath(given, strict=True)
        found = os.stat(real)
    except FileNotFoundError as error:
        raise reasons.Refusal(
            reasons.Reason.DaemonUnreachable, f"{given} does not exist: no daemon has served this cache here yet"
        ) from error
    except PermissionError as error:
        raise _denied(given, error) from error
    except OSError as error:
        raise reasons.Refusal(reasons.Reason.RootInvalid, f"{given}: {error}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise reasons.Refusal(
            reasons.Reason.RootInvalid,
            f"{given} is {stat.filemode(found.st_mode)}, not a directory: name the directory of the sockets "
            "(a mounted socket file would go stale with its daemon)",
        )
    _check_length(os.path.join(real, _LONGEST_NAME))
    return real


def converse(
    directory: str, name: str, client: protocol.Client, request: protocol.Request, deadline: float
) -> Conversation:
    """Connect to socket ``name`` in a resolved ``directory``, greet, ask, and read the answer by ``deadline``.

    ``deadline``: ``time.monotonic`` seconds. Raises Refusal ``DaemonUnreachable``, ``PeerNotTrusted``, ``Forbidden``,
    ``SocketPathTooLong``, ``DeadlineExceeded``, ``ProtocolViolated``, or what the daemon answered to the greeting.
    """
    if not name or "/" in name:
        raise reasons.Refusal(reasons.Reason.ProtocolViolated, f"{name!r} is not the name of a socket in {directory}")
    path = os.path.join(directory, name)
    _check_length(path)
    sock = _connect(path, deadline)
    try:
        _check_peer(sock, directory, path)
        hello = protocol.Hello(protocol=protocol.PROTOCOL, client=client)
        frames.send(sock, frames.encode(hello) + frames.encode(request), deadline)
        welcome, strays = _receive(sock, deadline)
        _close_all(strays)
        if not isinstance(welcome, protocol.Welcome):
            raise answers.refusal_of(welcome, path)
        answer, descriptors = _receive(sock, deadline)
        return Conversation(sock, path, welcome, answer, descriptors)
    except reasons.Refusal as refusal:
        sock.close()
        if isinstance(refusal, answers.KeyMismatch | answers.Later) or path in refusal.message:
            raise
        raise reasons.Refusal(refusal.reason, f"{path}: {refusal.message}") from refusal
    except BaseException:
        sock.close()
        raise


def backoff_seconds(attempt: int, longest_seconds: float, spread: Callable[[], float] = random.random) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 0): 0.05, 0.1, 0.2 ... each spread by 20 %.

    ``spread`` gives numbers in [0, 1). The engines of a node must not come back in step.
    """
    return float(min(longest_seconds, 0.05 * 2.0 ** min(attempt, 16)) * (0.8 + 0.4 * spread()))


class Patience:
    """Waiting for what time can mend: until ``wait_seconds`` from now are over, then the last refusal stands."""

    def __init__(
        self,
        wait_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._until = clock() + wait_seconds
        self._attempts = 0

    def pause(self, refusal: reasons.Refusal) -> None:
        """Sleep before the next attempt; raises ``refusal`` when waiting cannot mend it or the time is over."""
        left = self._until - self._clock()
        if left <= 0 or not answers.can_wait(refusal):
            raise refusal
        asked = refusal.retry_after_seconds if isinstance(refusal, answers.Later) else 0.0
        self._sleep(min(left, max(asked, backoff_seconds(self._attempts, 1.0))))
        self._attempts += 1


def _connect(path: str, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise reasons.Refusal(
                    reasons.Reason.DeadlineExceeded, f"{path}: its queue of connections stayed full (daemon hung?)"
                )
            sock.settimeout(left)
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:  # EAGAIN: the listener's backlog is full; nothing tells when it is not
                time.sleep(min(left, _BUSY_SECONDS))
    except (FileNotFoundError, ConnectionRefusedError) as error:
        sock.close()
        what = "does not exist" if isinstance(error, FileNotFoundError) else "has no listener (its daemon ended)"
        raise reasons.Refusal(reasons.Reason.DaemonUnreachable, f"{path} {what}") from error
    except PermissionError as error:
        sock.close()
        raise _denied(path, error) from error
    except OSError as error:
        sock.close()
        raise reasons.Refusal(reasons.Reason.DaemonUnreachable, f"{path}: {error}") from error
    except BaseException:
        sock.close()
        raise


def _check_peer(sock: socket.socket, directory: str, path: str) -> None:
    """Who bound the socket must own the directory: anyone else was only able to write to it."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", packed)
    try:
        owner = os.stat(directory).st_uid
    except OSError as error:
        raise reasons.Refusal(reasons.Reason.DaemonUnreachable, f"{directory}: {error}") from error
    if uid not in (owner, 0):
        raise reasons.Refusal(
            reasons.Reason.PeerNotTrusted,
            f"{path}: process {pid} of uid {uid} listens there, but uid {owner} owns {directory}; nothing was sent",
        )


def _receive(sock: socket.socket, deadline: float) -> tuple[protocol.Answer, list[int]]:
    body, descriptors = frames.receive(sock, deadline, frames.ANSWER_LIMIT_BYTES)
    try:
        return frames.decode_answer(body), descriptors
    except BaseException:
        _close_all(descriptors)
        raise


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _check_length(path: str) -> None:
    length = len(os.fsencode(path))
    if length > sockets.PATH_LIMIT_BYTES:
        raise reasons.Refusal(
            reasons.Reason.SocketPathTooLong,
            f"{path} is {length} bytes, the kernel's limit for a socket path is {sockets.PATH_LIMIT_BYTES}: "
            "mount the directory of the sockets at a shorter path",
        )


def _denied(path: str, error: OSError) -> reasons.Refusal:
    groups = ", ".join(str(group) for group in sorted({os.getegid(), *os.getgroups()}))
    return reasons.Refusal(
        reasons.Reason.Forbidden,
        f"{path}: {error.strerror} for uid {os.geteuid()}, groups {groups}. Either this process is not in the cache's "
        "socket group (spec.socket.group; for a pod supplementalGroups), or SELinux separates the two containers: "
        "then give both the same level (seLinuxOptions.level), or label the directory for sharing",
    )
