"""The manifest: the table of tensors in an arena.

An engine that restarts wants 10,000 tensors in milliseconds, and must not be led outside the arena by a wrong table.
Rows as msgpack maps take 11 ms to decode, columns 2 ms (10,000 tensors, one core); so the manifest is columns, and
:func:`check` proves every row against the arena's size before anything is mapped.
"""

from __future__ import annotations

import math
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
    ``dtypes``: index into ``dtype_names``. ``shapes``, ``strides``: in elements. ``offsets``: bytes from the arena's
    start, multiples of 256. ``digests``: 16 bytes each, joined (:mod:`weightcache.wire.digests`). ``aliases``: further
    name -> name of the tensor it is identical with (tied weights). ``metadata``: what kernels need besides tensors.
    """

    format: int = FORMAT
    arena_bytes: int
    names: list[str]
    kind_names: list[str]
    kinds: list[int]
    dtype_names: list[str]
    dtypes: list[int]
    shapes: list[list[int]]
    strides: list[list[int]]
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


def tensor_bytes(dtype: str, shape: list[int], strides: list[int]) -> int:
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
    bits = [DTYPE_BITS[name] for name in manifest.dtype_names]
    num_dtypes, num_kinds, arena_bytes = len(bits), len(manifest.kind_names), manifest.arena_bytes
    rows = zip(
        manifest.names,
        manifest.kinds,
        manifest.dtypes,
        manifest.shapes,
        manifest.strides,
        manifest.offsets,
        strict=True,
    )
    for name, kind, dtype, shape, strides, offset in rows:
        if not 0 <= dtype < num_dtypes or not 0 <= kind < num_kinds:
            return f"tensor {name!r}: dtype {dtype} or kind {kind} is not in its table"
        span, fits = 1, len(shape) == len(strides)
        for size, stride in zip(shape, strides):  # noqa: B905 - the keyword alone would cost a third of this check
            span += (size - 1) * stride
            if size < 0 or stride < 0:
                fits = False
        if not fits:
            return f"tensor {name!r}: shape {shape} and strides {strides} do not fit together"
        span = 0 if 0 in shape else span
        end = offset + span * bits[dtype] // 8
        if offset < 0 or offset % ALIGNMENT_BYTES or end > arena_bytes:
            return f"tensor {name!r}: bytes {offset} to {end} do not lie aligned in an arena of {arena_bytes}"
    return ""


def _alias_fault(manifest: Manifest) -> str:
    names = set(manifest.names)
    for alias, target in manifest.aliases.items():
        if alias in names:
            return f"alias {alias!r} is also the name of a tensor"
        if target not in names:
            return f"alias {alias!r} points to {target!r}, which the arena does not hold"
    return ""


def contiguous_strides(shape: list[int]) -> list[int]:
    """Row-major strides in elements. Pure."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
