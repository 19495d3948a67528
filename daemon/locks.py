"""Locks that outlive no one: ``flock`` on files that are never deleted.

A PID file says that someone was there once; after a crash, or across PID namespaces, a dead holder looks alive and a
live one dead. A deleted lock file that is still locked is worse: the next process creates the name again, locks the
new file, and both own the GPU. Here the kernel's lock on the open file is the only truth. It ends with its last
descriptor, whatever ended the process, and the file stays. The line in the file says who holds it; it is for people,
may be stale or torn, and decides nothing.

A descriptor is close-on-exec. A child that must keep the lock beyond its parent's death (a loader, whose memory is
still on the GPU) gets it through ``pass_fds``; the lock is free when both have closed it.
"""

from __future__ import annotations

import fcntl
import os
import random
import stat
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import msgspec

from weightcache.daemon import directories
from weightcache.wire import reasons

__all__ = ["HeldLock", "Holder", "lock_within", "try_lock"]

#: Files are made with this: any daemon of the directory's group may lock them.
FILE_MODE = 0o660
_LIMIT_BYTES = 4096
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class Holder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who holds a lock, in its own words. ``since``: Unix seconds. ``detail``: one line in place of cache and pod.

    ``pid_namespace``: inode of ``/proc/self/ns/pid``, stamped by :func:`try_lock`, so that a reader knows whether
    the PID means anything to it.
    """

    namespace: str = ""
    name: str = ""
    uid: str = ""
    pod: str = ""
    detail: str = ""
    pid: int = 0
    pid_namespace: int = 0
    since: float = 0.0
    version: str = ""

    def describe(self) -> str:
        """One line for messages, without control characters."""
        parts = [
            self.detail,
            f"cache {self.namespace}/{self.name} ({self.uid})" if self.name else "",
            f"pod {self.pod}" if self.pod else "",
            f"pid {self.pid}{self._foreign_pid()}" if self.pid else "",
            f"since {_instant(self.since)}" if self.since else "",
            f"version {self.version}" if self.version else "",
        ]
        text = ", ".join(part for part in parts if part) or "a holder that did not say who it is"
        return "".join(character if character.isprintable() else "?" for character in text)

    def _foreign_pid(self) -> str:
        return " of another PID namespace" if self.pid_namespace not in (0, _pid_namespace()) else ""


@dataclass
class HeldLock:
    """A lock in this process's hands. ``descriptor``: may be passed to a child, which then holds it as well."""

    path: Path
    descriptor: int

    def close(self) -> None:
        """Let go; twice is once. A child that inherited the descriptor keeps the lock: nothing is unlocked for it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def try_lock(path: Path, holder: Holder) -> HeldLock | Holder:
    """Take the lock at ``path`` at once, or say who holds it.

    Raises Refusal ``RootInvalid`` when the file cannot be opened or is no regular file (a planted link, say).
    """
    while True:
        descriptor, found = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return _read(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise _invalid(path, f"flock: {error.strerror}") from error
        if _names(path, found):
            _write(descriptor, holder)
            return HeldLock(path, descriptor)
        os.close(descriptor)  # someone deleted the file between open and lock: this lock would exclude nobody


def lock_within(path: Path, holder: Holder, seconds: float) -> HeldLock | Holder:
    """As :func:`try_lock`, but tries for ``seconds``; for locks that are held for a moment only."""
    deadline = time.monotonic() + seconds
    while True:
        found = try_lock(path, holder)
        if isinstance(found, HeldLock) or time.monotonic() >= deadline:
            return found
        time.sleep(random.uniform(0.005, 0.03))


def _open(path: Path) -> tuple[int, os.stat_result]:
    """The lock file, made when absent. flock needs only read access, so a file that may only be read will do."""
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, FILE_MODE)
        except PermissionError as denied:
            try:
                descriptor = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
            except FileNotFoundError:
                raise denied from None  # there is none, and we may not make one
    except OSError as error:
        raise _invalid(path, _open_fault(path, error)) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise _invalid(path, f"is a {directories.file_kind(found.st_mode)}, wanted a regular file")
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != FILE_MODE:
        os.fchmod(descriptor, FILE_MODE)  # the umask had its say at creation
    return descriptor, found


def _open_fault(path: Path, error: OSError) -> str:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return str(error.strerror)
    if stat.S_ISREG(mode):
        return f"{error.strerror} (mode {stat.S_IMODE(mode):04o})"
    return f"is a {directories.file_kind(mode)}, wanted a regular file"


def _names(path: Path, found: os.stat_result) -> bool:
    try:
        now = os.lstat(path)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino)


def _write(descriptor: int, holder: Holder) -> None:
    """Say who we are. No promise hangs on it: a full disk or a file we may only read leaves the former line."""
    line = msgspec.json.encode(msgspec.structs.replace(holder, pid_namespace=_pid_namespace())) + b"\n"
    try:
        os.pwrite(descriptor, line, 0)  # before the cut, so that a reader never finds the file empty
        os.ftruncate(descriptor, len(line))
    except OSError:
        return


def _read(descriptor: int) -> Holder:
    """What the file says: its first line. Waits a moment for a first holder that is just writing it."""
    for _ in range(5):
        line, ended, _ = os.pread(descriptor, _LIMIT_BYTES, 0).partition(b"\n")
        if ended:
            try:
                return msgspec.json.decode(line, type=Holder)
            except msgspec.MsgspecError:
                return Holder()
        time.sleep(0.01)
    return Holder()


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _instant(since: float) -> str:
    try:
        return datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{since:g}"


def _invalid(path: Path, fault: str) -> reasons.Refusal:
    return reasons.Refusal(reasons.Reason.RootInvalid, f"lock file {path}: {fault}")
