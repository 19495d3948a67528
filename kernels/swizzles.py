"""Block scales in the order that Blackwell's tensor cores read them.

A checkpoint stores one scale for 16 weights, row by row. A block-scaled matrix instruction fetches the scales of 128
rows x 4 columns as one 512-byte tile, in which a lane finds its four scales as one 32-bit word. Serving row-major
scales means reordering at every launch; so they are swizzled once.

    dst(r, c) = ((r // 128) * (C' / 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4

with R' = R rounded up to 128, C' = C rounded up to 4, padding zero. Source: cuBLAS, "1D Block Scaling Factors Layout";
the same as flashinfer's ``block_scale_interleave`` and vLLM's ``swizzle_blockscale``.

This is the reference (:mod:`weightcache.kernels.triton_swizzles` is the fast form). Four scales of a row stay together,
so what moves are 32-bit words.
"""

from __future__ import annotations

import torch

from weightcache.kernels import moves

__all__ = ["mma_view", "swizzle_block_scales", "unswizzle_block_scales"]


def swizzle_block_scales(scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``[..., R, C]`` of a one-byte dtype -> ``[..., R', C']`` of the same dtype, swizzled; padding is zero. Pure.

    Leading dimensions (experts) are swizzled independently. ``out``: a contiguous tensor to write instead of a new one.
    Raises ValueError for another element size or fewer than two dimensions.
    """
    raw = _as_bytes(scales)
    *lead, rows, columns = raw.shape
    padded_rows, padded_columns = _padded_sizes(rows, columns)
    if (padded_rows, padded_columns) != (rows, columns):
        padded = raw.new_zeros(*lead, padded_rows, padded_columns)
        padded[..., :rows, :columns] = raw
        raw = padded
    if out is None:
        out = scales.new_empty(*lead, padded_rows, padded_columns)
    words = _as_words(raw).view(-1, padded_rows // 128, 4, 32, padded_columns // 4)
    _as_words(out.view(torch.uint8)).view(-1, padded_rows // 128, padded_columns // 4, 32, 4).copy_(
        words.permute(0, 1, 4, 3, 2)
    )
    return out


def unswizzle_block_scales(swizzled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The inverse: ``[..., R', C']`` swizzled -> ``[..., rows, columns]``. Pure.

    Raises ValueError when R' and C' are not those of ``rows`` and ``columns``.
    """
    raw = _as_bytes(swizzled)
    *lead, padded_rows, padded_columns = raw.shape
    wanted = _padded_sizes(rows, columns)
    if (padded_rows, padded_columns) != wanted:
        raise ValueError(f"swizzled scales of {rows} x {columns} are {wanted}, not {(padded_rows, padded_columns)}")
    tiles = raw.reshape(-1, padded_rows // 128, padded_columns // 4, 32, 4, 4)
    plain = tiles.permute(0, 1, 4, 3, 2, 5).reshape(*lead, padded_rows, padded_columns)
    return plain[..., :rows, :columns].contiguous().view(swizzled.dtype)


def mma_view(swizzled: torch.Tensor) -> torch.Tensor:
    """``[g, R', C']`` swizzled -> the same bytes as ``[32, 4, R'/128, 4, C'/4, g]``, which CuteDSL kernels take. Pure.

    Element (r % 32, r % 128 // 32, r // 128, c % 4, c // 4, g). A strided view, not a copy. Source: flashinfer's
    ``convert_sf_to_mma_layout``.
    """
    groups, rows, columns = swizzled.shape
    return swizzled.view(groups, rows // 128, columns // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def _padded_sizes(rows: int, columns: int) -> tuple[int, int]:
    return moves.round_up(rows, moves.TILE_ROWS), moves.round_up(columns, moves.TILE_COLUMNS)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() != 1 or tensor.dim() < 2:
        raise ValueError(f"block scales are a matrix of one-byte elements, not {tensor.dtype} {tuple(tensor.shape)}")
    return tensor.contiguous().view(torch.uint8)


def _as_words(raw: torch.Tensor) -> torch.Tensor:
    """The bytes as 32-bit words; a view that starts between two words is copied."""
    return (raw if raw.storage_offset() % 4 == 0 else raw.clone()).view(torch.int32)
