"""The messages between a daemon and those who talk to it.

One tagged Struct a message, msgpack, unknown fields refused; never pickle, which runs code that a stranger planted on
a predictable path. A connection begins with ``Hello`` (the protocol version is in the first message, so that an old
and a new end part with a clear text), which the client may send together with its first request.

    Hello -> Welcome, or Refused(ProtocolVersionMismatch)
    Claim -> Claimed | KeyMismatch | ContentUnproven | NotReady | Draining | Refused(GroupTaken, GPUsNotVisible)
    Attach -> Attached + descriptors | KeyMismatch | ContentUnproven | NotReady | Draining | Refused(ClaimRequired)
    Rejoin -> Rejoined | Superseded | KeyMismatch | NotReady
    Status -> DaemonStatus      Verify -> Verified | NotReady      Release -> Released | Refused(LeasesOpen)
    Drain, Resume -> DaemonStatus

The connection is the lease (``Attach``, ``Rejoin``) or the claim (``Claim``): it ends with the connection.
"""

from __future__ import annotations

import msgspec

from weightcache.wire import evidence, keys

__all__ = [
    "PROTOCOL",
    "Answer",
    "Attach",
    "Attached",
    "CacheRef",
    "Claim",
    "Claimed",
    "Client",
    "ContentUnproven",
    "DaemonStatus",
    "Drain",
    "Draining",
    "GroupStatus",
    "Hello",
    "KeyMismatch",
    "LeaseStatus",
    "NotReady",
    "Progress",
    "RankStatus",
    "Refused",
    "Rejoin",
    "Rejoined",
    "Release",
    "Released",
    "Request",
    "Resume",
    "Status",
    "Superseded",
    "Verified",
    "Verify",
    "Welcome",
]

PROTOCOL = 1


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    pass


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Client(_Part, frozen=True):
    """Who connects, as it says itself; the kernel's peer credentials stand beside it in a lease."""

    name: str = ""
    namespace: str = ""
    pod_uid: str = ""
    pid: int = 0
    version: str = ""


class CacheRef(_Part, frozen=True):
    """A WeightCache by name and UID."""

    namespace: str
    name: str
    uid: str


# --- requests -------------------------------------------------------------------------------------------------------
class Hello(_Message, frozen=True):
    """First message of a connection."""

    protocol: int
    client: Client


class Claim(_Message, frozen=True):
    """Hold a whole group. ``gpus``: UUIDs that the engine sees, None for all. ``group``: a certain one, or any.

    ``share``: accept a group that others hold too. ``key``'s position is not compared.
    """

    key: keys.Key
    proof: evidence.Evidence
    gpus: list[str] | None = None
    group: int | None = None
    share: bool = False


class Attach(_Message, frozen=True):
    """Map one rank. ``token``: from ``Claimed``."""

    key: keys.Key
    proof: evidence.Evidence
    token: str


class Rejoin(_Message, frozen=True):
    """Count a lease again after a lost connection. ``generation``: of the arena that is mapped."""

    generation: str
    key: keys.Key
    token: str


class Status(_Message, frozen=True):
    """Ask for everything that can be known without a key."""


class Verify(_Message, frozen=True):
    """Judge the resident bytes. ``deep``: recompute every digest; otherwise report the last verdict."""

    deep: bool = True


class Release(_Message, frozen=True):
    """Free the arenas of this key. Refused while leases are open, unless ``force``; then after ``grace_seconds``."""

    key_digest: str
    force: bool = False
    grace_seconds: float = 0.0


class Drain(_Message, frozen=True):
    """Give no new leases; those that exist live on."""


class Resume(_Message, frozen=True):
    """Give leases again."""


# --- answers --------------------------------------------------------------------------------------------------------
class Welcome(_Message, frozen=True):
    """``gpu``: UUID of the rank behind this socket, empty on ``daemon.sock``. ``instance``: this daemon process."""

    protocol: int
    version: str
    cache: CacheRef
    gpu: str
    instance: str


