"""The words for what a daemon, a group and a rank are doing, and how one follows from the other.

A stored summary drifts from what it sums up. So only a rank has a state of its own; a group's and the daemon's are
derived from it each time someone asks.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "BUSY",
    "DIGESTING",
    "DRAINING",
    "FAILED",
    "LOADING",
    "PENDING",
    "READING",
    "READY",
    "REFUSED",
    "RELEASED",
    "SEALING",
    "STARTING",
    "VERIFYING",
    "WAITING_FOR_GATE",
    "daemon_state",
    "group_state",
]

PENDING = "Pending"
STARTING = "Starting"
WAITING_FOR_GATE = "WaitingForGate"
READING = "Reading"
DIGESTING = "Digesting"
SEALING = "Sealing"
VERIFYING = "Verifying"
READY = "Ready"
FAILED = "Failed"
RELEASED = "Released"
#: A rank in one of these is on its way to Ready.
BUSY = frozenset({PENDING, STARTING, WAITING_FOR_GATE, READING, DIGESTING, SEALING, VERIFYING})

LOADING = "Loading"
DRAINING = "Draining"
REFUSED = "Refused"


def group_state(ranks: Iterable[str]) -> str:
    """The state of a group from its ranks': ready only when every rank is. Pure."""
    found = set(ranks)
    if found == {READY}:
        return READY
    for state in (FAILED, RELEASED):
        if state in found:
            return state
    return LOADING if found & (BUSY - {PENDING}) or READY in found else PENDING


def daemon_state(groups: Iterable[str], *, draining: bool, refused: bool) -> str:
    """The state of a daemon from its groups': ``Refused`` before it owns anything, else the worst group's. Pure."""
    found = list(groups)
    if refused:
        return REFUSED
    if draining:
        return DRAINING
    if not found:
        return STARTING
    return next((state for state in (FAILED, RELEASED, LOADING, PENDING) if state in found), READY)
