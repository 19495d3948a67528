"""Attach to GPU memory against per-tensor CUDA IPC with pickle, side by side, each value from a fresh process.

    python benchmarks/attach_gpu.py                    one H200: under 5 minutes, 130 GiB of GPU memory
    python benchmarks/attach_gpu.py --rehearse         the same steps over host memory, small: checks the script

Ways, for bf16 tensors in 8 and 64 GiB:
    arena      weightcache.engine.attaching.attach: a claim, few VMM descriptors, one mapping, read-only views
    per-tensor what engines and weight daemons do today: torch.multiprocessing.reductions.reduce_tensor for each tensor
               in the daemon, one pickle over a Unix socket, each tensor rebuilt in the client
Both servers live at the same time and the clients alternate. Not counted: imports, the CUDA context, the first kernel.
Counted: everything from connecting to the last tensor. Each client then compares the numbers that the server wrote into
the tensors. ``--seconds`` bounds the whole run: rounds end when it would be exceeded, and the table says how many ran.
"""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - the way that is measured against
import select
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also when loaded as a file of another directory

import synthetic

NEEDS = "gpu"
SCRIPT = str(Path(__file__).resolve())
CASES = [(10_000, 8 * synthetic.GIB), (50_000, 8 * synthetic.GIB), (10_000, 64 * synthetic.GIB)]
REHEARSAL = [(500, 64 << 20)]
WAYS = ("arena", "per-tensor")
_ENOUGH_TENSORS = 1000


def main() -> None:
    """Run everything, or the one role that the parent process asks for."""
    parser = synthetic.arguments(__doc__)
    parser.add_argument("--rehearse", action="store_true", help="host memory instead of a GPU; figures mean nothing")
    parser.add_argument("--seconds", type=float, default=280.0, help="limit of the whole run")
    options = parser.parse_args()
    if options.role:
        roles = {
            "serve arena": _serve_arena,
            "serve per-tensor": _serve_per_tensor,
            "arena": _attach_arena,
            "per-tensor": _attach_per_tensor,
        }
        roles[options.role](options)
        return
    began = time.monotonic()
    print(synthetic.machine(), flush=True)
    report: dict[str, Any] = {"machine": synthetic.machine(), "cases": []}
    print("\n| tensors | GiB | way | median ms | ratio | rounds | all values, ms |\n|---|---|---|---|---|---|---|")
    cases = REHEARSAL if options.rehearse else CASES
    for number, case in enumerate(cases):
        share = (began + options.seconds - time.monotonic()) / (len(cases) - number)
        rows = _side_by_side(case, options, time.monotonic() + share)
        report["cases"].append({"tensors": case[0], "bytes": case[1], "rows": rows})
        _show(case, rows)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


def _side_by_side(case: tuple[int, int], options: Any, end: float) -> dict[str, list[dict[str, float]]]:
    flags = ["--tensors", str(case[0]), "--bytes", str(case[1]), *(["--rehearse"] if options.rehearse else [])]
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with (
        synthetic.process(SCRIPT, "--role", "serve arena", *flags) as arena,
        synthetic.process(SCRIPT, "--role", "serve per-tensor", *flags) as legacy,
    ):
        where = {"arena": arena["directory"], "per-tensor": legacy["directory"]}
        longest = 0.0
        while len(rows["arena"]) < options.runs and (time.monotonic() + longest < end or len(rows["arena"]) < 3):
            round_began = time.monotonic()
            for way in WAYS:
                rows[way].append(synthetic.measure(SCRIPT, "--role", way, "--directory", where[way], *flags))
            longest = max(longest, time.monotonic() - round_began)
    return rows


def _show(case: tuple[int, int], rows: dict[str, list[dict[str, float]]]) -> None:
    arena = synthetic.median_ms([row["seconds"] for row in rows["arena"]])
    for way in WAYS:
        values = [row["seconds"] for row in rows[way]]
        median = synthetic.median_ms(values)
        print(
            f"| {case[0]} | {case[1] / synthetic.GIB:g} | {way} | {median:.1f} | {median / arena:.1f} | {len(values)} "
            f"| {synthetic.show(values)} |",
            flush=True,
        )
    phases = {
        name: synthetic.median_ms([row[name] for row in rows["arena"]])
        for name in ("socket", "decode", "map", "views", "fill")
    }
    shown = ", ".join(f"{name} {value:.1f}" for name, value in phases.items())
    print(f"|  |  | arena, medians of phases (ms; fill comes after) | {shown} |  |  |  |", flush=True)


