"""A loading daemon on a terminal: a bar a rank, and the log's lines above them.

Eight ranks that rewrite one line hide each other, and eight logs of percentages scroll the one warning away. While
nothing loads there are no bars, and nothing is drawn: a daemon serves for weeks.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, TextIO, cast

from rich import console as rich_console
from rich import progress, table, text

from weightcache.cli import consoles, formats
from weightcache.daemon import logs

__all__ = ["Bars"]

_ENDED = frozenset({"rank-ready", "rank-failed"})
#: Columns of a line before its figures: which rank, phase, bar.
_FIXED_COLUMNS = 16 + 15 + 31


class Bars:
    """An observer of the daemon (:class:`weightcache.daemon.logs.Narrator`'s interface) and a context manager.

    A rank's bar appears with its first phase and goes when the rank is ready or failed, which is said in a line.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        console = consoles.build(stream or sys.stderr)
        figures = table.Column(no_wrap=True, overflow="ellipsis", max_width=max(12, console.width - _FIXED_COLUMNS))
        self._progress = progress.Progress(
            progress.TextColumn("[dim]{task.fields[where]}"),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=30),
            _Figures(table_column=figures),
            console=console,
            transient=True,
            refresh_per_second=8,
        )
        self._narrate = logs.Narrator(cast(TextIO, _Above(console)))  # print() asks for no more
        self._tasks: dict[tuple[int, int], progress.TaskID] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, event: str, **fields: Any) -> None:
        """Say that ``event`` happened; see the daemon's observer."""
        place = (fields.get("group", -1), fields.get("rank", -1))
        if event == "progress":
            self._progress.update(
                self._task(place),
                completed=fields["done_bytes"],
                total=fields["total_bytes"],
                rate=fields["per_second_bytes"],
                left=fields["left_seconds"],
            )
        elif event == "phase":
            self._progress.update(self._task(place), description=fields["state"], detail=fields.get("detail", ""))
        else:
            if event in _ENDED:
                self._remove([place])
            elif event in {"refused", "stopped"}:
                self._remove(list(self._tasks))
            self._narrate(event, **fields)

    def _task(self, place: tuple[int, int]) -> progress.TaskID:
        if place not in self._tasks:
            self._progress.start()
            self._tasks[place] = self._progress.add_task(
                "Starting", total=_UNKNOWN, where=f"group {place[0]} rank {place[1]}", rate=0.0, left=-1.0, detail=""
            )
        return self._tasks[place]

    def _remove(self, places: list[tuple[int, int]]) -> None:
        for place in places:
            if place in self._tasks:
                self._progress.remove_task(self._tasks.pop(place))
        if not self._tasks:
            self._progress.stop()


#: Bytes that nobody has told yet: an empty bar, for one that moves would look like progress.
_UNKNOWN = float("inf")


class _Figures(progress.ProgressColumn):
    """Bytes, rate and time left, or what a rank is waiting for."""

    def render(self, task: progress.Task) -> text.Text:
        """The text behind the bar. Pure."""
        detail, total = task.fields["detail"], task.total
        if detail or not total or total == _UNKNOWN:
            return text.Text(detail, style="yellow")
        figures = f"{formats.size(task.completed)} of {formats.size(total)}"
        if task.completed < total and task.fields["rate"]:
            figures += f"  {formats.rate(task.fields['rate'])}  {formats.duration(task.fields['left'])} left"
        return text.Text(figures)


class _Above:
    """The stream a narrator writes to: lines appear above the bars, whole, at the terminal's width."""

    def __init__(self, console: rich_console.Console) -> None:
        self._console = console
        self._pending = ""

    def write(self, data: str) -> int:
        """Print the lines that are complete, keep the rest."""
        *lines, self._pending = (self._pending + data).split("\n")
        for line in lines:
            self._console.print(line, soft_wrap=True)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back but an incomplete line."""
