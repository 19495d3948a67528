"""Compile arenas/xxh3.cu to PTX, which the driver of any GPU from compute capability 8.0 on finishes at load time.

The verifier must start in a fraction of a second on machines without a compiler, so the PTX is built once and checked
in. Its first line holds the SHA-256 of the source it came from: a test compares them, and so a stale file fails.

    python scripts/build_ptx.py           # writes arenas/xxh3.ptx
    python scripts/build_ptx.py --check   # exit code 1 when it is stale

Needs cuda-bindings and NVRTC (``pip install nvidia-cuda-nvrtc``, or torch for CUDA); no GPU and no driver.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

ARENAS = pathlib.Path(__file__).resolve().parent.parent / "arenas"
SOURCE = ARENAS / "xxh3.cu"
TARGET = ARENAS / "xxh3.ptx"
ARCHITECTURE = "compute_80"


class CompilationError(Exception):
    """NVRTC refused the source; the message is its log."""


def header(source: bytes) -> str:
    """The first line of the PTX made from ``source``. Pure."""
    return f"// sha256 of xxh3.cu: {hashlib.sha256(source).hexdigest()}"


def is_stale(source: bytes, ptx: str) -> bool:
    """Whether ``ptx`` was made from another source. Pure."""
    return ptx.split("\n", 1)[0] != header(source)


def compile_source(source: bytes, architecture: str = ARCHITECTURE, defines: Sequence[str] = ()) -> str:
    """The PTX of ``source`` with ``defines`` (``NAME=value``), header line first. Raises CompilationError."""
    from cuda.bindings import nvrtc

    _status, program = nvrtc.nvrtcCreateProgram(source, b"xxh3.cu", 0, [], [])
    try:
        options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"--define-macro={one}" for one in defines)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [one.encode() for one in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompilationError(_text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program))
        ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return f"{header(source)}\n{_without_compiler_build(ptx)}"


def _text(measure: Any, read: Any, program: Any) -> str:
    size: int = measure(program)[1]
    data: bytes = b" " * size  # the binding writes into it
    read(program, data)
    return data.rstrip(b"\0").decode()


def _without_compiler_build(ptx: str) -> str:
    """Drop the comment with build numbers, which differ between patch releases that emit the same code. Pure."""
    return re.sub(r"^// Compiler Build ID:.*\n", "", ptx, flags=re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the PTX, or with ``--check`` only compare. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the PTX is stale")
    source = SOURCE.read_bytes()
    if parser.parse_args(arguments).check:
        stale = not TARGET.exists() or is_stale(source, TARGET.read_text())
        print(f"{TARGET.name} is {'stale: run scripts/build_ptx.py' if stale else 'current'}")
        return int(stale)
    TARGET.write_text(compile_source(source))
    print(f"wrote {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
