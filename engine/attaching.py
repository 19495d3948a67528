"""Mapping a rank's finished weights into this process: the engine's side of it, in one call.

An engine that restarts needs the weights it had a minute ago, at once, and must never get others. So the daemon
compares the key before it sends anything, this side compares GPU, sizes and descriptors before it maps anything, and
then nothing is copied: the tensors are views of memory that no one can write any more.

What stays true whatever dies: tensors are valid as long as they exist. They hold the mapping, the mapping holds the
memory; neither the daemon nor the :class:`Attached` is needed for that.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from weightcache.engine import answers, claims, connecting, leases, mapping, proving
from weightcache.wire import evidence, keys, protocol, reasons

__all__ = ["Attached", "KeyMismatch", "Timings", "attach"]

KeyMismatch = answers.KeyMismatch
_LOG = logging.getLogger("weightcache.engine")


class Timings(NamedTuple):
    """Seconds of each phase of an attach. ``waited``: before the attempt that succeeded began."""

    waited: float
    socket: float
    decode: float
    map: float
    views: float
    verify: float

    @property
    def total(self) -> float:
        """The attach itself: everything but the waiting."""
        return sum(self) - self.waited


class Attached:
    """An attached rank. ``tensors``: by name, aliases included (as identical objects), read-only.

    ``lease``: counts until :meth:`close` or the end of the process, also when this object is dropped before.
    ``gpu``: UUID or host slot. ``path``: by which way the weights came, always ``attached``.
    """

    path = "attached"

    def __init__(
        self,
        mapped: mapping.Mapped,
        answer: protocol.Attached,
        lease: leases.Lease,
        timings: Timings,
    ) -> None:
        self.tensors = mapped.tensors
        self.manifest = mapped.manifest
        self.generation = answer.generation
        self.memory = answer.memory
        self.gpu = answer.gpu
        self.lease = lease
        self.timings = timings
        self._mapping = mapped.mapping

    @property
    def metadata(self) -> dict[str, Any]:
        """What kernels need besides tensors."""
        return self.manifest.metadata

    @property
    def state(self) -> leases.State:
        """What the lease is now."""
        return self.lease.state

    def damaged(self) -> list[str]:
        """Names of tensors whose resident bytes differ from their digests, recomputed now. ValueError when closed."""
        return mapping.damaged(self.manifest, self._mapping)

    def close(self) -> None:
        """End the lease and let go of the memory. Twice is once.

        Tensors that are still in use elsewhere stay valid, and the memory goes with the last of them.
        """
        self.lease.close()
        self.tensors = {}
        self._mapping.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def attach(  # noqa: PLR0913 - named at every call, each with a meaning of its own
    directory: str | os.PathLike[str],
    key: keys.Key,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    cache_uid: str = "",
    client: protocol.Client | None = None,
    gpus: Sequence[str] | None = None,
    group: int | None = None,
    share: bool = False,
    claim: claims.Claim | claims.Ticket | None = None,
    rank: int | None = None,
    wait_seconds: float = 0.0,
    deadline_seconds: float = 30.0,
    digest_store: evidence.DigestStore | None = None,
    verify: bool = False,
    on_lease_change: Callable[[leases.State], None] | None = None,
) -> Attached:
    """Map the rank that ``key`` describes, from the cache whose sockets lie in ``directory``.

    ``directory``: such as ``/run/weightcache/s/by-name/<namespace>/<name>``; links are followed before connecting.
    ``checkpoint``: the engine's own copy of the checkpoint, from which evidence comes that both ends mean the same
    bytes; without one, ``cache_uid`` says that configuration and tokenizer come from the cache's own ``model/``.
    ``gpus``, ``group``, ``share``: which group to claim; or ``claim``: one that is held already. ``rank``: its number
    in the group where the key does not tell (replicas of data parallelism). ``wait_seconds``: how long to wait for
    what time can mend. ``deadline_seconds``: for each exchange with the daemon. ``digest_store``: where file digests
    are kept. ``verify``: recompute every digest over the mapped bytes. ``on_lease_change``: see :mod:`leases`.

    Raises :class:`KeyMismatch`, and Refusal ``ContentUnproven``, ``NotReady``, ``Draining``, ``GroupTaken``,
    ``GPUsNotVisible``, ``ClaimRequired``, ``ArenaInvalid``, ``Damaged`` and what :mod:`connecting` and
    :mod:`proving` raise. Nothing is mapped and no lease is left then.
    """
    began = time.perf_counter()
    ticket = claim.ticket if isinstance(claim, claims.Claim) else claim
    if ticket is not None and checkpoint is None and not cache_uid and not key.content:
        prover = proving.Prover.repeat(ticket.proof)
    else:
        prover = proving.Prover(checkpoint, cache_uid, key.content)
    attempt = _Attempt(
        directory=directory,
        key=key,
        prover=prover,
        wish=claims.Wish(gpus=None if gpus is None else list(gpus), group=group, share=share),
        ticket=ticket,
        client=client or claims.default_client(),
        rank=claims.rank_index(key) if rank is None else rank,
        deadline_seconds=deadline_seconds,
        store=digest_store,
        verify=verify,
        on_change=on_lease_change,
    )
    patience = connecting.Patience(wait_seconds)
    while True:
        try:
            attached = attempt.run(began)
            _LOG.info("%s", _summary(attached))
            return attached
        except reasons.Refusal as refusal:
            patience.pause(refusal)


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """One attach, to be tried as often as patience allows."""

    directory: str | os.PathLike[str]
    key: keys.Key
    prover: proving.Prover
    wish: claims.Wish
    ticket: claims.Ticket | None
    client: protocol.Client
    rank: int
    deadline_seconds: float
    store: evidence.DigestStore | None
    verify: bool
    on_change: Callable[[leases.State], None] | None

    def run(self, began: float) -> Attached:
        started = time.perf_counter()
        real = connecting.resolve(self.directory)
        if self.ticket is not None:
            ticket, found = self.ticket, self._ask(real, self.ticket)
        else:
            # The lease holds the group from here on, so the claim ends with this block.
            with claims.ask(
                real, self.key, self.prover, self.wish, self.client, self.deadline_seconds, self.store
            ) as claim:
                ticket, found = claim.ticket, self._ask_own(real, claim.ticket)
        try:
            return self._map(found, ticket, (started - began, time.perf_counter() - started))
        except BaseException:
            found.close()
            raise

    def _ask_own(self, real: str, ticket: claims.Ticket) -> connecting.Conversation:
        try:
            return self._ask(real, ticket)
        except reasons.Refusal as refusal:
            if refusal.reason is not reasons.Reason.ClaimRequired:
                raise
            # The daemon was restarted between the two requests, and with it went the claim.
            raise answers.Later(reasons.Reason.NotReady, refusal.message) from refusal

    def _ask(self, real: str, ticket: claims.Ticket) -> connecting.Conversation:
        if not 0 <= self.rank < len(ticket.sockets) == len(ticket.gpus):
            raise reasons.Refusal(
                reasons.Reason.KeyMismatch,
                f"rank {self.rank} was asked for, group {ticket.group} has {len(ticket.sockets)}; nothing was mapped",
            )
        while True:
            request = protocol.Attach(key=self.key, proof=self.prover.proof, token=ticket.token)
            deadline = time.monotonic() + self.deadline_seconds
            found = connecting.converse(real, ticket.sockets[self.rank], self.client, request, deadline)
            if isinstance(found.answer, protocol.Attached):
                return found
            refusal = found.refusal()
            if not (isinstance(found.answer, protocol.ContentUnproven) and self.prover.can_strengthen()):
                raise refusal
            self.prover.strengthen(self.store)

    def _map(self, found: connecting.Conversation, ticket: claims.Ticket, seconds: tuple[float, float]) -> Attached:
        answer = found.answer
        assert isinstance(answer, protocol.Attached), "_ask returns no other answer"
        mapped = mapping.map_arena(answer, found.descriptors, ticket.gpus[self.rank], found.welcome.gpu)
        verifying = time.perf_counter()
        try:
            if self.verify:
                _refuse_damage(mapped, found.path)
            timings = Timings(*seconds, *mapped.seconds, time.perf_counter() - verifying)
            lease = leases.Lease(found.sock, answer, found.descriptors, self._rejoiner(answer, ticket), self.on_change)
        except BaseException:
            mapped.tensors.clear()  # else the traceback keeps them, and they the memory
            mapped.mapping.close()
            raise
        return Attached(mapped, answer, lease, timings)

    def _rejoiner(self, answer: protocol.Attached, ticket: claims.Ticket) -> Callable[[], connecting.Conversation]:
        """What a lost lease does to come back: the directory is resolved anew, as it may have been made anew."""
        request = protocol.Rejoin(generation=answer.generation, key=self.key, token=ticket.token)
        socket_name = ticket.sockets[self.rank]

        def rejoin() -> connecting.Conversation:
            deadline = time.monotonic() + self.deadline_seconds
            real = connecting.resolve(self.directory)
            found = connecting.converse(real, socket_name, self.client, request, deadline)
            if found.welcome.gpu == answer.gpu:
                return found
            found.close()
            raise reasons.Refusal(
                reasons.Reason.ArenaInvalid, f"{found.path} belongs to {found.welcome.gpu}, this arena to {answer.gpu}"
            )

        return rejoin


def _refuse_damage(mapped: mapping.Mapped, path: str) -> None:
    names = mapping.damaged(mapped.manifest, mapped.mapping)
    if names:
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        raise reasons.Refusal(
            reasons.Reason.Damaged,
            f"{path}: the mapped bytes of {len(names)} of {len(mapped.manifest)} tensors differ from their digests: "
            f"{', '.join(names[:10])}{more}; have the daemon verify (weightcache verify), which loads them again",
        )


def _summary(attached: Attached) -> str:
    """One line a start: which way, what, and how long each phase took. Pure."""
    timings = attached.timings
    phases = ", ".join(
        f"{name} {value * 1e3:.1f}" for name, value in timings._asdict().items() if name != "waited" and value
    )
    return (
        f"path={attached.path} gpu={attached.gpu} generation={attached.generation} lease={attached.lease.identity} "
        f"tensors={len(attached.manifest)} bytes={attached.manifest.arena_bytes} waited_ms={timings.waited * 1e3:.1f} "
        f"total_ms={timings.total * 1e3:.1f} ({phases})"
    )
