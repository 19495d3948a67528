"""The loader: one rank's checkpoint bytes become a sealed arena, in a process that ends with it.

    open files, compare stats -> wait until their clocks can be trusted -> plan -> enough memory? -> gate
    -> read through bounded buffers -> gate free -> digest every tensor -> seal -> compare stats again -> hand over

Everything that can refuse does so before the first weight byte is read; a file that changed at any time since the
daemon read its header ends the load, and nothing is handed over.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from weightcache.arenas import extents, memory
from weightcache.crds import specs
from weightcache.daemon import checkpoints, children, devices, gates, orders, plans, reading, reads, states
from weightcache.wire import evidence, manifests, reasons

__all__ = ["build_manifest", "load"]

#: What a loader takes of a GPU besides the arena: its context (526 MiB on an H200 with driver 580) and buffers.
GPU_OVERHEAD_BYTES = 640 << 20


def load(child: children.Child, order: orders.LoadOrder) -> None:
    """Follow an order to its ``SealedArena``. Raises Refusal; then nothing is left behind."""
    with _open_files(order) as files:
        settled = _settle(order.stats)
        plan = _plan(order)
        _refuse_shortage(order, plan)
        child.enter(states.WAITING_FOR_GATE)
        gate = gates.Gate(order.gate_directory, order.gate_slots, order.holder)
        with gate.acquire(lambda holders: child.enter(states.WAITING_FOR_GATE, holders)) as slot:
            arena = memory.create(str(order.spec.memory), plan.arena_bytes, device_uuid=order.device)
            try:
                outcome = _read(child, order, plan, arena, files)
                slot.release()
                manifest = _digest(child, plan, arena)
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
        shapes=[list(tensor.shape) for tensor in plan.tensors],
        strides=[list(tensor.strides) for tensor in plan.tensors],
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
        found = evidence.file_stat(files[name])
        if found != wanted:
            raise reasons.Refusal(
                reasons.Reason.CheckpointChanged, f"{name} is {found}, it was {wanted} when its header was read"
            )


def _settle(stats: Mapping[str, evidence.FileStat]) -> dict[str, bool]:
    """Wait until every file is old enough for its stat to be evidence (at most 2 s); whether each then is."""
    newest = max((stat.ctime_ns / 1e9 for stat in stats.values()), default=0.0)
    missing = newest + evidence.STAT_SETTLE_SECONDS - time.time()
    if 0 < missing <= evidence.STAT_SETTLE_SECONDS:
        time.sleep(missing + 0.01)
    now = time.time()
    return {name: evidence.is_settled(stat, now) for name, stat in stats.items()}


def _plan(order: orders.LoadOrder) -> plans.RankPlan:
    checkpoint = checkpoints.read(order.checkpoint)
    for name, stat in checkpoint.stats.items():
        if order.stats.get(name) != stat:
            raise reasons.Refusal(
                reasons.Reason.CheckpointChanged, f"{name} is {stat}, the daemon read it as {order.stats.get(name)}"
            )
    return plans.build_rank_plan(checkpoint, order.spec.parallelism, order.rank)


def _refuse_shortage(order: orders.LoadOrder, plan: plans.RankPlan) -> None:
    if order.spec.memory is specs.Memory.Host:
        need, free, reason = plan.arena_bytes, devices.host_free_bytes(), reasons.Reason.InsufficientHostMemory
    else:
        device = next((found for found in devices.list_gpus() if found.uuid == order.device), None)
        if device is None:
            raise reasons.Refusal(reasons.Reason.GPUNotFound, f"{order.device} is not on this node")
        need, free = plan.arena_bytes + GPU_OVERHEAD_BYTES, devices.free_bytes(device)
        reason = reasons.Reason.InsufficientGPUMemory
    if need > free:
        raise reasons.Refusal(
            reason,
            f"{order.device} needs {need} bytes ({need / 2**30:.2f} GiB), {free} are free ({free / 2**30:.2f} GiB), "
            f"{need - free} short ({(need - free) / 2**30:.2f} GiB)",
        )


def _read(
    child: children.Child,
    order: orders.LoadOrder,
    plan: plans.RankPlan,
    arena: memory.Arena,
    files: Mapping[str, int],
) -> reading.Outcome:
    on_gpu = order.spec.memory is specs.Memory.GPU
    needed = sum(block.size_bytes for block in plan.blocks) + plan.arena_bytes
    cut = reading.divide_buffers(order.buffer_bytes, order.num_threads, needed)
    units = reads.build_reads(plan, cut.buffer_bytes)
    total = sum(unit.size_bytes for unit in units)
    table = bytearray(reads.SCALE_BYTES * len(reads.scale_sources(plan)))
    child.enter(states.READING)
    staging = arena.staging(cut.num_buffers, cut.buffer_bytes, mirrored=on_gpu)
    try:
        outcome = reading.read_all(
            units,
            arena,
            staging,
            files,
            table,
            num_threads=cut.num_threads,
            bytes_per_second=order.bytes_per_second,
            on_progress=lambda done: child.send(orders.Progressed(bytes_done=done, bytes_total=total)),
        )
    finally:
        staging.close()
    reads.refuse_invalid_scales(plan, outcome.scales)
    return outcome


def _digest(child: children.Child, plan: plans.RankPlan, arena: memory.Arena) -> bytes:
    child.enter(states.DIGESTING)
    spans = [extents.Extent(tensor.offset, manifests.padded(tensor.size_bytes)) for tensor in plan.tensors]
    return manifests.encode(build_manifest(plan, arena.digests(spans)))


def _run(child: children.Child) -> None:
    order, _ = child.order()
    if not isinstance(order, orders.LoadOrder):
        raise reasons.Refusal(reasons.Reason.InternalError, f"a loader got {type(order).__name__}")
    load(child, order)


if __name__ == "__main__":
    sys.exit(children.main(_run))
