"""Moves of every kind, edge and random, and the references composed by hand: what Triton's results are compared with.

Run as a program it compares on the CPU, through Triton's interpreter, and prints what differed::

    TRITON_INTERPRET=1 python -m tests.support.move_cases
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tests.support import nvfp4
from weightcache.kernels import marlin, moves, moving, shuffles, swizzles

NUM_RANDOM = 24
_Order, _RowOrder = moves.Order, moves.RowOrder
_HALVES = (_RowOrder.GateFirst, _RowOrder.UpFirst, _RowOrder.UpFirstInterleaved, _RowOrder.UpFirstShuffled)
_DTYPES = {
    _Order.RowByRow: "U8",
    _Order.Swizzled: "F8_E4M3",
    _Order.MarlinWeights: "I32",
    _Order.MarlinScales: "F8_E4M3",
}


class Case(NamedTuple):
    """A move of a stack of ``num`` matrices of ``rows`` x ``columns`` bytes, which starts ``skew`` bytes off."""

    num: int
    rows: int
    columns: int
    move: moves.Move
    factor: float = 1.0
    skew: int = 0

    def source(self, seed: int) -> torch.Tensor:
        """Random bytes; for block scales all that are numbers."""
        size = self.num * self.rows * self.columns + self.skew
        codes = self.move.order in (_Order.RowByRow, _Order.MarlinWeights)
        flat = nvfp4.codes(size, seed=seed) if codes else nvfp4.block_scales(size, seed=seed)
        return flat[self.skew :].view(self.num, self.rows, self.columns)


def edges() -> Iterator[Case]:
    """Shapes at which something begins or ends: one element, odd rows and columns, whole tiles, starts off a word."""
    for rows, columns in ((1, 1), (128, 4), (130, 5), (33, 12), (256, 96), (127, 260)):
        for num in (1, 3):
            yield Case(num, rows, columns, _move(_Order.Swizzled, rows, columns))
            yield Case(num, rows, columns, _move(_Order.RowByRow, rows, columns + 3))
            yield Case(
                num, rows, columns, _move(_Order.Swizzled, rows, columns + 3, _RowOrder.Stored, rows + 7), skew=1
            )
    for order in _HALVES:
        for rows, padded in ((128, 128), (192, 256), (2, 128)):
            yield Case(2, rows, 24, _move(_Order.Swizzled, rows, 32, order, padded))
            yield Case(2, rows, 160, _move(_Order.RowByRow, rows, 256, order, padded), skew=3)
            yield Case(2, rows, 1024, _move(_Order.RowByRow, rows, 1024, order, padded))
    for rows, padded, columns in ((64, 64, 8), (96, 128, 24), (192, 256, 264)):
        yield Case(2, rows, columns, _move(_Order.MarlinWeights, rows, columns + 8, _RowOrder.GateFirst, padded))
        yield Case(1, padded, columns, _move(_Order.MarlinWeights, padded, columns), skew=4)
        yield Case(
            2, rows, columns // 8, _move(_Order.MarlinScales, rows, columns // 8 + 1, _RowOrder.Stored, padded), 4.0
        )
        yield Case(3, padded, 130, _move(_Order.MarlinScales, padded, 130), 64.0)


def random_cases(num: int, seed: int = 11) -> Iterator[Case]:
    """Any sizes, any row order, any padding that an order takes."""
    choose = random.Random(seed)
    for _ in range(num):
        order = choose.choice(list(_Order))
        rows_order = choose.choice((None, *_RowOrder))
        rows, columns, stack = 2 * choose.randint(1, 100), choose.randint(1, 300), choose.randint(1, 3)
        padded = rows if rows_order is None else moves.round_up(rows, 128) + 128 * choose.randint(0, 1)
        if order is _Order.MarlinWeights:
            columns = moves.round_up(columns, 8)
        if rows_order is None and order in (_Order.MarlinWeights, _Order.MarlinScales):
            rows = padded = moves.round_up(rows, 64)
        wider = columns + (8 if order is _Order.MarlinWeights else 1) * choose.randint(0, 5)
        move = _move(order, rows, wider, rows_order, padded)
        yield Case(stack, rows, columns, move, choose.choice((1.0, 2.0, 16.0)), choose.choice((0, 0, 1, 4)))


def expected(source: torch.Tensor, move: moves.Move, factor: float) -> torch.Tensor:
    """The references one after the other, on whatever device the source is."""
    rows = move.rows or moves.Rows(_RowOrder.Stored, move.num_rows, move.num_rows)
    gathered = shuffles.gather_rows(source, shuffles.index_of(rows), move.num_columns)
    if move.order is _Order.Swizzled:
        return swizzles.swizzle_block_scales(gathered)
    if move.order is _Order.MarlinWeights:
        return marlin.repack_weights(gathered)
    return marlin.scales(gathered, factor) if move.order is _Order.MarlinScales else gathered


def faults(cases: Iterator[Case], device: str) -> list[str]:
    """The cases that differ from the references, each written over bytes that were poisoned before."""
    wrong = []
    for seed, case in enumerate(cases):
        source = case.source(seed).to(device) if not case.skew else _skewed(case, seed, device)
        wanted = expected(source, case.move, case.factor)
        out = torch.empty_like(wanted)
        out.view(torch.uint8).fill_(0xA5)
        moving.move(source, case.move, factor=case.factor, out=out)
        made = moving.move(source, case.move, factor=case.factor) if seed % 8 == 0 else out
        if not nvfp4.same_bytes(out, wanted) or not nvfp4.same_bytes(made, wanted):
            wrong.append(str(case))
    return wrong


def _skewed(case: Case, seed: int, device: str) -> torch.Tensor:
    """On the device, still off alignment."""
    source = case.source(seed)
    flat = torch.empty(source.numel() + case.skew, dtype=torch.uint8, device=device)[case.skew :]
    flat.copy_(source.reshape(-1).view(torch.uint8))
    return flat.view(source.shape).view(source.dtype)


def _move(
    order: moves.Order, rows: int, columns: int, rows_order: moves.RowOrder | None = None, padded: int = 0
) -> moves.Move:
    wanted = None if rows_order is None else moves.Rows(rows_order, rows, padded)
    return moves.Move(order, _DTYPES[order], padded or rows, columns, wanted)


if __name__ == "__main__":
    wrong = [*faults(edges(), "cpu"), *faults(random_cases(NUM_RANDOM), "cpu")]
    print(*wrong, sep="\n")
    print(
        "triton" if "triton" in sys.modules else "no triton",
        len([*edges()]) + NUM_RANDOM,
        "cases,",
        len(wrong),
        "differ",
    )
    sys.exit(bool(wrong))
