"""Cold load: from the page cache into a sealed and verified arena, beside the ways that engines load today.

    python benchmarks/cold_load.py                          on a GPU 16 GiB of each model, else 0.5 GiB in host memory
    python benchmarks/cold_load.py --model experts --gib 16 --runs 5 --directory /dev/shm

Checkpoints of real shapes (``models``), then in one run, every value from fresh processes that take turns:

* the product's loader: reading (with content digests of every block), digesting the arena, sealing, whole process;
* the product's verifier: the digests alone, and the short-lived process as a whole;
* the content digest alone, by CPU threads;
* ``safetensors.torch.load_file`` of every file, to the GPU or into host memory of its own; imports and CUDA's start
  are left out there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also when loaded as a file of another directory

import models

from weightcache.crds import specs
from weightcache.daemon import checkpoints, devices, locks, orders, supervising
from weightcache.wire import digests, evidence, reasons

GIB = 1 << 30
WORK = ("Reading", "Digesting", "Sealing")
Seconds = dict[str, float]

PEER = """
import glob, sys, time
import torch
from safetensors.torch import load_file
device = sys.argv[2]
if device == "cuda":
    torch.zeros(1, device="cuda"); torch.cuda.synchronize()
began = time.monotonic()
kept = [load_file(path, device=device) for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors"))]
if device == "cpu":
    kept = [{name: tensor.clone() for name, tensor in one.items()} for one in kept]
else:
    torch.cuda.synchronize()
print(time.monotonic() - began)
"""


async def load_and_verify(path: Path, options: argparse.Namespace, device: str, scratch: Path) -> Seconds:
    """One loader and one verifier, each a fresh process; seconds by step, and bytes."""
    (scratch / "gate").mkdir(exist_ok=True)
    lock = locks.try_lock(scratch / "device.lock", locks.Holder(detail="benchmark"))
    assert isinstance(lock, locks.HeldLock)
    supervisor = supervising.Supervisor(4)
    order = orders.LoadOrder(
        spec=specs.parse({"model": {"hostPath": str(path)}, "memory": options.memory}),
        checkpoint=str(path),
        stats=dict(checkpoints.read(path).stats),
        rank=0,
        device=device,
        gate_directory=str(scratch / "gate"),
        gate_slots=1,
        buffer_bytes=options.buffer_mib << 20,
        num_threads=options.threads,
        holder="benchmark",
    )
    began = time.monotonic()
    arena, sealed = await supervisor.load(order, lock.descriptor, lambda event: None)
    loaded = time.monotonic()
    verdict = await supervisor.verify(arena)
    verified = time.monotonic()
    assert not verdict.damaged
    for descriptor in arena.descriptors:
        os.close(descriptor)
    lock.close()
    supervisor.close()
    return {
        **sealed.phases,
        "bytes": sealed.bytes_read,
        "arena": arena.arena_bytes,
        "tensors": arena.num_tensors,
        "loader": loaded - began,
        "verify": verdict.digest_seconds,
        "verifier": verified - loaded,
    }


def load_file(path: Path, target: str) -> float:
    """Seconds that safetensors' own loader takes for all files, in a fresh process."""
    command = [sys.executable, "-c", PEER, str(path), target]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def digest_content(path: Path, num_threads: int) -> float:
    """Seconds to digest every file with this many CPU threads."""
    began = time.monotonic()
    for file in sorted(path.glob("*.safetensors")):
        digests.digest_of_file(file, num_threads)
    return time.monotonic() - began


def measure(model: str, options: argparse.Namespace, device: str) -> dict[str, list[float]]:
    """Make the model, run every way ``--runs`` times, print its table."""
    ways: dict[str, list[float]] = {"load_file": [], "content": []}
    with tempfile.TemporaryDirectory(dir=options.directory) as made, tempfile.TemporaryDirectory() as scratch:
        path = models.make(Path(made), model, options.gib * GIB)
        digest_content(path, options.threads)  # warms the page cache
        time.sleep(evidence.STAT_SETTLE_SECONDS)
        for _ in range(options.runs):
            for name, value in asyncio.run(load_and_verify(path, options, device, Path(scratch))).items():
                ways.setdefault(name, []).append(value)
            ways["content"].append(digest_content(path, options.threads))
            ways["load_file"].append(load_file(path, "cuda" if options.memory == "GPU" else "cpu"))
        num_read = sum(1 for _ in checkpoints.read(path).tensors)
    ways["work"] = [sum(ways[phase][run] for phase in WORK) for run in range(options.runs)]
    print(f"\n{model}: {ways['bytes'][0] / GIB:.2f} GiB, {num_read} tensors, {ways['tensors'][0]} in the arena\n")
    _print_table(ways, options)
    return ways


def _print_table(ways: dict[str, list[float]], options: argparse.Namespace) -> None:
    read, arena = ways["bytes"][0], ways["arena"][0]
    where = "load_file to cuda" if options.memory == "GPU" else "load_file to cpu, copied"
    print("| what | median s | GB/s | all runs, s |\n|---|---|---|---|")
    _say("reading, with content digests of every block", ways["Reading"], read)
    _say("digests of the arena", ways["Digesting"], arena)
    _say("reading + digests + sealing", ways["work"], read)
    _say("loader, the whole process", ways["loader"], read)
    _say("verifier: its digests", ways["verify"], arena)
    _say("verifier, the whole process", ways["verifier"], arena)
    _say(f"content digest alone, {options.threads} CPU threads", ways["content"], read)
    _say(f"safetensors {where}", ways["load_file"], read)
    steps = ", ".join(f"{name} {statistics.median(ways[name]):.3f}" for name in ways if name[0].isupper())
    print(f"\nthe loader's steps, median s: {steps}")
    ratio = statistics.median(ways["load_file"]) / statistics.median(ways["work"])
    print(f"load_file takes {ratio:.1f} times as long as reading + digests + sealing", flush=True)


def _say(name: str, seconds: list[float], size_bytes: float) -> None:
    """One row: the median, what it means in GB/s, and every value."""
    median = statistics.median(seconds)
    values = " ".join(f"{one:.3f}" for one in seconds)
    print(f"| {name} | {median:.3f} | {size_bytes / median / 1e9:.1f} | {values} |", flush=True)


def main() -> None:
    """Find the device, measure each model, keep every value where ``--json`` says."""
    try:
        gpus = devices.list_gpus()
    except reasons.Refusal:
        gpus = []
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", choices=["GPU", "Host"], default="GPU" if gpus else "Host")
    parser.add_argument("--model", choices=models.NAMES, action="append", help="one or more; all by default")
    parser.add_argument("--gib", type=float, default=16 if gpus else 0.5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--buffer-mib", type=int, default=1024)
    parser.add_argument("--directory", type=Path, default=None, help="where the checkpoint is made: a temporary one")
    parser.add_argument("--json", type=Path, help="write every value there")
    options = parser.parse_args()
    device = gpus[0].uuid if options.memory == "GPU" else "host-0"
    print(
        f"{gpus[0].name if options.memory == 'GPU' else 'Host memory'}, {os.cpu_count()} cores, {options.threads} "
        f"threads, {options.buffer_mib} MiB of buffers, page cache",
        flush=True,
    )
    found = {model: measure(model, options, device) for model in options.model or models.NAMES}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
