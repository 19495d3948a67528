"""Byte-moving kernels against a plain device copy of the same bytes, side by side, each value shown.

    python benchmarks/transforms.py                        one GPU: about a minute, 8 GiB of GPU memory
    python benchmarks/transforms.py --library PATH         beside vLLM's own Marlin repack, from its
                                                           _C_stable_libtorch.abi3.so
    python benchmarks/transforms.py --sweep                each kernel in other blocks and warps: what the defaults are
                                                           chosen from
    python benchmarks/transforms.py --rehearse             small, on the CPU, by the references: checks the script

Shapes are those of whole layers: experts of Qwen3-30B-A3B (I 768, H 2048) and DeepSeek-V3 (I 2048, H 7168), as many of
them as fill ``--gib``. Bytes are counted once in and once out, in a gather with a swizzle as well; the copy moves as
many. Copy and kernel take turns; a value is the mean of ``--calls`` calls between two events of the GPU. Each result is
compared with the reference, on its first and last matrix.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also when loaded as a file of another directory

import synthetic
import torch

from weightcache.kernels import layouts, moves, moving

NEEDS = "gpu"
_QWEN, _DEEPSEEK = layouts.ExpertSizes(768, 2048), layouts.ExpertSizes(2048, 7168)
#: What is measured: label, layout, which tensor, of which model, source sizes if they are not the model's.
_CASES = (
    ("swizzle", "gate_up_swizzled", "w13_weight_scale"),
    ("swizzle", "gate_up_swizzled", "w2_weight_scale"),
    ("gather", "trtllm", "w13_weight"),
    ("gather", "trtllm", "w2_weight"),
    ("gather", "cutedsl", "w13_weight"),
    ("gather + swizzle", "trtllm", "w13_weight_scale"),
    ("gather + swizzle", "trtllm", "w2_weight_scale"),
    ("Marlin repack", "marlin", "w13_weight"),
    ("Marlin repack", "marlin", "w2_weight"),
    ("Marlin scales", "marlin", "w13_weight_scale"),
)
_MODELS = (("Qwen3-30B-A3B", _QWEN), ("DeepSeek-V3", _DEEPSEEK), ("padded", layouts.ExpertSizes(720, 1920)))
_TARGET = 0.9


class Case(NamedTuple):
    """A move over a stack of ``num`` matrices of ``rows`` x ``columns`` bytes."""

    label: str
    num: int
    rows: int
    columns: int
    move: moves.Move

    @property
    def moved_bytes(self) -> int:
        """Once in and once out."""
        rows, columns = self.move.shape
        out = rows * columns * (4 if self.move.dtype == "I32" else 1)
        return self.num * (self.rows * self.columns + out)


def main() -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of each source")
    parser.add_argument("--rounds", type=int, default=5, help="values a figure")
    parser.add_argument("--calls", type=int, default=10, help="calls a value")
    parser.add_argument("--library", type=Path, help="vLLM's operators, to compare the Marlin repack with")
    parser.add_argument("--json", type=Path, help="write every value there")
    parser.add_argument("--sweep", action="store_true", help="other blocks and warps instead")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU; figures mean nothing")
    options = parser.parse_args()
    if options.rehearse:
        options.gib, options.rounds, options.calls = 1 / 256, 2, 1
    device = "cpu" if options.rehearse else "cuda"
    print(synthetic.machine(), flush=True)
    if options.library:
        torch.ops.load_library(str(options.library))  # type: ignore[no-untyped-call]
    rows = _sweep(options) if options.sweep else _measure_all(options, device)
    if options.json:
        options.json.write_text(json.dumps({"machine": synthetic.machine(), "rows": rows}, indent=1))


def _measure_all(options: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    print("\n| kernel | source | copy GB/s | kernel GB/s | of the copy | all values: copy; kernel |")
    print("|---|---|---|---|---|---|")
    rows = []
    for case in _cases(int(options.gib * synthetic.GIB)):
        source = _source(case, device)
        out = moving.move(source, case.move, factor=4.0)
        _compare(case, source, out)

        ours = functools.partial(moving.move, source, case.move, factor=4.0, out=out)
        rows.append(_beside_copy(case, ours, options, device))
        if case.label.startswith("Marlin repack") and options.library:
            rows.append(_operator(case, source, options, device))
    below = [row["kernel"] for row in rows if row["ratio"] < _TARGET and not row["kernel"].startswith("Marlin")]
    print(f"\nbelow {_TARGET:.0%} of the copy: {', '.join(below) or 'none'}")
    if not options.library:
        print("vLLM's Marlin repack: not measured, no --library")
    return rows


def _cases(source_bytes: int) -> Iterator[Case]:
    for (label, layout, name), (model, sizes) in itertools.product(_CASES, _MODELS):
        if model == "padded" and layout not in ("trtllm", "marlin"):
            continue
        move = layouts.EXPERTS[layout].moves(sizes, layouts.padded_experts(layout, sizes))[name]
        wide = sizes.hidden if name.startswith("w13") else sizes.intermediate
        rows = 2 * sizes.intermediate if name.startswith("w13") else sizes.hidden
        columns = wide // (16 if name.endswith("scale") else 2)
        num = max(source_bytes // (rows * columns), 1)
        yield Case(f"{label}, {name} for {layout}, {model}", num, rows, columns, move)


def _source(case: Case, device: str) -> torch.Tensor:
    """Random bytes; as block scales none that is not a number."""
    scales = case.move.dtype == "F8_E4M3"
    shape = (case.num, case.rows, case.columns)
    made = torch.randint(0, 0x7F if scales else 256, shape, dtype=torch.uint8, device=device)
    return made.view(torch.float8_e4m3fn) if scales else made


def _compare(case: Case, source: torch.Tensor, out: torch.Tensor) -> None:
    for index in {0, case.num - 1}:
        wanted = moving.move(source[index : index + 1].cpu(), case.move, factor=4.0)[0]
        if not torch.equal(out[index].cpu().view(torch.uint8), wanted.view(torch.uint8)):
            raise SystemExit(f"{case.label}: matrix {index} differs from the reference")


def _beside_copy(
    case: Case, ours: Callable[[], object], options: argparse.Namespace, device: str, label: str = ""
) -> dict[str, Any]:
    """Copy and kernel in turns; prints and returns the row."""
    left = torch.empty(case.moved_bytes // 2, dtype=torch.uint8, device=device).fill_(7)
    right = torch.empty_like(left)
    sides: dict[str, tuple[Callable[[], object], list[float]]] = {
        "copy": (lambda: right.copy_(left), []),
        "kernel": (ours, []),
    }
    for call, _ in sides.values():
        _seconds(call, 2, device)
    for _ in range(options.rounds):
        for call, values in sides.values():
            values.append(case.moved_bytes / _seconds(call, options.calls, device) / 1e9)
    copies, kernels = sides["copy"][1], sides["kernel"][1]
    ratio = statistics.median(kernels) / statistics.median(copies)
    shown = "; ".join(" ".join(f"{value:.0f}" for value in values) for values in (copies, kernels))
    print(
        f"| {label or case.label} | {case.num} x {case.rows} x {case.columns} | {statistics.median(copies):.0f} "
        f"| {statistics.median(kernels):.0f} | {ratio:.1%} | {shown} |",
        flush=True,
    )
    return {"kernel": label or case.label, "ratio": ratio, "copy": copies, "values": kernels}


def _seconds(call: Callable[[], object], num_calls: int, device: str) -> float:
    """The mean of several calls in a row: by the GPU's own clock where there is one."""
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - began) / num_calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / num_calls


