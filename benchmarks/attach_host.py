"""Attach to host memory against a load from the page cache, side by side, each value from a fresh process.

    python benchmarks/attach_host.py            a quarter of an hour, 13 GiB of memory, 4 GiB of disk

Ways, for 10,000 bf16 tensors in 4 GiB:
    attach         weightcache.engine.attaching.attach: sealed memfd, read-only views
    load           safetensors.torch.load_file, then copy_ into the module's own memory; the file is in the page cache.
                   ``touched``: that memory was written before; ``new``: it is as torch.empty gives it, which is what a
                   restarted engine has
    lazy           load_file alone: it maps the file and touches nothing; the first forward pays
Then attach alone over the number of tensors, and over bytes; ``fill`` puts the tensors into a module of as many
parameters, which is what comes next. The server is the daemon's serving code over an arena
that was made directly, because no supported model has 10,000 tensors in 4 GiB.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also when loaded as a file of another directory

import synthetic

SCRIPT = str(Path(__file__).resolve())
TENSORS, SIZE = 10_000, 4 * synthetic.GIB
CURVE = [(1_000, synthetic.GIB), (50_000, synthetic.GIB), (10_000, synthetic.GIB // 4), (10_000, synthetic.GIB)]
WAYS = ("attach", "load touched", "load new", "lazy")


def main() -> None:
    """Run everything, or the one role that the parent process asks for."""
    options = synthetic.arguments(__doc__).parse_args()
    roles = {"serve": _serve, "attach": _attach, "load touched": _load, "load new": _load, "lazy": _lazy}
    if options.role:
        roles[options.role](options)
        return
    print(synthetic.machine(), flush=True)
    ways = _ways(options.runs)
    curve = _curve(options.runs, ways["attach"])
    if options.json:
        report = {"machine": synthetic.machine(), "ways": ways, "curve": curve}
        options.json.write_text(json.dumps(report, indent=1))


def _ways(runs: int) -> dict[str, list[dict[str, float]]]:
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="wc-bench-") as directory:
        file = Path(directory) / "model.safetensors"
        write_checkpoint(file, TENSORS, SIZE)
        with _server(TENSORS, SIZE) as ready:
            for _ in range(runs):
                for way in WAYS:
                    where = ready["directory"] if way == "attach" else str(file)
                    rows[way].append(_measure(way, where, TENSORS, SIZE))
                    print(f"{way} {rows[way][-1]['seconds'] * 1e3:.1f} ms", file=sys.stderr, flush=True)
    print(f"\n{TENSORS} tensors in {SIZE / synthetic.GIB:g} GiB, {runs} fresh processes a way, in turn\n")
    print("| way | median ms | times attach | all values, ms |\n|---|---|---|---|")
    values = {way: [row["seconds"] for row in rows[way]] for way in WAYS}
    attach = synthetic.median_ms(values["attach"])
    for way in WAYS:
        median = synthetic.median_ms(values[way])
        print(f"| {way} | {median:.1f} | {median / attach:.1f} | {synthetic.show(values[way])} |", flush=True)
    return rows


def _curve(runs: int, known: list[dict[str, float]]) -> list[dict[str, Any]]:
    """``known``: the rows of 10,000 tensors in 4 GiB, which are measured already."""
    print(f"\nattach over tensors and bytes, {runs} fresh processes each; phases are medians, ms\n")
    print("| tensors | GiB | median ms | us a tensor | socket | decode | map | views | then fill | all values, ms |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    found = []
    for num_tensors, size_bytes in [*CURVE, (TENSORS, SIZE)]:
        if (num_tensors, size_bytes) == (TENSORS, SIZE):
            rows = known
        else:
            with _server(num_tensors, size_bytes) as ready:
                rows = [_measure("attach", ready["directory"], num_tensors, size_bytes) for _ in range(runs)]
        values = [row["seconds"] for row in rows]
        median = synthetic.median_ms(values)
        phases = " | ".join(
            f"{synthetic.median_ms([row[name] for row in rows]):.1f}"
            for name in ("socket", "decode", "map", "views", "fill")
        )
        print(
            f"| {num_tensors} | {size_bytes / synthetic.GIB:g} | {median:.1f} | {median * 1e3 / num_tensors:.2f} "
            f"| {phases} | {synthetic.show(values)} |",
            flush=True,
        )
        found.append({"tensors": num_tensors, "bytes": size_bytes, "rows": rows})
    return found


def _server(num_tensors: int, size_bytes: int) -> Any:
    return synthetic.process(SCRIPT, "--role", "serve", "--tensors", str(num_tensors), "--bytes", str(size_bytes))


def _measure(role: str, directory: str, num_tensors: int, size_bytes: int) -> dict[str, float]:
    table = ("--tensors", str(num_tensors), "--bytes", str(size_bytes))
    return synthetic.measure(SCRIPT, "--role", role, "--directory", directory, *table)


# --- roles ----------------------------------------------------------------------------------------------------------
def _serve(options: Any) -> None:
    synthetic.serve_arena(options.tensors, options.bytes, kind="Host", device="host-0", fill="pattern")


def _attach(options: Any) -> None:
    attached, seconds = synthetic.attach(options.directory)
    _check(attached.tensors, options)
    print(json.dumps({"seconds": seconds, "fill": synthetic.fill(attached), **attached.timings._asdict()}))


def _load(options: Any) -> None:
    import safetensors.torch
    import torch

    make = torch.zeros if options.role == "load touched" else torch.empty
    own = {}
    for name, _, shape in synthetic.table(options.tensors, options.bytes):
        own[name] = make(shape, dtype=torch.bfloat16)
        if options.role == "load touched":
            own[name].fill_(1)  # zeros of a fresh mapping are not there yet
    began = time.perf_counter()
    found = safetensors.torch.load_file(options.directory)
    for name, tensor in found.items():
        own[name].copy_(tensor)
    seconds = time.perf_counter() - began
    _check(own, options)
    print(json.dumps({"seconds": seconds}))


def _lazy(options: Any) -> None:
    import safetensors.torch

    began = time.perf_counter()
    found = safetensors.torch.load_file(options.directory)
    seconds = time.perf_counter() - began
    _check(found, options)
    print(json.dumps({"seconds": seconds}))


def _check(tensors: Any, options: Any) -> None:
    """A fast way that brings other bytes is no way: compare tensors from everywhere with what was written."""
    import torch

    block = memoryview(synthetic.pattern())
    table = synthetic.table(options.tensors, options.bytes)
    for index in (0, 1, 2, len(table) // 2, len(table) - 1):
        name, _, shape = table[index]
        wanted = b"".join(synthetic.data_of(block, index, synthetic.size_of(shape)))
        found = tensors[name]
        assert list(found.shape) == shape, f"{name}: shape {list(found.shape)}, {shape} wanted"
        assert bytes(found.contiguous().view(torch.uint8).numpy().data) == wanted, f"{name}: other bytes"


def write_checkpoint(file: Path, num_tensors: int, size_bytes: int) -> None:
    """A safetensors file written from the format's description, never whole in memory; it ends in the page cache."""
    table, offset, header = synthetic.table(num_tensors, size_bytes), 0, {}
    for name, dtype, shape in table:
        end = offset + synthetic.size_of(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    block = memoryview(synthetic.pattern())
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for index, (_, _, shape) in enumerate(table):
            for part in synthetic.data_of(block, index, synthetic.size_of(shape)):
                out.write(part)
        out.flush()
        os.fsync(out.fileno())  # else the writing back runs beside the measurement
    with file.open("rb") as back:
        while back.read(1 << 24):
            pass


if __name__ == "__main__":
    main()
