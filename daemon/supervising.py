"""Running the short-lived children: a loader per rank, a verifier per arena.

Loading in the serving process would leave it with a CUDA context, the transients of loading, and every fault of a
driver or a checkpoint. So children do it, and this module is the parent's end: start, order, events, descriptors, and
an ending that is always seen, whatever it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from weightcache.daemon import groups, orders
from weightcache.wire import frames, manifests, protocol, reasons

__all__ = ["Supervisor"]

_T = TypeVar("_T", bound=msgspec.Struct)
_MODULES: dict[type, str] = {
    orders.LoadOrder: "weightcache.daemon.loading",
    orders.VerifyOrder: "weightcache.daemon.verifying",
}
_EVENTS: msgspec.msgpack.Decoder[orders.Event] = msgspec.msgpack.Decoder(orders.Event)
#: How long a child may stay silent: a loader that waits for the gate behind a slow one says nothing for hours.
_SILENCE_SECONDS = 7 * 24 * 3600.0


class Supervisor:
    """Starts children and waits for their outcome; at most ``max_children`` at once."""

    def __init__(self, max_children: int) -> None:
        self._threads = ThreadPoolExecutor(max_children, thread_name_prefix="child")

    async def load(
        self, order: orders.LoadOrder, lock_descriptor: int, on_event: Callable[[orders.Event], None]
    ) -> tuple[groups.HeldArena, orders.SealedArena]:
        """Run a loader to its end. ``on_event`` sees phases and progress, in the loop's thread.

        Raises Refusal with the loader's reason, or ``LoaderDied`` with how it ended. Cancelling kills the loader.
        """
        sealed, descriptors = await self._run(order, (), (lock_descriptor,), on_event, orders.SealedArena)
        try:
            manifest = manifests.decode(sealed.manifest)
            if len(descriptors) != len(sealed.chunk_sizes):
                raise reasons.Refusal(
                    reasons.Reason.ArenaInvalid,
                    f"{len(descriptors)} descriptors for {len(sealed.chunk_sizes)} chunks of {order.device}",
                )
        except BaseException:
            _close(descriptors)
            raise
        arena = groups.HeldArena(
            memory=str(order.spec.memory),
            device=order.device,
            descriptors=tuple(descriptors),
            chunk_sizes=sealed.chunk_sizes,
            manifest=sealed.manifest,
            arena_bytes=manifest.arena_bytes,
            num_tensors=len(manifest),
            generation=secrets.token_hex(8),
            blocks=tuple(sealed.blocks),
            settled=sealed.settled,
        )
        return arena, sealed

    async def verify(self, arena: groups.HeldArena) -> orders.Verdict:
        """Recompute every digest of an arena in a process of its own.

        Raises Refusal ``VerifyImpossible`` when it could not judge. Cancelling kills the verifier.
        """
        copies = [os.dup(descriptor) for descriptor in arena.descriptors]
        order = orders.VerifyOrder(
            memory=arena.memory, device=arena.device, chunk_sizes=arena.chunk_sizes, manifest=arena.manifest
        )
        try:
            verdict, descriptors = await self._run(order, copies, (), lambda _: None, orders.Verdict)
        except reasons.Refusal as refusal:
            if refusal.reason is reasons.Reason.LoaderDied:
                raise reasons.Refusal(reasons.Reason.VerifyImpossible, f"verifier: {refusal.message}") from refusal
            raise
        finally:
            _close(copies)
        _close(descriptors)
        return verdict

    def close(self) -> None:
        """Wait for the threads; every child must have ended or been killed by then."""
        self._threads.shutdown(wait=True)

    async def _run(
        self,
        order: orders.Order,
        descriptors: Sequence[int],
        inherited: Sequence[int],
        on_event: Callable[[orders.Event], None],
        outcome: type[_T],
    ) -> tuple[_T, list[int]]:
        """A child for ``order``: ``descriptors`` go with the order, ``inherited`` are kept open in it."""
        module = _MODULES[type(order)]
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = await _start(module, theirs.fileno(), inherited, order.device)
            try:
                return await self._converse(ours, order, descriptors, on_event, outcome)
            except reasons.Refusal as refusal:
                if refusal.reason is not reasons.Reason.DaemonUnreachable:
                    raise
                message = f"{module.rsplit('.', 1)[-1]} process {process.pid} {await _ending(process)}"
                raise reasons.Refusal(reasons.Reason.LoaderDied, message) from refusal
            finally:
                await _end(process)

    async def _converse(
        self,
        sock: socket.socket,
        order: orders.Order,
        descriptors: Sequence[int],
        on_event: Callable[[orders.Event], None],
        outcome: type[_T],
    ) -> tuple[_T, list[int]]:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + _SILENCE_SECONDS
        await loop.run_in_executor(self._threads, frames.send, sock, frames.encode(order), deadline, descriptors)
        while True:
            received = loop.run_in_executor(self._threads, _next_event, sock)
            try:
                event, found = await asyncio.shield(received)
            except asyncio.CancelledError:
                sock.shutdown(socket.SHUT_RDWR)
                received.add_done_callback(_discard)
                raise
            if isinstance(event, outcome):
                return event, found
            _close(found)
            if isinstance(event, orders.Failed):
                raise reasons.Refusal(reasons.Reason(event.reason), event.message)
            on_event(event)


async def _start(module: str, channel: int, inherited: Sequence[int], device: str) -> asyncio.subprocess.Process:
    """Raises Refusal ``LoaderDied`` when the node starts no process now: no fault of a daemon that serves."""
    try:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, "--socket", str(channel)),
            pass_fds=(channel, *inherited),
            env=_environment(device),
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        message = f"{module.rsplit('.', 1)[-1]} process cannot be started: {error}"
        raise reasons.Refusal(reasons.Reason.LoaderDied, message) from error


def progress(event: orders.Progressed, former: protocol.Progress, began_at: float, now: float) -> protocol.Progress:
    """Progress with rate and time left, from bytes and the time since reading began. Pure."""
    elapsed = now - began_at
    rate = event.bytes_done / elapsed if elapsed > 0 and event.bytes_done else former.bytes_per_second
    left = (event.bytes_total - event.bytes_done) / rate if rate > 0 else -1.0
    return protocol.Progress(
        bytes_done=event.bytes_done, bytes_total=event.bytes_total, bytes_per_second=rate, seconds_left=left
    )


def _next_event(sock: socket.socket) -> tuple[orders.Event, list[int]]:
    body, descriptors = frames.receive(sock, time.monotonic() + _SILENCE_SECONDS, frames.ANSWER_LIMIT_BYTES)
    try:
        return _EVENTS.decode(body), descriptors
    except msgspec.MsgspecError as error:
        _close(descriptors)
        raise reasons.Refusal(reasons.Reason.InternalError, f"a child sent what is no event: {error}") from error


def _discard(received: asyncio.Future[tuple[orders.Event, list[int]]]) -> None:
    if not received.cancelled() and received.exception() is None:
        _close(received.result()[1])


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _environment(device: str) -> dict[str, str]:
    """A GPU child sees its own GPU only, by UUID: no ordinal can mean another one.

    Each reader buffer has a stream; with the driver's default of 8 hardware queues, streams wait for each other.
    """
    if not device.startswith("GPU-"):
        return dict(os.environ)
    return {**os.environ, "CUDA_VISIBLE_DEVICES": device, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


async def _ending(process: asyncio.subprocess.Process) -> str:
    try:
        async with asyncio.timeout(5.0):
            code = await process.wait()
    except TimeoutError:
        return "closed its connection but did not end"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
    return f"ended with exit code {code}"


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(2.0):
            await process.wait()
    except (TimeoutError, asyncio.CancelledError):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
