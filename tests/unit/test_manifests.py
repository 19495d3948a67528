"""The manifest: what it says must lie inside the arena, or nothing is mapped."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcache.wire import manifests, reasons

GOOD = manifests.Manifest(
    arena_bytes=1024,
    names=["a", "b"],
    kind_names=["loaded"],
    kinds=[0, 0],
    dtype_names=["BF16", "U8"],
    dtypes=[0, 1],
    shapes=[(2, 3), (256,)],
    strides=[(3, 1), (1,)],
    offsets=[0, 256],
    digests=bytes(32),
    aliases={"tied": "a"},
)


def test_a_manifest_survives_the_wire():
    """Both ends must see the same table."""
    assert manifests.decode(manifests.encode(GOOD)) == GOOD
    assert (GOOD.size_bytes_of(0), GOOD.size_bytes_of(1)) == (12, 256)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offsets": [0, 1024]}, "'b': bytes 1024 to 1280"),
        ({"offsets": [0, 100]}, "'b': bytes 100"),
        ({"offsets": [-256, 256]}, "'a': bytes -256"),
        ({"shapes": [[2, 3], [1024]]}, "'b': bytes 256 to 1280"),
        ({"shapes": [[2, -3], [256]]}, "'a': shape"),
        ({"strides": [[300, 1], [1]], "shapes": [[3, 3], [256]]}, "'a': bytes 0 to 1206"),
        ({"strides": [[3], [1]]}, "'a': shape"),
        ({"names": ["a"]}, "names has 1"),
        ({"names": ["a", "a"]}, "same name"),
        ({"digests": bytes(31)}, "digests has 31 bytes"),
        ({"dtype_names": ["BF16", "X9"]}, "unknown dtype 'X9'"),
        ({"dtypes": [0, 2]}, "dtype 2"),
        ({"kinds": [0, 1]}, "kind 1"),
        ({"aliases": {"tied": "missing"}}, "'missing'"),
        ({"aliases": {"a": "b"}}, "'a' is also"),
        ({"format": 2}, "format 2, this side reads 1"),
    ],
)
def test_a_table_that_lies_is_refused_with_the_tensor_and_both_values(change, words):
    """A wrong row must not lead an engine outside the arena (answers W21, W22)."""
    with pytest.raises(reasons.Refusal, match=words.replace("'", "'")) as caught:
        manifests.decode(manifests.encode(msgspec.structs.replace(GOOD, **change)))
    assert caught.value.reason is reasons.Reason.ProtocolViolated


@given(st.binary(max_size=300))
def test_no_bytes_make_anything_but_a_refusal(data):
    """The decoder meets a hostile peer's bytes."""
    with pytest.raises(reasons.Refusal):
        manifests.decode(data)


def test_empty_and_scalar_tensors_have_their_place():
    """A 0-D scale takes its element, an empty tensor none, both a padded unit."""
    assert manifests.tensor_bytes("F32", [], []) == 4
    assert manifests.tensor_bytes("F32", [0, 5], [5, 1]) == 0
    assert (manifests.padded(0), manifests.padded(1), manifests.padded(256), manifests.padded(257)) == (
        256,
        256,
        256,
        512,
    )
