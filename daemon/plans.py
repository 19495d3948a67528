"""What each rank of a group holds: which bytes of which files lie where in its arena.

A loader that decides while it reads cannot be checked before it starts, and two loaders that decide apart may leave a
gap. So everything is decided here, from headers alone: the tensors of every rank with their places, the pieces they
are made of, and who digests which block of the checkpoint. The loader only copies (:mod:`weightcache.daemon.reads`).

Everything here is pure and deterministic: the daemon and each loader come to the same plan on their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from weightcache.crds import specs
from weightcache.daemon import architectures, blocks, checkpoints, headers, parameters, pieces, placements
from weightcache.wire import manifests

__all__ = ["LOADED", "RankPlan", "TensorPlan", "build_group_plans", "build_rank_plan"]

#: Kind of a tensor that is as the engine holds it after loading, before post-processing.
LOADED = "loaded"
_Slicing = architectures.Slicing
_Place = architectures.Place


class TensorPlan(NamedTuple):
    """One tensor of an arena. ``shape``, ``strides``: in elements, row-major. What no piece covers is zero.

    ``is_scale``: float32 values, one a piece, that must be finite and positive.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    size_bytes: int
    pieces: tuple[pieces.Piece, ...]
    is_scale: bool


@dataclass(frozen=True)
class RankPlan:
    """One rank's arena. ``aliases``: further name -> tensor (tied weights). ``blocks``: of checkpoint files, whose
    digests this rank brings. ``metadata``: ``experts``, global ids in the order in which expert tensors stack them.
    """

    rank: int
    tensors: tuple[TensorPlan, ...]
    aliases: dict[str, str]
    arena_bytes: int
    blocks: tuple[blocks.Block, ...]
    metadata: dict[str, Any]


def build_group_plans(checkpoint: checkpoints.Checkpoint, parallelism: specs.Parallelism) -> tuple[RankPlan, ...]:
    """The plan of every rank of a group, in rank order: (data * pipeline size + pipeline) * tensor size + tensor.

    Raises Refusal: ``ParallelismDoesNotDivide`` (what, its size, the divisor, the multiple needed), and those of
    :func:`parameters.build_parameters`.
    """
    return tuple(_build(checkpoint, parallelism, range(specs.world_size(parallelism))))


def build_rank_plan(checkpoint: checkpoints.Checkpoint, parallelism: specs.Parallelism, rank: int) -> RankPlan:
    """``build_group_plans(...)[rank]`` in the memory of one plan: for a loader, of which a node runs one a GPU."""
    (plan,) = _build(checkpoint, parallelism, range(rank, rank + 1))
    return plan


def _build(checkpoint: checkpoints.Checkpoint, parallelism: specs.Parallelism, wanted: range) -> Iterator[RankPlan]:
    """The plans of the ``wanted`` ranks. The others' needs are worked out as well: they decide who digests what."""
    whole = parameters.build_parameters(checkpoint)
    ranks = [_Rank(checkpoint, parallelism, rank) for rank in range(specs.world_size(parallelism))]
    held: dict[int, tuple[TensorPlan, ...]] = {}
    needs = []
    for index, rank in enumerate(ranks):
        tensors = tuple(rank.tensors(whole))
        needs.append(pieces.spans_of(piece for tensor in tensors for piece in tensor.pieces))
        if index in wanted:
            held[index] = tensors
    owned = blocks.assign({file: stat.size_bytes for file, stat in checkpoint.stats.items()}, needs)
    for index in wanted:
        yield RankPlan(
            rank=index,
            tensors=held[index],
            aliases=ranks[index].aliases(),
            arena_bytes=ranks[index].arena_bytes,
            blocks=owned[index],
            metadata={"experts": list(ranks[index].experts)},
        )


class _Cut(NamedTuple):
    """What a rank takes of one part, in elements: rows, and columns of each. ``held_rows``: with padding."""

    rows: placements.Share
    held_rows: int
    columns: placements.Share


