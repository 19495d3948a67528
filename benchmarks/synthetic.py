"""What the attach benchmarks share: tables of tensors that no model has, a process that serves them, honest medians.

A figure depends on the process it was taken in: first calls, page faults of a new heap and the CPU it landed on are
part of what a restarted engine pays. So every value comes from a fresh process, imports excluded, and all are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TREE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TREE))  # tests.support, when started as a script

GIB = 1 << 30
_PATTERN_BYTES = 1 << 20


def table(num_tensors: int, size_bytes: int) -> list[tuple[str, str, list[int]]]:
    """Names as a mixture-of-experts model has them, bf16, equal sizes, shapes of one, two and three dimensions."""
    elements = size_bytes // num_tensors // 256 * 128
    shapes = ([elements], [elements // 128, 128], [2, elements // 128, 64])
    return [
        (f"model.layers.{index // 256}.mlp.experts.{index % 256}.down_proj.weight", "BF16", shapes[index % 3])
        for index in range(num_tensors)
    ]


def pattern() -> bytes:
    """Bytes that do not repeat within a MiB; tensor ``i`` holds a part of them: see :func:`data_of`."""
    import numpy as np

    return np.random.default_rng(7).bytes(2 * _PATTERN_BYTES)


def data_of(block: memoryview, index: int, size_bytes: int) -> list[memoryview]:
    """The content of tensor ``index`` as parts of ``block`` (from :func:`pattern`), different for each index."""
    start = index * 256 % _PATTERN_BYTES
    whole, rest = divmod(size_bytes, _PATTERN_BYTES)
    parts = [block[start : start + _PATTERN_BYTES]] * whole
    return [*parts, block[start : start + rest]] if rest else parts


def size_of(shape: Sequence[int]) -> int:
    """Bytes of a bf16 tensor."""
    return math.prod(shape) * 2


@contextlib.contextmanager
def process(script: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """A helper process that prints one JSON line when it is ready; ended on leaving."""
    child = subprocess.Popen(
        [sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TREE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"{script} {' '.join(arguments)} ended with {child.wait()} before it was ready")
        yield json.loads(line)
    finally:
        child.stdin.close()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def serve_until_closed(ready: dict[str, Any]) -> None:
    """The other end of :func:`process`: say that it is ready, and live until the parent lets go."""
    print(json.dumps(ready), flush=True)
    sys.stdin.read()


def measure(script: str, *arguments: str) -> dict[str, float]:
    """One fresh process; what it prints as JSON."""
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, cwd=TREE, check=False)
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def median_ms(values: Sequence[float]) -> float:
    """The median of seconds, in milliseconds."""
    return statistics.median(values) * 1e3


def show(values: Sequence[float]) -> str:
    """Every value in milliseconds, in the order it was taken."""
    return " ".join(f"{value * 1e3:.1f}" for value in values)


def machine() -> str:
    """One line about where this ran."""
    import os
    import platform

    import torch

    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    gpu = f", {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    return (
        f"{len(os.sched_getaffinity(0))} cores of {model}{gpu}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    )


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that both benchmarks have. ``--role`` is how they start themselves."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10, help="fresh processes a figure")
    parser.add_argument("--json", type=Path, help="write every value there")
    for name in ("--role", "--directory"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    for name in ("--tensors", "--bytes"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    return parser


def serve_arena(num_tensors: int, size_bytes: int, *, kind: str, device: str, fill: str) -> None:
    """Serve one arena by the daemon's own serving code until the parent lets go.

    ``fill``: ``pattern`` writes every byte, ``stamp`` each tensor's number into its first 8 bytes.
    """
    from tests.support import servers

    block = memoryview(pattern())
    tensors: list[tuple[str, str, list[int], bytes | memoryview]] = []
    for index, (name, dtype, shape) in enumerate(table(num_tensors, size_bytes)):
        if fill == "stamp":
            tensors.append((name, dtype, shape, index.to_bytes(8, "little")))
        else:
            parts = data_of(block, index, size_of(shape))
            tensors.append((name, dtype, shape, parts[0] if len(parts) == 1 else b"".join(parts)))
    with tempfile.TemporaryDirectory(prefix="wc-") as directory:
        began = time.perf_counter()
        arena = servers.make_arena(tensors, kind=kind, device=device)
        tensors.clear()
        with servers.ArenaServer(Path(directory) / "r", [[arena]], memory_kind=kind) as server:
            serve_until_closed({"directory": str(server.directory), "made_seconds": time.perf_counter() - began})


def attach(directory: str) -> tuple[Any, float]:
    """Attach to what :func:`serve_arena` serves; the attached rank and the seconds it took, imports excluded."""
    from tests.support import servers
    from weightcache.engine import attaching

    began = time.perf_counter()
    attached = attaching.attach(directory, servers.KEY, cache_uid=servers.REF.uid)
    return attached, time.perf_counter() - began


def module_of(manifest: Any) -> Any:
    """A module on meta that has exactly the parameters of a manifest."""
    import torch

    from weightcache.engine import views

    root = torch.nn.Module()
    for name, shape, dtype in zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True):
        owner, leaf = root, name.rsplit(".", 1)[1]
        for part in name.split(".")[:-1]:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        empty = torch.empty(shape, dtype=views.DTYPES[manifest.dtype_names[dtype]], device="meta")
        owner.register_parameter(leaf, torch.nn.Parameter(empty, requires_grad=False))
    return root


def fill(attached: Any) -> float:
    """What an engine does after the attach; seconds to put the tensors into a module that was built before."""
    from weightcache.engine import filling

    module = module_of(attached.manifest)
    began = time.perf_counter()
    filling.fill(module, attached.tensors, attached.manifest.aliases)
    return time.perf_counter() - began
