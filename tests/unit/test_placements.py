"""Where layers, heads, rows and experts go: figures worked out by hand or taken from vLLM's own functions."""

from __future__ import annotations

import pytest

from weightcache.crds import specs
from weightcache.daemon import placements
from weightcache.wire import reasons

LINEAR, ROUND_ROBIN = specs.ExpertPlacement.linear, specs.ExpertPlacement.round_robin


@pytest.mark.parametrize(
    ("layers", "size", "counts"),
    [
        (5, 2, [3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (48, 1, [48]),
        (48, 5, [9, 10, 10, 10, 9]),
        (61, 4, [15, 15, 16, 15]),
        (7, 4, [2, 2, 2, 1]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_pipeline_stages_are_cut_where_the_engine_cuts(layers, size, counts):
    """A layer on the wrong stage is a model that runs and talks nonsense (figures of vLLM's get_pp_indices)."""
    stages = [placements.layers_of(layers, size, rank) for rank in range(size)]
    assert [len(stage) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage] == list(range(layers))


def test_uneven_experts_fall_on_the_first_ranks():
    """60 experts on 8 ranks: four ranks hold eight, then four hold seven (vLLM's determine_expert_map)."""
    held = [placements.expert_ids(60, 8, rank, LINEAR) for rank in range(8)]
    assert [len(experts) for experts in held] == [8, 8, 8, 8, 7, 7, 7, 7]
    assert held[3] == tuple(range(24, 32))
    assert held[4] == tuple(range(32, 39))


def test_round_robin_gives_every_nth_expert():
    """Answers W5: the placements hold the same number of other experts."""
    assert placements.expert_ids(10, 4, 1, ROUND_ROBIN) == (1, 5, 9)
    assert placements.expert_ids(10, 4, 3, ROUND_ROBIN) == (3, 7)
    assert placements.expert_ids(10, 4, 1, LINEAR) == (3, 4, 5)


@pytest.mark.parametrize("num_experts", [8, 60, 128, 257])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("placement", list(specs.ExpertPlacement))
def test_every_expert_is_held_exactly_once(num_experts, size, placement):
    """No expert is lost or held twice, whatever the remainder."""
    held = [expert for rank in range(size) for expert in placements.expert_ids(num_experts, size, rank, placement)]
    assert sorted(held) == list(range(num_experts))


def test_ranks_are_ordered_data_pipeline_tensor():
    """Rank (dp * pipeline + pp) * tensor + tp; the expert axis runs over data x tensor, within a stage."""
    parallelism = specs.Parallelism(tensor=2, pipeline=3, data=2, expert=specs.Expert(enabled=True))
    found = [placements.coordinates(parallelism, rank) for rank in range(12)]
    assert [(place.data_rank, place.pipeline_rank, place.tensor_rank) for place in found] == [
        (dp, pp, tp) for dp in range(2) for pp in range(3) for tp in range(2)
    ]
    assert [place.expert_rank for place in found] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert {(place.expert_size, place.slice_rank, place.slice_size) for place in found} == {(4, 0, 1)}


def test_without_expert_parallelism_experts_are_cut_over_data_and_tensor_ranks():
    """vLLM flattens tensor over data parallelism in expert layers; a rank that took half would hold wrong shapes."""
    found = [placements.coordinates(specs.Parallelism(tensor=2, data=2), rank) for rank in range(4)]
    assert [(place.slice_rank, place.slice_size) for place in found] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert {(place.expert_rank, place.expert_size) for place in found} == {(0, 1)}


def test_few_key_value_heads_are_repeated_in_order():
    """2 heads on 8 ranks: ranks 0-3 hold head 0, ranks 4-7 head 1 (vLLM: shard id = rank // replicas)."""
    held = [placements.head_share(2, 8, rank, "k_proj", True) for rank in range(8)]
    assert [share.start for share in held] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {share.num_items for share in held} == {1}
    assert placements.head_share(8, 2, 1, "k_proj", True) == (4, 4)


def test_vocabularies_are_padded_to_64():
    """As DEFAULT_VOCAB_PADDING_SIZE of the engine."""
    assert [placements.padded_vocabulary(size) for size in (1, 64, 65, 151936, 32001)] == [64, 64, 128, 151936, 32064]


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: placements.layers_of(3, 4, 0), ["4", "3 layers"]),
        (lambda: placements.expert_ids(4, 8, 0, LINEAR), ["8 expert-parallel ranks", "4 experts"]),
        (lambda: placements.equal_share(100, 3, 0, "x.down_proj"), ["x.down_proj", "100", "3 ranks", "multiple of 3"]),
        (lambda: placements.equal_share(96, 4, 0, "x.down_proj", 16), ["96", "a multiple of 4 x 16"]),
        (lambda: placements.head_share(14, 4, 0, "q_proj", False), ["q_proj", "14", "4 ranks"]),
        (lambda: placements.head_share(3, 8, 0, "k_proj", True), ["k_proj", "3 heads", "8 ranks"]),
        (lambda: placements.head_share(6, 4, 0, "k_proj", True), ["k_proj", "6", "4 ranks"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_both_values(attempt, words):
    """Nothing is rounded: a remainder would be rows or experts that no rank holds."""
    with pytest.raises(reasons.Refusal) as refused:
        attempt()
    assert refused.value.reason is reasons.Reason.ParallelismDoesNotDivide
    assert all(word in refused.value.message for word in words)
