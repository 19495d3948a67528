"""Orders to a running daemon: ``verify``, ``drain``, ``resume``, ``release``.

Each goes to exactly one daemon, says in a line what came of it, and ends with the exit code of the daemon's own reason.
"""

from __future__ import annotations

import argparse

import msgspec

from weightcache.cli import asking, formats, targets
from weightcache.wire import protocol, reasons

__all__ = ["drain", "release", "resume", "verify"]


def verify(options: argparse.Namespace) -> int:
    """Judge the resident bytes. Raises Refusal ``Damaged`` with the tensors' names, ``NotReady`` without weights."""
    target = _target(options)
    verdict = asking.ask(target.socket, protocol.Verify(deep=options.deep), protocol.Verified, options.timeout)
    if options.output == "json":
        print(msgspec.json.format(msgspec.json.encode(verdict), indent=2).decode())
    if not verdict.sound:
        names = ", ".join(verdict.damaged)
        message = f"{target.name}: {len(verdict.damaged)} tensors differ from their digests: {names}"
        raise reasons.Refusal(reasons.Reason.Damaged, message)
    if options.output == "table":
        print(f"{target.name} is sound: {formats.size(verdict.bytes_checked)} checked in {verdict.seconds:.2f} s")
    return 0


def drain(options: argparse.Namespace) -> int:
    """No new leases from now on; says how many are still open."""
    target = _target(options)
    status = asking.ask(target.socket, protocol.Drain(), protocol.DaemonStatus, options.timeout)
    leases = sum(len(rank.leases) for group in status.groups for rank in group.ranks)
    claims = sum(len(group.claims) for group in status.groups)
    print(f"{target.name} drains: no new leases; {leases} leases and {claims} claims are still open")
    return 0


def resume(options: argparse.Namespace) -> int:
    """Leases are given again, and what was released is loaded again."""
    target = _target(options)
    status = asking.ask(target.socket, protocol.Resume(), protocol.DaemonStatus, options.timeout)
    loading = "" if status.state == "Ready" else "; what was released is loaded again"
    print(f"{target.name} gives leases again; it is {status.state}{loading}")
    return 0


def release(options: argparse.Namespace) -> int:
    """Free the weights. Raises Refusal ``LeasesOpen`` with the holders' names unless forced, ``KeyMismatch``."""
    if options.grace and not options.force:
        raise reasons.Refusal(reasons.Reason.SettingsInvalid, "--grace means nothing without --force")
    target = _target(options)
    order = protocol.Release(key_digest=options.key, force=options.force, grace_seconds=options.grace)
    released = asking.ask(target.socket, order, protocol.Released, options.timeout + options.grace)
    print(f"{target.name} released {formats.size(released.bytes_freed)}; `weightcache resume` loads them again")
    for client in released.clients:
        print(f"cut off: {client} (what it has mapped stays in memory until it ends)")
    return 0


def _target(options: argparse.Namespace) -> targets.Target:
    return targets.find_one(options.root, options.cache, options.socket)
