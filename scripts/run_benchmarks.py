"""Lists the benchmarks, and runs those that this machine can run.

A benchmark is a script benchmarks/NAME.py that runs without arguments, measures its sides in one run and prints a
table. Its docstring's first line says what it measures; `NEEDS = "gpu"` in it says that it wants an NVIDIA GPU.
A benchmark asserts nothing about time, so this fails only when one of them breaks.
"""

from __future__ import annotations

import ast
import ctypes
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def describe(path: Path) -> tuple[str, str]:
    """The first line of a benchmark's docstring and what it needs, read without importing it."""
    module = ast.parse(path.read_text())
    needs = [
        node.value.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if any(isinstance(target, ast.Name) and target.id == "NEEDS" for target in node.targets)
    ]
    return (ast.get_docstring(module) or "no description").splitlines()[0], str(needs[0]) if needs else ""


def has_gpu() -> bool:
    """Whether the NVIDIA driver is here and answers."""
    try:
        return not ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError:
        return False


def main() -> int:
    """Returns 1 when a benchmark that was run failed, or when there is none."""
    paths = [path for path in sorted(FOLDER.glob("*.py")) if '__name__ == "__main__"' in path.read_text()]
    described = {path: describe(path) for path in paths}
    gpu = has_gpu()
    runnable = [path for path in paths if described[path][1] in (["", "gpu"] if gpu else [""])]
    for path in paths:
        text, needs = described[path]
        print(f"{path.stem:<24} {'' if path in runnable else f'[left out: needs {needs}] '}{text}")
    failed = []
    for path in runnable:
        print(f"\n=== {path.stem} ===", flush=True)
        begin = time.monotonic()
        if subprocess.run([sys.executable, str(path)], stdin=subprocess.DEVNULL, check=False).returncode:
            failed.append(path.stem)
        print(f"=== {path.stem}: {time.monotonic() - begin:.1f} s ===", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed or not paths))


if __name__ == "__main__":
    raise SystemExit(main())
