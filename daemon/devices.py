"""Which GPUs a node has, how much memory is free, and the host slots that stand in for GPUs.

CUDA's ordinals, NVML's indices and a container's own numbering disagree, and a mix-up serves another rank's weights.
So a GPU is its UUID, everywhere, and this is the one place that asks for it. NVML is asked, not CUDA: the serving
process must not make a CUDA context, which would cost memory on every GPU it looks at.

Free host memory is not what the node has: in a container the cgroup's limit comes first, and a kill comes without
warning. Pages of the page cache that can be dropped count as free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcache.wire import reasons

__all__ = ["GPU", "HOST", "Device", "free_bytes", "host_free_bytes", "list_gpus", "list_host_slots"]

GPU = "GPU"
HOST = "Host"
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_LOG = logging.getLogger("weightcache.daemon")


@dataclass(frozen=True)
class Device:
    """A GPU, or a host slot (``host-<number>``): what a rank lives on.

    ``index``: NVML's, or the slot's number, for display only. ``capability``: such as ``9.0``, empty for the host.
    ``total_bytes``, ``free_bytes``: when it was listed; host slots share theirs. ``mig``: cut into slices.
    """

    uuid: str
    kind: str
    index: int
    name: str
    capability: str
    total_bytes: int
    free_bytes: int
    mig: bool


def list_gpus(nvml: Any = None) -> list[Device]:
    """Every GPU that NVML shows to this process. ``nvml``: the pynvml module or a stand-in.

    A GPU that does not answer (fallen off the bus) is left out with a warning, so that it does not take the others
    with it. Raises Refusal ``GPUNotFound`` when NVML is missing or does not start.
    """
    nvml = nvml or _import_nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _not_found(f"NVML does not start: {error}; is the NVIDIA driver loaded and visible here?") from error
    try:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                found.append(_describe(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index))
            except nvml.NVMLError as error:
                _LOG.warning("GPU with NVML index %d is left out: %s", index, error)
        return found
    except nvml.NVMLError as error:
        raise _not_found(f"NVML does not list GPUs: {error}") from error
    finally:
        nvml.nvmlShutdown()


def list_host_slots(num_slots: int) -> list[Device]:
    """``num_slots`` slots over the host's memory, which they share. Raises Refusal ``InsufficientHostMemory``."""
    total, free = _meminfo(_PROC)["MemTotal"], host_free_bytes()
    return [
        Device(
            uuid=f"host-{number}",
            kind=HOST,
            index=number,
            name="host memory",
            capability="",
            total_bytes=total,
            free_bytes=free,
            mig=False,
        )
        for number in range(num_slots)
    ]


def free_bytes(device: Device, nvml: Any = None) -> int:
    """Bytes that are free on the device right now. Raises Refusal ``GPUNotFound`` when the GPU is gone."""
    if device.kind == HOST:
        return host_free_bytes()
    nvml = nvml or _import_nvml()
    try:
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(device.uuid)).free)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise _not_found(f"{device.uuid}: NVML does not tell its free memory: {error}") from error


def describe_shortage(where: str, need_bytes: int, free_bytes: int) -> str:
    """What is needed, what is free and what is missing, in bytes and GiB, for refusals. Pure."""
    figures = [f"{size} bytes ({size / 2**30:.2f} GiB)" for size in (need_bytes, free_bytes, need_bytes - free_bytes)]
    return f"{where} needs {figures[0]}, {figures[1]} are free, {figures[2]} short"


def host_free_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes this process may still fill: the least of MemAvailable and what each cgroup above it leaves.

    A cgroup leaves limit - (usage - inactive page cache), never less than 0. Version 1 and 2 are read, the parents too,
    since the tightest may be the pod's and not the container's. Raises Refusal ``InsufficientHostMemory`` when
    ``proc`` does not say what is available.
    """
    return min([_meminfo(proc)["MemAvailable"], *(_room(directory) for directory in _cgroups_above(proc, cgroups))])


# --- NVML -----------------------------------------------------------------------------------------------------------
def _import_nvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise _not_found("the package nvidia-ml-py is missing; install weightcache[gpu]") from error
    return pynvml


def _describe(nvml: Any, handle: Any, index: int) -> Device:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        kind=GPU,
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        capability=f"{major}.{minor}",
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        mig=_has_mig(nvml, handle),
    )


def _has_mig(nvml: Any, handle: Any) -> bool:
    """Whether MIG mode is on now. A mode that only waits for the next reset changes nothing yet."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return False
        raise
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _not_found(message: str) -> reasons.Refusal:
    return reasons.Refusal(reasons.Reason.GPUNotFound, message)


# --- host memory ----------------------------------------------------------------------------------------------------
def _meminfo(proc: Path) -> dict[str, int]:
    """MemTotal and MemAvailable in bytes (proc(5); the file says kB and means KiB)."""
    path = proc / "meminfo"
    try:
        found = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        return {name: int(found[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")}
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise reasons.Refusal(
            reasons.Reason.InsufficientHostMemory, f"{path} does not say how much memory is available: {error!r}"
        ) from error


def _cgroups_above(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The memory cgroups that hold this process, from its own up to the top of what is mounted.

    ``/proc/self/cgroup`` lines are ``id:controllers:path`` (cgroups(7)). In a container without a cgroup namespace the
    path is the host's, while the mount begins at the container's own: then only the top exists, and it is the right
    one. A path that leaves the namespace begins with ``/..``.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            mounts = [cgroups / "memory"]
        elif number == "0" and not controllers:
            mounts = [cgroups, cgroups / "unified"]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from (mount.joinpath(*parts[:depth]) for mount in mounts for depth in range(len(parts), -1, -1))


#: Version 2, then 1: limit, usage, and the line of memory.stat with the page cache that can be dropped first. In
#: version 1 only the ``total_`` lines count the children that usage counts (Documentation/admin-guide/cgroup-v1).
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_UNLIMITED = 1 << 62


def _room(directory: Path) -> int:
    """Bytes a cgroup leaves; without a limit, or where it cannot be read, more than any machine has."""
    for limit_file, usage_file, cache_line in _FILES:
        try:
            limit = int((directory / limit_file).read_text())
            usage = int((directory / usage_file).read_text())
            stats = dict(line.split(None, 1) for line in (directory / "memory.stat").read_text().splitlines())
            return max(0, limit - max(0, usage - int(stats.get(cache_line, 0))))
        except (OSError, ValueError):
            continue
    return _UNLIMITED
