"""What the serving process and its short-lived children say to each other.

A loader or verifier is a process of its own: its CUDA context, its transients and its faults end with it. It gets one
order over an inherited socket, reports events, and sends the finished descriptors back. It ends when the socket does,
so that no loader outlives its daemon (besides, the kernel kills it: PR_SET_PDEATHSIG), and it inherits the lock of its
GPU, so that the lock is not free while a loader may still hold memory there.
"""

from __future__ import annotations

import msgspec

from weightcache.crds import specs
from weightcache.wire import evidence

__all__ = [
    "BlockDigest",
    "Damage",
    "Event",
    "Failed",
    "LoadOrder",
    "Phase",
    "Progressed",
    "SealedArena",
    "Verdict",
    "VerifyOrder",
]


class _Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    pass


class LoadOrder(_Order, frozen=True):
    """Load one rank of a group.

    ``stats``: of every checkpoint file when the daemon read its header, by name: other stats mean that the plan no
    longer fits (``CheckpointChanged``). ``device``: GPU UUID, or host slot such as ``host-0``. ``gate_directory``:
    where the gate's slots lie. ``buffer_bytes``: all reader buffers together. ``holder``: one line for the gate file.
    ``bytes_per_second``: limit of reading, 0 for none. The GPU's lock is inherited beside the order, not named in it.
    """

    spec: specs.WeightCacheSpec
    checkpoint: str
    stats: dict[str, evidence.FileStat]
    rank: int
    device: str
    gate_directory: str
    gate_slots: int
    buffer_bytes: int
    num_threads: int
    holder: str
    bytes_per_second: int = 0


class VerifyOrder(_Order, frozen=True):
    """Recompute digests over an arena whose descriptors come with this order."""

    memory: str
    device: str
    chunk_sizes: list[int]
    manifest: bytes


class Phase(_Order, frozen=True):
    """The loader enters a phase: ``WaitingForGate``, ``Reading``, ``Digesting``, ``Sealing``. ``detail``: such as who
    holds the gate."""

    name: str
    detail: str = ""


class Progressed(_Order, frozen=True):
    """Bytes read so far, of those this rank reads."""

    bytes_done: int
    bytes_total: int


class BlockDigest(msgspec.Struct, frozen=True, array_like=True):
    """The digest (16 bytes) of one 4 MiB block of a checkpoint file."""

    file: str
    block: int
    digest: bytes


class SealedArena(_Order, frozen=True):
    """The finished arena; its descriptors come with this event, one a chunk.

    ``blocks``: content digests of the file blocks that this rank was to read. ``phases``: seconds by phase.
    ``bytes_read``: from checkpoint files, content-digest blocks included. ``settled``: by file name, whether the stat
    was old enough, before reading, to count as evidence.
    """

    manifest: bytes
    chunk_sizes: list[int]
    blocks: list[BlockDigest]
    phases: dict[str, float]
    bytes_read: int
    settled: dict[str, bool]


class Failed(_Order, frozen=True):
    """The child gives up. ``reason``: of :mod:`weightcache.wire.reasons`."""

    reason: str
    message: str


class Damage(msgspec.Struct, frozen=True, array_like=True):
    """A tensor whose resident bytes differ from its digest (both as hex)."""

    tensor: str
    wanted: str
    found: str


class Verdict(_Order, frozen=True):
    """Outcome of a verification over ``bytes_checked`` bytes; ``digest_seconds`` is the digest alone."""

    damaged: list[Damage]
    bytes_checked: int
    digest_seconds: float


Order = LoadOrder | VerifyOrder
Event = Phase | Progressed | SealedArena | Failed | Verdict
