"""Weights and scales as Marlin's W4A16 kernels read them.

Marlin multiplies 16-bit activations with 4-bit weights on GPUs that have no 4-bit tensor cores. Its loads are laid
out so that one lane gets eight consecutive nibbles, one 32-bit word, for the fragments it owns; its block scales are
stored so that a shift turns them into the 16-bit format of the activations. Sources: vLLM 0.32
``marlin_utils_fp4.py`` and the permutation of its Python reference ``marlin_utils_test.py``; IST-DASLab/marlin.

This is the reference (:mod:`weightcache.kernels.triton_marlin` is the fast form).
"""

from __future__ import annotations

import torch

from weightcache.kernels import moves

__all__ = [
    "global_scale",
    "pack_nibbles",
    "permute_bias",
    "repack_weights",
    "scale_bytes",
    "scale_factor",
    "scales",
    "unpack_nibbles",
]

_RUN = 64
_NOT_A_NUMBER = 0x7F
#: Within each run of 32 elements of a bias: output -> input (``get_scale_perms``, the single one).
_BIAS_ORDER = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 ``[..., N, K/2]`` -> uint8 codes ``[..., N, K]``; the low nibble is the even element. Pure."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes ``[..., N, K]`` -> uint8 ``[..., N, K/2]``. Pure."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def repack_weights(packed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 ``[..., N, K/2]`` as in the checkpoint -> int32 ``[..., K/16, 2 N]``. Pure.

    Word 16 c + 4 p + j of each run of 128 (64 columns n, 16 rows k) holds the codes of n = 16 j + c + {0, 8} and
    k = 2 p + {0, 1, 8, 9}: nibble s is entry (0, 2, 4, 6, 1, 3, 5, 7)[s] of the eight in that order. In bytes: four
    bytes of two rows make a word, low nibbles in its low half, high nibbles in its high half. ``out``: a contiguous
    tensor to write instead of a new one. Raises ValueError unless K % 16 == 0 and N % 64 == 0.
    """
    *lead, n, half = packed.shape
    k = 2 * half
    if k % moves.GROUP or n % _RUN:
        raise ValueError(f"Marlin takes K a multiple of 16 and N of 64, not K {k} and N {n}")
    # [.., run, j, b (n + 8), c, k tile, h (k + 8), p] -> [.., k tile, run, c, p, j, b, h]
    parts = packed.reshape(-1, n // _RUN, 4, 2, 8, k // 16, 2, 4).permute(0, 5, 1, 4, 7, 2, 3, 6)
    words = parts.contiguous().view(-1).view(torch.int32)
    _exchange(words, 4, 0x00F000F0)
    _exchange(words, 8, 0x0000FF00)
    shape = (*lead, k // 16, 2 * n)
    return words.view(shape) if out is None else out.copy_(words.view(shape))


def _exchange(words: torch.Tensor, shift: int, mask: int) -> None:
    """Exchange the bits under ``mask`` with those ``shift`` above them, in place: of nibbles 0 1 2 3 the middle two.

    After nibbles of each four, then the middle bytes: 0 .. 7 have become 0, 2, 4, 6, 1, 3, 5, 7.
    """
    swap = words.bitwise_right_shift(shift).bitwise_xor_(words).bitwise_and_(mask)
    words.bitwise_xor_(swap).bitwise_xor_(swap.bitwise_left_shift_(shift))


def scale_factor(block_scales: torch.Tensor, dtype: torch.dtype) -> float:
    """The power of two by which block scales are raised so that the largest still fits, 1 for fp16 models. Pure.

    2^floor(log2(448 * 2^7 / (2^7 * max))) while 0 < 2^7 * max < 448 * 2^7. For MoE, ``block_scales`` are those of all
    *local* experts together. Raises ValueError when a scale is not a number: the engine would pass it over here and
    multiply with it later.
    """
    # The bytes of e4m3 order as signed integers do (negative ones below all others), and need no copy in float.
    byte = int(block_scales.view(torch.int8).max())
    if byte == _NOT_A_NUMBER:
        raise ValueError("a block scale is not a number")
    if dtype == torch.float16 or byte <= 0:
        return 1.0
    largest = torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32) * 2.0**7
    limit = 448.0 * 2.0**7
    return float((limit / largest).log2().floor().exp2()) if largest < limit else 1.0


def scale_bytes(block_scales: torch.Tensor, factor: float) -> torch.Tensor:
    """e4m3 -> bytes under dtype e4m3 (really S0E5M3), element by element. Pure.

    fp16 times ``factor`` times 2^7; values below 2 become 0; the byte is bits 7..14. Exact: fp16 holds every e4m3.
    """
    raised = (block_scales.to(torch.float32) * factor).to(torch.float16) * 2.0**7
    raised = torch.where(raised < 2, torch.zeros_like(raised), raised)
    return ((raised.view(torch.int16) >> 7) & 0xFF).to(torch.uint8).view(torch.float8_e4m3fn)


def scales(block_scales: torch.Tensor, factor: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """e4m3 ``[..., N, K/16]`` -> ``[..., K/16, N]`` bytes under dtype e4m3 (really S0E5M3). Pure.

    Transposed; in runs of 64, output 8 i + j is input i + 8 j; in runs of 4 the order is 0, 2, 1, 3; then
    :func:`scale_bytes`. ``out``: a contiguous tensor to write instead of a new one. Raises ValueError unless N is a
    multiple of 64.
    """
    n = block_scales.shape[-2]
    if n % _RUN:
        raise ValueError(f"Marlin takes N a multiple of 64, not {n}")
    raw = scale_bytes(block_scales, factor).view(torch.uint8)
    place = torch.arange(n, device=raw.device)
    ordered = place // 4 * 4 + torch.tensor((0, 2, 1, 3), device=raw.device)[place % 4]
    rows = ordered // _RUN * _RUN + ordered % _RUN // 8 + ordered % 8 * 8
    turned = raw.index_select(-2, rows).transpose(-1, -2)
    if out is None:
        return turned.contiguous().view(torch.float8_e4m3fn)
    out.view(torch.uint8).copy_(turned)
    return out


def global_scale(scale: torch.Tensor, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """The global scale that undoes what was folded into the block scales, fp32. Pure.

    scale * 2^119 / factor for bf16 activations, scale * 2^7 / factor for fp16: the exponent biases of both formats
    (2^(e-1) - 2, for 8 and 5 exponent bits) less the 7 that the block scales carry. Raises ValueError for another
    dtype.
    """
    exponents = {torch.float16: 7, torch.bfloat16: 119}
    if dtype not in exponents:
        raise ValueError(f"Marlin multiplies with float16 or bfloat16, not {dtype}")
    return scale.to(torch.float32) * 2.0 ** exponents[dtype] / factor


def permute_bias(bias: torch.Tensor, size: int) -> torch.Tensor:
    """``[N]`` -> ``[size]``: zeros behind it, then within runs of 32 the order of the outputs that a lane owns. Pure.

    Raises ValueError unless ``size`` is a multiple of 32. Source: ``marlin_permute_bias``.
    """
    if size % 32:
        raise ValueError(f"Marlin takes a bias of a multiple of 32, not {size}")
    padded = torch.nn.functional.pad(bias, (0, size - bias.shape[0]))
    return padded.reshape(-1, 32)[:, _BIAS_ORDER].reshape(size)
