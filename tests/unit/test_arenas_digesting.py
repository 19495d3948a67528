"""The digest kernel itself, run on an emulated warp, against the xxhash library; and the PTX made from it."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from weightcache.arenas import digesting

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ROOT / "arenas" / "xxh3.cu"
MIB = 1 << 20

Emulation = Callable[..., list[bytes]]


def load_builder() -> types.ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("build_ptx", ROOT / "scripts" / "build_ptx.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=[1, 4], ids=["depth 1", "depth 4"])
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    """Run ``arenas/xxh3.cu`` over pieces: (bytes, bytes skipped before them), with any number of warps a block."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: the kernel's source cannot be compiled for the emulated warp")
    program = tmp_path_factory.mktemp("warp") / "xxh3"
    source = Path(__file__).with_name("warp_emulation.hpp")
    options = ["-O2", "-std=c++17", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    defines = [f'-DKERNEL="{KERNEL}"', f"-DDEPTH={request.param}"]
    subprocess.run([compiler, *options, *defines, "-x", "c++", str(source), "-o", str(program)], check=True)

    def run(pieces: Sequence[tuple[bytes, int]], warps: int = 1) -> list[bytes]:
        message = struct.pack("<II", len(pieces), warps)
        message += b"".join(struct.pack("<QQ", len(data), skipped) + data for data, skipped in pieces)
        output = subprocess.run([program], input=message, stdout=subprocess.PIPE, check=True, timeout=60).stdout
        return [output[i : i + 16] for i in range(0, len(output), 16)]

    return run


def random_pieces(sizes: Sequence[int]) -> list[bytes]:
    """Random bytes of each size, the same at every run."""
    generator = np.random.default_rng(len(sizes))
    return [generator.bytes(size) for size in sizes]


def assert_digests(emulated: Emulation, pieces: Sequence[bytes], warps: int = 1) -> None:
    """Compare the kernel with the library, and show each length with both digests."""
    expected = [xxhash.xxh3_128_digest(piece).hex() for piece in pieces]
    # Whole multiples of 16 end at an unreadable page, so that a read beyond the piece is a crash.
    found = [
        digest.hex() for digest in emulated([(piece, 0 if len(piece) % 16 == 0 else 16) for piece in pieces], warps)
    ]
    assert dict(enumerate(zip(map(len, pieces), found, strict=True))) == dict(
        enumerate(zip(map(len, pieces), expected, strict=True))
    )


SIZES = st.one_of(
    st.integers(1, 40).map(lambda n: 256 * n),  # what small tensors are
    st.integers(1, 1024).map(lambda n: 256 * n),
    st.integers(241, 9000),  # what the last block of a file may be
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(SIZES, min_size=1, max_size=6), warps=st.integers(1, 4))
@example(sizes=[256, 512, 768, 1024, 1280, 4096, 4352, 5120, 5376], warps=1)
@example(sizes=[241, 255, 257, 1023, 1025, 1087, 1088, 1089, 2047, 2049], warps=4)
def test_the_kernel_digests_any_length_as_xxhash_does(emulated: Emulation, sizes: list[int], warps: int) -> None:
    """A kernel that errs for one length calls sound weights damaged, or damaged ones sound."""
    assert_digests(emulated, random_pieces(sizes), warps)


def test_the_kernel_digests_whole_pieces_of_4_mib(emulated: Emulation) -> None:
    """The common case at its true size, and 256 bytes to either side of it."""
    assert_digests(emulated, random_pieces([4 * MIB, 4 * MIB - 256, 4 * MIB + 256, 3 * MIB + 12345]))


def test_the_kernel_sees_every_bit(emulated: Emulation) -> None:
    """One bit anywhere (each lane, each block, the overlapping tail) changes the digest."""
    whole = random_pieces([5000])[0]
    flipped = []
    for position in range(0, len(whole), 7):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        flipped.append(bytes(data))
    found = emulated([(data, 16) for data in [whole, *flipped]])
    assert len(set(found)) == len(flipped) + 1


def test_the_same_bytes_elsewhere_have_the_same_digest(emulated: Emulation) -> None:
    """A digest is about bytes, not about where in an arena they lie."""
    data = random_pieces([3333])[0]
    assert len(set(emulated([(data, skipped) for skipped in (16, 48, 256, 4096)]))) == 1


@pytest.mark.parametrize(
    ("address", "size", "expected"),
    [(0, 241, True), (16, 4 * MIB, True), (0, 240, False), (0, 0, False), (8, 4096, False), (1, 4096, False)],
)
def test_what_the_kernel_cannot_digest_is_told_beforehand(address: int, size: int, expected: bool) -> None:
    """Short inputs are another algorithm in XXH3, and unaligned loads fault: neither may reach the kernel."""
    assert digesting.is_digestible(address, size) is expected


def test_the_ptx_was_made_from_this_source() -> None:
    """A changed kernel with yesterday's PTX would be tested here and not used there."""
    builder = load_builder()
    assert not builder.is_stale(KERNEL.read_bytes(), digesting.PTX.read_text()), "run scripts/build_ptx.py"
    assert builder.is_stale(KERNEL.read_bytes() + b"\n", digesting.PTX.read_text())


def test_the_compiler_makes_the_same_ptx_again() -> None:
    """Nobody edited the PTX by hand. Compared as code where the compiler is the one that made it."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    builder = load_builder()
    try:
        fresh = builder.compile_source(KERNEL.read_bytes())
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    held = digesting.PTX.read_text()
    release = next(line for line in held.splitlines() if "release" in line)
    if release not in fresh:
        pytest.skip(f"another NVRTC made the checked-in PTX ({release})")
    assert fresh == held
