"""Rank plans, carried out by ten lines of interpreter and compared with slices cut by hand.

The expectation is written per layer kind with torch slicing over what the safetensors library loads; it shares no table
and no formula with the product. Where a rank's tensors come out otherwise, an engine would compute nonsense.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.support import checkpoints as support
from weightcache.crds import specs
from weightcache.daemon import checkpoints, pieces, plans, reads
from weightcache.wire import digests, manifests, reasons

MIB = 1 << 20
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


def parallel(tensor=1, pipeline=1, data=1, expert=False, placement="linear") -> specs.Parallelism:
    """A parallel layout."""
    placed = specs.Expert(enabled=expert, placement=specs.ExpertPlacement(placement))
    return specs.Parallelism(tensor=tensor, pipeline=pipeline, data=data, expert=placed)


def carry_out(plan: plans.RankPlan, directory: Path, buffer_bytes: int = 4 * MIB) -> tuple[bytearray, bytearray, dict]:
    """What a loader does with a plan: read units, copy rows, keep scales, digest blocks."""
    arena, scales, blocks = bytearray(plan.arena_bytes), bytearray(4 * len(reads.scale_sources(plan))), {}
    for unit in reads.build_reads(plan, buffer_bytes):
        with (directory / unit.file).open("rb") as file:
            file.seek(unit.begin)
            buffer = file.read(unit.size_bytes)
        assert len(buffer) == unit.size_bytes <= buffer_bytes
        for part in unit.segments:
            for row in range(part.num_rows):
                start, offset = part.source_offset + row * part.row_stride, part.offset + row * part.row_bytes
                assert 0 <= start <= len(buffer) - part.row_bytes
                arena[offset : offset + part.row_bytes] = buffer[start : start + part.row_bytes]
        for scale in unit.scales:
            table = slice(scale.table_offset, scale.table_offset + scale.size_bytes)
            scales[table] = buffer[scale.source_offset : scale.source_offset + scale.size_bytes]
        for block in unit.blocks:
            data = buffer[block.source_offset : block.source_offset + block.size_bytes]
            assert (unit.file, block.block) not in blocks
            blocks[unit.file, block.block] = xxhash.xxh3_128_digest(data)
    return arena, scales, blocks


def tensors_of(plan: plans.RankPlan, arena: bytearray) -> dict[str, torch.Tensor]:
    """The arena's tensors, as an engine would see them."""
    found = {}
    for tensor in plan.tensors:
        assert tensor.offset % 256 == 0
        raw = torch.frombuffer(arena, dtype=torch.uint8, offset=tensor.offset, count=tensor.size_bytes)
        whole = raw.clone().view(DTYPES[tensor.dtype])
        found[tensor.name] = torch.as_strided(whole, tensor.shape, tensor.strides)
    return found


