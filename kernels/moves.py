"""Moves: how one matrix of a checkpoint becomes the one a kernel reads, as data.

Padding, swapping halves, interleaving and shuffling are all the same thing: each row of the result is one row of the
source, or zeros. Done one after the other, as engines do, each of them copies the matrix once more. So a move says
where every row comes from, how wide a row becomes, and in which order the bytes are stored, and is made at once
(:mod:`weightcache.kernels.moving`).

No torch in here: sizes are wanted before anything is loaded, also by processes that never load.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["GROUP", "TILE_COLUMNS", "TILE_ROWS", "Move", "Order", "RowOrder", "Rows", "round_up"]

#: Weights that share one block scale, along the inputs.
GROUP = 16
#: A tile of block scales, as Blackwell's tensor cores fetch it.
TILE_ROWS, TILE_COLUMNS = 128, 4


class RowOrder(enum.Enum):
    """Which source row each row of the result is. ``[gate; up]``: the two halves of a gated expert, as loaded."""

    Stored = "as they are, zeros behind them"
    Shuffled = "the TRT-LLM shuffle"
    GateFirst = "[gate; up], zeros behind each half"
    UpFirst = "[up; gate], zeros behind each half"
    UpFirstInterleaved = "[up; gate] in turns of 64 rows (CuteDSL)"
    UpFirstShuffled = "[up; gate] row by row in turn, then the TRT-LLM shuffle"


class Rows(NamedTuple):
    """A row order for a matrix of ``num_source`` rows that becomes one of ``num_rows``; hashable."""

    order: RowOrder
    num_source: int
    num_rows: int


class Order(enum.Enum):
    """In which order the bytes of the result are stored."""

    RowByRow = "row by row"
    Swizzled = "block scales in tiles of 128 x 4"
    MarlinWeights = "4-bit codes in Marlin's words of 8"
    MarlinScales = "block scales in Marlin's order, as S0E5M3"


class Move(NamedTuple):
    """One matrix ``[num_source, columns]`` bytes -> the finished one. A stack of matrices is moved one by one.

    ``num_columns``: bytes of a row once padded with zeros, before it is stored in ``order``. ``dtype``: of the result,
    safetensors' name. ``rows``: None takes them as they are, all of them.
    """

    order: Order
    dtype: str
    num_rows: int
    num_columns: int
    rows: Rows | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of one finished matrix, in elements of ``dtype``. Pure."""
        if self.order is Order.Swizzled:
            return round_up(self.num_rows, TILE_ROWS), round_up(self.num_columns, TILE_COLUMNS)
        if self.order is Order.MarlinWeights:  # two codes a byte; K/16 rows of 16 N codes, eight a word
            return 2 * self.num_columns // GROUP, 2 * self.num_rows
        if self.order is Order.MarlinScales:
            return self.num_columns, self.num_rows
        return self.num_rows, self.num_columns


def round_up(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple. Pure."""
    return -(-size // multiple) * multiple
