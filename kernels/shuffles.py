"""Row orders: which row of a weight a kernel expects where.

TensorRT-LLM's kernels read the rows of "matrix A" in the order in which the epilogue's lanes own the outputs, and a
gated expert's gate and up rows side by side, so that one thread holds both halves of a product. Each order is a
gather: ``output[n] = input[index[n]]``, the same for weights and for their scales; index -1 is a row of zeros.

This is the reference (:mod:`weightcache.kernels.triton_gathers` is the fast form).
"""

from __future__ import annotations

import functools

import torch

from weightcache.kernels import moves

__all__ = ["gated_rows", "gather_rows", "halves", "index_of", "interleaved_rows", "inverse", "shuffled_rows"]

_RowOrder = moves.RowOrder


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


def halves(rows: int, num_rows: int, *, swapped: bool) -> torch.Tensor:
    """Index that pads each half of a matrix of ``rows`` by itself, to ``num_rows`` in all, int64 ``[num_rows]``. Pure.

    ``swapped``: the second half first. Padding the whole would move the second half into the first one's padding.
    Raises ValueError for odd numbers, or fewer rows than there are.
    """
    if rows % 2 or num_rows % 2 or num_rows < rows:
        raise ValueError(f"two halves of {rows} rows cannot become {num_rows} rows")
    first, second = (_padded(half, num_rows // 2) for half in torch.arange(rows).chunk(2))
    return torch.cat((second, first) if swapped else (first, second))


@functools.lru_cache(maxsize=256)
def index_of(rows: moves.Rows) -> torch.Tensor:
    """The index of a row order, int64 ``[num_rows]``, -1 where the result has zeros. Not to be written to.

    Raises ValueError for sizes that the order cannot take.
    """
    order, num_source, num_rows = rows
    if order is _RowOrder.Stored:
        return _padded(torch.arange(num_source), num_rows)
    if order is _RowOrder.Shuffled:
        return _padded(torch.arange(num_source), num_rows)[shuffled_rows(num_rows)]
    stacked = halves(num_source, num_rows, swapped=order is not _RowOrder.GateFirst)
    if order is _RowOrder.UpFirstInterleaved:
        return stacked[interleaved_rows(num_rows)]
    if order is _RowOrder.UpFirstShuffled:
        return stacked[gated_rows(num_rows)[shuffled_rows(num_rows)]]
    return stacked


def inverse(index: torch.Tensor) -> torch.Tensor:
    """The gather that undoes ``index``: where each source row went. Pure. Rows of zeros are left out."""
    held = index >= 0
    undo = index.new_empty(int(held.sum()))
    undo[index[held]] = torch.arange(len(index), dtype=index.dtype, device=index.device)[held]
    return undo


def gather_rows(
    matrix: torch.Tensor, index: torch.Tensor, columns: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``[..., R, C]`` with its rows in the order ``index`` (int64 ``[R']``, -1: zeros), widened to ``columns``. Pure.

    A copy of the same dtype, new columns zero; ``out``: a contiguous tensor to write instead. Works on bytes, since few
    operators know four- and eight-bit floats. Raises ValueError for fewer columns than there are.
    """
    *lead, _, width = matrix.shape
    columns = width if columns is None else columns
    if columns < width:
        raise ValueError(f"{width} columns do not fit into {columns}")
    raw = matrix.contiguous().view(torch.uint8)
    index = index.to(raw.device)
    out = matrix.new_empty(*lead, len(index), columns) if out is None else out
    target = out.view(torch.uint8)
    held = index >= 0
    if columns == width and bool(held.all()):
        torch.index_select(raw, -2, index, out=target)
        return out
    target.zero_()
    target[..., held, : raw.shape[-1]] = raw.index_select(-2, index[held])
    return out


def _padded(index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(index, (0, size - len(index)), value=-1)
