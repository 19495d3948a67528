"""Messages on a stream socket: a length, a body, perhaps descriptors, all within one deadline.

A limit for each read lets a peer live for ever on one byte a second; a length that is believed lets it ask for 2 GiB.
So a frame is 4 bytes of big-endian length, refused above a limit before anything is allocated, then that many bytes
of msgpack, and the deadline is for the whole message. Descriptors ride on the frame's first byte (SCM_RIGHTS, at most
253 in one message: Linux' SCM_MAX_FD).

The blocking form here is for clients and child processes; the daemon's serving loop has an asynchronous one
(:mod:`weightcache.daemon.connections`) over the same :func:`encode` and :func:`decode`.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from weightcache.wire import protocol, reasons

__all__ = [
    "ANSWER_LIMIT_BYTES",
    "LENGTH",
    "MAX_DESCRIPTORS",
    "REQUEST_LIMIT_BYTES",
    "decode_answer",
    "decode_request",
    "encode",
    "length_of",
    "receive",
    "send",
]

LENGTH = struct.Struct(">I")
REQUEST_LIMIT_BYTES = 1 << 20
ANSWER_LIMIT_BYTES = 128 << 20
MAX_DESCRIPTORS = 253
_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[protocol.Request] = msgspec.msgpack.Decoder(protocol.Request)
_ANSWERS: msgspec.msgpack.Decoder[protocol.Answer] = msgspec.msgpack.Decoder(protocol.Answer)


def encode(message: msgspec.Struct) -> bytes:
    """A message as a frame: length and body. Pure."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def length_of(head: bytes, limit_bytes: int) -> int:
    """The body's length from a frame's first 4 bytes. Raises Refusal ``ProtocolViolated`` above the limit. Pure."""
    (length,) = LENGTH.unpack(head)
    if length > limit_bytes:
        raise _violated(f"a message of {length} bytes, the limit is {limit_bytes}")
    return int(length)


def decode_request(body: bytes | bytearray) -> protocol.Request:
    """A request from a frame's body. Raises Refusal ``ProtocolViolated``. Pure."""
    return _decode(_REQUESTS, body)


def decode_answer(body: bytes | bytearray) -> protocol.Answer:
    """An answer from a frame's body. Raises Refusal ``ProtocolViolated``. Pure."""
    return _decode(_ANSWERS, body)


def _decode(decoder: msgspec.msgpack.Decoder[_T], body: bytes | bytearray) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _violated(f"a message of {len(body)} bytes cannot be decoded: {error}") from error


def send(sock: socket.socket, frame: bytes, deadline: float, descriptors: Sequence[int] = ()) -> None:
    """Send a whole frame by ``deadline`` (``time.monotonic`` seconds), descriptors on its first byte.

    Raises Refusal ``DeadlineExceeded`` or ``DaemonUnreachable`` (the peer is gone), ``ProtocolViolated`` for more than
    253 descriptors. After a failure the stream is out of step: close it.
    """
    if len(descriptors) > MAX_DESCRIPTORS:
        raise _violated(f"{len(descriptors)} descriptors in one message, the limit is {MAX_DESCRIPTORS}")
    rest = memoryview(frame)
    try:
        if descriptors:
            sock.settimeout(_left(deadline))
            rest = rest[socket.send_fds(sock, [rest[:1]], list(descriptors)) :]
        while rest:
            sock.settimeout(_left(deadline))
            rest = rest[sock.send(rest) :]
    except OSError as error:
        raise _lost(error) from error


def receive(sock: socket.socket, deadline: float, limit_bytes: int) -> tuple[bytearray, list[int]]:
    """A whole frame's body and the descriptors that came with it (close-on-exec; the caller owns them).

    Raises Refusal ``DeadlineExceeded``, ``DaemonUnreachable`` (the peer closed), ``ProtocolViolated`` (too long, or
    the kernel dropped descriptors); descriptors received so far are closed then.
    """
    descriptors: list[int] = []
    try:
        length = length_of(bytes(_exactly(sock, LENGTH.size, deadline, descriptors)), limit_bytes)
        return _exactly(sock, length, deadline, descriptors), descriptors
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _exactly(sock: socket.socket, size: int, deadline: float, descriptors: list[int]) -> bytearray:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    ancillary = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    try:
        while filled < size:
            sock.settimeout(_left(deadline))
            count, control, flags, _ = sock.recvmsg_into([view[filled:]], ancillary, socket.MSG_CMSG_CLOEXEC)
            _collect(control, descriptors)
            if flags & socket.MSG_CTRUNC:
                raise _violated("the kernel dropped descriptors (the open-files limit of this process?)")
            if count == 0:
                raise reasons.Refusal(
                    reasons.Reason.DaemonUnreachable, f"the peer closed the connection after {filled} of {size} bytes"
                )
            filled += count
    except OSError as error:
        raise _lost(error) from error
    return data


def _collect(control: list[tuple[int, int, bytes]], descriptors: list[int]) -> None:
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i")
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
            descriptors.extend(found)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    return left


def _violated(message: str) -> reasons.Refusal:
    return reasons.Refusal(reasons.Reason.ProtocolViolated, message)


def _lost(error: OSError) -> reasons.Refusal:
    if isinstance(error, TimeoutError):
        return reasons.Refusal(reasons.Reason.DeadlineExceeded, "a whole message did not pass before its deadline")
    return reasons.Refusal(reasons.Reason.DaemonUnreachable, f"the connection broke: {error}")
