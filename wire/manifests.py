"""The manifest: the table of tensors in an arena.

An engine that restarts wants 10,000 tensors in milliseconds, and must not be led outside the arena by a wrong table.
Rows as msgpack maps take 11 ms to decode, columns 2 ms (10,000 tensors, one core); so the manifest is columns, and
:func:`check` proves every row against the arena's size before anything is mapped.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import msgspec

from weightcache.wire import digests, reasons

__all__ = ["ALIGNMENT_BYTES", "DTYPE_BITS", "FORMAT", "Manifest", "check", "decode", "encode", "padded", "tensor_bytes"]

FORMAT = 1
ALIGNMENT_BYTES = 256

#: dtype names of the safetensors format, with their size in bits (https://github.com/huggingface/safetensors).
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Columns of equal length, one entry a tensor, then what belongs to the arena as a whole.

    ``kinds``: index into ``kind_names`` (``loaded``: as the engine holds it after loading, before post-processing).
    ``dtypes``: index into ``dtype_names``. ``shapes``, ``strides``: in elements (tuples: they decode faster than lists
    and can be looked up). ``offsets``: bytes from the arena's start, multiples of 256. ``digests``: 16 bytes each,
    joined (:mod:`weightcache.wire.digests`). ``aliases``: further name -> name of the tensor it is identical with
    (tied weights). ``metadata``: what kernels need besides tensors.
    """

    format: int = FORMAT
    arena_bytes: int
    names: list[str]
    kind_names: list[str]
    kinds: list[int]
    dtype_names: list[str]
    dtypes: list[int]
    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    offsets: list[int]
    digests: bytes
    aliases: dict[str, str] = {}
    metadata: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.names)

    def digest_of(self, index: int) -> bytes:
        """The 16-byte digest of tensor number ``index``."""
        return self.digests[index * digests.DIGEST_BYTES : (index + 1) * digests.DIGEST_BYTES]

    def size_bytes_of(self, index: int) -> int:
        """Bytes from the first to the last element of tensor number ``index`` (without padding)."""
        return tensor_bytes(self.dtype_names[self.dtypes[index]], self.shapes[index], self.strides[index])


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Manifest)


def padded(size_bytes: int) -> int:
    """A size rounded up to the arena's alignment; an empty tensor still takes one unit. Pure."""
    return max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES


def tensor_bytes(dtype: str, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes spanned by a strided tensor, 0 when a dimension is 0. Pure."""
    if 0 in shape:
        return 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return span * DTYPE_BITS[dtype] // 8


def encode(manifest: Manifest) -> bytes:
    """The manifest as msgpack. Pure."""
    return _ENCODER.encode(manifest)


def decode(data: bytes | memoryview) -> Manifest:
    """The manifest from msgpack, checked by :func:`check`. Raises Refusal ``ProtocolViolated``. Pure."""
    try:
        manifest = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise reasons.Refusal(reasons.Reason.ProtocolViolated, f"manifest cannot be decoded: {error}") from error
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Refuse a manifest whose rows do not fit together or do not fit into the arena. Pure.

    Raises Refusal ``ProtocolViolated`` that names the tensor, the field and both values.
    """
    fault = _column_fault(manifest) or _row_fault(manifest) or _alias_fault(manifest)
    if fault:
        raise reasons.Refusal(reasons.Reason.ProtocolViolated, f"manifest: {fault}")


def _column_fault(manifest: Manifest) -> str:
    count = len(manifest.names)
    if manifest.format != FORMAT:
        return f"format {manifest.format}, this side reads {FORMAT}"
    for column in ("kinds", "dtypes", "shapes", "strides", "offsets"):
        if len(getattr(manifest, column)) != count:
            return f"column {column} has {len(getattr(manifest, column))} entries, names has {count}"
    if len(manifest.digests) != count * digests.DIGEST_BYTES:
        return f"digests has {len(manifest.digests)} bytes, {count} tensors need {count * digests.DIGEST_BYTES}"
    if len(set(manifest.names)) != count:
        return "two tensors have the same name"
    unknown = [name for name in manifest.dtype_names if name not in DTYPE_BITS]
    return f"unknown dtype {unknown[0]!r}" if unknown else ""


def _row_fault(manifest: Manifest) -> str:
    """The first row that lies. Columns as wholes first: that takes a third of the time, and rows seldom lie."""
    if not manifest.names or _rows_fit(manifest):
        return ""
    num_dtypes, num_kinds, spans = len(manifest.dtype_names), len(manifest.kind_names), _Spans(manifest.dtype_names)
    rows = zip(
        *(manifest.names, manifest.kinds, manifest.dtypes, manifest.shapes, manifest.strides, manifest.offsets),
        strict=True,
    )
    for name, kind, dtype, shape, strides, offset in rows:
        if not 0 <= dtype < num_dtypes or not 0 <= kind < num_kinds:
            return f"tensor {name!r}: dtype {dtype} or kind {kind} is not in its table"
        span = spans[dtype, shape, strides]
        if span == _MISFIT:
            return f"tensor {name!r}: shape {shape} and strides {strides} do not fit together"
        if offset < 0 or offset % ALIGNMENT_BYTES or offset + span > manifest.arena_bytes:
            end, arena_bytes = offset + span, manifest.arena_bytes
            return f"tensor {name!r}: bytes {offset} to {end} do not lie aligned in an arena of {arena_bytes}"
    return "rows and columns disagree"


def _rows_fit(manifest: Manifest) -> bool:
    for column, table in ((manifest.dtypes, manifest.dtype_names), (manifest.kinds, manifest.kind_names)):
        if min(column) < 0 or max(column) >= len(table):
            return False
    spans = _Spans(manifest.dtype_names)
    sizes = map(spans.__getitem__, zip(manifest.dtypes, manifest.shapes, manifest.strides, strict=True))
    aligned = functools.reduce(operator.or_, manifest.offsets) % ALIGNMENT_BYTES == 0
    return (
        aligned
        and min(manifest.offsets) >= 0
        and max(map(operator.add, manifest.offsets, sizes)) <= manifest.arena_bytes
    )


#: More bytes than any arena has.
_MISFIT = 1 << 80


class _Spans(dict[tuple[int, tuple[int, ...], tuple[int, ...]], int]):
    """Bytes spanned by each (dtype index, shape, strides) met so far: models repeat few of them."""

    def __init__(self, dtype_names: list[str]) -> None:
        self._dtype_names = dtype_names

    def __missing__(self, row: tuple[int, tuple[int, ...], tuple[int, ...]]) -> int:
        dtype, shape, strides = row
        fits = len(shape) == len(strides) and min(shape, default=0) >= 0 and min(strides, default=0) >= 0
        self[row] = span = tensor_bytes(self._dtype_names[dtype], shape, strides) if fits else _MISFIT
        return span


def _alias_fault(manifest: Manifest) -> str:
    names = set(manifest.names) if manifest.aliases else set()
    for alias, target in manifest.aliases.items():
        if alias in names:
            return f"alias {alias!r} is also the name of a tensor"
        if target not in names:
            return f"alias {alias!r} points to {target!r}, which the arena does not hold"
    return ""


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements. Pure."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
