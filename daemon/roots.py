"""The one directory of a node where daemons meet: what lies in it, and who may do what there.

Everything that keeps daemons and engines apart hangs on it: an engine that can open a lock file can hold a GPU's
lock, a group member that can write to a socket directory can put its own socket there, and a second root is a second
lock on the same GPU. So the layout is made in one place, and checked by every daemon before it starts.

    <root>/                 0755  root's or the daemon's
      gpu/ gate/ keeper/    2770 of the daemons' group, 0700 without one: lock files; engines must not see them
      s/                    2755 (3775 of the daemons' group): all that engine pods mount
        by-name/<namespace>/<name> -> ../../<10 hex>
        <10 hex of the cache UID>/     2750 of the socket group: sockets (0660), ``uid``, ``model/``

Before its locks are held a daemon opens nothing below the root but lock files; :func:`open_root` opens nothing at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weightcache.daemon import directories
from weightcache.wire import protocol, reasons, sockets

__all__ = [
    "Root",
    "cache_directory",
    "check_socket_paths",
    "make_cache_directory",
    "open_root",
    "prepare",
    "rank_socket_name",
    "remove_cache_directory",
    "short_uid",
]

#: Sockets are bound under their name and this, then renamed; so are files and links here.
TEMPORARY_SUFFIX = ".new"
_CACHE_MODE = 0o2750


@dataclass(frozen=True)
class Root:
    """A node's root directory (absolute) and the directories in it."""

    path: Path

    @property
    def gpu_directory(self) -> Path:
        """Locks of GPUs, host slots and caches, and of the choice among them."""
        return self.path / "gpu"

    @property
    def gate_directory(self) -> Path:
        """Slots of the load gate."""
        return self.path / "gate"

    @property
    def keeper_directory(self) -> Path:
        """Where daemons and the keeper meet."""
        return self.path / "keeper"

    @property
    def socket_directory(self) -> Path:
        """What engine pods mount, read-only."""
        return self.path / "s"

    @property
    def by_name_directory(self) -> Path:
        """Links from namespace and name to a cache's directory."""
        return self.path / "s" / "by-name"


# --- the root -------------------------------------------------------------------------------------------------------
def prepare(path: str | os.PathLike[str], *, daemons_group: int = -1, socket_group: int = -1) -> Root:
    """Make the layout, or mend it; twice is once. Foreign groups need root, or CHOWN, FOWNER and FSETID.

    ``daemons_group``: group id that daemons of several uids share; -1 keeps the locks to this uid, and leaves a group
    that is already there. ``socket_group``: of ``s/``, where no daemons' group owns it. An existing top directory
    that holds anything else keeps its mode: /tmp named by mistake must not become ours. Raises Refusal ``RootInvalid``.
    """
    root = Root(Path(os.path.abspath(path)))
    locks = (0o2770, daemons_group) if daemons_group >= 0 else (0o700, -1)
    sockets = (0o3775, daemons_group) if daemons_group >= 0 else (0o2755, socket_group)
    with directories.refusing(root.path):
        root.path.parent.mkdir(parents=True, exist_ok=True)
        foreign = set(os.listdir(root.path)) - {"gpu", "gate", "keeper", "s"} if root.path.is_dir() else set()
    if not foreign:
        directories.make(root.path, directories.Kind.Top, 0o755, -1)
    for directory, kind in _layout(root):
        directories.make(directory, kind, *(locks if kind is directories.Kind.Locks else sockets))
    return open_root(root.path)


def open_root(path: str | os.PathLike[str]) -> Root:
    """The root, if this process can trust and use it; changes nothing and opens nothing.

    Raises Refusal ``RootInvalid`` with the path, what was found and what was wanted.
    """
    root = Root(Path(os.path.abspath(path)))
    for directory, kind in ((root.path, directories.Kind.Top), *_layout(root)):
        directories.check(directory, kind)
    return root


def _layout(root: Root) -> tuple[tuple[Path, directories.Kind], ...]:
    """Every directory but the top, ``gpu`` last: where it exists, the others do. Pure."""
    return (
        (root.socket_directory, directories.Kind.Sockets),
        (root.by_name_directory, directories.Kind.Sockets),
        (root.keeper_directory, directories.Kind.Locks),
        (root.gate_directory, directories.Kind.Locks),
        (root.gpu_directory, directories.Kind.Locks),
    )


# --- names ----------------------------------------------------------------------------------------------------------
def short_uid(cache_uid: str) -> str:
    """The first 10 hex digits of a cache's UID: its directory's name. Pure. ValueError when it is no UUID."""
    digits = cache_uid.replace("-", "").lower()
    if not re.fullmatch(r"[0-9a-f]{10,}", digits):
        raise ValueError(f"cache UID {cache_uid!r} is not a UUID")
    return digits[:10]


def rank_socket_name(device_uuid: str) -> str:
    """The socket of the rank on a device: 16 hex digits of the GPU's UUID, or of a host slot's number. Pure.

    ``GPU-01234567-89ab-cdef-...`` -> ``0123456789abcdef.sock``; ``host-10`` -> ``000000000000000a.sock``.
    ValueError for anything else.
    """
    if slot := re.fullmatch(r"host-([0-9]+)", device_uuid):
        return f"{int(slot[1]):016x}.sock"
    digits = device_uuid.removeprefix("GPU-").replace("-", "").lower()
    if device_uuid.startswith("GPU-") and re.fullmatch(r"[0-9a-f]{16,}", digits):
        return f"{digits[:16]}.sock"
    raise ValueError(f"{device_uuid!r} is neither a GPU's UUID nor a host slot")


