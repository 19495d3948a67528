"""Headers of safetensors files: what is read, and every lie that is refused."""

from __future__ import annotations

import json
import os
import struct
import time

import pytest
import safetensors
import safetensors.torch
import torch

from weightcache.daemon import headers
from weightcache.wire import reasons

R = reasons.Reason


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header (JSON, or bytes as they are), these data, and a header length that may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    """A tensor's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_headers_agree_with_the_reference_library(tmp_path):
    """What the safetensors library wrote is read with its dtypes, shapes and the very bytes."""
    tensors = {
        "a": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "b.weight": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        "scale": torch.tensor(1.5),
        "empty": torch.zeros(0, 7, dtype=torch.float16),
        "e4m3": torch.ones(5, dtype=torch.float8_e4m3fn),
        "ünïcode": torch.ones(1, dtype=torch.int64),
    }
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    found = headers.read(path, "x.safetensors")
    raw = path.read_bytes()
    assert {tensor.name for tensor in found.tensors} == set(tensors)
    for tensor in found.tensors:
        source = tensors[tensor.name]
        assert tensor.shape == tuple(source.shape)
        expected = source.flatten().view(torch.uint8) if source.numel() else torch.zeros(0, dtype=torch.uint8)
        assert raw[tensor.begin : tensor.begin + tensor.size_bytes] == bytes(expected.tolist())
    assert found.stat.size_bytes == len(raw)
    assert [tensor.begin for tensor in found.tensors] == sorted(tensor.begin for tensor in found.tensors)


LIES = {
    "seven bytes": (b"\x02\0\0\0\0\0\0", R.CheckpointIncomplete, "7 bytes"),
    "empty": (b"", R.CheckpointIncomplete, "0 bytes"),
    "length beyond the file": (file_of({}, length=3), R.CheckpointIncomplete, "header length 3 in a file of 10"),
    "length over the limit": (file_of({}, length=100_000_001), R.CheckpointInvalid, "allows 100000000"),
    "length of 2^64 - 1": (file_of({}, length=2**64 - 1), R.CheckpointInvalid, "allows 100000000"),
    "not JSON": (file_of(b"{nonsense}"), R.CheckpointInvalid, "not valid JSON"),
    "no brace first": (file_of(b" {}"), R.CheckpointInvalid, "does not begin"),
    "a list": (file_of(b"[]"), R.CheckpointInvalid, "does not begin"),
    "two values": (file_of(b"{}{}"), R.CheckpointInvalid, "not valid JSON"),
    "NaN": (file_of(b'{"a":NaN}'), R.CheckpointInvalid, "not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff":1}'), R.CheckpointInvalid, "not valid JSON"),
    "a lone surrogate": (
        file_of(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        R.CheckpointInvalid,
        "not valid JSON",
    ),
    "deep nesting": (file_of(b'{"a":' * 200_000 + b"1" + b"}" * 200_000), R.CheckpointInvalid, "not valid JSON"),
    "a name twice": (
        file_of(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"x",
        ),
        R.CheckpointInvalid,
        "two entries 'a'",
    ),
    "a name twice, once escaped": (
        file_of(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\\u0061":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"x",
        ),
        R.CheckpointInvalid,
        "two entries 'a'",
    ),
    "a field twice, once escaped": (
        file_of(b'{"a":{"dtype":"U8","\\u0064type":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        R.CheckpointInvalid,
        "two entries 'dtype'",
    ),
    "metadata twice": (
        file_of(b'{"__metadata__":{},"__metadata__":{"a":"b"}}'),
        R.CheckpointInvalid,
        "two entries '__metadata__'",
    ),
    "a field twice": (
        file_of(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        R.CheckpointInvalid,
        "two entries 'dtype'",
    ),
    "metadata with numbers": (file_of({"__metadata__": {"a": 1}}), R.CheckpointInvalid, "__metadata__"),
    "an entry that is text": (file_of({"a": "b"}), R.CheckpointInvalid, "'a'"),
    "an unknown field": (
        file_of({"a": {**entry("U8", [1], 0, 1), "x": 1}}, b"x"),
        R.CheckpointInvalid,
        "unknown field `x`",
    ),
    "unknown dtype": (file_of({"a": entry("U7", [1], 0, 1)}, b"x"), R.CheckpointInvalid, "unknown dtype 'U7'"),
    "dtype that is a list": (
        file_of({"a": entry([], [1], 0, 1)}, b"x"),
        R.CheckpointInvalid,
        "Expected `str`, got `array`",
    ),
    "4-bit dtype": (file_of({"a": entry("F4", [2], 0, 1)}, b"x"), R.UnsupportedQuantization, "F4 cannot be carried"),
    "negative size": (file_of({"a": entry("U8", [-1, -1], 0, 1)}, b"x"), R.CheckpointInvalid, "shape [-1, -1]"),
    "huge size": (
        file_of({"a": entry("U8", [2**64, 0], 0, 0)}),
        R.CheckpointInvalid,
        "shape [18446744073709551616, 0]",
    ),
    "a size that is true": (
        file_of({"a": entry("U8", [True], 0, 1)}, b"x"),
        R.CheckpointInvalid,
        "Expected `int`, got `bool`",
    ),
    "a size with a point": (
        file_of({"a": entry("U8", [1.0], 0, 1)}, b"x"),
        R.CheckpointInvalid,
        "Expected `int`, got `float`",
    ),
    "too many dimensions": (file_of({"a": entry("U8", [1] * 65, 0, 1)}, b"x"), R.CheckpointInvalid, "up to 64"),
    "a shape that overflows": (
        file_of({"a": entry("F64", [2**62] * 64, 0, 8)}, b"12345678"),
        R.CheckpointInvalid,
        "data_offsets give 8",
    ),
    "size other than shape": (
        file_of({"a": entry("BF16", [3], 0, 4)}, b"1234"),
        R.CheckpointInvalid,
        "needs 6 bytes, data_offsets give 4",
    ),
    "offsets out of order": (file_of({"a": entry("U8", [1], 2, 1)}, b"xx"), R.CheckpointInvalid, "reversed"),
    "negative offset": (file_of({"a": entry("U8", [2], -1, 1)}, b"x"), R.CheckpointInvalid, "negative"),
    "offset of 4000 digits": (
        file_of(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[%s,%s]}}' % (b"9" * 4000, b"9" * 4000)),
        R.CheckpointInvalid,
        "huge",
    ),
    "number of 5000 digits": (
        file_of(b'{"a":%s}' % (b"9" * 5000)),
        R.CheckpointInvalid,
        "not valid JSON",
    ),
    "offsets that are true": (
        file_of({"a": entry("U8", [1], False, True)}, b"x"),
        R.CheckpointInvalid,
        "Expected `int`, got `bool`",
    ),
    "three offsets": (
        file_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"x"),
        R.CheckpointInvalid,
        "Expected `array` of length 2",
    ),
    "overlap": (
        file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xxx"),
        R.CheckpointInvalid,
        "'b' begins at byte",
    ),
    "the same bytes twice": (
        file_of({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2)}, b"xx"),
        R.CheckpointInvalid,
        "overlaps",
    ),
    "a hole": (
        file_of({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"xxx"),
        R.CheckpointInvalid,
        "leaves a hole after 'a'",
    ),
    "a hole at the start": (file_of({"a": entry("U8", [1], 1, 2)}, b"xx"), R.CheckpointInvalid, "after the header"),
    "truncated data": (file_of({"a": entry("U8", [4], 0, 4)}, b"xxx"), R.CheckpointIncomplete, "truncated"),
    "trailing bytes": (file_of({"a": entry("U8", [1], 0, 1)}, b"xxx"), R.CheckpointInvalid, "2 bytes follow 'a'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused_with_file_and_reason(tmp_path, lie):
    """Every contradiction is named before a weight byte is read, and never becomes a shape or an offset."""
    data, reason, words = LIES[lie]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    for attempt in (lambda: headers.read(path, "bad.safetensors"), lambda: headers.parse(data, "bad.safetensors")):
        with pytest.raises(reasons.Refusal) as refused:
            attempt()
        assert refused.value.reason is reason
        assert refused.value.message.startswith("bad.safetensors: ")
        assert words in refused.value.message
        assert len(refused.value.message) < 2000


#: Refused here and not by the library: the format's text forbids it, or no engine can use it.
STRICTER = {
    "no brace first",
    "a name twice",
    "a name twice, once escaped",
    "metadata twice",
    "an unknown field",
    "too many dimensions",
    "4-bit dtype",
}


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie not in STRICTER])
def test_the_reference_library_refuses_the_same_files(lie):
    """What is refused is refused by the format, not by a reader that is wrong about it."""
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(LIES[lie][0])


def test_absent_unreadable_and_special_files_are_refused_without_hanging(tmp_path):
    """A FIFO or directory with a shard's name ends the attempt at once."""
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "directory.safetensors").mkdir()
    for name, reason in (
        ("absent.safetensors", R.CheckpointIncomplete),
        ("fifo.safetensors", R.CheckpointInvalid),
        ("directory.safetensors", R.CheckpointInvalid),
        ("nul\0.safetensors", R.CheckpointIncomplete),
    ):
        with pytest.raises(reasons.Refusal) as refused:
            headers.read(os.path.join(tmp_path, name), name)
        assert refused.value.reason is reason


def test_only_the_header_is_read(tmp_path):
    """A file of 1 TiB (sparse) costs what its header costs."""
    size = 1 << 40
    data = file_of({"a": entry("U8", [size], 0, size)})
    path = tmp_path / "big.safetensors"
    path.write_bytes(data)
    os.truncate(path, len(data) + size)
    began = time.monotonic()
    (tensor,) = headers.read(path, "big.safetensors").tensors
    assert (tensor.begin, tensor.size_bytes) == (len(data), size)
    assert time.monotonic() - began < 1


def test_a_hundred_thousand_tensors_are_read_in_seconds():
    """Headers of large expert models must not be what a start waits for."""
    names = (f"model.layers.{i}.mlp.experts.{i}.gate_proj.weight" for i in range(100_000))
    header = {name: entry("U8", [4], 4 * i, 4 * i + 4) for i, name in enumerate(names)}
    data = file_of(header, bytes(400_000))
    began = time.monotonic()
    assert len(headers.parse(data, "x")) == 100_000
    assert time.monotonic() - began < 10  # seconds; measured 0.6, a quadratic check takes minutes
