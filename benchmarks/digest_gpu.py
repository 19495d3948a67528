"""The digest kernel alone: XXH3-128 over resident GPU memory, beside a plain device copy of the same bytes.

    python benchmarks/digest_gpu.py --gib 64

Launches are synchronised and timed from the host, five of each, all values shown. A copy reads and writes, a digest
only reads: TB/s counts the bytes that cross the memory bus, for the copy twice its size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from weightcache.arenas import contexts, digesting, driver, memory
from weightcache.daemon import devices

NEEDS = "gpu"
RUNS = 5
PIECES = (4 << 20, 1 << 20, 64 << 10)


def timed(launch: Callable[[], None]) -> list[float]:
    """Milliseconds of each run, the first one (which warms up) left out."""
    found = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        launch()
        driver.call("cuCtxSynchronize")
        found.append((time.perf_counter() - began) * 1e3)
    return found[1:]


def say(name: str, milliseconds: list[float], moved_bytes: int) -> None:
    """One row of the table."""
    median = statistics.median(milliseconds)
    values = " ".join(f"{one:.2f}" for one in milliseconds)
    print(f"| {name} | {median:.2f} | {moved_bytes / median / 1e9:.2f} | {values} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=64)
    size_bytes = parser.parse_args().gib << 30
    gpu = devices.list_gpus()[0]
    context = contexts.Context(gpu.uuid)
    print(f"{gpu.name}, {size_bytes >> 30} GiB\n\n| what | median ms | TB/s | all runs, ms |\n|---|---|---|---|")
    with context.current():
        arena = memory.create("GPU", size_bytes, device_uuid=gpu.uuid)
        digester = digesting.Digester(context)
        digester.load()
        for piece_bytes in PIECES:
            spans = [(arena.address + start, piece_bytes) for start in range(0, size_bytes, piece_bytes)]
            with digesting.Batch(context, digester, spans) as batch:
                say(f"digest in pieces of {piece_bytes >> 10} KiB", timed(batch.launch), size_bytes)
        half = size_bytes // 2
        copy = timed(lambda: driver.call("cuMemcpyDtoD", arena.address + half, arena.address, half))
        say(f"device copy of {half >> 30} GiB", copy, 2 * half)
        digester.close()
        arena.close()


if __name__ == "__main__":
    main()