def cache_directory(root: Root, cache_uid: str) -> Path:
    """Where a cache's sockets lie. Pure."""
    return root.socket_directory / short_uid(cache_uid)


def check_socket_paths(root: Root, cache_uid: str, devices: Sequence[str]) -> None:
    """Refuse socket paths that the kernel would refuse later, with another name for it. Pure.

    ``devices``: UUIDs. Raises Refusal ``SocketPathTooLong`` with the longest path, its bytes and the limit; the
    temporary names that sockets are bound under count.
    """
    directory = cache_directory(root, cache_uid)
    names = [sockets.DAEMON_SOCKET, *(rank_socket_name(device) for device in devices)]
    longest = max((os.fsencode(directory / f"{name}{TEMPORARY_SUFFIX}") for name in names), key=len)
    excess = len(longest) - sockets.PATH_LIMIT_BYTES
    if excess > 0:
        raise reasons.Refusal(
            reasons.Reason.SocketPathTooLong,
            f"{os.fsdecode(longest)}: {len(longest)} bytes, {sockets.PATH_LIMIT_BYTES} are the limit; "
            f"choose a root that is shorter than {root.path} by {excess} bytes",
        )


# --- a cache's directory --------------------------------------------------------------------------------------------
def make_cache_directory(root: Root, cache: protocol.CacheRef, socket_group: int = -1) -> Path:
    """The cache's directory under ``s/`` and the link to it by name. The cache's lock must be held; twice is once.

    ``socket_group``: group id whose members may connect, -1 for this process's own. They can enter the directory and
    not change it. Raises Refusal ``RootInvalid`` when the directory is another uid's or another cache's.
    """
    directory = cache_directory(root, cache.uid)
    with directories.refusing(directory):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        _check_ours(directory, cache)
        _give_to_group(directory, socket_group if socket_group >= 0 else os.getegid())
        directories.change_mode(directory, _CACHE_MODE)
        _write_uid(directory, cache.uid)
    link = _link_of(root, cache)
    with directories.refusing(link):
        _make_namespace(root, link.parent)
        temporary = link.parent / f".{directory.name}{TEMPORARY_SUFFIX}"
        temporary.unlink(missing_ok=True)
        os.symlink(Path("..", "..", directory.name), temporary)
        os.rename(temporary, link)
    return directory


def remove_cache_directory(root: Root, cache: protocol.CacheRef) -> bool:
    """Remove the cache's directory, and the link by name if it leads there. The cache's lock must be held.

    Only what carries this cache's whole UID goes: a cache deleted and made again under the same name keeps its own.
    False when there was nothing of ours. Raises Refusal ``RootInvalid`` when it cannot be removed.
    """
    directory, link = cache_directory(root, cache.uid), _link_of(root, cache)
    with directories.refusing(directory):
        if _uid_in(directory) != cache.uid:
            return False
        with contextlib.suppress(FileNotFoundError):
            if Path(os.readlink(link)).name == directory.name:
                os.unlink(link)
        shutil.rmtree(directory)
    return True


def _link_of(root: Root, cache: protocol.CacheRef) -> Path:
    return root.by_name_directory / cache.namespace / cache.name


def _check_ours(directory: Path, cache: protocol.CacheRef) -> None:
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise directories.invalid(
            directory,
            f"a {directories.file_kind(found.st_mode)} of owner {found.st_uid}, wanted a directory of owner "
            f"{os.geteuid()} (this process); remove it once nobody uses it",
        )
    other = _uid_in(directory)
    if other not in ("", cache.uid):
        raise directories.invalid(
            directory, f"belongs to cache {other}, wanted {cache.uid}: the first 10 digits of both are equal"
        )


def _give_to_group(directory: Path, group: int) -> None:
    found = os.stat(directory)
    if found.st_gid == group:
        return
    try:
        os.chown(directory, -1, group)
    except PermissionError as error:
        raise directories.invalid(
            directory, f"group {found.st_gid}, wanted {group}, which uid {os.geteuid()} is no member of"
        ) from error


def _make_namespace(root: Root, directory: Path) -> None:
    """A namespace's directory, open to the same daemons as ``by-name`` itself."""
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        return
    directories.change_mode(directory, stat.S_IMODE(os.stat(root.by_name_directory).st_mode))


def _uid_in(directory: Path) -> str:
    """The cache UID that a directory carries; empty when it carries none. Raises OSError."""
    try:
        with open(directory / "uid", encoding="ascii", errors="replace") as file:
            return file.read(256).strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _write_uid(directory: Path, uid: str) -> None:
    temporary = directory / f"uid{TEMPORARY_SUFFIX}"
    temporary.unlink(missing_ok=True)
    temporary.write_text(f"{uid}\n", encoding="ascii")
    temporary.chmod(0o444)
    temporary.rename(directory / "uid")
