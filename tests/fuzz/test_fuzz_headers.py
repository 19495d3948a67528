"""Whatever bytes a safetensors file holds, reading its header ends with tensors inside the file or with a Refusal."""

from __future__ import annotations

import json
import struct

import safetensors
from hypothesis import given
from hypothesis import strategies as st

from weightcache.daemon import headers
from weightcache.wire import manifests, reasons

SIZES = st.one_of(st.integers(0, 40), st.integers(), st.booleans(), st.none(), st.floats(), st.text(max_size=3))
DTYPES = st.one_of(st.sampled_from(sorted(manifests.DTYPE_BITS)), st.just("F4"), st.text(max_size=4), SIZES)
ENTRIES = st.one_of(
    st.fixed_dictionaries(
        {"dtype": DTYPES, "shape": st.lists(SIZES, max_size=4), "data_offsets": st.lists(SIZES, max_size=3)},
        optional={"extra": SIZES},
    ),
    SIZES,
)
HEADERS = st.dictionaries(st.one_of(st.text(max_size=5), st.just("__metadata__")), ENTRIES, max_size=4)


def check(data: bytes) -> bool:
    """Read the header; whatever is accepted must be inside the file, gapless, and accepted by the reference library."""
    try:
        tensors = headers.parse(data, "fuzz")
    except reasons.Refusal:
        return False
    reference = dict(safetensors.deserialize(data))
    assert reference.keys() == {tensor.name for tensor in tensors}
    for tensor in tensors:
        found = reference[tensor.name]
        assert tensor.shape == tuple(found["shape"])
        assert data[tensor.begin : tensor.begin + tensor.size_bytes] == bytes(found["data"])
    return True


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_sound(data):
    """A damaged download never becomes an exception of another kind."""
    check(data)


@given(HEADERS, st.binary(max_size=80), st.integers(-3, 3))
def test_arbitrary_headers_are_refused_or_sound(header, data, slack):
    """Headers that are JSON, but lie about anything, never lead out of the file."""
    text = json.dumps(header).encode()
    check(struct.pack("<Q", max(0, len(text) + slack)) + text + data)


@given(st.data())
def test_damage_to_a_good_file_is_refused_or_sound(draw):
    """Bytes of a good header that are changed, cut or repeated lead to a refusal or to a sound header."""
    shapes = draw.draw(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4))
    dtype = draw.draw(st.sampled_from(sorted(manifests.DTYPE_BITS)))
    position, header = 0, {}
    for index, shape in enumerate(shapes):
        size = manifests.tensor_bytes(dtype, shape, manifests.contiguous_strides(shape))
        header[f"t{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    good = struct.pack("<Q", len(text)) + text + bytes(position)
    assert check(good)
    damaged = bytearray(good)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + draw.draw(st.integers(0, 2))] = draw.draw(st.binary(max_size=2))
    check(bytes(damaged))
