"""Which daemon a command means.

People know a cache by its name; on the node there are directories by UID, links by name, and leftovers of both. A
command that changes something must never guess between two.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from weightcache.wire import reasons, sockets

__all__ = ["Target", "find", "find_one", "list_below"]

_DIRECTORY = re.compile(r"[0-9a-f]{10}")


@dataclass(frozen=True)
class Target:
    """A daemon by the name people know, and its socket. ``name`` is ``namespace/name``, the UID part, or the path."""

    name: str
    socket: Path


def find(root: Path, cache: str | None, socket: Path | None) -> list[Target]:
    """The daemons that a command line names: one, or all below the root when it names none.

    ``root`` may also be the directory of sockets itself, which is all that an engine's pod mounts. Whether a daemon
    answers is another question. Raises Refusal ``DaemonUnreachable`` when there is none, ``SettingsInvalid`` when a
    bare name means several.
    """
    if socket is not None:
        return [Target(str(socket), socket)]
    found = list_below(root)
    if cache is None:
        if not found:
            raise _unreachable(f"no cache below {_socket_directory(root)}")
        return found
    matches = [target for target in found if cache in (target.name, target.name.rpartition("/")[2])]
    if not matches:
        names = ", ".join(target.name for target in found) or "none"
        raise _unreachable(f"no cache {cache} below {_socket_directory(root)}; found: {names}")
    if len(matches) > 1:
        raise _ambiguous(f"{cache} could be any of {', '.join(target.name for target in matches)}")
    return matches


def find_one(root: Path, cache: str | None, socket: Path | None) -> Target:
    """As :func:`find`, but exactly one. Raises Refusal ``SettingsInvalid`` that lists them when there are more."""
    found = find(root, cache, socket)
    if len(found) > 1:
        raise _ambiguous(f"name one of the caches below {root}: {', '.join(target.name for target in found)}")
    return found[0]


def list_below(root: Path) -> list[Target]:
    """Every cache directory below a root, by name. Those that no name points to are called by their UID part.

    Raises Refusal ``RootInvalid`` when the directory cannot be read.
    """
    directory = _socket_directory(root)
    try:
        uids = sorted(entry for entry in os.listdir(directory) if _DIRECTORY.fullmatch(entry))
        names = {link.resolve().name: f"{link.parent.name}/{link.name}" for link in directory.glob("by-name/*/*")}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise reasons.Refusal(reasons.Reason.RootInvalid, f"{directory}: {error.strerror}") from error
    targets = [Target(names.get(uid, uid), directory / uid / sockets.DAEMON_SOCKET) for uid in uids]
    return sorted(targets, key=lambda target: target.name)


def _socket_directory(root: Path) -> Path:
    return root if (root / "by-name").is_dir() else root / "s"


def _unreachable(message: str) -> reasons.Refusal:
    return reasons.Refusal(reasons.Reason.DaemonUnreachable, message)


def _ambiguous(message: str) -> reasons.Refusal:
    return reasons.Refusal(reasons.Reason.SettingsInvalid, message)
