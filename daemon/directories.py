"""Directories whose owner and mode are part of a promise.

A wrong mode shows nowhere until someone uses it: an engine holds a GPU's lock because it may open the lock file, a
group member puts its own socket in place of the daemon's. So what a directory is for decides which modes are allowed,
a directory is made closed and opened last, and what the kernel silently drops is looked for.

Checking uses stat and access only; nothing is opened.
"""

from __future__ import annotations

import contextlib
import enum
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from weightcache.wire import reasons

__all__ = ["Kind", "change_mode", "check", "file_kind", "invalid", "make", "mode_fault", "refusing"]


class Kind(enum.Enum):
    """What a directory is for, and with that what its mode may be."""

    Top = "top"
    Locks = "locks"
    Sockets = "sockets"


def mode_fault(kind: Kind, mode: int) -> str:
    """What is wrong with a directory's permission bits, as ``found, wanted``; empty if nothing. Pure."""
    found = f"mode {mode:04o}"
    if kind is Kind.Top and mode & 0o022:
        return f"{found}, wanted no write by group or others (0755)"
    if kind is Kind.Locks and mode & 0o007:
        return f"{found}, wanted nothing for others (2770 or 0700): who can open a lock file can hold the lock"
    if kind is Kind.Locks and mode & 0o070 and not mode & stat.S_ISGID:
        return f"{found}, wanted the set-group-ID bit (2770), or lock files belong to another group"
    if kind is Kind.Sockets and mode & 0o002:
        return f"{found}, wanted no write by others (2755 or 3775)"
    if kind is Kind.Sockets and mode & 0o020 and not mode & stat.S_ISVTX:
        return f"{found}, wanted the sticky bit with write by the group (3775), or one daemon moves another's sockets"
    return ""


def check(directory: Path, kind: Kind) -> None:
    """Refuse what this process cannot trust or use. Opens nothing, changes nothing.

    Raises Refusal ``RootInvalid`` with the path, what was found and what was wanted.
    """
    with refusing(directory):
        found = _stat(directory, kind)
        mode, uid = stat.S_IMODE(found.st_mode), os.geteuid()
        if found.st_uid not in (0, uid):
            raise invalid(directory, f"owner {found.st_uid}, wanted 0 or {uid} (this process)")
        if fault := mode_fault(kind, mode):
            raise invalid(directory, fault)
        if os.statvfs(directory).f_flag & os.ST_RDONLY:
            raise invalid(directory, "on a read-only mount, wanted a writable one")
        if kind is not Kind.Top and not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            groups = sorted({os.getegid(), *os.getgroups()})
            raise invalid(
                directory,
                f"owner {found.st_uid}, group {found.st_gid}, mode {mode:04o}, "
                f"wanted one that uid {uid} with groups {groups} may write to",
            )


def make(directory: Path, kind: Kind, mode: int, group: int) -> None:
    """Make it closed, then give it away, then open it; an existing one is changed only where it has to be.

    ``group``: owning group id, or -1 to leave mode and group of an existing directory, where ``kind`` allows them.
    Raises Refusal ``RootInvalid``.
    """
    with refusing(directory):
        try:
            os.mkdir(directory, 0o700)
            made = True
        except FileExistsError:
            made = False
        found = _stat(directory, kind)
        stranger = os.geteuid() == 0 and found.st_uid != 0
        regrouped = group >= 0 and found.st_gid != group
        if stranger or regrouped:
            os.chown(directory, 0 if stranger else -1, group if regrouped else -1)
        old = stat.S_IMODE(found.st_mode)
        if made or mode_fault(kind, old) or (group >= 0 and old != mode):
            change_mode(directory, mode)


def change_mode(directory: Path, mode: int) -> None:
    """chmod, and look whether it took: the kernel drops the set-group-ID bit without a word.

    Raises Refusal ``RootInvalid``, OSError.
    """
    os.chmod(directory, mode)
    found = os.stat(directory)
    if stat.S_IMODE(found.st_mode) != mode:
        raise invalid(
            directory,
            f"mode {stat.S_IMODE(found.st_mode):04o} after asking for {mode:04o}; "
            f"setting the group bit needs membership in group {found.st_gid} or CAP_FSETID",
        )


def file_kind(mode: int) -> str:
    """What a path is, in a word, from its mode. Pure."""
    names = {
        stat.S_IFDIR: "directory",
        stat.S_IFREG: "file",
        stat.S_IFLNK: "symbolic link",
        stat.S_IFSOCK: "socket",
        stat.S_IFIFO: "FIFO",
    }
    return names.get(stat.S_IFMT(mode), "device")


def invalid(path: Path, fault: str) -> reasons.Refusal:
    """The Refusal ``RootInvalid`` about a path. Pure."""
    return reasons.Refusal(reasons.Reason.RootInvalid, f"{path}: {fault}")


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turns an operating system's error into the Refusal ``RootInvalid`` about ``path``."""
    try:
        yield
    except FileNotFoundError as error:
        raise invalid(path, f"does not exist ({error.strerror}: {error.filename})") from error
    except OSError as error:
        raise invalid(path, f"{error.strerror}: {error.filename or path}") from error


def _stat(directory: Path, kind: Kind) -> os.stat_result:
    """Its stat, if it is a directory. The top may be a link to one, by its owner's choice; nothing below it may."""
    found = os.stat(directory) if kind is Kind.Top else os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode):
        raise invalid(directory, f"is a {file_kind(found.st_mode)}, wanted a directory")
    return found