# --- servers ----------------------------------------------------------------------------------------------------------
def _device(options: Any) -> Any:
    import torch

    return torch.device("cpu" if options.rehearse else "cuda:0")


def _serve_arena(options: Any) -> None:
    if options.rehearse:
        kind, device = "Host", "host-0"
    else:
        from weightcache.arenas import contexts

        kind, device = "GPU", contexts.visible_uuids()[0]
    synthetic.serve_arena(options.tensors, options.bytes, kind=kind, device=device, fill="stamp")


def _serve_per_tensor(options: Any) -> None:
    """Each tensor an allocation of torch's; reduced and pickled again for each client, as a daemon has to."""
    import torch
    from torch.multiprocessing import reductions

    _prepare(options)
    tensors = {}
    for index, (name, _, shape) in enumerate(synthetic.table(options.tensors, options.bytes)):
        made = torch.empty(shape, dtype=torch.bfloat16, device=_device(options))
        made.view(-1)[:4].view(torch.int64).fill_(index)
        tensors[name] = made
    _finish(options)
    with tempfile.TemporaryDirectory(prefix="wc-") as directory, socket.socket(socket.AF_UNIX) as listener:
        path = f"{directory}/legacy.sock"
        listener.bind(path)
        listener.listen()
        print(json.dumps({"directory": path}), flush=True)
        listener.settimeout(0.2)
        while not _parent_is_gone():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            with client:
                client.settimeout(60)
                client.recv(1)
                reduced = {name: reductions.reduce_tensor(tensor) for name, tensor in tensors.items()}
                body = pickle.dumps(reduced)
                client.sendall(len(body).to_bytes(8, "little") + body)
                client.recv(1)  # the handles must live until the client has opened them


def _parent_is_gone() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


# --- clients ----------------------------------------------------------------------------------------------------------
def _attach_arena(options: Any) -> None:
    _prepare(options)
    attached, seconds = synthetic.attach(options.directory)
    _check(attached.tensors, options)
    print(json.dumps({"seconds": seconds, "fill": synthetic.fill(attached), **attached.timings._asdict()}))


def _attach_per_tensor(options: Any) -> None:
    import torch.multiprocessing  # noqa: F401 - imports are excluded

    _prepare(options)
    began = time.perf_counter()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(options.directory)
        sock.sendall(b"a")
        size = int.from_bytes(_exactly(sock, 8), "little")
        reduced = pickle.loads(_exactly(sock, size))  # noqa: S301 - the way that is measured against
        tensors = {name: rebuild(*arguments) for name, (rebuild, arguments) in reduced.items()}
        seconds = time.perf_counter() - began
        _check(tensors, options)
        sock.sendall(b"b")
    print(json.dumps({"seconds": seconds}), flush=True)
    tensors.clear()


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = sock.recv_into(view[filled:])
        if not count:
            raise SystemExit("the server went away")
        filled += count
    return data


def _prepare(options: Any) -> None:
    """Everything that an engine has done before it asks for weights: the context, and a first kernel."""
    import torch

    if options.rehearse:
        torch.multiprocessing.set_sharing_strategy("file_system")  # "file_descriptor" needs a server per process
        return
    torch.ones(1024, device="cuda").sum().item()


def _finish(options: Any) -> None:
    import torch

    if not options.rehearse:
        torch.cuda.synchronize()


def _check(tensors: Any, options: Any) -> None:
    """The numbers of tensors from everywhere; a mapping of other memory would show others."""
    import torch

    table = synthetic.table(options.tensors, options.bytes)
    assert len(tensors) == len(table), f"{len(tensors)} tensors, {len(table)} wanted"
    for index in range(0, len(table), max(1, len(table) // _ENOUGH_TENSORS)):
        name, _, shape = table[index]
        found = tensors[name]
        assert list(found.shape) == shape, f"{name}: shape {list(found.shape)}, {shape} wanted"
        number = found.reshape(-1)[:4].view(torch.int64).item()
        assert number == index, f"{name}: tensor number {number}, {index} wanted"


if __name__ == "__main__":
    main()
