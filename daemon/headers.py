"""Reading the header of a safetensors file, and believing none of it.

A header decides which bytes of a file become weights. A truncated download, a stale copy or a hostile file may say
anything there, and a reader that trusts it reads beyond the file, leaves holes full of old memory, or dies deep inside
a loader. So the header is checked whole before a weight byte is read, and only the header is read: the cost does not
depend on the size of the file.

The format (https://github.com/huggingface/safetensors#format): 8 bytes, little-endian, length N of the header; N bytes
of JSON that begin with ``{`` and may end in spaces: tensor name -> ``{"dtype", "shape", "data_offsets": [begin, end]}``
with offsets from the end of the header, and ``__metadata__``, a map of strings; then the data, without holes.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from typing import Any, NamedTuple, NoReturn

import msgspec

from weightcache.wire import evidence, manifests, reasons

__all__ = ["MAX_HEADER_BYTES", "Header", "Tensor", "parse", "read"]

#: The limit of the reference implementation (``MAX_HEADER_SIZE``).
MAX_HEADER_BYTES = 100_000_000
#: More than any framework can hold (torch: 64); keeps a hostile shape short.
MAX_DIMENSIONS = 64
_MAX_SIZE = 2**63 - 1
_PREFIX_BYTES = 8
#: dtypes of the format that no manifest can carry: sub-byte types, complex numbers, AMD's 8-bit floats.
_NOT_CARRIED = frozenset({"F4", "F6_E2M3", "F6_E3M2", "C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


class Tensor(NamedTuple):
    """One tensor of a checkpoint: ``begin`` is an absolute offset in ``file``, ``shape`` is in elements."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


class Header(NamedTuple):
    """A file's tensors in the order of their bytes, where its data begins, and its stat when the header was read."""

    tensors: tuple[Tensor, ...]
    data_begin: int
    stat: evidence.FileStat


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


# In two steps, so that an entry that is wrong can be named.
_ENTRIES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)


class _Fault(Exception):
    """What is wrong, before the file's name is known."""

    def __init__(self, text: str, reason: reasons.Reason = reasons.Reason.CheckpointInvalid) -> None:
        super().__init__(text)
        self.reason = reason

    def refusal(self, file: str) -> reasons.Refusal:
        """The same fault for the user."""
        unsupported = self.reason is reasons.Reason.UnsupportedQuantization
        return reasons.Refusal(self.reason, f"{file}: {self}{'' if unsupported else '; download the file again'}")


def read(path: str | os.PathLike[str], file: str) -> Header:
    """The header of the safetensors file at ``path``; ``file`` is its name in messages and in the result.

    Reads 8 + N bytes. Raises Refusal: ``CheckpointIncomplete`` (absent, unreadable, shorter than it says),
    ``CheckpointInvalid`` (contradicts its format), ``UnsupportedQuantization`` (a dtype that cannot be carried).
    """
    try:
        # Not blocking: a FIFO of that name must not hang the daemon.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise reasons.Refusal(reasons.Reason.CheckpointIncomplete, f"{file}: cannot be opened: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise reasons.Refusal(reasons.Reason.CheckpointInvalid, f"{file}: not a regular file")
        found = evidence.file_stat(descriptor)
        prefix = os.pread(descriptor, _PREFIX_BYTES, 0)
        size = _header_bytes(prefix, found.size_bytes)
        tensors = _parse(os.pread(descriptor, size, _PREFIX_BYTES), size, found.size_bytes, file)
    except _Fault as fault:
        raise fault.refusal(file) from fault
    except OSError as error:
        raise reasons.Refusal(reasons.Reason.CheckpointIncomplete, f"{file}: cannot be read: {error}") from error
    finally:
        os.close(descriptor)
    return Header(tensors, _PREFIX_BYTES + size, found)


def parse(data: bytes, file: str) -> tuple[Tensor, ...]:
    """The tensors of a whole safetensors file held in memory, in the order of their bytes. Pure.

    Raises Refusal as :func:`read` does.
    """
    try:
        size = _header_bytes(data[:_PREFIX_BYTES], len(data))
        return _parse(data[_PREFIX_BYTES : _PREFIX_BYTES + size], size, len(data), file)
    except _Fault as fault:
        raise fault.refusal(file) from fault


def _header_bytes(prefix: bytes, file_bytes: int) -> int:
    if len(prefix) < _PREFIX_BYTES:
        raise _Fault(f"{file_bytes} bytes, a header needs at least 8", reasons.Reason.CheckpointIncomplete)
    size = int(struct.unpack("<Q", prefix)[0])
    if size > MAX_HEADER_BYTES:
        raise _Fault(f"header length {size}, the format allows {MAX_HEADER_BYTES}")
    if _PREFIX_BYTES + size > file_bytes:
        raise _Fault(f"header length {size} in a file of {file_bytes} bytes", reasons.Reason.CheckpointIncomplete)
    return size


