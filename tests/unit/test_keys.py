"""The key: whatever would make another byte or another meaning must differ, and nothing else may."""

import msgspec
import pytest

from weightcache.wire import configs, keys

BASE = keys.Key(
    layout_version=1,
    content="c" * 32,
    config="d" * 32,
    architecture="Qwen3MoeForCausalLM",
    dtype="bfloat16",
    quantization="modelopt/NVFP4",
    quantization_config="e" * 32,
    tensor_size=2,
    expert_parallel=True,
    expert_placement="linear",
    linear_layout="loaded",
    moe_layout="loaded",
    preparer="Native",
    libraries={"torch": "2.13.0"},
    position=keys.Position(tensor_rank=1, expert_rank=1, experts="4-7"),
)
OTHER = {int: 7, bool: False, str: "other", dict: {"torch": "2.14.0"}}


@pytest.mark.parametrize("field", [field for field in keys.Key.__struct_fields__ if field != "position"])
def test_every_field_alone_makes_a_mismatch_that_names_it_with_both_values(field):
    """No field may be left out of the comparison (answers W4, W5, W7, W8, W9)."""
    value = OTHER[type(getattr(BASE, field))]
    (found,) = keys.differences(msgspec.structs.replace(BASE, **{field: value}), BASE)
    assert found.field.split(".")[0] == field
    held = getattr(BASE, field)
    if isinstance(value, dict):
        value, held = value["torch"], held.get("torch")
    assert (found.wanted, found.held) == (str(value), str(held or "(none)") if held in ("", None) else str(held))
    assert found.advice


@pytest.mark.parametrize("field", keys.Position.__struct_fields__)
def test_another_rank_never_matches_but_may_claim_the_group(field):
    """A rank's weights belong to its place; the claim is about all of them (answers W1, W4)."""
    value = OTHER[type(getattr(BASE.position, field))]
    moved = msgspec.structs.replace(BASE, position=msgspec.structs.replace(BASE.position, **{field: value}))
    assert [found.field for found in keys.differences(moved, BASE)] == [f"position.{field}"]
    assert keys.differences(moved, BASE, same_group=True) == []


def test_a_library_that_only_one_side_names_is_a_difference():
    """A version that shaped the bytes at one end only must show (answers W7)."""
    found = keys.differences(BASE, msgspec.structs.replace(BASE, libraries={}))
    assert [(one.field, one.wanted, one.held) for one in found] == [("libraries.torch", "2.13.0", "(none)")]


def test_all_differences_are_listed_at_once():
    """One restart should mend them all, not one restart each."""
    wanted = msgspec.structs.replace(BASE, dtype="float16", expert_placement="round_robin")
    assert {found.field for found in keys.differences(wanted, BASE)} == {"dtype", "expert_placement"}


def test_a_key_without_content_leaves_the_content_to_the_evidence():
    """An engine that has not read the files proves sameness by other means; it does not match by silence."""
    assert keys.differences(msgspec.structs.replace(BASE, content=""), BASE) == []
    assert keys.differences(BASE, msgspec.structs.replace(BASE, content="")) != []


def test_experts_are_written_as_runs():
    """By hand: what a person reads in a mismatch."""
    assert keys.format_experts([0, 1, 2, 3]) == "0-3"
    assert keys.format_experts([0, 2, 4]) == "0,2,4"
    assert keys.format_experts([5]) == "5"
    assert keys.format_experts([]) == ""
    assert keys.format_experts([0, 1, 7, 8, 9]) == "0-1,7-9"


def test_key_digest_is_stable_and_sensitive():
    """A digest in a log of last month must mean the same key today."""
    assert keys.key_digest(BASE) == keys.key_digest(msgspec.convert(msgspec.to_builtins(BASE), keys.Key))
    assert keys.key_digest(BASE) != keys.key_digest(msgspec.structs.replace(BASE, dtype="float16"))


SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 512}


@pytest.mark.parametrize(
    "change",
    [
        {"max_position_embeddings": 4096},
        {"rope_theta": 1e6},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"transformers_version": "9"},
        {"head_dim": 32},
        {"num_key_value_heads": 4},
        {"tie_word_embeddings": False},
        {"mlp_only_layers": []},
        {"decoder_sparse_step": 1},
    ],
)
def test_lengths_rope_and_written_out_defaults_do_not_miss(change):
    """A longer context lives in the engine's buffers; a default written out is no other model (answers W17)."""
    assert configs.config_digest({**SMALL, **change}) == configs.config_digest(SMALL)


@pytest.mark.parametrize(
    "change", [{"hidden_size": 256}, {"head_dim": 64}, {"tie_word_embeddings": True}, {"num_experts": 8}]
)
def test_values_that_shape_tensors_miss(change):
    """Another size is another model."""
    assert configs.config_digest({**SMALL, **change}) != configs.config_digest(SMALL)


def test_both_names_of_the_expert_count_are_one():
    """transformers 5 renamed the field; the checkpoint is the same."""
    assert configs.config_digest({**SMALL, "num_local_experts": 8}) == configs.config_digest(
        {**SMALL, "num_experts": 8}
    )
