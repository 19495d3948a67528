"""A stand-in for an engine: attaches every rank of a group, checks every byte, and then lives until it is told to go.

It runs in a process of its own and shares nothing with the daemon but the socket directory and the checkpoint's
files. Its key comes from its own reading of the checkpoint, as an engine's would, never from the daemon. What it finds
it prints as one JSON object a line:

    {"event": "attached", ...}    after mapping all ranks; with --check also what the comparison found
    {"event": "refused", ...}     instead; the exit code is the reason's

and then it answers lines on standard input: ``bytes`` (compare again, and digest every tensor), ``leases STATE ...``
(wait until each rank's lease is in one of these states). End of input ends it, leases closed.

    python -m demo.client --spec FILE --directory DIR [--placement round_robin] [--share] [--check]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from demo import slicing
from weightcache.crds import specs
from weightcache.daemon import checkpoints, keying, settings
from weightcache.engine import attaching, claims, leases
from weightcache.wire import keys, reasons

LEASE_SECONDS = 30.0


class Client:
    """All ranks of one group, attached."""

    def __init__(self, spec: specs.WeightCacheSpec, directory: Path, *, share: bool) -> None:
        """Raises Refusal as :func:`attaching.attach` does."""
        self._spec = spec
        self._checkpoint = settings.checkpoint_directory(spec)
        self._changed = threading.Condition()
        self.ranks: list[attaching.Attached] = []
        wanted = keying.build_keys(spec, checkpoints.read(self._checkpoint))
        began = time.perf_counter()
        with claims.claim(directory, wanted[0], checkpoint=self._checkpoint, share=share) as claim:
            self.ranks = [self._attach(directory, key, claim) for key in wanted]
        self.seconds = time.perf_counter() - began

    def _attach(self, directory: Path, key: keys.Key, claim: claims.Claim) -> attaching.Attached:
        return attaching.attach(
            directory, key, checkpoint=self._checkpoint, claim=claim, on_lease_change=self._lease_changed
        )

    def _lease_changed(self, _: leases.State) -> None:
        with self._changed:
            self._changed.notify_all()

    def describe(self) -> dict[str, Any]:
        """What was attached. ``memory``: inode numbers: equal ones are the same memory."""
        return {
            "slots": [rank.gpu for rank in self.ranks],
            "generations": [rank.generation for rank in self.ranks],
            "memory": [inode_at(next(iter(rank.tensors.values())).data_ptr()) for rank in self.ranks],
            "tensors": [len(rank.tensors) for rank in self.ranks],
            "arena_bytes": [rank.manifest.arena_bytes for rank in self.ranks],
            "experts": [rank.metadata["experts"] for rank in self.ranks],
            "attach_seconds": self.seconds,
        }

    def check(self) -> dict[str, Any]:
        """Every tensor of every rank against the checkpoint, cut by hand; and a digest over all of them."""
        began, faults, num_bytes, digest = time.perf_counter(), [], 0, hashlib.sha256()
        for number, rank in enumerate(self.ranks):
            layout = layout_of(self._spec.parallelism, number)
            found = slicing.compare(rank.tensors, slicing.rank_tensors(self._checkpoint, layout))
            faults += [f"rank {number}: {fault}" for fault in found]
            for name, tensor in sorted(rank.tensors.items()):
                content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                num_bytes += content.nbytes
                digest.update(name.encode() + b"\0" + content.tobytes())
        seconds = time.perf_counter() - began
        return {"faults": faults, "bytes": num_bytes, "digest": digest.hexdigest(), "check_seconds": seconds}

    def wait_for_leases(self, wanted: Sequence[str]) -> dict[str, Any]:
        """Wait until every lease is in one of the states, or time is up; says what they are."""
        with self._changed:
            self._changed.wait_for(lambda: all(str(rank.state) in wanted for rank in self.ranks), LEASE_SECONDS)
        return {
            "states": [str(rank.state) for rank in self.ranks],
            "generations": [rank.generation for rank in self.ranks],
            "daemon_generations": [rank.lease.daemon_generation for rank in self.ranks],
            "trouble": [rank.lease.trouble for rank in self.ranks],
        }

    def close(self) -> None:
        """End every lease."""
        for rank in self.ranks:
            rank.close()


def layout_of(parallelism: specs.Parallelism, rank: int) -> slicing.Layout:
    """The witness's own words for a rank's place: tensor ranks vary fastest, then pipeline, then data ranks."""
    return slicing.Layout(
        tensor_size=parallelism.tensor,
        tensor_rank=rank % parallelism.tensor,
        pipeline_size=parallelism.pipeline,
        pipeline_rank=rank // parallelism.tensor % parallelism.pipeline,
        data_size=parallelism.data,
        data_rank=rank // parallelism.tensor // parallelism.pipeline,
        expert_parallel=parallelism.expert.enabled,
        placement=str(parallelism.expert.placement),
    )


def inode_at(address: int) -> int:
    """Which file is mapped at an address of this process, as the kernel says; a memfd has an inode of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        begin, end = (int(limit, 16) for limit in span.split("-"))
        if begin <= address < end:
            return int(inode)
    raise LookupError(f"nothing is mapped at {address:#x}")


def say(event: str, **facts: Any) -> None:
    """One line for the process that started this one."""
    print(json.dumps({"event": event, **facts}), flush=True)


def serve(client: Client) -> None:
    """Answer commands until the end of input."""
    for line in sys.stdin:
        command, *words = line.split()
        if command == "bytes":
            say("bytes", **client.check())
        elif command == "leases":
            say("leases", **client.wait_for_leases(words))
        else:
            raise SystemExit(f"unknown command {command!r}")


def main() -> int:
    """Attach, report, serve; the exit code of the reason when attaching is refused."""
    parser = argparse.ArgumentParser(description="Attach every rank of a cache and check every byte.")
    parser.add_argument("--spec", type=Path, required=True, help="the WeightCache, as the daemon has it")
    parser.add_argument("--directory", type=Path, required=True, help="the cache's socket directory")
    parser.add_argument("--placement", choices=["linear", "round_robin"], help="instead of the spec's")
    parser.add_argument("--share", action="store_true", help="take a group that others hold too")
    parser.add_argument("--check", action="store_true", help="compare every byte before reporting")
    options = parser.parse_args()
    spec, _ = settings.read_document(options.spec)
    if options.placement:
        expert = msgspec.structs.replace(spec.parallelism.expert, placement=specs.ExpertPlacement(options.placement))
        parallelism = msgspec.structs.replace(spec.parallelism, expert=expert)
        spec = msgspec.structs.replace(spec, parallelism=parallelism)
    try:
        client = Client(spec, options.directory, share=options.share)
    except reasons.Refusal as refusal:
        say("refused", reason=str(refusal.reason), message=refusal.message)
        return reasons.exit_code(refusal.reason)
    say("attached", **client.describe(), **(client.check() if options.check else {}))
    serve(client)
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
