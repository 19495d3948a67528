"""Calls to the CUDA driver that cannot fail silently.

The driver answers each call with a status that is easily dropped, and a dropped one surfaces later, elsewhere, as
wrong bytes. Here one function makes the call, raises on anything but success, and names the call and the error.
The binding is imported at the first call: importing this module needs neither cuda-bindings nor a driver.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from weightcache.wire import reasons

__all__ = ["DriverError", "bindings", "call", "initialize"]


class DriverError(Exception):
    """The driver refused a call. ``function`` and ``error`` are its names for both ("CUDA_ERROR_OUT_OF_MEMORY")."""

    def __init__(self, function: str, error: str, arguments: tuple[Any, ...] = ()) -> None:
        super().__init__(f"{function} answered {error}; called with {', '.join(map(_short, arguments)) or 'nothing'}")
        self.function = function
        self.error = error


@functools.cache
def bindings() -> Any:
    """The module ``cuda.bindings.driver``. Raises ``Refusal`` GPUNotFound when it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise reasons.Refusal(
            reasons.Reason.GPUNotFound, f"no CUDA binding here ({error}): pip install 'weightcache[gpu]'"
        ) from error


def call(function: str, *arguments: Any) -> Any:
    """Call ``function`` of the driver: its one result, a tuple of several, or None. Raises DriverError."""
    status, *results = getattr(bindings(), function)(*arguments)
    if status != 0:
        raise DriverError(function, getattr(status, "name", str(status)), arguments)
    return tuple(results) if len(results) > 1 else (results[0] if results else None)


@functools.cache
def initialize() -> None:
    """cuInit, once a process; creates no context. Raises ``Refusal`` GPUNotFound where no driver or GPU is visible."""
    try:
        call("cuInit", 0)
    except (RuntimeError, OSError, DriverError) as error:
        # The binding raises a RuntimeError of its own when libcuda.so.1 is not on this machine.
        raise reasons.Refusal(reasons.Reason.GPUNotFound, f"the NVIDIA driver does not answer here: {error}") from error


def _short(argument: Any) -> str:
    return " ".join(repr(argument).split())[:80]
