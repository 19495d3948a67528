"""Figures as people read them: times, rates, bars, short names.

Bytes are :func:`weightcache.daemon.logs.size`'s, so that a log and a table say the same.
"""

from __future__ import annotations

from weightcache.daemon import logs

__all__ = ["bar", "duration", "rate", "short_device", "size"]

size = logs.size


def duration(seconds: float) -> str:
    """A length of time in its two largest units: ``0.4 s``, ``12 s``, ``3 m 05 s``, ``2 h 10 m``. Pure."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    for unit, smaller, length, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // part:02d} {smaller}"
    return f"{whole} s"


def rate(bytes_per_second: float) -> str:
    """Bytes a second. Pure."""
    return f"{size(bytes_per_second)}/s"


def bar(done: float, total: float, width: int) -> str:
    """A bar of ``width`` cells, heavy for what is done and light for what is not: it reads without colour too. Pure."""
    filled = min(width, int(width * done / total)) if total > 0 else 0
    return "━" * filled + "─" * (width - filled)


def short_device(uuid: str) -> str:
    """A GPU's UUID cut to its first group (as people tell GPUs apart); host slots as they are. Pure."""
    kind, _, rest = uuid.partition("-")
    return f"{kind}-{rest.split('-', 1)[0]}" if kind in {"GPU", "MIG"} else uuid
