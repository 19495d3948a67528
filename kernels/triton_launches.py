"""What the Triton kernels of this room share: where they run, how their arguments look, and what torch lacks.

Triton launches on the *current* device, whatever device its arguments lie on, and knows 32-bit words, not strings of
bytes. Both are settled here once. Imported only with the kernels (:mod:`weightcache.kernels.moving`).
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch

from weightcache.kernels import marlin, moves, shuffles

__all__ = ["device_of", "index_on", "power_of_two", "scale_table", "stacked", "unit", "words"]


def device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one; does nothing for a CPU tensor (Triton's interpreter)."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@functools.lru_cache(maxsize=64)
def index_on(device: torch.device, rows: moves.Rows, num_rows: int) -> torch.Tensor:
    """The index of a row order as int32 on a device, -1 up to ``num_rows``. Not to be written to.

    Kept, a few KiB each: every layer of a model asks for the same ones, and copying one holds up the stream.
    """
    index = shuffles.index_of(rows).to(torch.int32)
    return torch.nn.functional.pad(index, (0, num_rows - len(index)), value=-1).to(device)


@functools.lru_cache(maxsize=64)
def scale_table(device: torch.device, factor: float) -> torch.Tensor:
    """What Marlin makes of each of the 256 bytes of e4m3, uint8 on a device. Not to be written to."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return marlin.scale_bytes(values, factor).view(torch.uint8).to(device)


def power_of_two(size: int, smallest: int, largest: int) -> int:
    """The least power of two that is not below ``size``, within bounds. Pure."""
    return min(max(1 << max(size - 1, 0).bit_length(), smallest), largest)


def stacked(tensor: torch.Tensor) -> torch.Tensor:
    """``[..., R, C]`` contiguous -> ``[E, R, C]``: a view."""
    return tensor.view(-1, *tensor.shape[-2:])


def unit(*sizes: int) -> int:
    """The largest power of two up to 16 that divides all sizes. Pure.

    Triton sees only whether a size divides by 16; a size passed as units x a constant tells it more: that
    several elements can be loaded at once.
    """
    return next(each for each in (16, 8, 4, 2, 1) if all(size % each == 0 for size in sizes))


def words(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The bytes of a contiguous ``[E, R, C]`` as wider elements: a view, or None where rows or start forbid it."""
    size = dtype.itemsize
    if tensor.shape[-1] * tensor.element_size() % size or tensor.data_ptr() % size or tensor.storage_offset() % size:
        return None
    return tensor.view(torch.uint8).view(dtype)
