"""One daemon's cache at run time: its groups, its verdicts, its counters, and the questions asked of them.

The serving loop, the supervisor and the status all need the same facts. They are kept here once; the methods decide
and record, the callers do the I/O.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from weightcache.crds import specs
from weightcache.daemon import groups, states
from weightcache.wire import digests, evidence, keys, protocol, reasons

__all__ = ["Cache", "prove_content"]


@dataclass
class Cache:
    """What this daemon holds. ``refusal``: why it cannot start, while it waits. ``clock``: Unix seconds."""

    ref: protocol.CacheRef
    spec: specs.WeightCacheSpec
    model: str
    version: str
    instance: str
    clock: Callable[[], float]
    started_at: float
    groups: list[groups.Group] = field(default_factory=list)
    refusal: reasons.Refusal | None = None
    draining: bool = False
    verification: protocol.Verified | None = None
    misses: Counter[str] = field(default_factory=Counter)
    attaches: int = 0

    @property
    def state(self) -> str:
        """Derived from the groups."""
        return states.daemon_state(
            (group.state for group in self.groups), draining=self.draining, refused=self.refusal is not None
        )

    def held_key(self) -> keys.Key | None:
        """The key of rank 0, with the content digest once it is proven. Pure."""
        if not self.groups:
            return None
        group = next((group for group in self.groups if group.content), self.groups[0])
        return with_content(group.ranks[0].key, group)

    def status(self) -> protocol.DaemonStatus:
        """Everything, as the wire shows it. Pure."""
        key = self.held_key()
        reason, message = self._trouble()
        return protocol.DaemonStatus(
            protocol=protocol.PROTOCOL,
            version=self.version,
            instance=self.instance,
            cache=self.ref,
            state=self.state,
            reason=reason,
            message=message,
            draining=self.draining,
            started_at=self.started_at,
            model=self.model,
            memory=str(self.spec.memory),
            key=key,
            key_digest=keys.key_digest(key) if key else "",
            resident_bytes=sum(
                sum(rank.arena.chunk_sizes) for group in self.groups for rank in group.ranks if rank.arena
            ),
            groups=[group.status() for group in self.groups],
            verification=self.verification,
            misses=dict(self.misses),
            attaches=self.attaches,
        )

    def not_ready(self) -> protocol.NotReady:
        """The answer of a daemon that has no groups yet. Pure."""
        reason, message = self._trouble()
        return protocol.NotReady(
            state=self.state, progress=protocol.Progress(), retry_after_seconds=1.0, reason=reason, message=message
        )

    def mismatch(self, wanted: keys.Key, held: keys.Key, *, same_group: bool) -> protocol.KeyMismatch | None:
        """The fields in which an engine's key differs, counted by field; content is judged by :meth:`content_fault`."""
        found = keys.differences(wanted, held, same_group=same_group)
        found = [difference for difference in found if difference.field != "content"]
        self.misses.update(difference.field for difference in found)
        return protocol.KeyMismatch(differences=found) if found else None

    def content_fault(
        self, wanted: keys.Key, proof: evidence.Evidence, content: evidence.HeldContent
    ) -> protocol.KeyMismatch | protocol.ContentUnproven | None:
        """Whether the engine means other bytes than the group holds; None when sameness is proven."""
        if wanted.content and not proof.digest:
            proof = msgspec.structs.replace(proof, digest=wanted.content)
        verdict, why = evidence.judge(proof, content)
        if verdict is evidence.Verdict.Same:
            return None
        if verdict is evidence.Verdict.Unproven:
            return protocol.ContentUnproven(message=why)
        self.misses["content"] += 1
        advice = "point both ends at the same checkpoint files"
        found = keys.Difference("content", wanted=why, held=content.digest, advice=advice)
        return protocol.KeyMismatch(differences=[found])

    def _trouble(self) -> tuple[str, str]:
        if self.refusal is not None:
            return str(self.refusal.reason), self.refusal.message
        return next((group.trouble() for group in self.groups if group.trouble()[0]), ("", ""))


def with_content(key: keys.Key, group: groups.Group) -> keys.Key:
    """A rank's key with its group's content digest. Pure."""
    return msgspec.structs.replace(key, content=group.content.digest) if group.content else key


def prove_content(
    group: groups.Group, stats: Mapping[str, evidence.FileStat], directory: str, cache_uid: str
) -> evidence.HeldContent:
    """The identity of the checkpoint from the block digests that the group's ranks brought. Reads links only.

    Raises Refusal ``InternalError`` when a block is missing or was read twice with different outcomes.
    """
    found: dict[tuple[str, int], bytes] = {}
    arenas = [rank.arena for rank in group.ranks if rank.arena]
    for arena in arenas:
        for block in arena.blocks:
            if found.setdefault((block.file, block.block), block.digest) != block.digest:
                raise reasons.Refusal(
                    reasons.Reason.CheckpointChanged, f"{block.file}: two ranks read block {block.block} differently"
                )
    files = [_held_file(name, stat, found, arenas, directory) for name, stat in sorted(stats.items())]
    digest = digests.digest_of_checkpoint(
        [digests.FileDigest(file.name, file.stat.size_bytes, file.digest) for file in files]
    )
    return evidence.HeldContent(digest=digest, files=files, cache_uid=cache_uid)


def _held_file(
    name: str,
    stat: evidence.FileStat,
    found: dict[tuple[str, int], bytes],
    arenas: Sequence[groups.HeldArena],
    directory: str,
) -> evidence.HeldFile:
    count = digests.num_blocks(stat.size_bytes)
    missing = [index for index in range(count) if (name, index) not in found]
    if missing:
        raise reasons.Refusal(reasons.Reason.InternalError, f"{name}: no rank digested block {missing[0]} of {count}")
    return evidence.HeldFile(
        name=name,
        stat=stat,
        settled=all(arena.settled.get(name, False) for arena in arenas),
        blob=evidence.blob_name(os.path.join(directory, name)),
        digest=digests.combine(found[name, index] for index in range(count)),
    )
