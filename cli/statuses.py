"""A daemon's status as a person reads it: what is held, how far it is, who uses it, and what is wrong.

The wire's :class:`~weightcache.wire.protocol.DaemonStatus` is complete and flat; a page of it hides the one rank that
waits. So what is wrong stands below the table with its next step, and what is merely long (200 leases) is counted. The
functions here are pure: status in, renderable out; :mod:`weightcache.cli.showing` does the asking and printing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import console, padding, table, text

from weightcache.cli import formats, targets
from weightcache.daemon import states
from weightcache.wire import keys, protocol, reasons

__all__ = ["Finding", "build_page"]

MAX_HOLDERS_SHOWN = 8
#: What a terminal shows from how many columns on; narrower ones leave the rest to ``--output json``.
MEDIUM_COLUMNS, WIDE_COLUMNS = 102, 130
_STYLES = {
    states.READY: "green",
    states.FAILED: "bold red",
    states.REFUSED: "bold red",
    states.RELEASED: "magenta",
    states.PENDING: "dim",
}


@dataclass(frozen=True)
class Finding:
    """What asking one daemon brought: its status, or why there is none."""

    target: targets.Target
    status: protocol.DaemonStatus | None = None
    refusal: reasons.Refusal | None = None


def build_page(findings: Sequence[Finding], now: float, width: int) -> console.Group:
    """All daemons, one below the other. ``now``: Unix seconds; ``width``: columns of the terminal. Pure."""
    parts: list[console.RenderableType] = []
    for finding in findings:
        if parts:
            parts.append("")
        parts.extend(_build_answer(finding.status, now, width) if finding.status else _build_silence(finding))
    return console.Group(*parts)


def _build_silence(finding: Finding) -> Iterator[console.RenderableType]:
    assert finding.refusal is not None, "a finding without a status has a refusal"
    yield text.Text.assemble((finding.target.name, "bold"), "  ", (finding.refusal.reason, "bold red"))
    yield _indented(text.Text(finding.refusal.message))
    yield _indented(text.Text(f"next step: {reasons.MEANINGS[finding.refusal.reason].next_step}"))


def _build_answer(status: protocol.DaemonStatus, now: float, width: int) -> Iterator[console.RenderableType]:
    yield _title(status, now)
    yield from (_indented(text.Text.assemble((f"{name:8}", "dim"), line)) for name, line in _facts(status, now))
    if status.groups:
        yield _indented(_build_table(status, width))
    yield from (_indented(text.Text(line)) for line in _users(status, now))
    yield from _troubles(status)


def _title(status: protocol.DaemonStatus, now: float) -> text.Text:
    return text.Text.assemble(
        (f"{status.cache.namespace}/{status.cache.name}", "bold"),
        "  ",
        _state(status.state),
        f"  {status.memory}, {formats.size(status.resident_bytes)} resident",
        f"  up {formats.duration(now - status.started_at)}",
        (f"  weightcache {status.version}", "dim"),
    )


def _facts(status: protocol.DaemonStatus, now: float) -> Iterator[tuple[str, str]]:
    yield "model", status.model
    if status.key:
        yield "key", status.key_digest + ("" if status.key.content else " (provisional: the content is not proven yet)")
        yield "layout", _layout(status.key)
    if status.verification:
        verdict = status.verification
        outcome = "sound" if verdict.sound else f"{len(verdict.damaged)} tensors DAMAGED"
        cost = f"{formats.size(verdict.bytes_checked)} in {verdict.seconds:.2f} s"
        yield "verify", f"{outcome}, {cost}, {formats.duration(now - verdict.at)} ago"
    misses = ", ".join(f"{field} {count}" for field, count in sorted(status.misses.items()))
    yield "use", f"attaches {status.attaches}" + (f"; key mismatches: {misses}" if misses else "")


def _layout(key: keys.Key) -> str:
    sizes = (("tensor", key.tensor_size), ("pipeline", key.pipeline_size), ("data", key.data_size))
    parts = [key.architecture, key.dtype, key.quantization, *(f"{name} {size}" for name, size in sizes if size > 1)]
    if key.expert_parallel:
        parts.append(f"experts {key.expert_placement}")
    return ", ".join(part for part in parts if part)


_COLUMNS: dict[str, console.JustifyMethod] = {
    "": "left",
    "GPU": "left",
    "STATE": "left",
    "PROGRESS": "left",
    "SIZE": "right",
    "TENSORS": "right",
    "WEIGHTS": "left",
    "LEASES": "right",
}
_LEAST_COLUMNS = {"SIZE": MEDIUM_COLUMNS, "LEASES": MEDIUM_COLUMNS, "TENSORS": WIDE_COLUMNS, "WEIGHTS": WIDE_COLUMNS}
_BAR_CELLS = ((WIDE_COLUMNS, 16), (MEDIUM_COLUMNS, 8), (0, 0))


def _build_table(status: protocol.DaemonStatus, width: int) -> table.Table:
    shown = [name for name in _COLUMNS if width >= _LEAST_COLUMNS.get(name, 0)]
    bar_cells = next(cells for columns, cells in _BAR_CELLS if width >= columns)
    built = table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in shown:
        built.add_column(name, justify=_COLUMNS[name], no_wrap=True)
    for group in status.groups:
        built.add_row(f"group {group.group}", "", _state(group.state))
        for rank in group.ranks:
            cells = _cells(rank, bar_cells)
            built.add_row(*(cells[name] for name in shown))
    return built


def _cells(rank: protocol.RankStatus, bar_cells: int) -> dict[str, text.Text | str]:
    return {
        "": f"  rank {rank.rank}",
        "GPU": formats.short_device(rank.gpu),
        "STATE": _state(rank.state),
        "PROGRESS": _progress(rank, bar_cells),
        "SIZE": formats.size(rank.arena_bytes) if rank.arena_bytes else "-",
        "TENSORS": str(rank.num_tensors) if rank.num_tensors else "-",
        "WEIGHTS": rank.generation[:8] or "-",
        "LEASES": str(len(rank.leases)) if rank.leases else "-",
    }


def _progress(rank: protocol.RankStatus, bar_cells: int) -> text.Text:
    progress = rank.progress
    if rank.state == states.READY:
        total = sum(rank.phases.values())
        return text.Text(f"loaded in {formats.duration(total)}" if total else "", style="dim")
    if rank.state not in states.BUSY or not progress.bytes_total:
        return text.Text("")
    drawn = formats.bar(progress.bytes_done, progress.bytes_total, bar_cells)
    filled = drawn.count("━")
    figures = f"{' ' if drawn else ''}{100 * progress.bytes_done / progress.bytes_total:3.0f} %"
    if rank.state == states.READING and progress.bytes_per_second:
        figures += f" {formats.rate(progress.bytes_per_second)}"
        figures += f" {formats.duration(progress.seconds_left)} left" if progress.seconds_left >= 0 else ""
    return text.Text.assemble((drawn[:filled], "green"), (drawn[filled:], "dim"), figures)


def _users(status: protocol.DaemonStatus, now: float) -> Iterator[str]:
    """Who uses which ranks, one line an engine and group: its ranks are processes of their own, with a lease each."""
    engines: dict[tuple[str, int], dict[int, list[protocol.LeaseStatus]]] = {}
    for group in status.groups:
        for claim in group.claims:
            engines.setdefault((_client_name(claim.client), group.group), {}).setdefault(-1, []).append(claim)
        for rank in group.ranks:
            for lease in rank.leases:
                ranks = engines.setdefault((_client_name(lease.client), group.group), {})
                ranks.setdefault(rank.rank, []).append(lease)
    current = {rank.generation for group in status.groups for rank in group.ranks}
    for (name, number), ranks in list(engines.items())[:MAX_HOLDERS_SHOWN]:
        yield _user(name, number, ranks, current, now)
    if len(engines) > MAX_HOLDERS_SHOWN:
        yield f"and {len(engines) - MAX_HOLDERS_SHOWN} more engines; --output json shows all"


def _user(name: str, group: int, ranks: dict[int, list[protocol.LeaseStatus]], current: set[str], now: float) -> str:
    leases = [lease for found in ranks.values() for lease in found]
    held = [rank for rank in ranks if rank >= 0]
    parts = [f"group {group}"]
    if held:
        parts.append(f"rank{'s' if len(held) > 1 else ''} {keys.format_experts(held)}")
    parts.append(_listed("pid", {lease.pid for lease in leases}))
    parts.append(f"for {formats.duration(now - min(lease.since for lease in leases))}")
    older = any(lease.generation not in current for rank in held for lease in ranks[rank])
    note = " (older weights than the daemon's)" if older else "" if held else " (claimed, nothing attached yet)"
    return f"used by {name}: {', '.join(parts)}{note}"


def _listed(word: str, numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    rest = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return f"{word} {' '.join(map(str, ordered[:8]))}{rest}"


def _client_name(client: protocol.Client) -> str:
    return "/".join(filter(None, (client.namespace, client.name))) or "unnamed client"


def _troubles(status: protocol.DaemonStatus) -> Iterator[console.RenderableType]:
    told = {(rank.reason, rank.message) for group in status.groups for rank in group.ranks if rank.reason}
    if status.reason and (status.reason, status.message) not in told:
        yield from _trouble("", status.reason, status.message)
    for group in status.groups:
        for rank in group.ranks:
            where = f"group {group.group} rank {rank.rank} ({rank.gpu}): "
            if rank.reason:
                yield from _trouble(f"{where}attempt {rank.attempts}: ", rank.reason, rank.message)
            elif rank.message:
                yield _indented(text.Text(where + rank.message))


def _trouble(where: str, reason: str, message: str) -> Iterator[console.RenderableType]:
    yield _indented(text.Text.assemble(where, (reason, "bold red"), f": {message}"))
    if reason in reasons.Reason.__members__:
        yield _indented(text.Text(f"next step: {reasons.MEANINGS[reasons.Reason(reason)].next_step}"), 4)


def _state(state: str) -> text.Text:
    return text.Text(state, style=_STYLES.get(state, "yellow"))


def _indented(renderable: console.RenderableType, columns: int = 2) -> padding.Padding:
    return padding.Padding(renderable, (0, 0, 0, columns), expand=False)
