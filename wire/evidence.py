"""Proving that two processes mean the same checkpoint bytes, without reading them again.

A path proves nothing (files are replaced), headers prove nothing (fine-tunes share them), and reading 400 GB to prove
sameness costs what the cache was to save. Cheapest exact evidence first:

1. the cache's UID, when the engine has no weight files of its own and uses the daemon's ``model/``;
2. hub blob names: the Hugging Face cache names a blob by the SHA-256 of its content;
3. the same inode, size, mtime and ctime of every file, where the kernel's clock can have told two writes apart;
4. the full digest, computed once and kept beside the stat.

Exact means against accident: someone who forges ctimes on the node could as well write into GPU memory.
"""

from __future__ import annotations

import enum
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from weightcache.wire import digests

__all__ = [
    "STAT_SETTLE_SECONDS",
    "Evidence",
    "FileEvidence",
    "FileStat",
    "HeldContent",
    "HeldFile",
    "Verdict",
    "blob_name",
    "file_stat",
    "gather",
    "is_settled",
    "judge",
]

#: A file written within the clock's granularity of a stat can change again under an equal ctime. Two seconds cover
#: every file system's granularity (ext3 and NFSv2 keep whole seconds).
STAT_SETTLE_SECONDS = 2.0
_SHA256 = re.compile(r"^[0-9a-f]{64}$")


class Verdict(enum.Enum):
    """Outcome of :func:`judge`."""

    Same = "Same"
    Different = "Different"
    Unproven = "Unproven"


class FileStat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the kernel says of a file. Nanoseconds since the epoch."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


class FileEvidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file as a client sees it. ``blob``: hub blob name (64 hex) or empty."""

    name: str
    stat: FileStat
    blob: str = ""


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a client offers. Any part may be empty. ``digest``: checkpoint digest (32 hex)."""

    cache_uid: str = ""
    files: list[FileEvidence] = []
    digest: str = ""


class HeldFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file as the daemon read it. ``settled``: the stat may be trusted as evidence."""

    name: str
    stat: FileStat
    settled: bool
    blob: str
    digest: bytes


class HeldContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint behind an arena: digest (32 hex), files, and the cache that holds it."""

    digest: str
    files: list[HeldFile]
    cache_uid: str


