"""``weightcache inspect``: what a daemon would do with a checkpoint, without doing it.

A checkpoint that is refused after an hour in a queue for GPUs has wasted the hour. Everything that a daemon refuses
before the first weight byte is known from headers alone, on any machine; so are each rank's bytes, tensors and experts.
The plan is the loader's own (:mod:`weightcache.daemon.plans`); nothing is decided here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich import table, text

from weightcache.cli import consoles, formats
from weightcache.crds import specs
from weightcache.daemon import checkpoints, devices, keying, plans, reads
from weightcache.engine import proving
from weightcache.wire import evidence, keys, reasons

__all__ = ["Inspection", "RankInspection", "content_digest", "inspect", "inspect_checkpoint"]

#: Size of a reader's buffer as the loader has it by default: reads are cut, not changed, by it.
_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True)
class RankInspection:
    """One rank of a group. ``read_bytes``: from checkpoint files, blocks for the content digest included."""

    rank: int
    arena_bytes: int
    num_tensors: int
    read_bytes: int
    experts: str


@dataclass(frozen=True)
class Inspection:
    """What a plan says. ``key``: of rank 0. ``content`` and ``key_digest`` are empty unless the digest was computed."""

    checkpoint: str
    architecture: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    num_tensors: int
    num_experts: int
    files: dict[str, int]
    memory: str
    ranks: tuple[RankInspection, ...]
    key: keys.Key
    content: str
    key_digest: str


def inspect(options: argparse.Namespace) -> int:
    """Print what a daemon would load. Raises Refusal with the reason for which a daemon would refuse it."""
    found = inspect_checkpoint(build_spec(options), compute_digest=options.digest)
    if options.output == "json":
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        for part in _build_report(found):
            consoles.show(part)
    return 0


def build_spec(options: argparse.Namespace) -> specs.WeightCacheSpec:
    """The spec that a command line describes."""
    expert = specs.Expert(enabled=options.expert_parallel, placement=specs.ExpertPlacement(options.expert_placement))
    return specs.WeightCacheSpec(
        model=specs.Model(host_path=os.path.abspath(options.checkpoint)),
        parallelism=specs.Parallelism(
            tensor=options.tensor, pipeline=options.pipeline, data=options.data, expert=expert
        ),
        memory=specs.Memory(options.memory),
    )


def inspect_checkpoint(spec: specs.WeightCacheSpec, *, compute_digest: bool) -> Inspection:
    """Plan every rank of a group. With ``compute_digest`` every byte is read: content digest and scales.

    Raises Refusal as :func:`checkpoints.read` and :func:`plans.build_group_plans` do, and ``ScaleInvalid``,
    ``CheckpointChanged`` with ``compute_digest``.
    """
    directory = Path(spec.model.host_path) / spec.model.path
    checkpoint = checkpoints.read(directory)
    built = plans.build_group_plans(checkpoint, spec.parallelism)
    rank_keys = keying.build_keys(spec, checkpoint)
    content = ""
    if compute_digest:
        content = content_digest(checkpoint)
        for plan in built:
            reads.refuse_invalid_scales(plan, _scale_table(plan, directory))
    key = msgspec.structs.replace(rank_keys[0], content=content)
    return Inspection(
        checkpoint=str(directory),
        architecture=checkpoint.architecture,
        dtype=checkpoint.dtype,
        quantization=key.quantization,
        kv_cache_dtype=checkpoint.quantization.kv_cache,
        num_tensors=len(checkpoint.tensors),
        num_experts=checkpoint.num_experts,
        files={name: stat.size_bytes for name, stat in checkpoint.stats.items()},
        memory=str(spec.memory),
        ranks=tuple(
            RankInspection(
                rank=plan.rank,
                arena_bytes=plan.arena_bytes,
                num_tensors=len(plan.tensors),
                read_bytes=sum(read.size_bytes for read in reads.build_reads(plan, _BUFFER_BYTES)),
                experts=rank_key.position.experts,
            )
            for plan, rank_key in zip(built, rank_keys, strict=True)
        ),
        key=key,
        content=content,
        key_digest=keys.key_digest(key) if content else "",
    )


def content_digest(checkpoint: checkpoints.Checkpoint) -> str:
    """The digest of a checkpoint's bytes (32 hex): reads each file once ever, as long as its stat stays.

    Raises Refusal ``CheckpointChanged`` when a file changes meanwhile.
    """
    total = sum(stat.size_bytes for stat in checkpoint.stats.values())
    console = consoles.build(sys.stderr)
    try:
        with console.status(f"digesting {formats.size(total)} of {checkpoint.directory}"):
            return evidence.checkpoint_digest(checkpoint.directory, checkpoint.stats, proving.default_store())
    except OSError as error:
        raise reasons.Refusal(reasons.Reason.CheckpointChanged, f"{checkpoint.directory}: {error}") from error


def _scale_table(plan: plans.RankPlan, directory: Path) -> bytes:
    """The values of a plan's scales, in the order that :func:`reads.scale_sources` names them."""
    descriptors: dict[str, int] = {}
    values = bytearray()
    try:
        for piece in (piece for tensor in plan.tensors if tensor.is_scale for piece in tensor.pieces):
            if piece.file not in descriptors:
                descriptors[piece.file] = os.open(directory / piece.file, os.O_RDONLY | os.O_CLOEXEC)
            values += os.pread(descriptors[piece.file], reads.SCALE_BYTES, piece.begin)
    except OSError as error:
        raise reasons.Refusal(reasons.Reason.CheckpointChanged, f"{directory}: {error}") from error
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return bytes(values)


