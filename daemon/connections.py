"""The daemon's end of a connection: whole messages, each within a deadline, none blocking another.

One serial accept loop lets one silent client hold up every rank for its time-out; a limit for each read lets a peer
live for ever on a byte a second. Here every connection is a task of its own, a frame that has begun must be whole by
its deadline, and a stalled reader is dropped when an answer does not leave in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from weightcache.daemon import roots
from weightcache.wire import frames, protocol, reasons

__all__ = ["MESSAGE_SECONDS", "Closed", "Connection", "Peer", "listen"]


#: A frame that has begun must be whole, and an answer must have left, within this many seconds.
MESSAGE_SECONDS = 10.0


class Closed(Exception):
    """The peer closed the connection between two messages."""


class Peer(NamedTuple):
    """Credentials of the process at the other end, as the kernel saw them at connect (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


class Connection:
    """One accepted stream socket (non-blocking; owned)."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.peer = Peer(*struct.unpack("3i", packed))

    async def request(self, idle_seconds: float | None) -> protocol.Request:
        """The next request. ``idle_seconds``: how long it may take to begin (None: for ever, as a lease does).

        Raises Closed, Refusal ``DeadlineExceeded`` or ``ProtocolViolated``; after a refusal the stream is out of step.
        """
        head = await self._first_byte(idle_seconds)
        try:
            async with asyncio.timeout(MESSAGE_SECONDS):
                head += await self._exactly(frames.LENGTH.size - 1)
                body = await self._exactly(frames.length_of(bytes(head), frames.REQUEST_LIMIT_BYTES))
        except TimeoutError as error:
            raise reasons.Refusal(
                reasons.Reason.DeadlineExceeded, f"a message was not whole after {MESSAGE_SECONDS:g} s"
            ) from error
        return frames.decode_request(body)

    async def answer(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send an answer whole, descriptors on its first byte. Raises Closed or Refusal ``DeadlineExceeded``."""
        rest = memoryview(frames.encode(message))
        try:
            async with asyncio.timeout(MESSAGE_SECONDS):
                if descriptors:
                    rest = rest[await self._send_descriptors(rest[:1], descriptors) :]
                await self._loop.sock_sendall(self._socket, rest)
        except TimeoutError as error:
            raise reasons.Refusal(
                reasons.Reason.DeadlineExceeded, f"the peer did not take an answer within {MESSAGE_SECONDS:g} s"
            ) from error
        except OSError as error:
            raise Closed(str(error)) from error

    def close(self) -> None:
        """Close the socket; the peer sees the end of the stream."""
        self._socket.close()

    def cut(self) -> None:
        """End the stream in both directions, so that the task that reads from it ends by itself."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    async def _first_byte(self, idle_seconds: float | None) -> bytes:
        try:
            async with asyncio.timeout(idle_seconds):
                data = await self._loop.sock_recv(self._socket, 1)
        except TimeoutError as error:
            raise reasons.Refusal(
                reasons.Reason.DeadlineExceeded, f"no message began within {idle_seconds:g} s"
            ) from error
        except OSError as error:
            raise Closed(str(error)) from error
        if not data:
            raise Closed("end of stream")
        return data

    async def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            try:
                count = await self._loop.sock_recv_into(self._socket, view[filled:])
            except OSError as error:
                raise Closed(str(error)) from error
            if count == 0:
                raise reasons.Refusal(
                    reasons.Reason.ProtocolViolated, f"the stream ended after {filled} of {size} bytes of a message"
                )
            filled += count
        return data

    async def _send_descriptors(self, first: memoryview, descriptors: Sequence[int]) -> int:
        while True:
            try:
                return socket.send_fds(self._socket, [first], list(descriptors))
            except BlockingIOError:
                await self._writable()

    async def _writable(self) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._socket, _settle, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self._socket)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def listen(path: str, mode: int, group: int = -1, backlog: int = 1024) -> socket.socket:
    """A listening socket at ``path``, appearing there at once: bound to a temporary name, then renamed over the final.

    There is no moment without a listener, and connections to a former one stay open. ``group``: owning group id, -1
    to leave it. Raises OSError.
    """
    temporary = f"{path}{roots.TEMPORARY_SUFFIX}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        sock.bind(temporary)
        if group >= 0:
            os.chown(temporary, -1, group)
        os.chmod(temporary, mode)
        sock.listen(backlog)
        os.rename(temporary, path)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
