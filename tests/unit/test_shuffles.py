"""Row orders against flashinfer's own index generators, which run on the CPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightcache.kernels import shuffles

flashinfer_utils = pytest.importorskip("flashinfer.utils", reason="flashinfer-python is the witness of these orders")
flashinfer_moe = pytest.importorskip("flashinfer.fused_moe.core")


def matrix(rows):
    return torch.zeros(rows, 8, dtype=torch.uint8)


@pytest.mark.parametrize("rows", [32, 128, 256, 1536, 4096])
@pytest.mark.parametrize("tile", [64, 128, 256])
def test_the_trtllm_shuffle_is_flashinfers(rows, tile):
    """A row in another place is another output."""
    wanted = flashinfer_utils.get_shuffle_matrix_a_row_indices(matrix(rows), tile)
    assert torch.equal(shuffles.shuffled_rows(rows, tile), wanted)


@pytest.mark.parametrize("rows", [128, 256, 1536])
def test_the_gated_order_and_its_composition_are_flashinfers(rows):
    """gemm1's rows: interleave first, shuffle second."""
    wanted = flashinfer_moe.get_reorder_rows_for_gated_act_gemm_row_indices(matrix(rows))
    assert torch.equal(shuffles.gated_rows(rows), wanted)
    both = flashinfer_moe._maybe_get_cached_w3_w1_permute_indices({}, matrix(rows), 128)
    assert torch.equal(shuffles.gated_rows(rows)[shuffles.shuffled_rows(rows)], both)


def test_the_interleave_in_groups_of_64_by_hand():
    """256 rows of [up; gate]: up 0-63, gate 0-63, up 64-127, gate 64-127."""
    wanted = [*range(64), *range(128, 192), *range(64, 128), *range(192, 256)]
    assert shuffles.interleaved_rows(256).tolist() == wanted


@given(st.integers(1, 40), st.sampled_from(["shuffled", "gated", "interleaved"]))
def test_inverse_undoes_every_order(blocks, kind):
    """The checkpoint's rows can be had back from an arena."""
    index = getattr(shuffles, f"{kind}_rows")(128 * blocks)
    rows = torch.arange(128 * blocks, dtype=torch.int32).reshape(-1, 1)
    assert torch.equal(shuffles.gather_rows(shuffles.gather_rows(rows, index), shuffles.inverse(index)), rows)


@pytest.mark.parametrize(("order", "rows"), [("shuffled_rows", 40), ("gated_rows", 3), ("interleaved_rows", 64)])
def test_sizes_that_do_not_divide_are_refused(order, rows):
    """A silent remainder would be rows that nobody reads."""
    with pytest.raises(ValueError, match=str(rows)):
        getattr(shuffles, order)(rows)
