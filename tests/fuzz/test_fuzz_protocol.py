"""Whatever bytes come, only the protocol's own error comes out. A longer run: ``make fuzz-long``."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from weightcache.wire import frames, keys, protocol, reasons

KEY = keys.Key(
    layout_version=1,
    content="",
    config="",
    architecture="",
    dtype="",
    quantization="",
    quantization_config="",
    linear_layout="",
    preparer="",
)
SEEDS = [
    frames.encode(message)[4:]
    for message in (
        protocol.Hello(protocol=1, client=protocol.Client()),
        protocol.Rejoin(generation="g", key=KEY, token="t"),
        protocol.Release(key_digest="k"),
        protocol.Status(),
    )
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def decodes_or_refuses(body):
    for decode in (frames.decode_request, frames.decode_answer):
        try:
            decode(body)
        except reasons.Refusal as refusal:
            assert refusal.reason is reasons.Reason.ProtocolViolated


@given(st.binary(max_size=400))
def test_random_bytes_decode_or_are_refused(body):
    """Garbage is an error of its own kind, not a traceback."""
    decodes_or_refuses(body)


@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6))
def test_damaged_messages_decode_or_are_refused(seed, changes):
    """A bit that flipped in a good message meets the same gate."""
    body = bytearray(seed)
    for index, value in changes:
        body[index % len(body)] = value
    decodes_or_refuses(bytes(body))


@given(st.sampled_from(["Hello", "Claim", "Attach", "Rejoin", "Verify", "Release", "Attached"]), VALUES)
def test_well_formed_messages_with_wrong_values_are_refused(tag, value):
    """The right tag with anything in it."""
    body = {"type": tag, **(value if isinstance(value, dict) else {"key": value, "protocol": value})}
    decodes_or_refuses(msgspec.msgpack.encode(body))


def test_deep_nesting_is_refused_without_a_crash():
    """Ten thousand nested lists must not overflow a stack."""
    decodes_or_refuses(b"\x81\xa3key" + b"\x91" * 10_000 + b"\x01")
