"""Which ranks there are, what they hold, who uses them, and which group an engine gets.

Everything the daemon knows at run time is here, in one place, touched only by the serving loop's thread; every
summary (is a group ready, is it taken) is derived. Nothing in this module does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weightcache.daemon import devices, orders, states
from weightcache.wire import evidence, keys, protocol, reasons

__all__ = ["Group", "HeldArena", "Lease", "Rank", "choose_group", "leases_of"]


@dataclass(frozen=True)
class HeldArena:
    """A finished arena in this daemon's hands: descriptors, table and where it came from."""

    memory: str
    device: str
    descriptors: tuple[int, ...]
    chunk_sizes: list[int]
    manifest: bytes
    arena_bytes: int
    num_tensors: int
    generation: str
    blocks: tuple[orders.BlockDigest, ...]
    settled: dict[str, bool]


@dataclass(frozen=True)
class Lease:
    """An open connection that uses a rank (lease) or holds a group (claim)."""

    identity: str
    client: protocol.Client
    pid: int
    uid: int
    gid: int
    since: float
    generation: str
    group: int

    def status(self) -> protocol.LeaseStatus:
        """As the wire shows it. Pure."""
        return protocol.LeaseStatus(
            lease=self.identity,
            client=self.client,
            pid=self.pid,
            uid=self.uid,
            gid=self.gid,
            since=self.since,
            generation=self.generation,
            group=self.group,
        )

    def describe(self) -> str:
        """Who this is, for messages. Pure."""
        name = "/".join(filter(None, (self.client.namespace, self.client.name))) or "unnamed client"
        return f"{name} (pid {self.pid}, uid {self.uid})"


@dataclass
class Rank:
    """One rank on one device."""

    index: int
    group: int
    device: devices.Device
    key: keys.Key
    state: str = states.PENDING
    progress: protocol.Progress = field(default_factory=protocol.Progress)
    arena: HeldArena | None = None
    detail: str = ""
    reason: str = ""
    message: str = ""
    attempts: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)

    def status(self) -> protocol.RankStatus:
        """As the wire shows it. Pure."""
        return protocol.RankStatus(
            rank=self.index,
            gpu=self.device.uuid,
            state=self.state,
            progress=self.progress,
            arena_bytes=self.arena.arena_bytes if self.arena else 0,
            num_tensors=self.arena.num_tensors if self.arena else 0,
            generation=self.arena.generation if self.arena else "",
            attempts=self.attempts,
            reason=self.reason,
            message=self.message or self.detail,
            phases=self.phases,
            leases=[lease.status() for lease in self.leases.values()],
        )


@dataclass
class Group:
    """All ranks of one copy of the model. ``content``: proven identity of the checkpoint, once every block is read."""

    index: int
    ranks: list[Rank]
    claims: dict[str, Lease] = field(default_factory=dict)
    content: evidence.HeldContent | None = None

    @property
    def state(self) -> str:
        """Derived from the ranks; not ready before the checkpoint's identity is proven."""
        state = states.group_state(rank.state for rank in self.ranks)
        return states.LOADING if state == states.READY and self.content is None else state

    @property
    def gpus(self) -> list[str]:
        """Device UUIDs in rank order."""
        return [rank.device.uuid for rank in self.ranks]

    def holders(self) -> list[Lease]:
        """Everyone who uses this group: claims first, then leases of any generation. Pure."""
        return [*self.claims.values(), *(lease for rank in self.ranks for lease in rank.leases.values())]

    def progress(self) -> protocol.Progress:
        """The ranks' progress added up. Pure."""
        done = sum(rank.progress.bytes_done for rank in self.ranks)
        total = sum(rank.progress.bytes_total for rank in self.ranks)
        rate = sum(rank.progress.bytes_per_second for rank in self.ranks if rank.state == states.READING)
        return protocol.Progress(
            bytes_done=done,
            bytes_total=total,
            bytes_per_second=rate,
            seconds_left=(total - done) / rate if rate > 0 else -1.0,
        )

    def trouble(self) -> tuple[str, str]:
        """Reason and message of the first rank that has one. Pure."""
        return next(((rank.reason, rank.message) for rank in self.ranks if rank.reason), ("", ""))

    def status(self) -> protocol.GroupStatus:
        """As the wire shows it. Pure."""
        return protocol.GroupStatus(
            group=self.index,
            state=self.state,
            ranks=[rank.status() for rank in self.ranks],
            claims=[claim.status() for claim in self.claims.values()],
        )


def leases_of(groups: Iterable[Group]) -> list[Lease]:
    """Every lease, claims left out: a claim holds no memory. Pure."""
    return [lease for group in groups for rank in group.ranks for lease in rank.leases.values()]


def choose_group(
    groups: Sequence[Group], gpus: Sequence[str] | None, wanted: int | None, share: bool
) -> Group | protocol.NotReady:
    """The group an engine gets, or why it has to wait. Pure.

    Only groups that lie wholly on ``gpus`` (None: anywhere) count, and only ``wanted`` where it is given. A ready and
    free one first; then, if one is still loading and free, wait for it; then, with ``share``, the one with the fewest
    holders. Raises Refusal ``GPUsNotVisible`` or ``GroupTaken``.
    """
    seen = None if gpus is None else set(gpus)
    candidates = [group for group in groups if wanted in (None, group.index)]
    visible = [group for group in candidates if seen is None or seen >= set(group.gpus)]
    if not visible:
        raise reasons.Refusal(reasons.Reason.GPUsNotVisible, _not_visible(groups, gpus, wanted))
    free = [group for group in visible if not group.holders()]
    ready = [group for group in free if group.state == states.READY]
    if ready:
        return ready[0]
    shared = [group for group in visible if share and group.state == states.READY]
    if shared:
        return min(shared, key=lambda group: len(group.holders()))
    waiting = free or ([group for group in visible if group.state != states.READY] if share else [])
    if waiting:
        return not_ready(waiting[0])
    held = "; ".join(
        f"group {group.index} by {', '.join(lease.describe() for lease in group.holders()[:4])}" for group in visible
    )
    raise reasons.Refusal(reasons.Reason.GroupTaken, f"every group on this engine's GPUs is held: {held}")


def not_ready(group: Group) -> protocol.NotReady:
    """The answer of a group that is not whole. Pure."""
    reason, message = group.trouble()
    progress = group.progress()
    retry = 0.2 if progress.seconds_left < 0 else min(5.0, max(0.2, progress.seconds_left / 2))
    return protocol.NotReady(
        state=group.state, progress=progress, retry_after_seconds=retry, reason=reason, message=message
    )


def _not_visible(groups: Sequence[Group], gpus: Sequence[str] | None, wanted: int | None) -> str:
    own = "; ".join(f"group {group.index}: {', '.join(group.gpus)} ({group.state})" for group in groups)
    seen = "all GPUs" if gpus is None else ", ".join(gpus) or "no GPU"
    asked = "any group" if wanted is None else f"group {wanted}"
    return f"the engine sees {seen} and asked for {asked}; this daemon has {own or 'no group'}"
