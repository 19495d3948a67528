"""Cold load: from the page cache into a sealed and verified arena, beside the ways that engines load today.

    python benchmarks/cold_load.py --memory GPU --gib 16 --directory /dev/shm --runs 3
    python benchmarks/cold_load.py --memory Host --gib 0.5 --runs 3            (no GPU)

Makes a synthetic Llama checkpoint (bf16, random bytes, one file a layer), then, in one run and in fresh processes:

* the product's loader: reading (with content digests of every block), digesting the arena, sealing, whole process;
* the product's verifier: the digests alone, and the short-lived process as a whole;
* the content digest alone, by CPU threads;
* ``safetensors.torch.load_file`` of every file, to the GPU or to the host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from weightcache.crds import specs
from weightcache.daemon import checkpoints, devices, locks, orders, supervising
from weightcache.wire import digests

HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 4096, 14336, 32, 8, 128
LAYER = (
    ("self_attn.q_proj.weight", HEADS * HEAD, HIDDEN),
    ("self_attn.k_proj.weight", KV_HEADS * HEAD, HIDDEN),
    ("self_attn.v_proj.weight", KV_HEADS * HEAD, HIDDEN),
    ("self_attn.o_proj.weight", HIDDEN, HEADS * HEAD),
    ("mlp.gate_proj.weight", INNER, HIDDEN),
    ("mlp.up_proj.weight", INNER, HIDDEN),
    ("mlp.down_proj.weight", HIDDEN, INNER),
    ("input_layernorm.weight", HIDDEN, 0),
    ("post_attention_layernorm.weight", HIDDEN, 0),
)
LAYER_BYTES = 2 * sum(rows * max(1, columns) for _, rows, columns in LAYER)


def make(directory: Path, gib: float) -> Path:
    """A Llama checkpoint of about this size; random bytes, no two files alike."""
    layers = max(1, round(gib * 2**30 / LAYER_BYTES))
    pool = np.random.default_rng(0).integers(0, 256, 96 << 20, dtype=np.uint8)
    weight_map: dict[str, str] = {}

    def write(name: str, tensors: list[tuple[str, int, int]], turn: int) -> None:
        header, position = {}, 0
        for tensor, rows, columns in tensors:
            size = 2 * rows * max(1, columns)
            shape = [rows, columns] if columns else [rows]
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]}
            weight_map[tensor] = name
            position += size
        text = json.dumps(header).encode()
        rolled = memoryview(np.roll(pool, 4099 * turn).tobytes())
        with (directory / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            while position > 0:
                position -= file.write(rolled[: min(position, len(rolled))])

    for layer in range(layers):
        rows = [(f"model.layers.{layer}.{name}", size, columns) for name, size, columns in LAYER]
        write(f"layer-{layer:03d}.safetensors", rows, layer)
    ends = [
        ("model.embed_tokens.weight", 32000, HIDDEN),
        ("lm_head.weight", 32000, HIDDEN),
        ("model.norm.weight", HIDDEN, 0),
    ]
    write("ends.safetensors", ends, layers)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": layers,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


async def load_once(path: Path, arguments: argparse.Namespace, device: str, scratch: Path) -> dict[str, float]:
    """One loader and one verifier, each a fresh process."""
    (scratch / "gate").mkdir(exist_ok=True)
    lock = locks.try_lock(scratch / "device.lock", locks.Holder(detail="benchmark"))
    assert isinstance(lock, locks.HeldLock)
    supervisor = supervising.Supervisor(4)
    order = orders.LoadOrder(
        spec=specs.parse({"model": {"hostPath": str(path)}, "memory": arguments.memory}),
        checkpoint=str(path),
        stats=dict(checkpoints.read(path).stats),
        rank=0,
        device=device,
        gate_directory=str(scratch / "gate"),
        gate_slots=1,
        buffer_bytes=arguments.buffer_mib << 20,
        num_threads=arguments.threads,
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
        "bytes": sealed.bytes_read,
        "arena": arena.arena_bytes,
        "Reading": sealed.phases["Reading"],
        "Digesting": sealed.phases["Digesting"],
        "Sealing": sealed.phases["Sealing"],
        "loader": loaded - began,
        "verify_digest": verdict.digest_seconds,
        "verifier": verified - loaded,
    }


PEER = """
import sys, time, glob
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


def content_digest(path: Path, threads: int) -> float:
    """Seconds to digest every file with this many threads, from the page cache."""
    began = time.monotonic()
    for file in sorted(path.glob("*.safetensors")):
        digests.digest_of_file(file, threads)
    return time.monotonic() - began


def say(name: str, seconds: list[float], size_bytes: float) -> None:
    """One row: every value, the median, and what it means in GB/s."""
    median = statistics.median(seconds)
    values = " ".join(f"{one:.3f}" for one in seconds)
    print(f"| {name} | {median:.3f} | {size_bytes / median / 1e9:.1f} | {values} |", flush=True)


def main() -> None:
    """Make, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", choices=["GPU", "Host"], default="Host")
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--buffer-mib", type=int, default=1024)
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the checkpoint is made (default: temporary)"
    )
    arguments = parser.parse_args()
    gpus = devices.list_gpus() if arguments.memory == "GPU" else []
    device = gpus[0].uuid if gpus else "host-0"
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made, tempfile.TemporaryDirectory() as scratch:
        path = make(Path(made), arguments.gib)
        content_digest(path, arguments.threads)  # warms the page cache
        time.sleep(2.1)
        print(
            f"{gpus[0].name if gpus else 'Host memory'}, {os.cpu_count()} cores, {arguments.threads} threads, "
            f"{arguments.buffer_mib} MiB of buffers, checkpoint {sum(f.stat().st_size for f in path.glob('*.safetensors')) / 2**30:.2f} GiB"
        )
        rows: list[dict[str, Any]] = []
        peer: list[float] = []
        content: list[float] = []
        for _ in range(arguments.runs):
            rows.append(asyncio.run(load_once(path, arguments, device, Path(scratch))))
            target = "cuda" if gpus else "cpu"
            command = [sys.executable, "-c", PEER, str(path), target]
            peer.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            content.append(content_digest(path, arguments.threads))
        read, arena = rows[0]["bytes"], rows[0]["arena"]
        print("\n| what | median s | GB/s | all runs, s |\n|---|---|---|---|")
        say("loader: reading, content digests included", [row["Reading"] for row in rows], read)
        say("loader: digests of the arena", [row["Digesting"] for row in rows], arena)
        say(
            "loader: reading + digests + sealing",
            [row["Reading"] + row["Digesting"] + row["Sealing"] for row in rows],
            read,
        )
        say("loader: whole process", [row["loader"] for row in rows], read)
        say("verifier: digests alone", [row["verify_digest"] for row in rows], arena)
        say("verifier: whole process", [row["verifier"] for row in rows], arena)
        say("content digest alone, CPU threads", content, read)
        say(f"safetensors load_file to {'cuda' if gpus else 'cpu, copied'}", peer, read)
        ratio = statistics.median(peer) / statistics.median(
            [row["Reading"] + row["Digesting"] + row["Sealing"] for row in rows]
        )
        print(f"\nload_file takes {ratio:.1f} times as long as reading + digests + sealing")
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(exist_ok=True)


if __name__ == "__main__":
    main()