class Expected:
    """One rank's parameters, cut by hand from the loaded checkpoint (facts: vLLM 0.32's layers and weight loaders)."""

    def __init__(self, directory: Path, tp=(0, 1), stage=(0, 1), experts=None, slices=None) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.source = {}
        for path in directory.glob("*.safetensors"):
            self.source |= safetensors.torch.load_file(path)
        (self.rank, self.size), (self.stage, self.stages) = tp, stage
        self.experts = experts if experts is not None else range(self.config.get("num_experts", 0))
        self.slice_rank, self.slice_size = slices or tp
        self.quantized = "quantization_config" in self.config
        self.out = {}

    def build(self, layers) -> dict[str, torch.Tensor]:
        config = self.config
        first, last = self.stage == 0, self.stage == self.stages - 1
        if config["model_type"] == "qwen3_moe":
            first = last = True
        tied = config["tie_word_embeddings"]
        if first or (tied and last):
            self.out["model.embed_tokens.weight"] = self.vocabulary("model.embed_tokens.weight")
        if last:
            self.out["model.norm.weight"] = self.source["model.norm.weight"]
            if not tied:
                self.out["lm_head.weight"] = self.vocabulary("lm_head.weight")
        for layer in layers:
            self.layer(f"model.layers.{layer}.", layer)
        return self.out

    def vocabulary(self, name):
        whole = self.source[name]
        rows = (whole.shape[0] + 63) // 64 * 64
        padded = torch.cat([whole, torch.zeros(rows - whole.shape[0], whole.shape[1], dtype=whole.dtype)])
        return padded.chunk(self.size)[self.rank]

    def layer(self, prefix, number):
        config, source = self.config, self.source
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            if f"{prefix}{name}.weight" in source:
                self.out[f"{prefix}{name}.weight"] = source[f"{prefix}{name}.weight"]
        for letter in "kv":
            name = f"{prefix}self_attn.{letter}_proj.{letter}_scale"
            if name in source:
                self.out[f"{prefix}self_attn.attn.{letter}_scale"] = source[name]
        heads, few = self.size, config["num_key_value_heads"]
        # Fewer key-value heads than ranks: each head serves size / few consecutive ranks.
        few_rank, few_size = (self.rank, heads) if few >= heads else (self.rank // (heads // few), few)
        parts = [(f"{prefix}self_attn.q_proj", self.rank, heads)]
        parts += [(f"{prefix}self_attn.{x}_proj", few_rank, few_size) for x in "kv"]
        self.column(f"{prefix}self_attn.qkv_proj", parts)
        self.row(f"{prefix}self_attn.o_proj")
        has_experts = config.get("num_experts") and number not in config["mlp_only_layers"]
        if has_experts and (number + 1) % config["decoder_sparse_step"] == 0:
            self.out[f"{prefix}mlp.gate.weight"] = source[f"{prefix}mlp.gate.weight"]
            self.moe(f"{prefix}mlp.experts.")
        else:
            self.column(
                f"{prefix}mlp.gate_up_proj", [(f"{prefix}mlp.{x}_proj", self.rank, heads) for x in ("gate", "up")]
            )
            self.row(f"{prefix}mlp.down_proj")

    def suffixes(self, name):
        return [
            x
            for x in ("weight", "weight_scale", "weight_scale_2", "input_scale", "bias")
            if f"{name}.{x}" in self.source
        ]

    def column(self, target, parts):
        for suffix in self.suffixes(parts[0][0]):
            sources = [(self.source[f"{name}.{suffix}"], rank, size) for name, rank, size in parts]
            if sources[0][0].ndim == 0:
                self.out[f"{target}.{suffix}"] = torch.stack([tensor for tensor, _, _ in sources])
            else:
                self.out[f"{target}.{suffix}"] = torch.cat([tensor.chunk(size)[rank] for tensor, rank, size in sources])

    def row(self, name):
        for suffix in self.suffixes(name):
            tensor = self.source[f"{name}.{suffix}"]
            if tensor.ndim == 2:
                tensor = tensor.chunk(self.size, dim=1)[self.rank]
            self.out[f"{name}.{suffix}"] = tensor.reshape(1) if tensor.ndim == 0 else tensor

    def moe(self, prefix):
        for suffix in self.suffixes(f"{prefix}0.gate_proj"):
            everyone = range(self.config["num_experts"]) if suffix == "input_scale" else self.experts
            w13, w2 = [], []
            for expert in everyone:
                gate, up, down = (self.source[f"{prefix}{expert}.{x}_proj.{suffix}"] for x in ("gate", "up", "down"))
                if gate.ndim == 0:
                    w13.append(torch.stack([gate, up]))
                    w2.append(down)
                else:
                    w13.append(torch.cat([part.chunk(self.slice_size)[self.slice_rank] for part in (gate, up)]))
                    w2.append(down.chunk(self.slice_size, dim=1)[self.slice_rank])
            self.out[f"{prefix}routed_experts.w13_{suffix}"] = torch.stack(w13)
            self.out[f"{prefix}routed_experts.w2_{suffix}"] = torch.stack(w2)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and every byte."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (name, found[name].dtype, found[name].shape) == (name, tensor.dtype, tensor.shape)
        left, right = (x.contiguous().reshape(-1).view(torch.uint8) for x in (found[name], tensor))
        assert torch.equal(left, right), name


def check_group(directory: Path, parallelism: specs.Parallelism, expected: list[dict[str, torch.Tensor]]) -> None:
    """Every rank's bytes, and the blocks of all ranks together."""
    group = plans.build_group_plans(checkpoints.read(directory), parallelism)
    assert len(group) == len(expected)
    blocks: dict[tuple[str, int], bytes] = {}
    for plan, tensors in zip(group, expected, strict=True):
        arena, scales, digested = carry_out(plan, directory)
        assert_equal(tensors_of(plan, arena), tensors)
        reads.refuse_invalid_scales(plan, scales)
        assert not blocks.keys() & digested.keys()
        blocks |= digested
    for path in directory.glob("*.safetensors"):
        count = digests.num_blocks(path.stat().st_size)
        assert digests.combine(blocks.pop((path.name, index)) for index in range(count)) == digests.digest_of_file(path)
    assert not blocks


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("quantization", ["none", "nvfp4", "w4a16_nvfp4"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensor_parallel_ranks_hold_their_slices(tmp_path, architecture, quantization, size):
    """Columns, rows, heads (repeated at 4), vocabulary and experts, bf16 and NVFP4, for every rank."""
    path = support.make_checkpoint(tmp_path / "m", architecture, quantization, num_shards=3)
    expected = [Expected(path, tp=(rank, size)).build(range(3)) for rank in range(size)]
    check_group(path, parallel(tensor=size), expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("size", "stages"), [(2, [[0, 1, 2], [3, 4]]), (3, [[0, 1], [2, 3], [4]])])
def test_pipeline_stages_hold_their_layers_and_ends(tmp_path, architecture, size, stages):
    """Layers by stage; embedding first and head last, but on every stage where the engine builds them so."""
    path = support.make_checkpoint(tmp_path / "m", architecture, "nvfp4", num_hidden_layers=5, num_shards=2)
    expected = [
        Expected(path, tp=(tp, 2), stage=(stage, size)).build(layers)
        for stage, layers in enumerate(stages)
        for tp in range(2)
    ]
    check_group(path, parallel(tensor=2, pipeline=size), expected)


@pytest.mark.parametrize("quantization", ["none", "nvfp4"])
@pytest.mark.parametrize(
    ("num_experts", "placement", "size", "held"),
    [
        (8, "linear", 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, "round_robin", 2, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (8, "linear", 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (6, "linear", 4, [[0, 1], [2, 3], [4], [5]]),
        (6, "round_robin", 4, [[0, 4], [1, 5], [2], [3]]),
    ],
)
def test_expert_parallel_ranks_hold_whole_experts(tmp_path, quantization, num_experts, placement, size, held):
    """Answers W5: whole experts in placement order, but input scales of all experts on every rank."""
    path = support.make_checkpoint(tmp_path / "m", "qwen3_moe", quantization, num_experts=num_experts)
    parallelism = parallel(tensor=size, expert=True, placement=placement)
    expected = [
        Expected(path, tp=(rank, size), experts=held[rank], slices=(0, 1)).build(range(3)) for rank in range(size)
    ]
    check_group(path, parallelism, expected)
    group = plans.build_group_plans(checkpoints.read(path), parallelism)
    assert [plan.metadata["experts"] for plan in group] == held


def test_expert_parallelism_runs_over_data_and_tensor_ranks(tmp_path):
    """Two data-parallel ranks of two hold a quarter of the experts each, and equal halves of the rest."""
    path = support.make_checkpoint(tmp_path / "m", "qwen3_moe", "nvfp4")
    expected = [
        Expected(path, tp=(tp, 2), experts=range(2 * (2 * dp + tp), 2 * (2 * dp + tp) + 2), slices=(0, 1)).build(
            range(3)
        )
        for dp in range(2)
        for tp in range(2)
    ]
    check_group(path, parallel(tensor=2, data=2, expert=True), expected)


def test_data_parallel_ranks_cut_experts_and_repeat_the_rest(tmp_path):
    """Without expert parallelism the engine cuts expert matrices over data x tensor ranks."""
    path = support.make_checkpoint(tmp_path / "m", "qwen3_moe", "nvfp4")
    expected = [
        Expected(path, tp=(tp, 2), slices=(2 * dp + tp, 4)).build(range(3)) for dp in range(2) for tp in range(2)
    ]
    check_group(path, parallel(tensor=2, data=2), expected)


def test_layers_without_experts_are_dense(tmp_path):
    """mlp_only_layers and decoder_sparse_step decide which layers have experts."""
    path = support.make_checkpoint(
        tmp_path / "m", "qwen3_moe", "nvfp4", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]
    )
    expected = [Expected(path, tp=(rank, 2)).build(range(4)) for rank in range(2)]
    assert "model.layers.1.mlp.experts.routed_experts.w13_weight" in expected[0]
    assert "model.layers.3.mlp.gate_up_proj.weight" in expected[0]
    check_group(path, parallel(tensor=2), expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_biases_are_cut_with_their_rows(tmp_path, architecture):
    """Column-parallel biases are cut, row-parallel ones whole."""
    options = {"attention_bias": True, **({"mlp_bias": True} if architecture == "llama" else {})}
    path = support.make_checkpoint(tmp_path / "m", architecture, "nvfp4", **options)
    expected = [Expected(path, tp=(rank, 4)).build(range(3)) for rank in range(4)]
    assert "model.layers.0.self_attn.qkv_proj.bias" in expected[0]
    check_group(path, parallel(tensor=4), expected)


def test_tied_embeddings_are_one_tensor_with_two_names(tmp_path):
    """Answers W21: the head is an alias, on the stage that has it, and its own copy in the files is not held."""
    path = support.make_checkpoint(tmp_path / "m", "llama", tie_word_embeddings=True, torch_dtype="float16")
    expected = [Expected(path, stage=(stage, 2)).build(layers) for stage, layers in enumerate(([0, 1], [2]))]
    check_group(path, parallel(pipeline=2), expected)
    first, last = plans.build_group_plans(checkpoints.read(path), parallel(pipeline=2))
    assert (first.aliases, last.aliases) == ({}, {"lm_head.weight": "model.embed_tokens.weight"})
    assert "model.embed_tokens.weight" in {tensor.name for tensor in last.tensors}


def test_kv_cache_scales_go_to_the_attention_layer(tmp_path):
    """Scales of an FP8 KV cache keep their values under the engine's names."""
    path = support.make_checkpoint(tmp_path / "m", "qwen3", "nvfp4", kv_scales=True)
    expected = Expected(path).build(range(3))
    assert expected["model.layers.2.self_attn.attn.v_scale"].shape == ()
    check_group(path, parallel(), [expected])


def test_files_of_many_blocks_are_digested_once_and_whole(tmp_path):
    """Blocks of 4 MiB, strided rows across buffers and blocks, and a buffer of three blocks give the same bytes."""
    path = support.make_checkpoint(
        tmp_path / "m", "llama", hidden_size=512, intermediate_size=4096, vocab_size=9001, num_shards=2
    )
    assert max(file.stat().st_size for file in path.glob("*.safetensors")) > 5 * digests.BLOCK_BYTES
    expected = [Expected(path, tp=(rank, 4)).build(range(3)) for rank in range(4)]
    check_group(path, parallel(tensor=4), expected)
    plan = plans.build_group_plans(checkpoints.read(path), parallel(tensor=4))[2]
    arena, _, _ = carry_out(plan, path, 13 * MIB)
    assert_equal(tensors_of(plan, arena), expected[2])


def test_replicas_share_the_work_of_digesting(tmp_path):
    """Data-parallel replicas read the same bytes; none of them digests much more than another."""
    path = support.make_checkpoint(tmp_path / "m", "llama", hidden_size=512, intermediate_size=4096, vocab_size=9001)
    group = plans.build_group_plans(checkpoints.read(path), parallel(data=3))
    loads = [sum(block.size_bytes for block in plan.blocks) for plan in group]
    assert max(loads) - min(loads) <= digests.BLOCK_BYTES


def test_plans_are_the_same_in_every_process(tmp_path):
    """Daemon and loaders plan on their own and must agree, whatever the order of files or hashes."""
    path = support.make_checkpoint(tmp_path / "m", "qwen3_moe", "nvfp4", num_shards=3)
    layout = parallel(tensor=2, data=2, expert=True)
    first, again = (plans.build_group_plans(checkpoints.read(path), layout) for _ in range(2))
    assert first == again
    for rank, plan in enumerate(first):
        assert plans.build_rank_plan(checkpoints.read(path), layout, rank) == plan
    names = [tensor.name for tensor in first[0].tensors]
    assert names[:3] == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    layers = [int(name.split(".")[2]) for name in names[3:]]
    assert layers == sorted(layers)


def test_arenas_are_packed_without_waste(tmp_path):
    """Tensors lie one after the other, each padded to 256 bytes, and nothing else."""
    path = support.make_checkpoint(tmp_path / "m", "qwen3", "nvfp4")
    (plan,) = plans.build_group_plans(checkpoints.read(path), parallel())
    position = 0
    for tensor in plan.tensors:
        assert tensor.offset == position
        assert tensor.size_bytes == manifests.tensor_bytes(tensor.dtype, list(tensor.shape), list(tensor.strides))
        position += manifests.padded(tensor.size_bytes)
    assert plan.arena_bytes == position


@pytest.mark.parametrize(
    ("architecture", "config", "layout", "words"),
    [
        ("llama", {}, parallel(tensor=3), ["lm_head.weight (padded rows)", "128", "3 ranks"]),
        ("llama", {}, parallel(tensor=8), ["self_attn.o_proj.weight (columns)", "64", "8 x 16"]),
        ("llama", {"intermediate_size": 96}, parallel(tensor=4), ["mlp.down_proj.weight (columns)", "96", "4 x 16"]),
        ("llama", {}, parallel(pipeline=4), ["parallelism.pipeline is 4", "3 layers"]),
        ("qwen3_moe", {}, parallel(tensor=16, expert=True), ["16", "8 experts"]),
        ("qwen3_moe", {"moe_intermediate_size": 48}, parallel(tensor=2), ["experts.0.down_proj", "48", "2 x 16"]),
        ("qwen3_moe", {}, parallel(tensor=2, data=4), ["experts.0.down_proj", "64", "8 x 16"]),
        (
            "qwen3",
            {"num_attention_heads": 6, "head_dim": 32},
            parallel(tensor=4),
            ["q_proj", "num_attention_heads", "6", "4 ranks"],
        ),
    ],
)
def test_layouts_that_do_not_divide_are_refused_with_the_layer(tmp_path, architecture, config, layout, words):
    """The message names the layer, its size, the divisor and the multiple that is needed."""
    path = support.make_checkpoint(tmp_path / "m", architecture, "nvfp4", **config)
    with pytest.raises(reasons.Refusal) as refused:
        plans.build_group_plans(checkpoints.read(path), layout)
    assert refused.value.reason is reasons.Reason.ParallelismDoesNotDivide
    assert all(word in refused.value.message for word in words), refused.value.message


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_not_finite_and_positive_are_refused_by_name(tmp_path, value):
    """Answers W23: the table of scales names the checkpoint's tensor that would become 1/0 or NaN."""
    path = support.make_checkpoint(tmp_path / "m", "qwen3_moe", "nvfp4")
    tensors = support.make_tensors(json.loads((path / "config.json").read_text()))
    bad = "model.layers.1.mlp.experts.5.down_proj.input_scale"
    tensors[bad] = ("F32", (), torch.tensor(value).numpy().tobytes())
    support.write_shards(path, tensors)
    for plan in plans.build_group_plans(checkpoints.read(path), parallel(tensor=2, expert=True)):
        _, scales, _ = carry_out(plan, path)
        with pytest.raises(reasons.Refusal) as refused:
            reads.refuse_invalid_scales(plan, scales)
        assert refused.value.reason is reasons.Reason.ScaleInvalid
        assert f"{bad} is {value}" in refused.value.message


@given(
    architecture=st.sampled_from(["llama", "qwen3", "qwen3_moe"]),
    quantization=st.sampled_from(["none", "nvfp4", "w4a16_nvfp4"]),
    sizes=st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 2)),
    expert=st.booleans(),
    placement=st.sampled_from(list(specs.ExpertPlacement)),
)
def test_every_byte_of_the_checkpoint_reaches_a_rank(
    tmp_path_factory, architecture, quantization, sizes, expert, placement
):
    """Whatever the layout: together the ranks hold every byte, none writes over another, each block has one owner."""
    path = tmp_path_factory.getbasetemp() / f"{architecture}-{quantization}"
    if not path.exists():
        support.make_checkpoint(path, architecture, quantization, num_shards=2)
    checkpoint = checkpoints.read(path)
    tensor, pipeline, data = sizes
    if tensor * data > 4 and not (expert and architecture == "qwen3_moe"):
        data = 1
    group = plans.build_group_plans(checkpoint, parallel(tensor, pipeline, data, expert, placement.value))
    covered = {file: bytearray(stat.size_bytes) for file, stat in checkpoint.stats.items()}
    for plan in group:
        filled = bytearray(plan.arena_bytes)
        for piece in (piece for tensor in plan.tensors for piece in tensor.pieces):
            for row in range(piece.num_rows):
                begin, offset = piece.begin + row * piece.row_stride, piece.offset + row * piece.row_bytes
                assert not any(filled[offset : offset + piece.row_bytes])
                filled[offset : offset + piece.row_bytes] = b"\1" * piece.row_bytes
                covered[piece.file][begin : begin + piece.row_bytes] = b"\1" * piece.row_bytes
        assert sum(filled) <= sum(tensor.size_bytes for tensor in plan.tensors)
    for tensor in checkpoint.tensors.values():
        assert all(covered[tensor.file][tensor.begin : tensor.begin + tensor.size_bytes]), tensor.name
    owners = [(block.file, block.block) for plan in group for block in plan.blocks]
    assert len(owners) == len(set(owners)) == sum(digests.num_blocks(size) for size in map(len, covered.values()))


def test_a_buffer_smaller_than_a_block_is_refused(tmp_path):
    """A block must be digested from one buffer."""
    path = support.make_checkpoint(tmp_path / "m", "llama")
    (plan,) = plans.build_group_plans(checkpoints.read(path), parallel())
    with pytest.raises(reasons.Refusal) as refused:
        reads.build_reads(plan, 4 * MIB - 1)
    assert refused.value.reason is reasons.Reason.SettingsInvalid


def test_clipped_pieces_are_the_piece(tmp_path):
    """However a buffer cuts rows, every needed byte arrives once, at its place (all cuts of small pieces tried)."""
    source = bytes(range(1, 61))
    for row_bytes, num_rows, stride in ((7, 4, 11), (5, 1, 5), (1, 9, 4), (6, 3, 6)):
        piece = pieces.Piece("x", "f", 10, row_bytes, num_rows, stride, 100)
        wanted = b"".join(source[10 + i * stride :][:row_bytes] for i in range(num_rows))
        for first in range(60):
            for second in range(first, 61):
                out = bytearray(len(wanted))
                for begin, end in ((0, first), (first, second), (second, 60)):
                    for part in pieces.clip(piece, begin, end):
                        for row in range(part.num_rows):
                            start = begin + part.source_offset + row * part.row_stride
                            assert begin <= start <= end - part.row_bytes
                            at = part.offset - 100 + row * part.row_bytes
                            assert not any(out[at : at + part.row_bytes])
                            out[at : at + part.row_bytes] = source[start : start + part.row_bytes]
                assert out == wanted
