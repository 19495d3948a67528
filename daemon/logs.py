"""What a daemon says while it works: lines with figures (a terminal gets bars: :mod:`weightcache.cli.bars`).

The daemon reports facts to an observer and knows nothing of formats; this module is that observer. A line must let
the person on call see what is slow without a second command: bytes, rate, time left, seconds by phase.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

__all__ = ["Narrator", "size"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(size_bytes: float) -> str:
    """Bytes for people: two decimals from KiB on. Pure."""
    value, unit = float(size_bytes), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"


class Narrator:
    """An observer that writes one line an event; progress at most every ``progress_seconds`` a rank.

    ``style``: ``text`` for people, ``json`` for machines (one object a line).
    """

    def __init__(self, stream: TextIO | None = None, style: str = "text", progress_seconds: float = 5.0) -> None:
        self._stream = stream or sys.stderr
        self._style = style
        self._progress_seconds = progress_seconds
        self._last: dict[tuple[int, int], float] = {}

    def __call__(self, event: str, **fields: Any) -> None:
        """Say that ``event`` happened. Fields that end in ``_bytes`` and ``_seconds`` are formatted as such."""
        if event == "progress":
            if not self._is_due(fields):
                return
            fields = {name: value for name, value in fields.items() if name != "left_seconds" or value >= 0}
        if self._style == "json":
            print(json.dumps({"time": time.time(), "event": event, **fields}), file=self._stream, flush=True)
        else:
            self._line(event, fields)

    def _line(self, event: str, fields: dict[str, Any]) -> None:
        clock = time.strftime("%H:%M:%S")
        text = " ".join(f"{name}={_text(name, value)}" for name, value in fields.items() if value not in ("", None))
        print(f"{clock} {event} {text}".rstrip(), file=self._stream, flush=True)

    def _is_due(self, fields: dict[str, Any]) -> bool:
        rank, now = (fields["group"], fields["rank"]), time.monotonic()
        is_due = fields["done_bytes"] >= fields["total_bytes"] or (
            now - self._last.get(rank, -self._progress_seconds) >= self._progress_seconds
        )
        if is_due:
            self._last[rank] = now
        return is_due


def _text(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return size(value).replace(" ", "") + ("/s" if name == "per_second_bytes" else "")
    if name.endswith("_seconds"):
        return f"{value:.2f}"
    text = str(value)
    return json.dumps(text) if not text or " " in text or "=" in text else text