def file_stat(path: str | os.PathLike[str] | int) -> FileStat:
    """The stat of a path (links followed) or descriptor. Raises OSError."""
    found = os.stat(path)
    return FileStat(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def is_settled(stat: FileStat, taken_at: float | None = None) -> bool:
    """Whether a stat taken at ``taken_at`` (Unix seconds, now by default) is old enough to be evidence."""
    now = time.time() if taken_at is None else taken_at
    return now - stat.ctime_ns / 1e9 >= STAT_SETTLE_SECONDS


def blob_name(path: str | os.PathLike[str]) -> str:
    """The hub blob that a file of a Hugging Face cache is a link to, or empty. Only SHA-256 names count.

    Layout: ``snapshots/<revision>/<file> -> ../../blobs/<sha256>`` (huggingface_hub, "Understand caching").
    """
    if not os.path.islink(path):
        return ""
    target = Path(os.readlink(path))
    return target.name if target.parent.name == "blobs" and _SHA256.match(target.name) else ""


def gather(directory: str | os.PathLike[str], names: Iterable[str], cache_uid: str = "") -> Evidence:
    """The cheap evidence for files below ``directory``: one stat and one readlink a file. Raises OSError."""
    files = []
    for name in sorted(names):
        path = os.path.join(directory, name)
        files.append(FileEvidence(name, file_stat(path), blob_name(path)))
    return Evidence(cache_uid=cache_uid, files=files)


def judge(offered: Evidence, held: HeldContent) -> tuple[Verdict, str]:
    """Whether the client's checkpoint is the daemon's, and the sentence that says why. Pure."""
    if offered.digest:
        if offered.digest == held.digest:
            return Verdict.Same, "equal content digests"
        return Verdict.Different, f"content digest {offered.digest}, held {held.digest}"
    if offered.cache_uid and not offered.files:
        if offered.cache_uid == held.cache_uid:
            return Verdict.Same, "the cache's own model directory"
        return Verdict.Different, f"cache {offered.cache_uid}, this daemon serves {held.cache_uid}"
    if not offered.files:
        return Verdict.Unproven, "no evidence was offered"
    return _judge_files(offered.files, held.files)


def _judge_files(offered: Sequence[FileEvidence], held: Sequence[HeldFile]) -> tuple[Verdict, str]:
    ours = {file.name: file for file in held}
    theirs = {file.name: file for file in offered}
    if ours.keys() != theirs.keys() or len(theirs) != len(offered):
        only = sorted(ours.keys() ^ theirs.keys())
        return Verdict.Different, f"different sets of files: {', '.join(only[:5])}"
    unproven = ""
    for name, file in theirs.items():
        mine = ours[name]
        if file.stat.size_bytes != mine.stat.size_bytes:
            return Verdict.Different, f"{name}: {file.stat.size_bytes} bytes, held {mine.stat.size_bytes}"
        if file.blob and mine.blob:
            if file.blob != mine.blob:
                return Verdict.Different, f"{name}: hub blob {file.blob}, held {mine.blob}"
        elif file.stat != mine.stat:
            unproven = unproven or f"{name}: another inode, mtime or ctime than the file the daemon read"
        elif not mine.settled:
            unproven = unproven or f"{name}: written less than {STAT_SETTLE_SECONDS:g} s before the daemon read it"
    if unproven:
        return Verdict.Unproven, unproven
    return Verdict.Same, "equal stat or hub blob of every file"


class DigestStore:
    """File digests kept beside the stat they belong to, so that a full digest is computed once.

    One small file an entry in ``directory``; written to a temporary name and renamed. A damaged or foreign entry
    counts as absent. Only settled stats are stored or believed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    def digest_of(self, path: str | os.PathLike[str], num_threads: int = 4) -> bytes:
        """The 16-byte digest of a file: from the store, or computed and stored. Raises OSError if it changes."""
        before = file_stat(path)
        settled = is_settled(before)
        known = self._load(before) if settled else None
        if known is not None:
            return known
        digest = digests.digest_of_file(path, num_threads)
        if file_stat(path) != before:
            raise OSError(f"{os.fspath(path)} changed while it was being read")
        if settled:
            self.save(before, digest)
        return digest

    def save(self, stat: FileStat, digest: bytes) -> None:
        """Keep a digest. Failure to write is not an error: the next one computes it again."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = self._path(stat).with_suffix(f".{os.getpid()}.tmp")
            temporary.write_bytes(msgspec.msgpack.encode([digests.ALGORITHM, stat, digest]))
            temporary.rename(self._path(stat))
        except OSError:
            return

    def _load(self, stat: FileStat) -> bytes | None:
        try:
            algorithm, kept, digest = msgspec.msgpack.decode(
                self._path(stat).read_bytes(), type=tuple[str, FileStat, bytes]
            )
        except (OSError, msgspec.MsgspecError):
            return None
        return digest if (algorithm, kept, len(digest)) == (digests.ALGORITHM, stat, digests.DIGEST_BYTES) else None

    def _path(self, stat: FileStat) -> Path:
        return self._directory / digests.digest_of_value([stat.inode, stat.size_bytes, stat.mtime_ns, stat.ctime_ns])


def checkpoint_digest(
    directory: str | os.PathLike[str], names: Iterable[str], store: DigestStore, num_threads: int = 4
) -> str:
    """The full content digest of the named files (32 hex), each from the store where it is known. Raises OSError."""
    found = []
    for name in sorted(names):
        path = os.path.join(directory, name)
        digest = store.digest_of(path, num_threads)
        found.append(digests.FileDigest(name, os.stat(path).st_size, digest))
    return digests.digest_of_checkpoint(found)