def _operator(case: Case, source: torch.Tensor, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """vLLM's operator alone, expert by expert, on sources transposed beforehand as it wants them; unpadded sizes only.

    What the engine does besides (the transposition before, the copy into a stack after) is not counted.
    """
    if case.move.shape != (2 * case.columns // 16, 2 * case.rows):
        return {"kernel": f"vLLM's operator, {case.label}", "ratio": 1.0, "copy": [], "values": []}
    turned = [matrix.view(torch.int32).T.contiguous() for matrix in source]

    def theirs() -> None:
        for matrix in turned:
            torch.ops._C.gptq_marlin_repack(matrix, 2 * case.columns, case.rows, 4, False)

    return _beside_copy(case, theirs, options, device, f"Marlin repack by vLLM's operator: {case.label}")


def _sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Other blocks and warps of each kernel, one line each."""
    from weightcache.kernels import triton_gathers, triton_launches, triton_marlin, triton_swizzles

    table = triton_launches.scale_table(torch.device("cuda", torch.cuda.current_device()), 4.0)
    rows = []
    for case in _cases(int(options.gib * synthetic.GIB)):
        source = _source(case, "cuda")
        out = moving.move(source, case.move, factor=4.0)
        length = case.move.shape[0] if case.move.order is moves.Order.Swizzled else case.move.num_rows
        index = None if case.move.rows is None else triton_launches.index_on(source.device, case.move.rows, length)
        print(f"\n{case.label}: {case.num} x {case.rows} x {case.columns}, GB/s", flush=True)
        run = {
            moves.Order.RowByRow: functools.partial(triton_gathers.gather_rows, source, index, out),
            moves.Order.Swizzled: functools.partial(triton_swizzles.swizzle_block_scales, source, index, out),
            moves.Order.MarlinWeights: functools.partial(triton_marlin.repack_weights, source, index, out),
            moves.Order.MarlinScales: functools.partial(triton_marlin.scales, source, index, table, out),
        }[case.move.order]
        for block, warps in itertools.product(_BLOCKS[case.move.order], (4, 8, 16)):
            call = functools.partial(run, block=block, warps=warps)
            _seconds(call, 2, "cuda")
            value = case.moved_bytes / _seconds(call, options.calls, "cuda") / 1e9
            print(f"  block {block:6} warps {warps:2}: {value:.0f}", flush=True)
            rows.append({"kernel": case.label, "block": block, "warps": warps, "value": value})
    return rows


_BLOCKS = {
    moves.Order.RowByRow: (8 << 10, 16 << 10, 32 << 10, 64 << 10),
    moves.Order.Swizzled: (16, 32, 64, 128),
    moves.Order.MarlinWeights: (16, 32, 64),
    moves.Order.MarlinScales: (32, 64, 128),
}


if __name__ == "__main__":
    main()
