"""Where things go: which rank stands where, which layers, heads, rows and experts are its own.

Engine and daemon must cut a model at the same places, or the shapes fit and the numbers do not. The formulas are those
of vLLM 0.32, named at each function. Everything here is pure.
"""

from __future__ import annotations

from typing import NamedTuple

from weightcache.crds import specs
from weightcache.wire import reasons

__all__ = [
    "VOCABULARY_MULTIPLE",
    "Coordinates",
    "Share",
    "coordinates",
    "equal_share",
    "expert_ids",
    "experts_of",
    "head_share",
    "layers_of",
    "padded_vocabulary",
]

#: ``DEFAULT_VOCAB_PADDING_SIZE`` of ``vocab_parallel_embedding.py``.
VOCABULARY_MULTIPLE = 64


class Coordinates(NamedTuple):
    """A rank's position on each axis. The expert axis runs over data x tensor (``FusedMoEParallelConfig.make``):
    with expert parallelism each expert is whole on its rank; without, each expert's matrices are cut over the whole
    axis, data-parallel ranks included. ``expert_rank`` of ``expert_size`` and ``slice_rank`` of ``slice_size`` say so:
    one of the two sizes is 1.
    """

    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    expert_rank: int
    expert_size: int
    slice_rank: int
    slice_size: int


class Share(NamedTuple):
    """Consecutive items: ``num_items`` from ``start`` on."""

    start: int
    num_items: int


def coordinates(parallelism: specs.Parallelism, rank: int) -> Coordinates:
    """Where rank (dp * pipeline + pp) * tensor + tp stands. Pure."""
    rest, tensor_rank = divmod(rank, parallelism.tensor)
    data_rank, pipeline_rank = divmod(rest, parallelism.pipeline)
    flat_rank, flat_size = data_rank * parallelism.tensor + tensor_rank, parallelism.data * parallelism.tensor
    if parallelism.expert.enabled:
        return Coordinates(tensor_rank, pipeline_rank, data_rank, flat_rank, flat_size, 0, 1)
    return Coordinates(tensor_rank, pipeline_rank, data_rank, 0, 1, flat_rank, flat_size)


def layers_of(num_layers: int, size: int, rank: int) -> range:
    """The layers of a pipeline stage: equal shares, the rest one each to stages -2, -3, ... Pure.

    Source: ``vllm/distributed/utils.py``, ``get_pp_indices``; its environment override is not followed. Raises Refusal
    ``ParallelismDoesNotDivide`` with more stages than layers.
    """
    if size > num_layers:
        raise reasons.Refusal(
            reasons.Reason.ParallelismDoesNotDivide,
            f"parallelism.pipeline is {size}, the model has {num_layers} layers: choose at most {num_layers}",
        )
    counts = [num_layers // size] * size
    for index in range(2, num_layers % size + 2):
        counts[-index] += 1
    start = sum(counts[:rank])
    return range(start, start + counts[rank])


def expert_ids(num_experts: int, size: int, rank: int, placement: specs.ExpertPlacement) -> tuple[int, ...]:
    """The experts of expert rank ``rank``, in the order in which they are stacked. Pure.

    The first ``num_experts % size`` ranks hold one more. Source: ``expert_map_manager.py``, ``determine_expert_map``.
    Raises Refusal ``ParallelismDoesNotDivide`` when a rank would hold none.
    """
    if size > max(1, num_experts):
        raise reasons.Refusal(
            reasons.Reason.ParallelismDoesNotDivide,
            f"{size} expert-parallel ranks (parallelism.data x tensor) for {num_experts} experts: "
            f"choose at most {num_experts}",
        )
    if placement is specs.ExpertPlacement.round_robin:
        return tuple(range(rank, num_experts, size))
    base, rest = divmod(num_experts, size)
    start = rank * base + min(rank, rest)
    return tuple(range(start, start + base + (rank < rest)))


def experts_of(parallelism: specs.Parallelism, rank: int, num_experts: int) -> tuple[int, ...]:
    """The experts that a group's rank holds, whole or in slices, in the order in which they are stacked. Pure."""
    if not num_experts:
        return ()
    place = coordinates(parallelism, rank)
    return expert_ids(num_experts, place.expert_size, place.expert_rank, parallelism.expert.placement)


def equal_share(num_items: int, size: int, rank: int, what: str, multiple: int = 1) -> Share:
    """The rank's equal share of ``num_items``, itself a multiple of ``multiple``. Pure.

    Raises Refusal ``ParallelismDoesNotDivide`` that names ``what``, the size, the divisor and the multiple needed.
    """
    if num_items % (size * multiple):
        needed = f"a multiple of {size} x {multiple}" if multiple > 1 else f"a multiple of {size}"
        raise reasons.Refusal(
            reasons.Reason.ParallelismDoesNotDivide,
            f"{what}: {num_items} does not divide over {size} ranks: it must be {needed}",
        )
    count = num_items // size
    return Share(rank * count, count)


def head_share(num_heads: int, size: int, rank: int, what: str, replicated: bool) -> Share:
    """The rank's attention heads; with ``replicated``, fewer heads than ranks are repeated: head r // (size / heads).

    Pure. Source: ``linear.py``, ``QKVParallelLinear``. Raises Refusal ``ParallelismDoesNotDivide``.
    """
    if not replicated or num_heads >= size:
        return equal_share(num_heads, size, rank, what)
    if size % num_heads:
        raise reasons.Refusal(
            reasons.Reason.ParallelismDoesNotDivide,
            f"{what}: {num_heads} heads cannot be repeated evenly over {size} ranks: "
            f"choose a tensor size that divides {num_heads} or is a multiple of it",
        )
    return Share(rank // (size // num_heads), 1)


def padded_vocabulary(size: int) -> int:
    """Rows of an embedding before it is shared: the vocabulary rounded up to a multiple of 64. Pure."""
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
