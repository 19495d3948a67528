"""A GPU by its UUID, and this process's context on it.

Ordinals depend on CUDA_VISIBLE_DEVICES and differ between NVML and CUDA; two processes that disagree about "GPU 1"
map one rank's weights into another. So a GPU is named by UUID only, and this is the one place where a UUID becomes an
ordinal. The context is the device's primary one, which torch uses too: retained while the object lives, never at
import, and made current only for the length of a call, so that a thread's own current context stays what it was.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weightcache.arenas import driver
from weightcache.wire import reasons

__all__ = ["Context", "parse_uuid", "visible_uuids"]


def parse_uuid(device_uuid: str) -> bytes:
    """The 16 bytes of "GPU-xxxxxxxx-…" (NVML's spelling; the prefix may be missing). Pure.

    Raises ``Refusal``: GPUNotFound for anything else, MIGNotSupported for "MIG-…".
    """
    if device_uuid.startswith("MIG-"):
        raise reasons.Refusal(
            reasons.Reason.MIGNotSupported, f"{device_uuid} is a slice of a GPU; sharing from slices is untested"
        )
    try:
        return uuid.UUID(device_uuid.removeprefix("GPU-")).bytes
    except ValueError as error:
        raise reasons.Refusal(reasons.Reason.GPUNotFound, f"{device_uuid!r} is not the UUID of a GPU") from error


def visible_uuids() -> list[str]:
    """The UUIDs ("GPU-…") of the GPUs this process sees, in CUDA's order. Creates no context."""
    driver.initialize()
    devices = (driver.call("cuDeviceGet", ordinal) for ordinal in range(driver.call("cuDeviceGetCount")))
    return [f"GPU-{uuid.UUID(bytes=bytes(driver.call('cuDeviceGetUuid', device).bytes))}" for device in devices]


class Context:
    """The primary context of the GPU with this UUID. Close it when everything made in it is freed.

    ``ordinal`` is the device's number in this process only. Raises ``Refusal`` GPUNotFound when no visible GPU has
    the UUID, and ``driver.DriverError`` CUDA_ERROR_OUT_OF_MEMORY when the GPU has no room for a context (about
    0.5 GiB).
    """

    def __init__(self, device_uuid: str) -> None:
        wanted = parse_uuid(device_uuid)
        seen = visible_uuids()
        ordinals = [ordinal for ordinal, text in enumerate(seen) if parse_uuid(text) == wanted]
        if not ordinals:
            raise reasons.Refusal(
                reasons.Reason.GPUNotFound, f"GPU {device_uuid} is not among those visible here: {', '.join(seen)}"
            )
        self.device_uuid = seen[ordinals[0]]
        self.ordinal = ordinals[0]
        self._device = driver.call("cuDeviceGet", self.ordinal)
        self._handle: Any = driver.call("cuDevicePrimaryCtxRetain", self._device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """This context is the calling thread's current one inside the block."""
        driver.call("cuCtxPushCurrent", self._handle)
        try:
            yield
        finally:
            driver.call("cuCtxPopCurrent")

    def synchronize(self) -> None:
        """Wait for everything this process has asked of the GPU, torch's work included."""
        with self.current():
            driver.call("cuCtxSynchronize")

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU, as the driver counts them."""
        with self.current():
            free, total = driver.call("cuMemGetInfo")
        return int(free), int(total)

    def close(self) -> None:
        """Release the context: it ends when nobody in the process retains it. Twice is once."""
        if self._handle is not None:
            self._handle = None
            driver.call("cuDevicePrimaryCtxRelease", self._device)
