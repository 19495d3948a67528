"""Whatever a checkpoint's JSON files say, planning it ends with a plan or with a Refusal."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.support import checkpoints as support
from weightcache.crds import specs
from weightcache.daemon import checkpoints, plans
from weightcache.wire import reasons

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 70), st.integers(), st.floats(), st.text(max_size=8)),
    lambda children: st.one_of(
        st.lists(children, max_size=3), st.dictionaries(st.text(max_size=4), children, max_size=3)
    ),
    max_leaves=4,
)
FIELDS = sorted(
    {*support.SIZES, *support.EXPERT_SIZES, "architectures", "torch_dtype", "attention_bias", "text_config"}
)
QUANTIZATION = [
    "quant_method",
    "quant_algo",
    "group_size",
    "ignore",
    "kv_cache_scheme",
    "config_groups",
    "quantization",
]


@given(
    fields=st.dictionaries(st.sampled_from([*FIELDS, "quantization_config"]), VALUES, max_size=2),
    quantization=st.dictionaries(st.sampled_from(QUANTIZATION), VALUES, max_size=2),
    legacy=st.one_of(st.none(), VALUES, st.dictionaries(st.sampled_from([*QUANTIZATION, "producer"]), VALUES)),
    index=st.one_of(st.none(), st.dictionaries(st.sampled_from(["weight_map", "metadata"]), VALUES)),
    size=st.sampled_from([1, 2, 3]),
)
def test_arbitrary_configurations_are_refused_or_planned(tmp_path_factory, fields, quantization, legacy, index, size):
    """A field of another type or size never becomes an exception of another kind."""
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    if not path.exists():
        support.make_checkpoint(path, "qwen3_moe", "nvfp4", num_hidden_layers=1, num_experts=2)
    config = support.make_config("qwen3_moe", "nvfp4", num_hidden_layers=1, num_experts=2)
    config["quantization_config"].update(quantization)
    config.update(fields)
    for name, value in (
        ("config.json", config),
        ("hf_quant_config.json", legacy),
        ("model.safetensors.index.json", index),
    ):
        if value is None:
            (path / name).unlink(missing_ok=True)
        else:
            (path / name).write_text(json.dumps(value))
    try:
        checkpoint = checkpoints.read(path)
        assert checkpoint.num_experts >= 0
        plans.build_group_plans(checkpoint, specs.Parallelism(tensor=size))
    except reasons.Refusal as refusal:
        assert refusal.reason is not reasons.Reason.InternalError
