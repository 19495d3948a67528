"""What holds for every test: how hard hypothesis tries, and that tests of a GPU are skipped where there is none."""

from __future__ import annotations

import ctypes
from pathlib import Path

import hypothesis
import pytest

GPU_TESTS = Path(__file__).parent / "gpu"

# A deadline per example measures the machine, not the code; the time limit per test stays. The short profile draws
# the same examples each time, so that a red run is red again; the long one is where new examples are looked for.
hypothesis.settings.register_profile("short", max_examples=100, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile(
    "long", max_examples=20_000, deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("short")


def reason_without_gpu() -> str:
    """Why no GPU can be used here; empty where one can. Asks the driver for its count, and makes no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs an NVIDIA GPU: this machine has no driver (libcuda.so.1)"
    count = ctypes.c_int(0)
    result = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if result:
        return f"needs an NVIDIA GPU: the driver answered CUresult {result}"
    return "" if count.value else "needs an NVIDIA GPU: the driver sees none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in tests/gpu, or marked gpu, is skipped with the reason where there is no GPU."""
    wanting = [item for item in items if item.get_closest_marker("gpu") or GPU_TESTS in item.path.parents]
    reason = reason_without_gpu() if wanting else ""
    for item in wanting if reason else []:
        item.add_marker(pytest.mark.skip(reason=reason))
