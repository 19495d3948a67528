"""Keeping every rank loaded, and saying at once when one is not.

A launcher that starts its ranks and looks away serves half a model when one dies. Here each rank has a task that
loads it, has it verified by another process, and loads it again with back-off whenever its arena is lost or found
damaged; whether a group may be served is derived from its ranks at each question.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from weightcache.crds import specs
from weightcache.daemon import (
    backoff,
    caches,
    checkpoints,
    devices,
    groups,
    holdings,
    keying,
    orders,
    plans,
    serving,
    states,
    supervising,
)
from weightcache.daemon import settings as settings_module
from weightcache.wire import protocol, reasons

__all__ = ["Ranks"]

#: Before any rank was ready, these still mean "try again" to a daemon that otherwise exits with the reason.
_TRY_AGAIN = frozenset({reasons.Reason.LoaderDied, reasons.Reason.VerifyImpossible, reasons.Reason.Damaged})


class Ranks:
    """Every rank of a daemon: plans, loads, verifies, releases. Implements :class:`sessions.Operations`."""

    server: serving.Server

    def __init__(
        self,
        config: settings_module.Settings,
        cache: caches.Cache,
        supervisor: supervising.Supervisor,
        observe: Callable[..., None],
    ) -> None:
        self._settings = config
        self._cache = cache
        self._supervisor = supervisor
        self._observe = observe
        self._holding: holdings.Holding | None = None
        self._checkpoint: checkpoints.Checkpoint | None = None
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._fatal: asyncio.Future[reasons.Refusal] | None = None
        self._was_ready = False
        self._verifying = asyncio.Lock()

    def all_ranks(self) -> Iterator[groups.Rank]:
        """Every rank of every group."""
        return (rank for group in self._cache.groups for rank in group.ranks)

    async def plan(self, holding: holdings.Holding) -> None:
        """Read the checkpoint's headers, refuse what cannot work, and lay out the groups on the owned devices.

        Raises Refusal with the reason; not a weight byte has been read then.
        """
        self._holding = holding
        self._was_ready = False
        spec = self._settings.spec
        self._checkpoint = await asyncio.to_thread(checkpoints.read, self._cache.model)
        keying.refuse_other_quantization(spec, self._checkpoint)
        keys = keying.build_keys(spec, self._checkpoint)
        arena_bytes = await asyncio.to_thread(self._plan_bytes, self._checkpoint)
        _refuse_too_small(spec, holding.owned, arena_bytes)
        world = len(keys)
        self._cache.groups = [
            groups.Group(
                index=index,
                ranks=[
                    groups.Rank(index=rank, group=index, device=holding.owned[index * world + rank], key=keys[rank])
                    for rank in range(world)
                ],
            )
            for index in range(len(holding.owned) // world)
        ]

    def start(self) -> None:
        """Begin loading every rank that is not loaded."""
        self._fatal = self._fatal or asyncio.get_running_loop().create_future()
        for rank in self.all_ranks():
            task = self._tasks.get((rank.group, rank.index))
            if task is None or task.done():
                task = asyncio.create_task(self._keep_loaded(rank))
                task.add_done_callback(self._task_ended)
                self._tasks[rank.group, rank.index] = task

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Wait until ``stop``; raises the Refusal that makes this daemon pointless."""
        assert self._fatal is not None, "start() comes first"
        stopping = asyncio.ensure_future(stop.wait())
        ends: set[asyncio.Future[Any]] = {stopping, self._fatal}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._fatal.done():
            raise self._fatal.result()

    async def close(self) -> None:
        """Kill the loaders and let go of every arena. Memory that an engine mapped lives on with the engine."""
        await self._cancel_tasks()
        self._fatal = None
        for rank in self.all_ranks():
            _drop_arena(rank)
            rank.state = states.PENDING

    # --- operations that sessions ask for --------------------------------------------------------------------------
    async def verify(self, *, deep: bool) -> protocol.Verified | protocol.NotReady:
        """Recompute every digest (``deep``), or give the last verdict. Damaged ranks are loaded again."""
        if not deep:
            return self._cache.verification or self._cache.not_ready()
        async with self._verifying:
            held = [(rank, rank.arena) for rank in self.all_ranks() if rank.arena and rank.state == states.READY]
            if not held:
                return self._cache.not_ready()
            began, damaged, checked = time.monotonic(), [], 0
            for rank, arena in held:
                if rank.arena is not arena:
                    continue  # given up while another was judged: its descriptors are closed
                verdict = await self._supervisor.verify(arena)
                checked += verdict.bytes_checked
                if verdict.damaged and rank.arena is arena:
                    damaged += [f"{rank.device.uuid} {damage.tensor}" for damage in verdict.damaged]
                    self._give_up_arena(rank, _damage(rank, verdict))
            self._cache.verification = protocol.Verified(
                sound=not damaged,
                deep=True,
                damaged=damaged,
                bytes_checked=checked,
                seconds=time.monotonic() - began,
                at=self._cache.clock(),
            )
            self._observe("verified", sound=not damaged, damaged=len(damaged), checked_bytes=checked)
            return self._cache.verification

    async def release(self, grace_seconds: float) -> protocol.Released:
        """Drop every arena after ``grace_seconds`` for engines to leave; whoever is left is cut off and named."""
        self._cache.draining = True
        deadline = time.monotonic() + grace_seconds
        # Leases end in sessions, which know nothing of a release; a tenth of a second is soon enough.
        while groups.leases_of(self._cache.groups) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        clients = self.server.cut_leases() if groups.leases_of(self._cache.groups) else []
        await self._cancel_tasks()
        freed = 0
        for rank in self.all_ranks():
            freed += _drop_arena(rank)
            rank.state = states.RELEASED
        self._observe("released", freed_bytes=freed, clients=", ".join(clients))
        return protocol.Released(bytes_freed=freed, clients=clients)

    def resume(self) -> None:
        """Load again what was released."""
        self.start()

    # --- one rank ---------------------------------------------------------------------------------------------------
    async def _keep_loaded(self, rank: groups.Rank) -> None:
        while rank.arena is None:
            try:
                await self._load(rank)
            except reasons.Refusal as refusal:
                self._fail(rank, refusal)
                if self._is_fatal(refusal):
                    return
                await asyncio.sleep(backoff.retry_seconds(rank.attempts))

    async def _load(self, rank: groups.Rank) -> None:
        assert self._holding is not None and self._checkpoint is not None, "plan() comes first"
        rank.attempts += 1
        rank.state, rank.progress, rank.detail = states.STARTING, protocol.Progress(), ""
        began = time.monotonic()
        watch = _Watch(rank, self._observe)
        lock = self._holding.lock_descriptor(rank.device.uuid)
        arena, sealed = await self._supervisor.load(self._order(rank), lock, watch)
        try:
            rank.state = states.VERIFYING
            verify_began = time.monotonic()
            verdict = await self._supervisor.verify(arena)
            if verdict.damaged:
                raise _damage(rank, verdict)
            rank.phases = {**sealed.phases, states.VERIFYING: time.monotonic() - verify_began}
            rank.arena = arena
            self._prove(self._cache.groups[rank.group])
        except BaseException:
            rank.arena = None
            _close(arena)
            raise
        rank.state, rank.reason, rank.message, rank.detail, rank.attempts = states.READY, "", "", "", 0
        self._observe(
            "rank-ready",
            group=rank.group,
            rank=rank.index,
            gpu=rank.device.uuid,
            arena_bytes=arena.arena_bytes,
            tensors=arena.num_tensors,
            read_bytes=sealed.bytes_read,
            took_seconds=time.monotonic() - began,
            **{f"{name.lower()}_seconds": seconds for name, seconds in rank.phases.items()},
        )
        self._say_ready(self._cache.groups[rank.group])

    def _order(self, rank: groups.Rank) -> orders.LoadOrder:
        assert self._holding is not None and self._checkpoint is not None, "plan() comes first"
        config, ref = self._settings, self._cache.ref
        return orders.LoadOrder(
            spec=config.spec,
            checkpoint=self._cache.model,
            stats=dict(self._checkpoint.stats),
            rank=rank.index,
            device=rank.device.uuid,
            gate_directory=str(self._holding.root.gate_directory),
            gate_slots=config.gate_slots,
            buffer_bytes=config.load_buffer_bytes // config.gate_slots,
            num_threads=config.reader_threads,
            holder=f"{ref.namespace}/{ref.name} group {rank.group} rank {rank.index} on {rank.device.uuid}",
            bytes_per_second=config.bytes_per_second,
        )

    def _prove(self, group: groups.Group) -> None:
        """Prove the checkpoint's identity once every rank of the group brought its blocks."""
        assert self._checkpoint is not None, "plan() comes first"
        if any(rank.arena is None for rank in group.ranks):
            return
        content = caches.prove_content(group, self._checkpoint.stats, self._cache.model, self._cache.ref.uid)
        others = {other.content.digest for other in self._cache.groups if other.content}
        if others - {content.digest}:
            raise reasons.Refusal(
                reasons.Reason.CheckpointChanged,
                f"the checkpoint now has content digest {content.digest}, other ranks hold {', '.join(sorted(others))}",
            )
        group.content = content

    def _say_ready(self, group: groups.Group) -> None:
        if group.state != states.READY or group.content is None:
            return
        self._was_ready = True
        status = self._cache.status()
        self._observe(
            "group-ready",
            group=group.index,
            gpus=",".join(group.gpus),
            key=status.key_digest,
            content=group.content.digest,
            resident_bytes=sum(rank.arena.arena_bytes for rank in group.ranks if rank.arena),
        )

    def _fail(self, rank: groups.Rank, refusal: reasons.Refusal) -> None:
        rank.state, rank.reason, rank.message, rank.detail = states.FAILED, str(refusal.reason), refusal.message, ""
        self._observe(
            "rank-failed",
            group=rank.group,
            rank=rank.index,
            gpu=rank.device.uuid,
            reason=rank.reason,
            message=rank.message,
            attempt=rank.attempts,
        )

    def _give_up_arena(self, rank: groups.Rank, refusal: reasons.Refusal) -> None:
        _drop_arena(rank)
        self._fail(rank, refusal)
        self.start()

    def _is_fatal(self, refusal: reasons.Refusal) -> bool:
        """Whether the daemon should give up this plan: end with the reason, or read the checkpoint anew.

        A changed checkpoint cannot complete what was planned from the old one; but a group that is ready with the old
        bytes is served on, and then it is for a person to release it.
        """
        if self._fatal is None or self._fatal.done():
            return False
        if refusal.reason is reasons.Reason.CheckpointChanged:
            gives_up = not any(group.state == states.READY for group in self._cache.groups)
        else:
            ends = self._settings.on_owned == "exit" and refusal.reason not in _TRY_AGAIN
            gives_up = ends and not self._was_ready
        if gives_up:
            self._fatal.set_result(refusal)
        return gives_up

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None or self._fatal is None or self._fatal.done():
            return
        error = task.exception()
        self._fatal.set_result(reasons.Refusal(reasons.Reason.InternalError, f"{type(error).__name__}: {error}"))

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _plan_bytes(self, checkpoint: checkpoints.Checkpoint) -> list[int]:
        return [plan.arena_bytes for plan in plans.build_group_plans(checkpoint, self._settings.spec.parallelism)]


