"""Where output goes: a terminal, a pipe, or a log, and what each of them can show.

A table that is cut at 80 columns because nobody is looking loses data in a file, and colour codes in it break grep.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich import console as rich_console

__all__ = ["build", "show"]

#: Off a terminal nothing is cut or folded: tables take what they need.
UNBOUNDED_COLUMNS = 10_000


def build(stream: TextIO | None = None) -> rich_console.Console:
    """A console on ``stream`` (standard output). Colour only on a terminal, and not with NO_COLOR (no-color.org)."""
    from rich import console as rich_console

    target = stream or sys.stdout
    if isinstance(target, io.TextIOWrapper):
        target.reconfigure(errors="replace")  # a bar is not worth a UnicodeEncodeError
    terminal = target.isatty()
    return rich_console.Console(
        file=target,
        width=None if terminal else UNBOUNDED_COLUMNS,
        force_terminal=None if terminal else False,
        no_color=not terminal or bool(os.environ.get("NO_COLOR")),
        highlight=False,
        markup=False,
    )


def show(renderable: rich_console.RenderableType) -> None:
    """Print on standard output; lines end where their text does."""
    console = build()
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
