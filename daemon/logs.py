"""What a daemon says while it works: lines with figures for a log, a bar for a terminal.

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

    ``style``: ``text`` for people, ``json`` for machines (one object a line). On a terminal, progress is a line that
    is rewritten in place.
    """

    def __init__(self, stream: TextIO | None = None, style: str = "text", progress_seconds: float = 5.0) -> None:
        self._stream = stream or sys.stderr
        self._style = style
        self._interactive = style == "text" and self._stream.isatty()
        self._progress_seconds = 0.1 if self._interactive else progress_seconds
        self._last: dict[Any, float] = {}
        self._open_line = False

    def __call__(self, event: str, **fields: Any) -> None:
        """Say that ``event`` happened. Fields that end in ``_bytes`` and ``_seconds`` are formatted as such."""
        if event == "progress":
            self._progress(fields)
        elif self._style == "json":
            print(json.dumps({"time": time.time(), "event": event, **fields}), file=self._stream, flush=True)
        else:
            self._line(event, fields)

    def _line(self, event: str, fields: dict[str, Any]) -> None:
        if self._open_line:
            print(file=self._stream)
            self._open_line = False
        clock = time.strftime("%H:%M:%S")
        text = " ".join(f"{name}={_text(name, value)}" for name, value in fields.items() if value not in ("", None))
        print(f"{clock} {event} {text}".rstrip(), file=self._stream, flush=True)

    def _progress(self, fields: dict[str, Any]) -> None:
        now, done = time.monotonic(), fields["done_bytes"] >= fields["total_bytes"]
        if not done and now - self._last.get(fields["rank"], 0.0) < self._progress_seconds:
            return
        self._last[fields["rank"]] = now
        if self._style == "json":
            print(json.dumps({"time": time.time(), "event": "progress", **fields}), file=self._stream, flush=True)
        elif self._interactive:
            print("\r\x1b[2K" + _bar(fields), end="\n" if done else "", file=self._stream, flush=True)
            self._open_line = not done
        else:
            self._line(
                "progress", {name: value for name, value in fields.items() if name != "left_seconds" or value >= 0}
            )


def _bar(fields: dict[str, Any]) -> str:
    total = max(1, fields["total_bytes"])
    filled = int(30 * fields["done_bytes"] / total)
    left = fields["left_seconds"]
    return (
        f"rank {fields['rank']} [{'#' * filled}{'.' * (30 - filled)}] {100 * fields['done_bytes'] / total:5.1f} % "
        f"{size(fields['done_bytes'])} of {size(total)}, {size(fields['per_second_bytes'])}/s"
        + (f", {left:.0f} s left" if left >= 0 else "")
    )


def _text(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return size(value).replace(" ", "") + ("/s" if name == "per_second_bytes" else "")
    if name.endswith("_seconds"):
        return f"{value:.2f}"
    text = str(value)
    return json.dumps(text) if not text or " " in text or "=" in text else text
