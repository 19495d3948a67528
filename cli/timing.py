"""One attach in a fresh process, timed: ``python -m weightcache.cli.timing``, order on stdin, outcome on stdout.

The second attach of a process is faster than its first (imports, allocator, page tables), and an engine that restarts
only ever has a first. So :mod:`weightcache.cli.benching` starts one of these for each attach.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from weightcache.engine import claims
from weightcache.wire import keys, protocol, reasons, versions

__all__ = ["Failure", "Measurement", "Order", "client"]


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attach rank ``rank`` of the group that ``ticket`` holds, from the sockets in ``directory``."""

    directory: str
    key: keys.Key
    ticket: claims.Ticket
    rank: int
    deadline_seconds: float


class Measurement(msgspec.Struct, frozen=True, tag=True):
    """Seconds by phase. ``import_seconds``, and on a GPU ``context_seconds``, are an engine's own and not in total."""

    rank: int
    gpu: str
    memory: str
    arena_bytes: int
    num_tensors: int
    import_seconds: float
    context_seconds: float
    socket_seconds: float
    decode_seconds: float
    map_seconds: float
    views_seconds: float
    total_seconds: float


class Failure(msgspec.Struct, frozen=True, tag=True):
    """Why there is no measurement."""

    reason: str
    message: str


def client() -> protocol.Client:
    """Who is shown as holding claim and leases while a benchmark runs."""
    return protocol.Client(name="weightcache-bench", pid=os.getpid(), version=versions.version())


def _measure(order: Order) -> Measurement:
    began = time.perf_counter()
    import torch

    from weightcache.engine import attaching

    imported = time.perf_counter()
    if order.ticket.gpus[order.rank].startswith("GPU-"):
        torch.zeros(1, device="cuda")  # an engine has its context before it asks for weights
    ready = time.perf_counter()
    attached = attaching.attach(
        order.directory,
        order.key,
        claim=order.ticket,
        rank=order.rank,
        client=client(),
        deadline_seconds=order.deadline_seconds,
    )
    with attached:
        timings = attached.timings
        return Measurement(
            rank=order.rank,
            gpu=attached.gpu,
            memory=attached.memory,
            arena_bytes=attached.manifest.arena_bytes,
            num_tensors=len(attached.manifest),
            import_seconds=imported - began,
            context_seconds=ready - imported,
            socket_seconds=timings.socket,
            decode_seconds=timings.decode,
            map_seconds=timings.map,
            views_seconds=timings.views,
            total_seconds=timings.total,
        )


def _main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    try:
        outcome: Measurement | Failure = _measure(order)
    except reasons.Refusal as refusal:
        outcome = Failure(str(refusal.reason), refusal.message)
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
