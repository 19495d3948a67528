"""Which bytes a digest covers, and in which pieces: the same for every process and backend."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from weightcache.arenas import extents

SIZES = st.integers(0, 40).map(lambda n: n * 256)


@given(st.lists(st.tuples(SIZES, SIZES)), st.integers(1, 8).map(lambda n: n * 256))
def test_pieces_cover_each_byte_of_each_extent_once_and_in_order(
    spans: list[tuple[int, int]], piece_bytes: int
) -> None:
    """A byte left out could be damaged unseen; one covered twice would make loader and verifier disagree."""
    given_extents = [extents.Extent(*span) for span in spans]
    covered = [b for piece in extents.pieces(given_extents, piece_bytes) for b in range(piece.offset, piece.end)]
    assert covered == [b for offset, size in spans for b in range(offset, offset + size)]
    assert all(0 < piece.size_bytes <= piece_bytes for piece in extents.pieces(given_extents, piece_bytes))


def test_a_tensor_of_one_piece_is_digested_by_the_rule_of_many() -> None:
    """A small tensor's digest is the digest of its piece's digest, as for large ones; an empty one's is of nothing."""
    one, two = bytes(range(256)), bytes(512)
    found = extents.combined(
        [extents.Extent(0, 256), extents.Extent(256, 0), extents.Extent(256, 768)],
        [xxhash.xxh3_128_digest(one), xxhash.xxh3_128_digest(two), xxhash.xxh3_128_digest(one)],
        piece_bytes=512,
    )
    joined = xxhash.xxh3_128_digest(two) + xxhash.xxh3_128_digest(one)
    assert found == [
        xxhash.xxh3_128_digest(xxhash.xxh3_128_digest(one)),
        xxhash.xxh3_128_digest(b""),
        xxhash.xxh3_128_digest(joined),
    ]


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 256), (255, 256), (256, 256), (257, 512)])
def test_padding_ends_at_the_next_multiple_of_256(size: int, expected: int) -> None:
    """Planner and verifier round alike."""
    assert extents.padded(size) == expected


@pytest.mark.parametrize("span", [(-256, 256), (0, -256), (768, 512), (1024, 256), (128, 256), (256, 100)])
def test_an_extent_outside_or_unaligned_is_refused_with_both_values(span: tuple[int, int]) -> None:
    """A manifest that lies about an offset must not make anyone read beyond the arena."""
    with pytest.raises(ValueError, match=r"outside of 1024 bytes|not aligned to 256"):
        extents.check_within([extents.Extent(*span)], 1024, 256)


@pytest.mark.parametrize("rows", [(3, 10, 45), (1, 101, 101), (-1, 1, 1), (2, 20, 10)])
def test_rows_that_do_not_lie_in_their_source_are_refused(rows: tuple[int, int, int]) -> None:
    """A wrong stride would copy a neighbour's bytes into a tensor."""
    with pytest.raises(ValueError, match="rows"):
        extents.check_rows(99, *rows)


def test_rows_may_end_at_the_last_byte_of_their_source() -> None:
    """The last row has no stride behind it."""
    extents.check_rows(99, 3, 9, 45)
    extents.check_rows(0, 0, 9, 45)
