"""The loader: one rank's checkpoint bytes become a sealed arena, in a process that ends with it.

    open files, compare stats -> plan -> enough memory? -> make the arena -> wait until the files' clocks can be trusted
    -> gate -> read through bounded buffers -> gate free -> digest every tensor -> compare stats again -> seal
    -> hand over

Everything that can refuse does so before the first weight byte is read; a file that changed at any time since the
daemon read its header ends the load, and nothing is handed over. Whatever needs no buffers is done before the gate,
so that the node's other ranks wait for reading only: a CUDA context alone takes longer than 10 GB of weights.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from weightcache.arenas import driver, extents, memory
from weightcache.crds import specs
from weightcache.daemon import checkpoints, children, devices, gates, orders, plans, reading, reads, scales, states
from weightcache.wire import evidence, manifests, reasons

__all__ = ["build_manifest", "load"]

#: What a loader takes of a GPU besides arena and buffers: its context (526 MiB on an H200 with driver 580), with room.
CONTEXT_BYTES = 576 << 20
#: Steps that are timed, but are no state of a rank of their own.
PLANNING, ALLOCATING, SETTLING, BUFFERING = "Planning", "Allocating", "Settling", "Buffering"


class _Work(NamedTuple):
    """What is decided before the gate: the plan, how the buffers are cut, and what to read."""

    plan: plans.RankPlan
    cut: reading.Buffers
    units: list[reads.Read]


def load(child: children.Child, order: orders.LoadOrder) -> None:
    """Follow an order to its ``SealedArena``. Raises Refusal; then nothing is left behind."""
    with _open_files(order) as files:
        work = _prepare(child, order)
        child.begin(ALLOCATING)
        arena = memory.create(str(order.spec.memory), work.plan.arena_bytes, device_uuid=order.device)
        try:
            arena.digests(())  # a GPU's driver finishes the kernel now (0.3 s on an H200), not while others wait
            child.begin(SETTLING)
            settled = _settle(order.stats)
            child.enter(states.WAITING_FOR_GATE)
            gate = gates.Gate(order.gate_directory, order.gate_slots, order.holder)
            with gate.acquire(lambda holders: child.enter(states.WAITING_FOR_GATE, holders)):
                outcome = _read(child, order, work, arena, files)
            manifest = _digest(child, work.plan, arena)
            child.enter(states.SEALING)
            _refuse_changes(order.stats, files)
            chunk_sizes = list(arena.chunk_sizes)
            descriptors = arena.seal()
        finally:
            arena.close()
    child.account()
    child.send(
        orders.SealedArena(
            manifest=manifest,
            chunk_sizes=chunk_sizes,
            blocks=outcome.blocks,
            phases=child.phases,
            bytes_read=outcome.bytes_read,
            settled=settled,
        ),
        descriptors,
    )


def build_manifest(plan: plans.RankPlan, found: list[bytes]) -> manifests.Manifest:
    """The table of an arena from its plan and its tensors' digests. Pure."""
    kinds = sorted({tensor.kind for tensor in plan.tensors})
    dtypes = sorted({tensor.dtype for tensor in plan.tensors})
    return manifests.Manifest(
        arena_bytes=plan.arena_bytes,
        names=[tensor.name for tensor in plan.tensors],
        kind_names=kinds,
        kinds=[kinds.index(tensor.kind) for tensor in plan.tensors],
        dtype_names=dtypes,
        dtypes=[dtypes.index(tensor.dtype) for tensor in plan.tensors],
        shapes=[tensor.shape for tensor in plan.tensors],
        strides=[tensor.strides for tensor in plan.tensors],
        offsets=[tensor.offset for tensor in plan.tensors],
        digests=b"".join(found),
        aliases=plan.aliases,
        metadata=plan.metadata,
    )


