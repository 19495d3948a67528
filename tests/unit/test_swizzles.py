"""Block-scale swizzle: the published formula element by element, and its inverse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcache.kernels import swizzles


def by_hand(scales):
    """cuBLAS' formula, one element at a time, into a buffer that starts as zeros."""
    rows, columns = scales.shape
    padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    flat = torch.zeros(padded_rows * padded_columns, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (padded_columns // 4) + c // 4
            flat[tile * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scales[r, c]
    return flat.reshape(padded_rows, padded_columns)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (130, 5), (256, 8), (33, 12), (300, 7)])
def test_every_scale_lands_where_the_published_formula_says(shape):
    """A scale in another place multiplies another block of weights."""
    scales = torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(swizzles.swizzle_block_scales(scales), by_hand(scales))


def test_experts_are_swizzled_one_by_one():
    """A stack of experts is a stack of swizzled matrices, not one tall matrix."""
    scales = torch.randint(1, 256, (3, 130, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(swizzles.swizzle_block_scales(scales), torch.stack([by_hand(one) for one in scales]))


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 2**31))
def test_unswizzle_undoes_swizzle_for_any_shape(rows, columns, seed):
    """The checkpoint's scales can be had back from an arena."""
    scales = torch.randint(0, 256, (2, rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    scales = scales.view(torch.float8_e4m3fn)
    undone = swizzles.unswizzle_block_scales(swizzles.swizzle_block_scales(scales), rows, columns)
    assert torch.equal(undone.view(torch.uint8), scales.view(torch.uint8))


def test_the_mma_view_names_the_same_bytes():
    """CuteDSL kernels index (r % 32, r % 128 // 32, r // 128, c % 4, c // 4, g): each must be scale (r, c) of g."""
    scales = torch.randint(0, 256, (2, 256, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    swizzled = swizzles.swizzle_block_scales(scales)
    view = swizzles.mma_view(swizzled)
    assert view.data_ptr() == swizzled.data_ptr() and tuple(view.shape) == (32, 4, 2, 4, 2, 2)
    for g, r, c in ((0, 0, 0), (1, 255, 7), (0, 130, 5), (1, 63, 2)):
        assert view[r % 32, r % 128 // 32, r // 128, c % 4, c // 4, g] == scales[g, r, c]


def test_a_wrong_element_size_or_shape_is_refused():
    """Swizzling two-byte scales would shear them apart; unswizzling another size would mix them."""
    with pytest.raises(ValueError, match="one-byte"):
        swizzles.swizzle_block_scales(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"\(128, 8\), not \(128, 4\)"):
        swizzles.unswizzle_block_scales(torch.zeros(128, 4, dtype=torch.uint8), 100, 5)
