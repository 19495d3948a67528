"""Keys of ranks: equal exactly where the plans give equal bytes, over every small parallel layout."""

import itertools

import msgspec
import pytest

from tests.support import checkpoints as support
from weightcache.crds import specs
from weightcache.daemon import checkpoints, keying, plans
from weightcache.wire import keys, reasons


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def checkpoint(request, tmp_path_factory):
    return checkpoints.read(support.make_checkpoint(tmp_path_factory.mktemp("model"), request.param, "nvfp4"))


def spec_of(tensor, pipeline, data, enabled, placement):
    expert = specs.Expert(enabled=enabled, placement=specs.ExpertPlacement(placement))
    parallelism = specs.Parallelism(tensor=tensor, pipeline=pipeline, data=data, expert=expert)
    return specs.WeightCacheSpec(model=specs.Model(host_path="/m"), parallelism=parallelism)


LAYOUTS = [
    spec_of(*layout) for layout in itertools.product((1, 2), (1, 2), (1, 2), (False, True), ("linear", "round_robin"))
]


def bytes_of(plan):
    """What decides an arena's bytes: which source bytes lie where, and what each tensor is."""
    return (
        [(t.name, t.dtype, t.shape, t.offset, list(t.pieces)) for t in plan.tensors],
        plan.aliases,
        plan.metadata,
    )


def test_no_two_ranks_with_equal_keys_have_other_bytes(checkpoint):
    """Over 32 layouts: a key that leaves something out would show here as two plans (answers W4, W5)."""
    found = {}
    for spec in LAYOUTS:
        for key, plan in zip(
            keying.build_keys(spec, checkpoint), plans.build_group_plans(checkpoint, spec.parallelism), strict=True
        ):
            held = found.setdefault(keys.key_digest(key), bytes_of(plan))
            assert held == bytes_of(plan), f"{spec.parallelism} rank {plan.rank}: equal key, other bytes"
    assert len(found) > 8


def test_replicas_of_a_dense_model_share_a_key_and_those_of_experts_do_not(checkpoint):
    """Data parallelism counts only where experts are spread over it."""
    both = keying.build_keys(spec_of(1, 1, 2, False, "linear"), checkpoint)
    assert (both[0] == both[1]) is (checkpoint.num_experts == 0)


def test_expert_parallelism_over_one_rank_is_none(checkpoint):
    """The engine does not use it then either: the switch alone must not miss."""
    on, off = (keying.build_keys(spec_of(1, 1, 1, enabled, "linear"), checkpoint) for enabled in (True, False))
    assert on == off


def test_the_method_that_the_user_expects_is_compared(checkpoint):
    """A checkpoint of another quantization is refused with both names."""
    spec = specs.WeightCacheSpec(
        model=specs.Model(host_path="/m"), quantization=specs.Quantization(method="compressed-tensors")
    )
    with pytest.raises(reasons.Refusal, match="'compressed-tensors', the checkpoint is 'modelopt/NVFP4'"):
        keying.refuse_other_quantization(spec, checkpoint)
    for method in ("", "modelopt", "modelopt/NVFP4"):
        keying.refuse_other_quantization(
            msgspec.structs.replace(spec, quantization=specs.Quantization(method=method)), checkpoint
        )
