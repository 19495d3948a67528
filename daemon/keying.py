"""The key of each rank of a group, from the checkpoint and the parallel layout.

The daemon and the engine must arrive at the same key from different ends, so every rule that normalises a value (data
parallelism that only replicates, placement that means nothing without experts) stands here once for the native
preparer, next to the reason for it.
"""

from __future__ import annotations

from weightcache.crds import specs
from weightcache.daemon import checkpoints, placements
from weightcache.wire import configs, digests, keys, reasons

__all__ = [
    "LOADED",
    "build_keys",
    "build_position",
    "is_expert_parallel",
    "quantization_of",
    "refuse_other_quantization",
]

#: Layout of the loaded stage: as the engine's parameters are after loading and before any post-processing.
LOADED = "loaded"


def build_keys(spec: specs.WeightCacheSpec, checkpoint: checkpoints.Checkpoint) -> tuple[keys.Key, ...]:
    """One key a rank, in rank order, without the content digest. Pure.

    Data parallelism is part of the key only where there are experts: the engine spreads them over data x tensor ranks
    (whole ones with expert parallelism, slices of each without: vLLM's ``FusedMoEParallelConfig.make``). Without
    experts, replicas hold equal weights and any of them may be mapped. Expert parallelism over one rank is none.
    Loaded tensors do not depend on the device, so ``capability`` is empty.
    """
    return tuple(_key(spec, checkpoint, rank) for rank in range(specs.world_size(spec.parallelism)))


def build_position(parallelism: specs.Parallelism, num_experts: int, rank: int) -> keys.Position:
    """Where a rank stands, as its key says it. ``num_experts``: a layer's, over all ranks. Pure."""
    place = placements.coordinates(parallelism, rank)
    return keys.Position(
        tensor_rank=place.tensor_rank,
        pipeline_rank=place.pipeline_rank,
        data_rank=place.data_rank if num_experts else 0,
        expert_rank=place.expert_rank if is_expert_parallel(parallelism, num_experts) else 0,
        experts=keys.format_experts(placements.experts_of(parallelism, rank, num_experts)),
    )


def is_expert_parallel(parallelism: specs.Parallelism, num_experts: int) -> bool:
    """Whether experts are spread whole over more than one rank: the effective value, as the engine sees it. Pure."""
    return parallelism.expert.enabled and num_experts > 0 and parallelism.tensor * parallelism.data > 1


def quantization_of(checkpoint: checkpoints.Checkpoint) -> str:
    """Method and algorithm as the key and messages name them: ``modelopt/NVFP4``, or ``none``. Pure."""
    found = checkpoint.quantization
    return f"{found.name}/{found.algorithm}" if found.algorithm else found.name


def refuse_other_quantization(spec: specs.WeightCacheSpec, checkpoint: checkpoints.Checkpoint) -> None:
    """Refuse a checkpoint of another method than the user expects. Pure. Raises Refusal ``UnsupportedQuantization``."""
    wanted, found = spec.quantization.method, quantization_of(checkpoint)
    if wanted and wanted not in (found, checkpoint.quantization.name):
        raise reasons.Refusal(
            reasons.Reason.UnsupportedQuantization, f"quantization.method is {wanted!r}, the checkpoint is {found!r}"
        )


def _key(spec: specs.WeightCacheSpec, checkpoint: checkpoints.Checkpoint, rank: int) -> keys.Key:
    parallelism = spec.parallelism
    num_experts = checkpoint.num_experts
    spread = is_expert_parallel(parallelism, num_experts)
    return keys.Key(
        layout_version=keys.LAYOUT_VERSION,
        content="",
        config=configs.config_digest(checkpoint.config),
        architecture=checkpoint.architecture,
        dtype=checkpoint.dtype,
        quantization=quantization_of(checkpoint),
        quantization_config=digests.digest_of_value(checkpoint.quantization.config),
        tensor_size=parallelism.tensor,
        pipeline_size=parallelism.pipeline,
        data_size=parallelism.data if num_experts else 1,
        expert_parallel=spread,
        expert_placement=str(parallelism.expert.placement) if spread else "",
        linear_layout=LOADED,
        moe_layout=LOADED if num_experts else "",
        kv_cache_dtype=checkpoint.quantization.kv_cache,
        preparer=str(spec.preparer),
        position=build_position(parallelism, num_experts, rank),
    )
