"""``weightcache status``: ask, print, and again with ``--watch``.

A status that hides a dead daemon is worse than none: what does not answer is shown as such, and the exit code says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from rich import console, live

from weightcache.cli import asking, consoles, main, statuses, targets
from weightcache.wire import protocol, reasons

__all__ = ["show_status"]


def show_status(options: argparse.Namespace) -> int:
    """Print the status of the named daemon, or of all below the root; returns 0 when every one answered.

    With several and some silent: what answered is printed, the exit code is that of the first silent one.
    """
    if options.watch:
        return _watch(options)
    findings = _gather(options)
    if options.output == "json":
        _print_json(findings, one=_names_one(options), indent=2)
        for finding in findings:
            if finding.refusal:
                main.report(finding.refusal)
    else:
        consoles.show(_page(findings))
    return _exit_code(findings)


def _gather(options: argparse.Namespace) -> list[statuses.Finding]:
    found = targets.find(options.root, options.cache, options.socket)
    with ThreadPoolExecutor(min(16, len(found))) as pool:
        return list(pool.map(lambda target: _ask(target, options.timeout), found))


def _ask(target: targets.Target, timeout_seconds: float) -> statuses.Finding:
    try:
        status = asking.ask(target.socket, protocol.Status(), protocol.DaemonStatus, timeout_seconds)
    except reasons.Refusal as refusal:
        return statuses.Finding(target, refusal=refusal)
    return statuses.Finding(target, status)


def _watch(options: argparse.Namespace) -> int:
    terminal = consoles.build()
    if options.output == "json" or not terminal.is_terminal:
        while True:
            findings = _gather_patiently(options)
            if options.output == "json":
                _print_json(findings, one=_names_one(options), indent=0)
            else:
                consoles.show(_page(findings))
            sys.stdout.flush()
            time.sleep(options.interval)
    with live.Live(console=terminal, auto_refresh=False, vertical_overflow="crop") as screen:
        while True:
            screen.update(_page(_gather_patiently(options)), refresh=True)
            time.sleep(options.interval)


def _gather_patiently(options: argparse.Namespace) -> list[statuses.Finding]:
    """As :func:`_gather`, but a root that is still empty, or empty again, is something to watch, not to end on."""
    try:
        return _gather(options)
    except reasons.Refusal as refusal:
        if refusal.reason is not reasons.Reason.DaemonUnreachable:
            raise
        name = options.cache or str(options.root)
        return [statuses.Finding(targets.Target(name, options.root), refusal=refusal)]


def _page(findings: Sequence[statuses.Finding]) -> console.Group:
    return statuses.build_page(findings, time.time(), consoles.build().width)


def _names_one(options: argparse.Namespace) -> bool:
    return options.cache is not None or options.socket is not None


def _print_json(findings: Sequence[statuses.Finding], *, one: bool, indent: int) -> None:
    """One object where one daemon was named, else a list; ``indent`` 0: one line. Silent daemons are left out."""
    found = [finding.status for finding in findings if finding.status]
    if one and not found:
        return
    encoded = msgspec.json.encode(found[0] if one else found)
    print(msgspec.json.format(encoded, indent=indent).decode() if indent else encoded.decode())


def _exit_code(findings: Sequence[statuses.Finding]) -> int:
    silent = [finding.refusal for finding in findings if finding.refusal]
    return reasons.exit_code(silent[0].reason) if silent else 0