class _Watch:
    """Turns a loader's events into a rank's state and the observer's facts."""

    def __init__(self, rank: groups.Rank, observe: Callable[..., None]) -> None:
        self._rank = rank
        self._observe = observe
        self._reading_since = time.monotonic()

    def __call__(self, event: orders.Event) -> None:
        rank = self._rank
        if isinstance(event, orders.Phase):
            changed = (rank.state, rank.detail) != (event.name, event.detail)
            rank.state, rank.detail = event.name, event.detail
            self._reading_since = time.monotonic()
            if changed:
                self._observe("phase", group=rank.group, rank=rank.index, state=event.name, detail=event.detail)
        elif isinstance(event, orders.Progressed):
            rank.progress = supervising.progress(event, rank.progress, self._reading_since, time.monotonic())
            self._observe(
                "progress",
                group=rank.group,
                rank=rank.index,
                done_bytes=rank.progress.bytes_done,
                total_bytes=rank.progress.bytes_total,
                per_second_bytes=rank.progress.bytes_per_second,
                left_seconds=rank.progress.seconds_left,
            )


def _refuse_too_small(spec: specs.WeightCacheSpec, owned: tuple[devices.Device, ...], arena_bytes: list[int]) -> None:
    """Compare what the arenas need with what is free, before anything is loaded; the loaders look again."""
    if spec.memory is specs.Memory.Host:
        need, free = sum(arena_bytes) * (len(owned) // len(arena_bytes)), devices.free_bytes(owned[0])
        shortages = [("the host", need, free)] if need > free else []
        reason = reasons.Reason.InsufficientHostMemory
    else:
        needs = [(device.uuid, arena_bytes[index % len(arena_bytes)]) for index, device in enumerate(owned)]
        free_of = {device.uuid: devices.free_bytes(device) for device in owned}
        shortages = [(uuid, need, free_of[uuid]) for uuid, need in needs if need > free_of[uuid]]
        reason = reasons.Reason.InsufficientGPUMemory
    if shortages:
        raise reasons.Refusal(
            reason,
            "; ".join(devices.describe_shortage(where, need, free) for where, need, free in shortages),
        )


def _damage(rank: groups.Rank, verdict: orders.Verdict) -> reasons.Refusal:
    first = verdict.damaged[0]
    return reasons.Refusal(
        reasons.Reason.Damaged,
        f"{rank.device.uuid}: {len(verdict.damaged)} tensors differ from their digests, first {first.tensor}: "
        f"{first.found}, sealed as {first.wanted}; the rank is loaded again",
    )


def _drop_arena(rank: groups.Rank) -> int:
    arena, rank.arena = rank.arena, None
    if arena is None:
        return 0
    _close(arena)
    return sum(arena.chunk_sizes)


def _close(arena: groups.HeldArena) -> None:
    for descriptor in arena.descriptors:
        os.close(descriptor)