class _Rank:
    """One rank: where it stands, and where its next tensor goes."""

    def __init__(self, checkpoint: checkpoints.Checkpoint, parallelism: specs.Parallelism, rank: int) -> None:
        place = placements.coordinates(parallelism, rank)
        self._tensor_axis = place.tensor_rank, parallelism.tensor
        self._slice_axis = place.slice_rank, place.slice_size
        self._stage, self._num_stages = place.pipeline_rank, parallelism.pipeline
        self._layers = placements.layers_of(checkpoint.sizes["num_hidden_layers"], self._num_stages, self._stage)
        self._tied = parameters.is_tied(checkpoint.sizes)
        self._outside = architectures.ARCHITECTURES[checkpoint.architecture].outside
        self.experts = placements.experts_of(parallelism, rank, checkpoint.num_experts)
        self.arena_bytes = 0

    def tensors(self, whole: tuple[parameters.Parameter, ...]) -> Iterator[TensorPlan]:
        """This rank's tensors, each behind the one before."""
        for parameter in whole:
            if self._holds(parameter):
                yield self._tensor(parameter)

    def aliases(self) -> dict[str, str]:
        """The head, where it is the embedding itself and this rank has a head."""
        places = {f"{module.name}.weight": module.place for module in self._outside}
        has_head = self._tied and self._is_at(places[parameters.HEAD])
        return {parameters.HEAD: parameters.EMBEDDING} if has_head else {}

    def _holds(self, parameter: parameters.Parameter) -> bool:
        place = parameter.module.place
        return parameter.layer in self._layers if place is _Place.Layer else self._is_at(place)

    def _is_at(self, place: architectures.Place) -> bool:
        first, last = self._stage == 0, self._stage == self._num_stages - 1
        if place is _Place.First:
            return first or (self._tied and last)
        return last or place is _Place.Every

    def _tensor(self, parameter: parameters.Parameter) -> TensorPlan:
        sources = parameter.sources
        if parameter.module.experts and not parameter.all_experts:
            sources = tuple(sources[expert] for expert in self.experts)
        cuts = [self._cut(parameter, index) for index in range(len(sources[0]))]
        shape = _shape(parameter, cuts, len(sources))
        size_bytes = math.prod(shape) * parameter.element_bytes
        offset = self.arena_bytes
        self.arena_bytes += manifests.padded(size_bytes)
        return TensorPlan(
            name=parameter.name,
            kind=LOADED,
            dtype=parameter.dtype,
            shape=shape,
            strides=manifests.contiguous_strides(shape),
            offset=offset,
            size_bytes=size_bytes,
            pieces=tuple(_pieces(parameter, sources, cuts, offset)),
            is_scale=parameter.is_scale,
        )

    def _cut(self, parameter: parameters.Parameter, index: int) -> _Cut:
        rank, size = self._slice_axis if parameter.module.experts else self._tensor_axis
        rows, what = parameter.rows[index], parameter.part_name(index)
        columns = placements.Share(0, parameter.row_elements)
        if parameter.slicing is _Slicing.Columns:
            share = placements.equal_share(parameter.columns, size, rank, f"{what} (columns)", parameter.block)
            columns = placements.Share(share.start // parameter.packing, share.num_items // parameter.packing)
            return _Cut(placements.Share(0, rows), rows, columns)
        if parameter.slicing is _Slicing.Vocabulary:
            padded = placements.equal_share(placements.padded_vocabulary(rows), size, rank, f"{what} (padded rows)")
            start, end = min(padded.start, rows), min(padded.start + padded.num_items, rows)
            return _Cut(placements.Share(start, end - start), padded.num_items, columns)
        taken = placements.Share(0, rows)
        if parameter.slicing is _Slicing.Rows and parameter.heads[index]:
            part, heads = parameter.module.parts[index], parameter.heads[index]
            found = placements.head_share(heads, size, rank, f"{what} ({part.heads})", part.replicated)
            taken = placements.Share(found.start * (rows // heads), found.num_items * (rows // heads))
        elif parameter.slicing is _Slicing.Rows:
            taken = placements.equal_share(rows, size, rank, f"{what} (rows)")
        return _Cut(taken, taken.num_items, columns)


def _shape(parameter: parameters.Parameter, cuts: list[_Cut], num_experts: int) -> tuple[int, ...]:
    """The engine's shape: experts first; scalars one a part, but for an expert's only one and for a lone scalar."""
    num_rows = sum(cut.held_rows for cut in cuts)
    stacked = (num_experts,) if parameter.module.experts else ()
    if parameter.is_scale and (num_rows == 1 and (stacked or not parameter.module.parts)):
        return stacked
    return (*stacked, num_rows, cuts[0].columns.num_items) if parameter.columns else (*stacked, num_rows)


def _pieces(
    parameter: parameters.Parameter, sources: tuple[tuple[headers.Tensor, ...], ...], cuts: list[_Cut], offset: int
) -> Iterator[pieces.Piece]:
    element = parameter.element_bytes
    stride = parameter.row_elements * element
    templates = []
    for cut in cuts:
        width, num_rows = cut.columns.num_items * element, cut.rows.num_items
        skip = cut.rows.start * stride + cut.columns.start * element
        # Whole rows are one run of bytes.
        rows = (width, num_rows, stride) if width < stride else (num_rows * stride, 1, num_rows * stride)
        templates.append((skip, *rows, cut.held_rows * width))
    for parts in sources:
        for tensor, (skip, row_bytes, num_rows, row_stride, held_bytes) in zip(parts, templates, strict=True):
            if row_bytes and num_rows:
                begin = tensor.begin + skip
                yield pieces.Piece(tensor.name, tensor.file, begin, row_bytes, num_rows, row_stride, offset)
            offset += held_bytes
