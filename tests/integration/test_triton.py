"""The Triton kernels without a GPU: through Triton's interpreter, and compiled for the GPUs they are for.

Triton decides when it is imported whether it interprets, so each test runs a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
TREE = Path(__file__).resolve().parent.parent.parent


def run(*arguments, **environment):
    """A fresh Python in the tree; its output. Fails with it."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=TREE,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_kernel_moves_the_same_bytes_as_the_reference():
    """Edge and random shapes, paddings, row orders and starts off alignment, into poisoned memory: bit for bit."""
    said = run("-W", "error", "-m", "tests.support.move_cases", TRITON_INTERPRET="1").splitlines()[-1]
    assert said.startswith("triton ") and said.endswith(" 0 differ"), said


def test_without_a_gpu_triton_is_not_even_imported():
    """A loader without a GPU needs no Triton, and must not wait for it."""
    said = run("-m", "tests.support.move_cases", TRITON_INTERPRET="0").splitlines()[-1]
    assert said.startswith("no triton ") and said.endswith(" 0 differ"), said


@pytest.mark.parametrize("capability", [90, 100])
def test_every_kernel_compiles_for_its_gpus_and_moves_16_bytes_a_thread(capability, tmp_path):
    """Hopper and Blackwell, with the assembler that Triton brings: a kernel that only interprets would fail on site."""
    said = run("-c", COMPILE, str(capability), TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert said.split() == ["_swizzle", "_gather", "_repack", "_scales"]


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weightcache.kernels import triton_gathers, triton_marlin, triton_swizzles

pointers = {"source": "*i32", "out": "*i32", "index": "*i32", "table": "*u8"}
kernels = (
    (triton_swizzles._swizzle, {"WORDS": True, "UNIT": 4, "BLOCK": 64}, pointers),
    (triton_gathers._gather, {"UNIT": 4, "ROWS": 16, "COLUMNS": 256}, pointers),
    (triton_marlin._repack, {"UNIT": 4, "BLOCK": 32}, {**pointers, "source": "*i64"}),
    (triton_marlin._scales, {"UNIT": 16, "BLOCK": 64}, {**pointers, "source": "*u8", "out": "*u8"}),
)
for kernel, constants, types in kernels:
    names = kernel.arg_names
    constants = {"HAS_INDEX": True, **constants}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("source", "out")}
    place = {(names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=place, attrs=aligned),
        target=GPUTarget("cuda", int(sys.argv[1]), 32),
        options={"num_warps": 8},
    )
    wide = [line for line in made.asm["ptx"].splitlines() if "st.global" in line]
    assert made.asm["cubin"] and wide and all(".v4.b32" in line for line in wide), (kernel, wide)
    print(kernel.__name__)
"""
