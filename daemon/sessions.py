"""What each request gets, on each socket.

The connection is the lease and the claim: they are entered before the answer leaves and end in one place, when the
connection does, however it ends. Mapping never precedes agreement: the order of checks is drain, key, readiness,
content, claim; and a key mismatch is told before the weights are loaded, so that nobody waits for what cannot fit.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from weightcache.daemon import caches, connections, groups, roots, states
from weightcache.wire import protocol, reasons

__all__ = ["IDLE_SECONDS", "Operations", "Scope", "Session"]

#: A connection that holds nothing must ask something within this time.
IDLE_SECONDS = 60.0
DRAIN_RETRY_SECONDS = 5.0


class Operations(Protocol):
    """What takes longer than an answer, done by the daemon's main part."""

    async def verify(self, *, deep: bool) -> protocol.Verified | protocol.NotReady:
        """Judge the resident bytes."""

    async def release(self, grace_seconds: float) -> protocol.Released:
        """Drop every arena, after cutting the leases that are left."""

    def resume(self) -> None:
        """Load again what was released."""


@dataclass(frozen=True)
class Scope:
    """Which socket a session came in on: of a rank, of the daemon, or the private one (then ``rank`` is None)."""

    name: str
    rank: groups.Rank | None = None


#: An answer and the descriptors that go with it, which are closed once it has left.
_Answer = tuple[msgspec.Struct, Sequence[int]]
_Handler = Callable[["Session", Any], Awaitable[_Answer]]


