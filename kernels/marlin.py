"""Weights and scales as Marlin's W4A16 kernels read them.

Marlin multiplies 16-bit activations with 4-bit weights on GPUs that have no 4-bit tensor cores. Its loads are laid
out so that one lane gets eight consecutive nibbles, one 32-bit word, for the fragments it owns; its block scales are
stored so that a shift turns them into the 16-bit format of the activations. Sources: vLLM 0.32
``marlin_utils_fp4.py`` and the permutation of its Python reference ``marlin_utils_test.py``; IST-DASLab/marlin.
"""

from __future__ import annotations

import functools

import torch

__all__ = [
    "global_scale",
    "pack_nibbles",
    "padded_linear",
    "repack_weights",
    "scale_factor",
    "scales",
    "unpack_nibbles",
]

_TILE = 16
_RUN = 1024
_GROUP = 16


@functools.cache
def _weight_order() -> torch.Tensor:
    """Within each run of 1024 nibbles (16 rows of k x 64 columns of n, tile by tile): output nibble -> source nibble."""
    order: list[int] = []
    for lane in range(32):
        sources = [
            [16 * (2 * (lane % 4) + d) + lane // 4 + 8 * b + 256 * tile for b in (0, 1) for d in (0, 1, 8, 9)]
            for tile in range(4)
        ]
        for eight in sources:
            order.extend(eight[index] for index in (0, 2, 4, 6, 1, 3, 5, 7))
    return torch.tensor(order)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 ``[..., N, K/2]`` -> uint8 codes ``[..., N, K]``; the low nibble is the even element. Pure."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes ``[..., N, K]`` -> uint8 ``[..., N, K/2]``. Pure."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def repack_weights(packed: torch.Tensor) -> torch.Tensor:
    """uint8 ``[..., N, K/2]`` as in the checkpoint -> int32 ``[..., K/16, 2 N]``. Pure.

    Codes q[k][n] are cut into 16 x 16 tiles (k tile, n tile, k, n), each k-tile's row is permuted in runs of 1024
    nibbles, and eight nibbles make a word, the first one lowest. Raises ValueError unless K % 16 == 0 and N % 64 == 0.
    """
    *lead, n, half = packed.shape
    k = 2 * half
    if k % _TILE or n % 64:
        raise ValueError(f"Marlin takes K a multiple of 16 and N of 64, not K {k} and N {n}")
    codes = unpack_nibbles(packed).transpose(-1, -2)
    tiles = codes.reshape(*lead, k // _TILE, _TILE, n // _TILE, _TILE).transpose(-2, -3)
    runs = tiles.reshape(*lead, k // _TILE, -1, _RUN)
    permuted = runs[..., _weight_order().to(packed.device)].reshape(*lead, k // _TILE, 2 * n, 8).to(torch.int64)
    shifts = torch.arange(0, 32, 4, device=packed.device)
    return (permuted << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def scale_factor(block_scales: torch.Tensor, dtype: torch.dtype) -> float:
    """The power of two by which block scales are raised so that the largest still fits, 1 for fp16 models. Pure.

    2^floor(log2(448 * 2^7 / (2^7 * max))) while 2^7 * max < 448 * 2^7. For MoE, ``block_scales`` are those of all
    *local* experts together.
    """
    if dtype == torch.float16:
        return 1.0
    largest = block_scales.to(torch.float32).max() * 2.0**7
    limit = 448.0 * 2.0**7
    if not 0 < largest < limit:
        return 1.0
    return float((limit / largest).log2().floor().exp2())


def scales(block_scales: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """e4m3 ``[..., N, K/16]`` -> ``[..., K/16, N]`` bytes under dtype e4m3 (really S0E5M3). Pure.

    Transposed; in runs of 64, output 8 i + j is input i + 8 j; in runs of 4 the order is 0, 2, 1, 3; then fp16 times
    ``factor`` times 2^7, values below 2 become 0, and the byte is bits 7..14. ``dtype``: the model's, through which
    vLLM passes the scales. Raises ValueError unless N % 64 == 0.
    """
    *lead, n, groups = block_scales.shape
    if n % 64:
        raise ValueError(f"Marlin takes N a multiple of 64, not {n}")
    values = block_scales.to(dtype).transpose(-1, -2)
    runs = values.reshape(*lead, groups, n // 64, 8, 8).transpose(-1, -2).reshape(*lead, groups, n // 4, 4)
    ordered = runs[..., [0, 2, 1, 3]].reshape(*lead, groups, n).to(torch.float16)
    raised = (ordered.to(torch.float32) * factor).to(torch.float16) * 2.0**7
    raised = torch.where(raised < 2, torch.zeros_like(raised), raised)
    return ((raised.view(torch.int16) >> 7) & 0xFF).to(torch.uint8).view(torch.float8_e4m3fn)


def global_scale(scale: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """The global scale that undoes what was folded into the block scales, fp32. Pure.

    scale * 2^119 / factor for bf16 activations, scale * 2^7 / factor for fp16: the exponent biases of both formats
    (2^(e-1) - 2, for 8 and 5 exponent bits) less the 7 that the block scales carry.
    """
    exponent = 7 if dtype == torch.float16 else 119
    return scale.to(torch.float32) * 2.0**exponent / factor


def padded_linear(n: int, k: int) -> tuple[int, int]:
    """N and K of a linear layer after padding: the cheaper of multiples (64, 128) and (128, 64). Pure."""
    choices = [(-(-n // a) * a, -(-k // b) * b) for a, b in ((64, 128), (128, 64))]
    return min(choices, key=lambda pair: (pair[0] * pair[1], pair[0] + pair[1]))