class Claimed(_Message, frozen=True):
    """``gpus``: UUIDs in rank order; ``sockets``: file names beside ``daemon.sock`` in the same order."""

    group: int
    gpus: list[str]
    sockets: list[str]
    token: str
    shared_with: int


class Attached(_Message, frozen=True):
    """The arena. Descriptors come with this message, one a chunk, in order.

    ``manifest``: :class:`weightcache.wire.manifests.Manifest` as msgpack.
    """

    manifest: bytes
    memory: str
    gpu: str
    chunk_sizes: list[int]
    generation: str
    lease: str


class KeyMismatch(_Message, frozen=True):
    """Nothing was mapped. Every field that differs."""

    differences: list[keys.Difference]


class ContentUnproven(_Message, frozen=True):
    """Keys agree but for the content, which no evidence decides: send the full digest."""

    message: str


class Progress(_Part, frozen=True):
    """Bytes that this rank reads from the checkpoint. ``seconds_left`` is negative while unknown."""

    bytes_done: int = 0
    bytes_total: int = 0
    bytes_per_second: float = 0.0
    seconds_left: float = -1.0


class NotReady(_Message, frozen=True):
    """Not now. ``state``: of the group or daemon; ``reason`` and ``message``: why, where something went wrong."""

    state: str
    progress: Progress
    retry_after_seconds: float
    reason: str = ""
    message: str = ""


class Draining(_Message, frozen=True):
    """No new leases here."""

    retry_after_seconds: float


class Rejoined(_Message, frozen=True):
    """The lease counts again, under its generation."""

    generation: str
    lease: str


class Superseded(_Message, frozen=True):
    """The mapping stays valid, but the daemon now holds another arena. The lease counts under its old generation."""

    generation: str
    lease: str


class Verified(_Message, frozen=True):
    """Verdict over the resident bytes. ``damaged``: ``<gpu> <tensor>`` of each that differs."""

    sound: bool
    deep: bool
    damaged: list[str]
    bytes_checked: int
    seconds: float
    at: float


class Released(_Message, frozen=True):
    """``clients``: leases that a forced release cut off."""

    bytes_freed: int
    clients: list[str]


class Refused(_Message, frozen=True):
    """A fixed reason (:mod:`weightcache.wire.reasons`) and its figures."""

    reason: str
    message: str


class LeaseStatus(_Part, frozen=True):
    """One open lease or claim. ``pid``, ``uid``, ``gid``: by the kernel, in the daemon's namespaces."""

    lease: str
    client: Client
    pid: int
    uid: int
    gid: int
    since: float
    generation: str
    group: int


class RankStatus(_Part, frozen=True):
    """One rank. ``phases``: seconds by phase of the last load. ``state``: see :mod:`weightcache.daemon.states`."""

    rank: int
    gpu: str
    state: str
    progress: Progress
    arena_bytes: int
    num_tensors: int
    generation: str
    attempts: int
    reason: str
    message: str
    phases: dict[str, float]
    leases: list[LeaseStatus]


class GroupStatus(_Part, frozen=True):
    """One group: ready only when every rank is."""

    group: int
    state: str
    ranks: list[RankStatus]
    claims: list[LeaseStatus]


class DaemonStatus(_Message, frozen=True):
    """Everything a person or a reporter asks for. Times are Unix seconds."""

    protocol: int
    version: str
    instance: str
    cache: CacheRef
    state: str
    reason: str
    message: str
    draining: bool
    started_at: float
    model: str
    memory: str
    key: keys.Key | None
    key_digest: str
    resident_bytes: int
    groups: list[GroupStatus]
    verification: Verified | None
    misses: dict[str, int]
    attaches: int


Request = Hello | Claim | Attach | Rejoin | Status | Verify | Release | Drain | Resume
Answer = (
    Welcome
    | Claimed
    | Attached
    | KeyMismatch
    | ContentUnproven
    | NotReady
    | Draining
    | Rejoined
    | Superseded
    | Verified
    | Released
    | Refused
    | DaemonStatus
)
