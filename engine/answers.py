"""What a daemon's "no" means to an engine: each answer as a refusal with a fixed reason.

An engine that cannot attach has to be told, in one message, what it asked for, what is held, and what to change; or
that waiting mends it, and for how long. Drawn as a tree:

    Refusal                 wrong for good: another request or another setting is needed
    ├── KeyMismatch         the daemon holds other weights; every field with both values
    └── Later               the same request may succeed in a while
"""

from __future__ import annotations

from collections.abc import Sequence

from weightcache.wire import keys, protocol, reasons

__all__ = ["KeyMismatch", "Later", "can_wait", "refusal_of"]

#: Reasons that time alone can mend, seen from an engine.
_WAITABLE = frozenset(
    {
        reasons.Reason.DaemonUnreachable,
        reasons.Reason.DeadlineExceeded,
        reasons.Reason.NotReady,
        reasons.Reason.Draining,
        reasons.Reason.GroupTaken,
    }
)


class KeyMismatch(reasons.Refusal):
    """The daemon holds other weights than asked for; nothing was mapped. ``differences``: every field that differs."""

    def __init__(self, differences: Sequence[keys.Difference], where: str) -> None:
        super().__init__(
            reasons.Reason.KeyMismatch,
            f"the daemon at {where} holds other weights than asked for; nothing was mapped\n{_table(differences)}",
        )
        self.differences = tuple(differences)


class Later(reasons.Refusal):
    """Not now. ``retry_after_seconds``: when the daemon thinks that asking again is worth it."""

    def __init__(self, reason: reasons.Reason, message: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason, message)
        self.retry_after_seconds = retry_after_seconds


def can_wait(refusal: reasons.Refusal) -> bool:
    """Whether the same request may succeed later with nothing changed. Pure."""
    return refusal.reason in _WAITABLE


def refusal_of(answer: protocol.Answer, where: str) -> reasons.Refusal:
    """The refusal that an answer means to someone who wanted another one; ``where`` names the socket. Pure."""
    if isinstance(answer, protocol.KeyMismatch):
        return KeyMismatch(answer.differences, where)
    if isinstance(answer, protocol.NotReady):
        return Later(reasons.Reason.NotReady, f"{where}: {_not_ready(answer)}", answer.retry_after_seconds)
    if isinstance(answer, protocol.Draining):
        return Later(
            reasons.Reason.Draining,
            f"{where}: the daemon gives no new leases; it asks to try again in {answer.retry_after_seconds:g} s",
            answer.retry_after_seconds,
        )
    if isinstance(answer, protocol.ContentUnproven):
        return reasons.Refusal(
            reasons.Reason.ContentUnproven,
            f"{where}: {answer.message}; name the checkpoint, so that its full digest can be sent",
        )
    if isinstance(answer, protocol.Refused):
        return _refused(answer, where)
    return reasons.Refusal(reasons.Reason.ProtocolViolated, f"{where}: {type(answer).__name__} is no answer to this")


def _refused(answer: protocol.Refused, where: str) -> reasons.Refusal:
    try:
        return reasons.Refusal(reasons.Reason(answer.reason), f"{where}: {answer.message}")
    except ValueError:
        return reasons.Refusal(
            reasons.Reason.ProtocolViolated,
            f"{where}: refused for a reason that this version does not know, {answer.reason!r}: {answer.message}",
        )


def _not_ready(answer: protocol.NotReady) -> str:
    done, total = answer.progress.bytes_done, answer.progress.bytes_total
    text = f"the weights are not ready, state {answer.state}"
    if total:
        text += f", {done / 1e9:.1f} of {total / 1e9:.1f} GB read"
    if answer.progress.seconds_left >= 0:
        text += f", about {answer.progress.seconds_left:.0f} s left"
    if answer.reason:
        text += f"; {answer.reason}: {answer.message}"
    return text


def _table(differences: Sequence[keys.Difference]) -> str:
    rows = [("field", "wanted", "held", "what to do")]
    rows += [(found.field, found.wanted, found.held, found.advice) for found in differences]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )
