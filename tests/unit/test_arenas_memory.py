"""The choice of a memory by name, and what a process needs for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weightcache.arenas import memory
from weightcache.wire import reasons


@pytest.mark.parametrize("order", ["create", "map_readonly"])
def test_an_unknown_memory_is_refused_naming_the_known_ones(order: str) -> None:
    """A typo in a setting must not fall back to another memory."""
    arguments = ("gpu", 4096) if order == "create" else ("gpu", [0], [4096])
    with pytest.raises(reasons.Refusal, match="'gpu', which is none of GPU, Host") as caught:
        getattr(memory, order)(*arguments)
    assert caught.value.reason == reasons.Reason.SettingsInvalid


def test_the_host_backend_loads_neither_cuda_nor_torch() -> None:
    """A daemon on a machine without a GPU stack works, and the daemon's serving process has no context to lose."""
    program = (
        "import sys; from weightcache.arenas import contexts, digesting, driver, memory, pinning, vmm;"
        "early = sorted({'numpy', 'torch', 'cuda'} & set(sys.modules));"
        "memory.create('Host', 4096).close();"
        "print(early, sorted({'torch', 'cuda'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[] []"