@contextlib.contextmanager
def _open_files(order: orders.LoadOrder) -> Iterator[dict[str, int]]:
    files: dict[str, int] = {}
    try:
        for name in order.stats:
            try:
                files[name] = os.open(Path(order.checkpoint) / name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise reasons.Refusal(reasons.Reason.CheckpointIncomplete, f"{name}: {error}") from error
        _refuse_changes(order.stats, files)
        yield files
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def _refuse_changes(stats: Mapping[str, evidence.FileStat], files: Mapping[str, int]) -> None:
    for name, wanted in stats.items():
        _refuse_change(name, evidence.file_stat(files[name]), wanted)


def _refuse_change(name: str, found: evidence.FileStat, wanted: evidence.FileStat | None) -> None:
    if found == wanted:
        return
    if wanted is None:
        raise reasons.Refusal(reasons.Reason.CheckpointChanged, f"{name} is new since the daemon read the headers")
    differing = [
        f"{field} is {getattr(found, field)}, was {getattr(wanted, field)}"
        for field in found.__struct_fields__
        if getattr(found, field) != getattr(wanted, field)
    ]
    raise reasons.Refusal(
        reasons.Reason.CheckpointChanged,
        f"{name} changed since its header was read: {', '.join(differing)}; wait until its writer has finished",
    )


def _settle(stats: Mapping[str, evidence.FileStat]) -> dict[str, bool]:
    """Wait until every file is old enough for its stat to be evidence (at most 2 s); whether each then is."""
    newest = max((stat.ctime_ns / 1e9 for stat in stats.values()), default=0.0)
    missing = newest + evidence.STAT_SETTLE_SECONDS - time.time()
    if 0 < missing <= evidence.STAT_SETTLE_SECONDS:
        time.sleep(missing + 0.01)
    now = time.time()
    return {name: evidence.is_settled(stat, now) for name, stat in stats.items()}


def _prepare(child: children.Child, order: orders.LoadOrder) -> _Work:
    """Plan, and refuse what cannot be: all that needs headers alone."""
    child.begin(PLANNING)
    checkpoint = checkpoints.read(order.checkpoint)
    for name, stat in checkpoint.stats.items():
        _refuse_change(name, stat, order.stats.get(name))
    plan = plans.build_rank_plan(checkpoint, order.spec.parallelism, order.rank)
    needed = sum(block.size_bytes for block in plan.blocks) + plan.arena_bytes
    cut = reading.divide_buffers(order.buffer_bytes, order.num_threads, needed)
    _refuse_shortage(order, plan, cut)
    return _Work(plan, cut, scales.set_apart(reads.build_reads(plan, cut.buffer_bytes)))


def _refuse_shortage(order: orders.LoadOrder, plan: plans.RankPlan, cut: reading.Buffers) -> None:
    buffers = cut.num_buffers * cut.buffer_bytes  # on a GPU there as well, for the digests
    if order.spec.memory is specs.Memory.Host:
        need, free, reason = (
            plan.arena_bytes + buffers,
            devices.host_free_bytes(),
            reasons.Reason.InsufficientHostMemory,
        )
    else:
        device = next((found for found in devices.list_gpus() if found.uuid == order.device), None)
        if device is None:
            raise reasons.Refusal(reasons.Reason.GPUNotFound, f"{order.device} is not on this node")
        need, free = plan.arena_bytes + buffers + CONTEXT_BYTES, devices.free_bytes(device)
        reason = reasons.Reason.InsufficientGPUMemory
    if need > free:
        raise reasons.Refusal(
            reason,
            devices.describe_shortage(order.device, need, free)
            + f"; {plan.arena_bytes} bytes are for the weights, the rest while loading",
        )


def _read(
    child: children.Child, order: orders.LoadOrder, work: _Work, arena: memory.Arena, files: Mapping[str, int]
) -> reading.Outcome:
    if order.spec.memory is specs.Memory.Host:  # whoever held the gate before may have filled it
        _refuse_shortage(order, work.plan, work.cut)
    total = sum(unit.size_bytes for unit in work.units)
    table = bytearray(reads.SCALE_BYTES * len(reads.scale_sources(work.plan)))
    child.begin(BUFFERING)
    staging = arena.staging(work.cut.num_buffers, work.cut.buffer_bytes, mirrored=order.spec.memory is specs.Memory.GPU)
    child.enter(states.READING)
    try:
        outcome = reading.read_all(
            work.units,
            arena,
            staging,
            files,
            table,
            num_threads=work.cut.num_threads,
            bytes_per_second=order.bytes_per_second,
            on_progress=lambda done: child.send(orders.Progressed(bytes_done=done, bytes_total=total)),
        )
    finally:
        staging.close()
    reads.refuse_invalid_scales(work.plan, outcome.scales)
    scales.put(arena, work.plan, outcome.scales)
    return outcome


def _digest(child: children.Child, plan: plans.RankPlan, arena: memory.Arena) -> bytes:
    child.enter(states.DIGESTING)
    spans = [extents.Extent(tensor.offset, manifests.padded(tensor.size_bytes)) for tensor in plan.tensors]
    return manifests.encode(build_manifest(plan, arena.digests(spans)))


def _run(child: children.Child) -> None:
    gc.disable()  # a plan is hundreds of thousands of objects and no cycle: collecting doubles the time it takes
    order, _ = child.order()
    if not isinstance(order, orders.LoadOrder):
        raise reasons.Refusal(reasons.Reason.InternalError, f"a loader got {type(order).__name__}")
    try:
        load(child, order)
    except driver.DriverError as error:
        if error.error != "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        on_host = error.function == "cuMemHostAlloc"
        reason = reasons.Reason.InsufficientHostMemory if on_host else reasons.Reason.InsufficientGPUMemory
        raise reasons.Refusal(reason, f"{order.device}: {error}") from error


if __name__ == "__main__":
    sys.exit(children.main(_run))
