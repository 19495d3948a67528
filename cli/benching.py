"""``weightcache bench attach``: what an engine's restart would pay on this node, against the daemon that runs there.

A figure from another machine says little about this one. Here every rank of a group is attached by fresh processes,
one at a time, and every value is shown: a median alone hides the cold one. The group is claimed for as long as it
takes, so no engine is disturbed and none gets in between.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich import table

from weightcache.cli import asking, consoles, formats, targets, timing
from weightcache.crds import specs
from weightcache.daemon import keying
from weightcache.engine import claims
from weightcache.wire import configs, keys, protocol, reasons

__all__ = ["bench_attach", "rank_keys", "summarize"]

PHASES = ("socket", "decode", "map", "views", "total")


def bench_attach(options: argparse.Namespace) -> int:
    """Attach every rank of a group ``--runs`` times, each in a process of its own, and print milliseconds by phase.

    Raises Refusal: ``NotReady``, ``GroupTaken`` (unless ``--share``) and what an attach raises.
    """
    target = targets.find_one(options.root, options.cache, options.socket)
    status = asking.ask(target.socket, protocol.Status(), protocol.DaemonStatus, options.timeout)
    wanted = rank_keys(status, target.socket.parent / "model")
    with claims.claim(
        target.socket.parent, wanted[0], client=timing.client(), share=options.share, deadline_seconds=options.timeout
    ) as claim:
        measured = [
            _attach(timing.Order(str(target.socket.parent), key, claim.ticket, rank, options.timeout))
            for _ in range(options.runs)
            for rank, key in enumerate(wanted)
        ]
    if options.output == "json":
        report = {"cache": target.name, "milliseconds": summarize(measured), "attaches": measured}
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print(target.name, measured)
    return 0


def rank_keys(status: protocol.DaemonStatus, model_directory: Path) -> list[keys.Key]:
    """The key of every rank of a group, from what a status tells of rank 0 and the configuration beside the sockets.

    Raises Refusal ``NotReady`` when the daemon has no proven content yet, ``CheckpointNotFound``.
    """
    key = status.key
    if key is None or not key.content:
        raise reasons.Refusal(reasons.Reason.NotReady, f"the daemon is {status.state} and holds no proven weights yet")
    world = len(status.groups[0].ranks)
    parallelism = specs.Parallelism(
        tensor=key.tensor_size,
        pipeline=key.pipeline_size,
        data=max(1, world // (key.tensor_size * key.pipeline_size)),
        expert=specs.Expert(
            enabled=key.expert_parallel,
            placement=specs.ExpertPlacement(key.expert_placement or specs.ExpertPlacement.linear),
        ),
    )
    num_experts = _num_experts(model_directory / "config.json") if key.moe_layout else 0
    positions = [keying.build_position(parallelism, num_experts, rank) for rank in range(world)]
    return [msgspec.structs.replace(key, position=position) for position in positions]


def summarize(measured: Sequence[timing.Measurement]) -> dict[str, dict[str, float]]:
    """Milliseconds by phase: least, median, most, over all ranks and runs. Pure."""
    found: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        values = _milliseconds(measured, phase)
        found[phase] = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return found


def _milliseconds(measured: Sequence[timing.Measurement], phase: str) -> list[float]:
    return [1e3 * getattr(found, f"{phase}_seconds") for found in measured]


def _num_experts(config: Path) -> int:
    try:
        resolved = configs.resolve(msgspec.json.decode(config.read_bytes(), type=dict))
        return int(resolved["num_experts"])
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        message = f"{config}: the number of experts cannot be read: {error!r}"
        raise reasons.Refusal(reasons.Reason.CheckpointNotFound, message) from error


def _attach(order: timing.Order) -> timing.Measurement:
    device = order.ticket.gpus[order.rank]
    visible = {"CUDA_VISIBLE_DEVICES": device} if device.startswith("GPU-") else {}
    ended = subprocess.run(
        [sys.executable, "-m", "weightcache.cli.timing"],
        input=msgspec.json.encode(order),
        stdout=subprocess.PIPE,
        env={**os.environ, **visible},
        check=False,
    )
    if ended.returncode:
        message = f"the process that attached rank {order.rank} ended with {ended.returncode}"
        raise reasons.Refusal(reasons.Reason.InternalError, message)
    outcome = msgspec.json.decode(ended.stdout, type=timing.Measurement | timing.Failure)
    if isinstance(outcome, timing.Failure):
        raise reasons.Refusal(reasons.Reason(outcome.reason), outcome.message)
    return outcome


def _print(name: str, measured: Sequence[timing.Measurement]) -> None:
    num_ranks = 1 + max(found.rank for found in measured)
    print(f"{name}: each of {num_ranks} ranks attached by {len(measured) // num_ranks} fresh processes")
    for found in measured[:num_ranks]:
        print(f"  rank {found.rank} on {found.gpu}: {found.num_tensors} tensors, {formats.size(found.arena_bytes)}")
    built = table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    built.add_column("MILLISECONDS")
    for heading in ("MIN", "MEDIAN", "MAX"):
        built.add_column(heading, justify="right")
    for phase, figures in summarize(measured).items():
        built.add_row(phase, *(f"{value:.2f}" for value in figures.values()), style="bold" if phase == "total" else "")
    consoles.show(built)
    print("\n".join(_totals(measured, num_ranks)))
    imports = statistics.median(_milliseconds(measured, "import"))
    contexts = statistics.median(_milliseconds(measured, "context"))
    print(f"not counted, an engine's own: imports {imports:.0f} ms, CUDA context {contexts:.0f} ms (medians)")


def _totals(measured: Sequence[timing.Measurement], num_ranks: int) -> Iterator[str]:
    for rank in range(num_ranks):
        values = _milliseconds([found for found in measured if found.rank == rank], "total")
        yield f"rank {rank} totals: {' '.join(f'{value:.1f}' for value in values)}"
