"""Row orders: which row of a weight a kernel expects where.

TensorRT-LLM's kernels read the rows of "matrix A" in the order in which the epilogue's lanes own the outputs, and a
gated expert's gate and up rows side by side, so that one thread holds both halves of a product. Each order is a
gather: ``output[n] = input[index[n]]``, the same for weights and for their scales.
"""

from __future__ import annotations

import torch

__all__ = ["gated_rows", "gather_rows", "inverse", "interleaved_rows", "shuffled_rows"]


def shuffled_rows(rows: int, epilogue_tile: int = 128) -> torch.Tensor:
    """Index of the TRT-LLM row shuffle, int64 ``[rows]``. Pure.

    With a tile that is a multiple of 128: output row n takes row 32 (n // 32) + 4 (n % 8) + (n % 32) // 8; otherwise
    blocks of 16: 16 (n // 16) + 2 (n % 8) + (n % 16) // 8. Source: flashinfer ``get_shuffle_block_size`` and
    ``get_shuffle_matrix_a_row_indices``. Raises ValueError when ``rows`` is not a multiple of the block.
    """
    block, run = (32, 4) if epilogue_tile % 128 == 0 else (16, 2)
    if rows % block:
        raise ValueError(f"{rows} rows cannot be shuffled in blocks of {block}")
    n = torch.arange(rows)
    return block * (n // block) + run * (n % 8) + (n % block) // 8


def gated_rows(rows: int) -> torch.Tensor:
    """Index that interleaves the two halves of a gated matrix, int64 ``[rows]``. Pure.

    Output row n takes row n // 2 + (rows / 2) (n % 2) of ``[up; gate]``. Source: flashinfer
    ``reorder_rows_for_gated_act_gemm``. Raises ValueError for an odd number of rows.
    """
    if rows % 2:
        raise ValueError(f"{rows} rows have no two equal halves")
    n = torch.arange(rows)
    return n // 2 + (rows // 2) * (n % 2)


def interleaved_rows(rows: int, group: int = 64) -> torch.Tensor:
    """Index that interleaves the halves of ``[up; gate]`` in groups of 64 rows, int64 ``[rows]``. Pure.

    Output row n takes row (n % 128 // 64) (rows / 2) + 64 (n // 128) + n % 64: the order of CuteDSL's MoE kernels.
    Source: vLLM 0.32 ``prepare_nvfp4_moe_layer_for_flashinfer_cutedsl``. Raises ValueError when half the rows is not
    a multiple of ``group``.
    """
    if rows % (2 * group):
        raise ValueError(f"{rows} rows cannot be interleaved in groups of {group}")
    n = torch.arange(rows)
    return (n % (2 * group)) // group * (rows // 2) + group * (n // (2 * group)) + n % group


def inverse(index: torch.Tensor) -> torch.Tensor:
    """The gather that undoes ``index``. Pure."""
    undo = torch.empty_like(index)
    undo[index] = torch.arange(len(index), dtype=index.dtype, device=index.device)
    return undo


def gather_rows(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``[..., R, C]`` with its rows in the order ``index`` (int64 ``[R]``): a copy of the same dtype. Pure.

    Works on bytes, since few operators know four- and eight-bit floats.
    """
    raw = matrix.contiguous().view(torch.uint8)
    return raw.index_select(-2, index.to(raw.device)).view(matrix.dtype)
