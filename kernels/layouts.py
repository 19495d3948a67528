"""Layouts: what each kernel family wants of a layer's matrices, as moves, and the sizes that follow.

A plan must know names, dtypes and sizes of the finished tensors before a byte is loaded; the loader must make exactly
those. Both read this table. No torch in here. Sources: vLLM 0.32 ``kernels/linear/nvfp4``, ``flashinfer_fp4_moe.py``,
``flashinfer_utils.py`` (padding), ``marlin_utils.py``, ``marlin_utils_fp4.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weightcache.kernels import moves

__all__ = ["EXPERTS", "LINEAR", "ExpertSizes", "padded_experts", "padded_marlin"]

_Order = moves.Order
_Rows = moves.Rows
_RowOrder = moves.RowOrder
_WEIGHTS, _SCALES, _WORDS = "U8", "F8_E4M3", "I32"


class ExpertSizes(NamedTuple):
    """Of one expert on this rank: ``intermediate`` rows in each of gate and up, ``hidden`` inputs."""

    intermediate: int
    hidden: int


def _emulation(n: int, k: int) -> dict[str, moves.Move]:
    return {
        "weight": moves.Move(_Order.RowByRow, _WEIGHTS, n, k // 2),
        "weight_scale": moves.Move(_Order.RowByRow, _SCALES, n, k // 16),
    }


def _padded_swizzled(n: int, k: int) -> dict[str, moves.Move]:
    """Weights zero-padded to multiples of 32; scales swizzled from their unpadded form."""
    padded = moves.round_up(n, 32)
    rows = None if padded == n else _Rows(_RowOrder.Stored, n, padded)
    return {
        "weight": moves.Move(_Order.RowByRow, _WEIGHTS, padded, moves.round_up(k, 32) // 2, rows),
        "weight_scale": moves.Move(_Order.Swizzled, _SCALES, n, k // 16),
    }


def _trtllm(n: int, k: int) -> dict[str, moves.Move]:
    """Rows of weights and scales by the TRT-LLM shuffle, scales then swizzled; no padding."""
    rows = _Rows(_RowOrder.Shuffled, n, n)
    return {
        "weight": moves.Move(_Order.RowByRow, _WEIGHTS, n, k // 2, rows),
        "weight_scale": moves.Move(_Order.Swizzled, _SCALES, n, k // 16, rows),
    }


def _marlin(n: int, k: int) -> dict[str, moves.Move]:
    padded_n, padded_k = padded_marlin(n, k)
    rows = None if padded_n == n else _Rows(_RowOrder.Stored, n, padded_n)
    return {
        "weight": moves.Move(_Order.MarlinWeights, _WORDS, padded_n, padded_k // 2, rows),
        "weight_scale": moves.Move(_Order.MarlinScales, _SCALES, padded_n, padded_k // 16, rows),
    }


def padded_marlin(n: int, k: int) -> tuple[int, int]:
    """N and K of a linear layer after padding: the cheaper of multiples (64, 128) and (128, 64). Pure."""
    choices = [(moves.round_up(n, a), moves.round_up(k, b)) for a, b in ((64, 128), (128, 64))]
    return min(choices, key=lambda pair: (pair[0] * pair[1], pair[0] + pair[1]))


class _ExpertLayout(NamedTuple):
    """Row orders of w13 and w2, how scales and weights are stored, and the multiples that I and H are padded to."""

    w13: _RowOrder
    w2: _RowOrder
    intermediate: int = 1
    hidden: int = 1
    weights: _Order = _Order.RowByRow
    scales: _Order = _Order.Swizzled

    def moves(self, sizes: ExpertSizes, padded: ExpertSizes) -> dict[str, moves.Move]:
        gate_up = _rows(self.w13, 2 * sizes.intermediate, 2 * padded.intermediate)
        down = _rows(self.w2, sizes.hidden, padded.hidden)
        dtype = _WORDS if self.weights is _Order.MarlinWeights else _WEIGHTS
        rows_13, rows_2 = 2 * padded.intermediate, padded.hidden
        return {
            "w13_weight": moves.Move(self.weights, dtype, rows_13, padded.hidden // 2, gate_up),
            "w13_weight_scale": moves.Move(self.scales, _SCALES, rows_13, padded.hidden // 16, gate_up),
            "w2_weight": moves.Move(self.weights, dtype, rows_2, padded.intermediate // 2, down),
            "w2_weight_scale": moves.Move(self.scales, _SCALES, rows_2, padded.intermediate // 16, down),
        }


def _rows(order: moves.RowOrder, num_source: int, num_rows: int) -> moves.Rows | None:
    """None where the order changes nothing."""
    unchanged = order in (_RowOrder.Stored, _RowOrder.GateFirst) and num_source == num_rows
    return None if unchanged else _Rows(order, num_source, num_rows)


def padded_experts(layout: str, sizes: ExpertSizes) -> ExpertSizes:
    """I and H as the kernel sees them. Pure. Raises KeyError for a layout that is not in :data:`EXPERTS`."""
    found = EXPERTS[layout]
    intermediate = found.intermediate
    if layout == "marlin":  # its tiles are (64, 128) or (128, 64); H is never padded
        intermediate = 64 if sizes.hidden % 128 == 0 else 128
    return ExpertSizes(moves.round_up(sizes.intermediate, intermediate), moves.round_up(sizes.hidden, found.hidden))


#: Layout of a linear layer -> its two matrices' moves from N and K.
LINEAR: dict[str, Callable[[int, int], dict[str, moves.Move]]] = {
    "padded_swizzled": _padded_swizzled,
    "trtllm": _trtllm,
    "marlin": _marlin,
    "emulation": _emulation,
}

#: Layout of experts. w13 is loaded as [gate; up].
EXPERTS: dict[str, _ExpertLayout] = {
    "trtllm": _ExpertLayout(_RowOrder.UpFirstShuffled, _RowOrder.Shuffled, 64, 256),
    "cutedsl": _ExpertLayout(_RowOrder.UpFirstInterleaved, _RowOrder.Stored, 64, 256),
    "up_gate_swizzled": _ExpertLayout(_RowOrder.UpFirst, _RowOrder.Stored),
    "gate_up_swizzled": _ExpertLayout(_RowOrder.GateFirst, _RowOrder.Stored),
    "marlin": _ExpertLayout(
        _RowOrder.GateFirst, _RowOrder.Stored, weights=_Order.MarlinWeights, scales=_Order.MarlinScales
    ),
    "emulation": _ExpertLayout(_RowOrder.GateFirst, _RowOrder.Stored, scales=_Order.RowByRow),
}