def _parse(text: bytes, size: int, file_bytes: int, file: str) -> tuple[Tensor, ...]:
    if len(text) < size:
        raise _Fault(f"{len(text)} of {size} header bytes can be read", reasons.Reason.CheckpointIncomplete)
    if not text.startswith(b"{"):
        raise _Fault("the header does not begin with '{'")
    try:
        entries = _ENTRIES.decode(text)
        _check_metadata(entries.pop("__metadata__", None))
        _refuse_duplicates(text, len(entries))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _Fault(f"the header is not valid JSON: {error}") from error
    data_begin = _PREFIX_BYTES + size
    tensors = [_tensor(name, raw, data_begin, file) for name, raw in entries.items()]
    tensors.sort(key=_by_offset)
    _check_contiguous(tensors, data_begin, file_bytes)
    return tuple(tensors)


def _check_metadata(raw: msgspec.Raw | None) -> None:
    if raw is None:
        return
    try:
        msgspec.json.decode(raw, type=dict[str, str])
    except msgspec.ValidationError as error:
        raise _Fault(f"__metadata__ is not a map of strings: {error}") from error


def _refuse_duplicates(text: bytes, num_entries: int) -> None:
    """Refuse a name or field that stands twice, of which decoders silently keep the last.

    Without escapes, each entry that is complete spells each field once; so equal counts prove that there are no others.
    That takes milliseconds for 100,000 tensors, looking at each pair takes a second. Anything else is looked at.
    """
    spelled = (text.count(b'"dtype"'), text.count(b'"shape"'), text.count(b'"data_offsets"'))
    plain = b"\\" not in text and text.count(b'"__metadata__"') <= 1
    if not plain or spelled != (num_entries,) * 3:
        json.loads(text.decode("utf-8"), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _Fault(f"the header has two entries {twice!r:.200}")
    return found


def _tensor(name: str, raw: msgspec.Raw, data_begin: int, file: str) -> Tensor:
    try:
        dtype, shape, (begin, end) = msgspec.structs.astuple(_ENTRY.decode(raw))
    except msgspec.MsgspecError as error:
        raise _Fault(f"tensor {name!r:.200}: {error}") from error
    if not 0 <= begin <= end <= _MAX_SIZE:
        raise _Fault(f"tensor {name!r:.200}: data_offsets {begin!r:.40} to {end!r:.40} are negative, reversed or huge")
    if len(shape) > MAX_DIMENSIONS or not all(0 <= size <= _MAX_SIZE for size in shape):
        raise _Fault(f"tensor {name!r:.200}: shape {shape!r:.100} is not a list of up to {MAX_DIMENSIONS} sizes")
    bits = manifests.DTYPE_BITS.get(dtype)
    if bits is None:
        _refuse_dtype(name, dtype)
    if math.prod(shape) * bits != (end - begin) * 8:
        want = math.prod(shape) * bits // 8
        raise _Fault(
            f"tensor {name!r:.200}: {dtype} of shape {shape!r:.200} needs {want!r:.40} bytes, "
            f"data_offsets give {end - begin}"
        )
    return Tensor(name, file, dtype, tuple(shape), data_begin + begin, end - begin)


def _refuse_dtype(name: str, dtype: str) -> NoReturn:
    if dtype in _NOT_CARRIED:
        raise _Fault(
            f"tensor {name!r:.200}: dtype {dtype} cannot be carried; 4-bit weights are read as U8, two a byte",
            reasons.Reason.UnsupportedQuantization,
        )
    raise _Fault(f"tensor {name!r:.200}: unknown dtype {dtype!r:.100}")


def _by_offset(tensor: Tensor) -> tuple[int, int]:
    return tensor.begin, tensor.size_bytes


def _check_contiguous(tensors: list[Tensor], data_begin: int, file_bytes: int) -> None:
    """The format forbids holes and overlaps: each tensor begins where the one before ends, the last ends the file."""
    position, before = data_begin, "the header"
    for tensor in tensors:
        if tensor.begin != position:
            what = "overlaps" if tensor.begin < position else "leaves a hole after"
            raise _Fault(
                f"tensor {tensor.name!r:.200} begins at byte {tensor.begin} and {what} {before}, "
                f"which ends at {position}"
            )
        position, before = tensor.begin + tensor.size_bytes, f"{tensor.name!r:.200}"
    if position > file_bytes:
        raise _Fault(
            f"{before} ends at byte {position}, the file at {file_bytes}: truncated",
            reasons.Reason.CheckpointIncomplete,
        )
    if position < file_bytes:
        raise _Fault(f"{file_bytes - position} bytes follow {before}, which ends at {position}")