class Session:
    """One connection from accept to close."""

    def __init__(
        self, cache: caches.Cache, operations: Operations, connection: connections.Connection, scope: Scope
    ) -> None:
        self._cache = cache
        self._operations = operations
        self._connection = connection
        self._scope = scope
        self._client = protocol.Client()
        self._held: tuple[dict[str, groups.Lease], str] | None = None

    @property
    def lease(self) -> str:
        """Identity of the lease or claim that this session holds, or empty."""
        return self._held[1] if self._held else ""

    @property
    def scope_name(self) -> str:
        """Which socket this session came in on."""
        return self._scope.name

    def describe(self) -> str:
        """Who holds the lease or claim, for messages."""
        held = self._held[0].get(self._held[1]) if self._held else None
        return held.describe() if held else ""

    def cut(self) -> None:
        """End the connection from this side."""
        self._connection.cut()

    async def run(self) -> None:
        """Answer until the peer goes or breaks the rules; then end its lease or claim."""
        try:
            await self._greet()
            while True:
                request = await self._connection.request(None if self._held else IDLE_SECONDS)
                await self._reply(*await self._answer_to(request))
        except connections.Closed:
            pass
        except reasons.Refusal as refusal:
            await self._say_farewell(refusal)
        finally:
            if self._held:
                self._held[0].pop(self._held[1], None)
                self._held = None
            self._connection.close()

    async def _greet(self) -> None:
        hello = await self._connection.request(connections.MESSAGE_SECONDS)
        if not isinstance(hello, protocol.Hello):
            raise reasons.Refusal(
                reasons.Reason.ProtocolViolated, f"the first message is {type(hello).__name__}, Hello expected"
            )
        if hello.protocol != protocol.PROTOCOL:
            raise reasons.Refusal(
                reasons.Reason.ProtocolVersionMismatch,
                f"the client speaks protocol {hello.protocol} (weightcache {hello.client.version or 'unknown'}), "
                f"this daemon {protocol.PROTOCOL} (weightcache {self._cache.version})",
            )
        self._client = hello.client
        welcome = protocol.Welcome(
            protocol=protocol.PROTOCOL,
            version=self._cache.version,
            cache=self._cache.ref,
            gpu=self._scope.rank.device.uuid if self._scope.rank else "",
            instance=self._cache.instance,
        )
        await self._connection.answer(welcome)

    async def _reply(self, answer: msgspec.Struct, descriptors: Sequence[int]) -> None:
        try:
            await self._connection.answer(answer, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _answer_to(self, request: protocol.Request) -> _Answer:
        handler = _HANDLERS[self._scope.name].get(type(request))
        if handler is None:
            served = ", ".join(sorted(kind.__name__ for kind in _HANDLERS[self._scope.name]))
            raise reasons.Refusal(
                reasons.Reason.ProtocolViolated,
                f"{type(request).__name__} does not belong on the {self._scope.name} socket, which takes {served}",
            )
        try:
            return await handler(self, request)
        except reasons.Refusal as refusal:
            if refusal.reason is reasons.Reason.ProtocolViolated:
                raise
            return protocol.Refused(reason=str(refusal.reason), message=refusal.message), ()

    async def _say_farewell(self, refusal: reasons.Refusal) -> None:
        try:
            await self._connection.answer(protocol.Refused(reason=str(refusal.reason), message=refusal.message))
        except (connections.Closed, reasons.Refusal):
            return

    # --- requests -------------------------------------------------------------------------------------------------
    async def _status(self, _: protocol.Status) -> _Answer:
        return self._cache.status(), ()

    async def _claim(self, request: protocol.Claim) -> _Answer:
        self._refuse_second_hold()
        if self._cache.draining:
            return protocol.Draining(retry_after_seconds=DRAIN_RETRY_SECONDS), ()
        if not self._cache.groups:
            return self._cache.not_ready(), ()
        mismatch = self._cache.mismatch(request.key, self._cache.groups[0].ranks[0].key, same_group=True)
        if mismatch:
            return mismatch, ()
        group = groups.choose_group(self._cache.groups, request.gpus, request.group, request.share)
        if isinstance(group, protocol.NotReady):
            return group, ()
        assert group.content is not None, "a ready group has proven content"
        fault = self._cache.content_fault(request.key, request.proof, group.content)
        if fault:
            return fault, ()
        shared_with = len(group.holders())
        token = secrets.token_hex(16)
        self._hold(group.claims, token, group, "")
        sockets = [roots.rank_socket_name(uuid) for uuid in group.gpus]
        return (
            protocol.Claimed(group=group.index, gpus=group.gpus, sockets=sockets, token=token, shared_with=shared_with),
            (),
        )

    async def _attach(self, request: protocol.Attach) -> _Answer:
        self._refuse_second_hold()
        rank, group = self._rank_and_group()
        mismatch = self._cache.mismatch(request.key, rank.key, same_group=False)
        if mismatch:
            return mismatch, ()
        if group.state != states.READY or group.content is None or rank.arena is None:
            return groups.not_ready(group), ()
        fault = self._cache.content_fault(request.key, request.proof, group.content)
        if fault:
            return fault, ()
        if request.token not in group.claims:
            raise reasons.Refusal(
                reasons.Reason.ClaimRequired,
                f"no open claim on group {group.index} has this token: claim the group on daemon.sock and keep that "
                "connection open while its ranks attach",
            )
        lease = self._hold(rank.leases, secrets.token_hex(8), group, rank.arena.generation)
        self._cache.attaches += 1
        attached = protocol.Attached(
            manifest=rank.arena.manifest,
            memory=rank.arena.memory,
            gpu=rank.device.uuid,
            chunk_sizes=rank.arena.chunk_sizes,
            generation=rank.arena.generation,
            lease=lease,
        )
        # Copies: the arena may be given up while the answer waits for a slow peer, and a closed descriptor's number
        # may by then name another arena.
        return attached, [os.dup(descriptor) for descriptor in rank.arena.descriptors]

    async def _rejoin(self, request: protocol.Rejoin) -> _Answer:
        self._refuse_second_hold()
        rank, group = self._rank_and_group()
        if rank.arena is None:
            return groups.not_ready(group), ()
        current = rank.arena.generation
        if request.generation == current:
            mismatch = self._cache.mismatch(request.key, rank.key, same_group=False)
            if mismatch:
                return mismatch, ()
            return protocol.Rejoined(generation=current, lease=self._rejoined(rank, group, current)), ()
        lease = self._rejoined(rank, group, request.generation)
        return protocol.Superseded(generation=current, lease=lease), ()

    async def _verify(self, request: protocol.Verify) -> _Answer:
        return await self._operations.verify(deep=request.deep), ()

    async def _drain(self, _: protocol.Drain) -> _Answer:
        self._refuse_strangers("drain")
        self._cache.draining = True
        return self._cache.status(), ()

    async def _resume(self, _: protocol.Resume) -> _Answer:
        self._refuse_strangers("resume")
        self._cache.draining = False
        self._operations.resume()
        return self._cache.status(), ()

    async def _release(self, request: protocol.Release) -> _Answer:
        self._refuse_strangers("release")
        held = self._cache.status().key_digest
        if request.key_digest != held:
            raise reasons.Refusal(
                reasons.Reason.KeyMismatch, f"release of key {request.key_digest or '(none)'}, this daemon holds {held}"
            )
        open_leases = groups.leases_of(self._cache.groups)
        if open_leases and not request.force:
            names = ", ".join(lease.describe() for lease in open_leases[:8])
            raise reasons.Refusal(reasons.Reason.LeasesOpen, f"{len(open_leases)} leases are open: {names}")
        return await self._operations.release(request.grace_seconds if request.force else 0.0), ()

    # --- what they share ------------------------------------------------------------------------------------------
    def _rank_and_group(self) -> tuple[groups.Rank, groups.Group]:
        rank = self._scope.rank
        for group in self._cache.groups:
            if rank is not None and any(own is rank for own in group.ranks):
                return rank, group
        raise reasons.Refusal(reasons.Reason.NotReady, "the daemon is starting again: connect anew")

    def _hold(self, table: dict[str, groups.Lease], identity: str, group: groups.Group, generation: str) -> str:
        table[identity] = groups.Lease(
            identity=identity if generation else identity[:8],
            client=self._client,
            pid=self._connection.peer.pid,
            uid=self._connection.peer.uid,
            gid=self._connection.peer.gid,
            since=self._cache.clock(),
            generation=generation,
            group=group.index,
        )
        self._held = (table, identity)
        return identity

    def _rejoined(self, rank: groups.Rank, group: groups.Group, generation: str) -> str:
        return self._hold(rank.leases, secrets.token_hex(8), group, generation or "(unknown)")

    def _refuse_second_hold(self) -> None:
        if self._held:
            raise reasons.Refusal(
                reasons.Reason.ProtocolViolated, "this connection already is a lease or a claim: open another one"
            )

    def _refuse_strangers(self, action: str) -> None:
        uid = self._connection.peer.uid
        if uid not in (0, os.geteuid()):
            raise reasons.Refusal(
                reasons.Reason.Forbidden, f"uid {uid} may not {action}: only root and the daemon's uid {os.geteuid()}"
            )


_CONTROL: dict[type, _Handler] = {
    protocol.Status: Session._status,
    protocol.Verify: Session._verify,
    protocol.Drain: Session._drain,
    protocol.Resume: Session._resume,
    protocol.Release: Session._release,
}
_HANDLERS: dict[str, dict[type, _Handler]] = {
    "private": _CONTROL,
    "daemon": {**_CONTROL, protocol.Claim: Session._claim},
    "rank": {
        protocol.Attach: Session._attach,
        protocol.Rejoin: Session._rejoin,
        protocol.Status: Session._status,
    },
}


async def accept_for_ever(
    listener: Any, start: Callable[[connections.Connection], None], on_error: Callable[[OSError], None]
) -> None:
    """Accept connections until cancelled; ``start`` begins a task for each. Running out of descriptors only waits."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock, _ = await loop.sock_accept(listener)
        except OSError as error:
            on_error(error)
            await asyncio.sleep(0.2)
            continue
        try:
            start(connections.Connection(sock))
        except OSError:
            sock.close()
