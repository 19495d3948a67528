"""Ten thousand tensors over one piece of mapped memory, in milliseconds and without a copy.

Wrapping each tensor's memory by itself costs 20 to 80 ms and gives objects that nothing keeps alive or in bounds. One
base tensor for each dtype over the whole mapping, and one ``as_strided`` a tensor, costs a microsecond or two a
tensor; torch checks each against the storage, and the storage keeps the memory mapped for as long as any view lives.
Garbage collection is off meanwhile: at 10,000 new objects it would search the whole heap several times over.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from weightcache.wire import manifests, reasons

__all__ = ["DTYPES", "base_of", "build_views", "collection_paused"]

#: safetensors' dtype names -> torch's. A dtype that this torch does not have is left out, so that it is refused.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, found)
    for name, found in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "U16": "uint16",
        "I16": "int16",
        "F16": "float16",
        "BF16": "bfloat16",
        "U32": "uint32",
        "I32": "int32",
        "F32": "float32",
        "U64": "uint64",
        "I64": "int64",
        "F64": "float64",
    }.items()
    if hasattr(torch, found)
}


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Keep Python's cyclic garbage collector from running; as it was before, whatever happens."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """No mode such as ``with torch.device(...)`` is asked about each call, and autograd keeps no record of each view.

    Nobody trains or writes these tensors, so the record (that a view belongs to a base, for in-place operations) would
    be a quarter of the time and half of the memory, for nothing. It is left out where torch has the switch, which is
    not part of its public API.
    """
    without_record = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", contextlib.nullcontext)
    with torch._C.DisableTorchFunction(), without_record():
        yield


def base_of(buffer: Any, device: torch.device) -> torch.Tensor:
    """A uint8 tensor over a mapping's whole buffer, without a copy; its storage keeps the mapping alive.

    ``buffer``: a read-only memoryview, or an object with ``__cuda_array_interface__`` in memory of ``device``. The
    device is always named: under ``with torch.device(...)`` torch would otherwise move the memory there.
    """
    if isinstance(buffer, memoryview):
        with warnings.catch_warnings():
            # torch has no read-only tensors and says so; here the kernel ends a writer (SIGSEGV), which is the point.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(buffer, dtype=torch.uint8)
    return torch.as_tensor(buffer, device=device)


def build_views(manifest: manifests.Manifest, base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every tensor of a checked manifest as a view of ``base`` (uint8, at least ``arena_bytes``), aliases included.

    An alias is the identical object. Raises Refusal ``ProtocolViolated`` for a dtype that this torch lacks. Pure.
    """
    unknown = [name for name in manifest.dtype_names if name not in DTYPES]
    if unknown:
        raise reasons.Refusal(
            reasons.Reason.ProtocolViolated, f"torch {torch.__version__} has no dtype for {', '.join(unknown)}"
        )
    # Mappings are whole pages, so the base divides by every element size; offsets are multiples of 256 bytes.
    bases = [base.view(DTYPES[name]) for name in manifest.dtype_names]
    element_bytes = [found.element_size() for found in bases]
    with _plain_tensors():
        found = map(
            torch.as_strided,
            map(bases.__getitem__, manifest.dtypes),
            manifest.shapes,
            manifest.strides,
            map(operator.floordiv, manifest.offsets, map(element_bytes.__getitem__, manifest.dtypes)),
        )
        views = dict(zip(manifest.names, found, strict=True))
    for alias, target in manifest.aliases.items():
        views[alias] = views[target]
    return views
