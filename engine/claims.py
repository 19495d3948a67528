"""Holding a whole group before its ranks attach.

Ranks that attach one by one race with those of another engine, and two engines end up with half a group each. So a
group is claimed first, by one connection, which is the claim and ends with it. What the ranks need besides, wherever
they run, is the :class:`Ticket`: plain data, to be sent to them in any form.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from types import TracebackType

import msgspec

from weightcache.engine import connecting, proving
from weightcache.wire import evidence, keys, protocol, reasons, sockets, versions

__all__ = ["Claim", "Ticket", "Wish", "ask", "claim", "default_client", "rank_index"]


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A claim's data. ``gpus``, ``sockets``: UUID and socket name of each rank, in rank order.

    ``proof``: the evidence that convinced the daemon. ``shared_with``: holders that the group had before.
    """

    group: int
    gpus: list[str]
    sockets: list[str]
    token: str
    shared_with: int
    cache: protocol.CacheRef
    proof: evidence.Evidence


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Which group. ``gpus``: UUIDs that this engine sees (None: no matter). ``group``: a certain one.

    ``share``: take a group that others hold too, when none is free.
    """

    gpus: list[str] | None = None
    group: int | None = None
    share: bool = False


class Claim:
    """A held group. It ends with :meth:`close`, or with this process; leases of ranks that attached live on."""

    def __init__(self, ticket: Ticket, connection: socket.socket) -> None:
        self.ticket = ticket
        self.connection = connection

    @property
    def group(self) -> int:
        """Number of the group at its daemon."""
        return self.ticket.group

    @property
    def gpus(self) -> list[str]:
        """GPU UUIDs (or host slots) in rank order."""
        return self.ticket.gpus

    @property
    def sockets(self) -> list[str]:
        """Socket names beside ``daemon.sock``, in rank order."""
        return self.ticket.sockets

    @property
    def token(self) -> str:
        """What an attach shows."""
        return self.ticket.token

    def close(self) -> None:
        """Give the claim back. Twice is once."""
        self.connection.close()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def claim(  # noqa: PLR0913 - named at every call, each with a meaning of its own
    directory: str | os.PathLike[str],
    key: keys.Key,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    cache_uid: str = "",
    client: protocol.Client | None = None,
    gpus: Sequence[str] | None = None,
    group: int | None = None,
    share: bool = False,
    wait_seconds: float = 0.0,
    deadline_seconds: float = 30.0,
    digest_store: evidence.DigestStore | None = None,
) -> Claim:
    """Hold a group of the cache whose sockets lie in ``directory``; parameters as in :func:`attaching.attach`.

    ``key``'s position does not count. Raises Refusal: ``GroupTaken``, ``GPUsNotVisible``, ``NotReady``, ``Draining``,
    ``ContentUnproven``, ``DaemonUnreachable`` and what :mod:`connecting` raises; :class:`answers.KeyMismatch`.
    """
    prover = proving.Prover(checkpoint, cache_uid, key.content)
    wish = Wish(gpus=None if gpus is None else list(gpus), group=group, share=share)
    patience = connecting.Patience(wait_seconds)
    while True:
        try:
            found = connecting.resolve(directory)
            return ask(found, key, prover, wish, client or default_client(), deadline_seconds, digest_store)
        except reasons.Refusal as refusal:
            patience.pause(refusal)


def ask(  # noqa: PLR0913 - one request has this many parts
    directory: str,
    key: keys.Key,
    prover: proving.Prover,
    wish: Wish,
    client: protocol.Client,
    deadline_seconds: float,
    store: evidence.DigestStore | None,
) -> Claim:
    """Ask once for a claim, with stronger evidence where the daemon wants it. ``directory`` is resolved already.

    A full digest can take minutes and a daemon ends connections that are idle, so the second request is made on a
    connection of its own.
    """
    while True:
        request = protocol.Claim(key=key, proof=prover.proof, gpus=wish.gpus, group=wish.group, share=wish.share)
        deadline = time.monotonic() + deadline_seconds
        found = connecting.converse(directory, sockets.DAEMON_SOCKET, client, request, deadline)
        answer = found.answer
        if isinstance(answer, protocol.Claimed):
            return Claim(_ticket(found.welcome, answer, prover.proof), found.keep_connection())
        refusal = found.refusal()
        if not (isinstance(answer, protocol.ContentUnproven) and prover.can_strengthen()):
            raise refusal
        prover.strengthen(store)


def rank_index(key: keys.Key) -> int:
    """Which rank of its group a key belongs to: tensor ranks vary fastest, then pipeline, then data ranks. Pure."""
    place = key.position
    return (place.data_rank * key.pipeline_size + place.pipeline_rank) * key.tensor_size + place.tensor_rank


def default_client() -> protocol.Client:
    """Who this process is: the pod as its environment names it (downward API), and the process id."""
    return protocol.Client(
        name=os.environ.get("POD_NAME", "") or os.environ.get("HOSTNAME", "") or socket.gethostname(),
        namespace=os.environ.get("POD_NAMESPACE", ""),
        pod_uid=os.environ.get("POD_UID", ""),
        pid=os.getpid(),
        version=versions.version(),
    )


def _ticket(welcome: protocol.Welcome, answer: protocol.Claimed, proof: evidence.Evidence) -> Ticket:
    return Ticket(
        group=answer.group,
        gpus=answer.gpus,
        sockets=answer.sockets,
        token=answer.token,
        shared_with=answer.shared_with,
        cache=welcome.cache,
        proof=proof,
    )