# --- what a person reads --------------------------------------------------------------------------------------------
def _build_report(found: Inspection) -> Iterator[Any]:
    yield text.Text(found.checkpoint, style="bold")
    for name, line in _facts(found):
        yield text.Text.assemble((f"  {name:14}", "dim"), line)
    yield ""
    yield _rank_table(found)
    yield ""
    yield _key_table(found)


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    largest = max(rank.arena_bytes for rank in found.ranks)
    total = sum(rank.arena_bytes for rank in found.ranks)
    experts = f", {found.num_experts} experts a layer" if found.num_experts else ""
    yield "architecture", f"{found.architecture}, {found.dtype}{experts}"
    yield "quantization", found.quantization + (f", KV cache {found.kv_cache_dtype}" if found.kv_cache_dtype else "")
    yield "files", f"{len(found.files)}, {formats.size(sum(found.files.values()))}, {found.num_tensors} tensors"
    if found.memory == specs.Memory.Host:
        free = devices.host_free_bytes()
        verdict = "enough" if free >= total else f"{formats.size(total - free)} short"
        yield "memory", f"a group needs {formats.size(total)}; this machine has {formats.size(free)} free: {verdict}"
    else:
        yield "memory", f"each rank's GPU needs up to {formats.size(largest)} free; a group {formats.size(total)}"


def _rank_table(found: Inspection) -> table.Table:
    built = table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("RANK", "ARENA", "TENSORS", "TO READ"):
        built.add_column(name, justify="right", no_wrap=True)
    if found.num_experts:
        built.add_column("EXPERTS", overflow="fold")
    for rank in found.ranks:
        cells = [str(rank.rank), formats.size(rank.arena_bytes), str(rank.num_tensors), formats.size(rank.read_bytes)]
        built.add_row(*cells, *([rank.experts] if found.num_experts else []))
    return built


def _key_table(found: Inspection) -> table.Table:
    built = table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    built.add_column("KEY OF RANK 0", no_wrap=True)
    built.add_column(found.key_digest or "digest unknown: --digest reads the checkpoint for it", overflow="fold")
    for field, value in msgspec.to_builtins(found.key).items():
        if field == "position":
            for name, part in value.items():
                built.add_row(f"position.{name}", str(part) if part != "" else "-")
        elif field == "content" and not value:
            built.add_row("content", text.Text("not computed (--digest)", style="dim"))
        else:
            built.add_row(field, str(value) if value not in ("", {}) else "-")
    return built
