"""Marlin's layout: against a tile-by-tile reading of its kernel's published permutation, and by hand."""

import pytest
import torch

from weightcache.kernels import layouts, marlin


def codes(n, k, seed=0):
    return torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_nibbles_pack_low_first():
    """Element 0 is the low nibble of byte 0, as the checkpoints have it."""
    assert marlin.pack_nibbles(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    assert marlin.unpack_nibbles(torch.tensor([[0x21, 0x0F]], dtype=torch.uint8)).tolist() == [[1, 2, 15, 0]]


def test_each_word_holds_the_fragment_of_its_lane():
    """Lane i of tile j owns rows 2 (i % 4) + {0, 1, 8, 9} of k and columns i // 4 + {0, 8} of n: by the mma layout."""
    n, k = 128, 32
    q = codes(n, k)
    packed = marlin.repack_weights(marlin.pack_nibbles(q))
    assert packed.shape == (k // 16, 2 * n) and packed.dtype == torch.int32
    for k_tile, word, lane, tile in (
        (0, 0, 0, 0),
        (1, 4 * 5 + 2, 5, 2),
        (1, 128 + 4 * 31 + 3, 31, 7),
        (0, 4 * 9, 9, 0),
    ):
        rows = [2 * (lane % 4) + d for d in (0, 1, 8, 9)]
        columns = [lane // 4, lane // 4 + 8]
        owned = [int(q[16 * tile + c, 16 * k_tile + r]) for c in columns for r in rows]
        wanted = sum(owned[index] << (4 * slot) for slot, index in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
        assert int(packed[k_tile, word]) & 0xFFFFFFFF == wanted


def test_experts_are_repacked_one_by_one():
    """A stack is a stack of matrices."""
    stack = torch.stack([marlin.pack_nibbles(codes(64, 16, seed)) for seed in range(3)])
    assert torch.equal(marlin.repack_weights(stack), torch.stack([marlin.repack_weights(one) for one in stack]))


def test_scales_become_s0e5m3_that_a_shift_turns_back():
    """The byte is fp16 of scale x factor x 2^7, shifted by 7: shifting back gives the value within e4m3's grain."""
    values = torch.tensor([448.0, 1.0, 0.5, 2.0**-6, 0.0]).repeat(64, 1).to(torch.float8_e4m3fn)
    out = marlin.scales(values, 1.0)
    assert out.shape == (5, 64)
    back = (out.view(torch.uint8).to(torch.int16) << 7).view(torch.float16).to(torch.float32) / 2.0**7
    assert back[:, 0].tolist() == [448.0, 1.0, 0.5, 2.0**-6, 0.0]


def test_the_scale_factor_is_the_largest_power_of_two_that_fits():
    """By hand: 448 needs 1; 100 may be raised 4 times (400), not 8; fp16 models are never raised."""
    for largest, wanted in ((448.0, 1.0), (96.0, 4.0), (224.0, 2.0), (0.0, 1.0)):
        block = torch.tensor([[largest]]).to(torch.float8_e4m3fn)
        assert marlin.scale_factor(block, torch.bfloat16) == wanted
    assert marlin.scale_factor(torch.tensor([[1.0]]).to(torch.float8_e4m3fn), torch.float16) == 1.0


def test_the_cheaper_padding_is_chosen():
    """By hand: multiples of (64, 128) or (128, 64), whichever are fewer weights."""
    assert layouts.padded_marlin(96, 128) == (128, 128)
    assert layouts.padded_marlin(64, 96) == (64, 128)
    assert layouts.padded_marlin(128, 64) == (128, 64)
    assert layouts.padded_marlin(64, 64) == (64, 128)
    assert layouts.padded_marlin(320, 64) == (384, 64)


@pytest.mark.parametrize("shape", [(48, 8), (64, 4)])
def test_sizes_that_marlin_cannot_take_are_refused(shape):
    """N 48 or K 8: no tile fits."""
    with pytest.raises(ValueError, match="Marlin takes"):
        marlin.repack_weights(torch.zeros(shape, dtype=torch.uint8))
