"""Checkpoint directories: what is accepted as the engine would, and what is refused before a weight is read."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests.support import checkpoints as support
from weightcache.daemon import checkpoints, headers, parameters, quantizations
from weightcache.wire import reasons

R = reasons.Reason
INDEX = "model.safetensors.index.json"


def refusal(attempt) -> reasons.Refusal:
    """The Refusal that an attempt ends with."""
    with pytest.raises(reasons.Refusal) as refused:
        attempt()
    return refused.value


def edit(path, change) -> None:
    """Rewrite a JSON file of the checkpoint."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.fixture
def sharded(tmp_path):
    """A sound quantized checkpoint of three shards."""
    return support.make_checkpoint(tmp_path / "model", "qwen3_moe", "nvfp4", num_shards=3)


def test_a_sound_checkpoint_is_read_whole(sharded):
    """Every tensor of every shard is there, with the stat of its file."""
    found = checkpoints.read(sharded)
    config = json.loads((sharded / "config.json").read_text())
    expected = support.make_tensors(config)
    assert found.tensors.keys() == expected.keys()
    for name, (dtype, shape, data) in expected.items():
        tensor = found.tensors[name]
        assert (tensor.dtype, tensor.shape) == (dtype, shape)
        with (sharded / tensor.file).open("rb") as file:
            file.seek(tensor.begin)
            assert file.read(tensor.size_bytes) == data
    assert {name: stat.size_bytes for name, stat in found.stats.items()} == {
        path.name: path.stat().st_size for path in sharded.glob("*.safetensors")
    }
    assert (found.architecture, found.dtype, found.num_experts) == ("Qwen3MoeForCausalLM", "bfloat16", 8)
    assert (found.quantization.name, found.quantization.algorithm) == ("modelopt", "NVFP4")


def test_a_snapshot_of_links_is_read(tmp_path, sharded):
    """The hub's cache is a directory of links that lead out of it; that is no escape."""
    blobs = tmp_path / "blobs"
    shutil.move(sharded, blobs)
    sharded.mkdir()
    for path in blobs.iterdir():
        (sharded / path.name).symlink_to(os.path.relpath(path, sharded))
    assert len(checkpoints.read(sharded).tensors) > 100


@pytest.mark.parametrize(
    ("damage", "reason", "words"),
    [
        (shutil.rmtree, R.CheckpointNotFound, ["not a directory"]),
        (lambda d: (d / "config.json").unlink(), R.CheckpointNotFound, ["config.json"]),
        (lambda d: (d / "config.json").write_text("{"), R.CheckpointInvalid, ["config.json", "JSON"]),
        (lambda d: (d / "config.json").write_text("[]"), R.CheckpointInvalid, ["config.json", "object"]),
        (lambda d: (d / "config.json").write_bytes(b'{"\xff":1}'), R.CheckpointInvalid, ["config.json", "JSON"]),
        (lambda d: (d / "config.json").write_text('{"a":' * 99999), R.CheckpointInvalid, ["config.json", "JSON"]),
        (lambda d: (d / "config.json").write_text('{"a":1,"a":2}'), R.CheckpointInvalid, ["config.json", "two values"]),
        (lambda d: (d / INDEX).unlink(), R.CheckpointIncomplete, [INDEX, "model-00001-of-00003.safetensors"]),
        (lambda d: (d / INDEX).write_text('{"weight_map": 3}'), R.CheckpointInvalid, [INDEX, "weight_map"]),
        (
            lambda d: (d / "model-00002-of-00003.safetensors").unlink(),
            R.CheckpointIncomplete,
            ["1 of 3 shards are missing: model-00002-of-00003.safetensors"],
        ),
        (
            lambda d: os.truncate(d / "model-00002-of-00003.safetensors", 30_000),
            R.CheckpointIncomplete,
            ["model-00002-of-00003.safetensors", "truncated"],
        ),
        (
            lambda d: shutil.copy(d / "model-00001-of-00003.safetensors", d / "model.safetensors"),
            R.CheckpointInvalid,
            ["model.safetensors", INDEX, "two answers"],
        ),
        (
            lambda d: shutil.copy(d / "model-00001-of-00003.safetensors", d / "model-00002-of-00003.safetensors"),
            R.CheckpointInvalid,
            ["model.embed_tokens.weight is in model-00001-of-00003.safetensors and in model-00002"],
        ),
    ],
)
def test_a_damaged_directory_is_refused_by_name(sharded, damage, reason, words):
    """Each missing or contradicting file is named, with the reason that says whether waiting can help."""
    damage(sharded)
    refused = refusal(lambda: checkpoints.read(sharded))
    assert refused.reason is reason
    assert all(word in refused.message for word in words), refused.message


OUTSIDE = ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "", 7, "x.bin", "a\n.safetensors"]


@pytest.mark.parametrize("file", OUTSIDE)
def test_an_index_cannot_lead_out_of_the_directory(sharded, file):
    """A planted index must not make a daemon read files elsewhere."""
    edit(sharded / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": file}))
    refused = refusal(lambda: checkpoints.read(sharded))
    assert refused.reason is R.CheckpointInvalid
    assert "lm_head.weight" in refused.message


def test_an_index_that_names_a_tensor_no_file_has_is_refused(sharded):
    """The index of another revision is not loaded around."""
    edit(sharded / INDEX, lambda index: index["weight_map"].update({"ghost": "model-00001-of-00003.safetensors"}))
    refused = refusal(lambda: checkpoints.read(sharded))
    assert refused.reason is R.CheckpointIncomplete
    assert "ghost (model-00001-of-00003.safetensors)" in refused.message


def test_a_tensor_in_another_file_than_the_index_says_is_refused(sharded):
    """An index that is wrong about one place is wrong."""
    edit(sharded / INDEX, lambda i: i["weight_map"].update({"lm_head.weight": "model-00001-of-00003.safetensors"}))
    refused = refusal(lambda: checkpoints.read(sharded))
    assert refused.reason is R.CheckpointInvalid
    assert "lm_head.weight should be in model-00001" in refused.message


@pytest.mark.parametrize(
    ("field", "value", "reason", "words"),
    [
        ("architectures", ["MambaForCausalLM"], R.UnsupportedArchitecture, ["MambaForCausalLM", "Qwen3MoeForCausalLM"]),
        ("architectures", None, R.UnsupportedArchitecture, ["None"]),
        ("torch_dtype", "float32", R.UnsupportedQuantization, ["float32", "bfloat16"]),
        ("torch_dtype", None, R.UnsupportedQuantization, ["None"]),
        ("hidden_size", "64", R.CheckpointInvalid, ["hidden_size", "'64'"]),
        ("hidden_size", -64, R.CheckpointInvalid, ["hidden_size", "-64"]),
        ("hidden_size", 2**40, R.CheckpointInvalid, ["hidden_size"]),
        ("num_hidden_layers", True, R.CheckpointInvalid, ["num_hidden_layers", "True"]),
        ("num_experts", "8", R.CheckpointInvalid, ["num_experts"]),
        ("mlp_only_layers", [None], R.CheckpointInvalid, ["mlp_only_layers"]),
        ("tie_word_embeddings", "no", R.CheckpointInvalid, ["tie_word_embeddings"]),
        ("num_attention_heads", None, R.CheckpointInvalid, ["num_attention_heads is missing"]),
    ],
)
def test_a_bad_field_of_the_configuration_is_refused_by_name(sharded, field, value, reason, words):
    """Sizes are checked before anything is multiplied with them."""
    edit(sharded / "config.json", lambda config: config.update({field: value}))
    refused = refusal(lambda: checkpoints.read(sharded))
    assert refused.reason is reason
    assert all(word in refused.message for word in words), refused.message


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, ["config.json: quant_method is 'awq'", "modelopt"]),
        ({"quant_method": "gptq"}, ["'gptq'"]),
        ({"quant_method": "fp8"}, ["'fp8'"]),
        ({"quant_method": "compressed-tensors"}, ["'compressed-tensors' (compressed-tensors is not read yet)"]),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ["quant_algo is 'FP8'", "NVFP4"]),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, ["quant_algo is 'MIXED_PRECISION'"]),
        ({"quant_method": "modelopt"}, ["quant_algo is None"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, ["group_size is 32"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": "lm_head"}, ["ignore is 'lm_head'"]),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"type": "int", "num_bits": 4}},
            ["kv_cache_scheme"],
        ),
        ("nvfp4", ["quantization_config is 'nvfp4'"]),
    ],
)
def test_other_quantizations_are_refused_with_the_true_reason(sharded, quantization, words):
    """Answers W12: file, field, value and what is supported, before a shape can disagree."""
    edit(sharded / "config.json", lambda config: config.update(quantization_config=quantization))
    refused = refusal(lambda: checkpoints.read(sharded))
    assert refused.reason is R.UnsupportedQuantization
    assert all(word in refused.message for word in [*words, "supported"]), refused.message


def test_the_legacy_file_alone_is_enough_and_contradictions_are_refused(sharded):
    """Older exports have only hf_quant_config.json; two files that disagree are refused."""
    edit(sharded / "config.json", lambda config: config.pop("quantization_config"))
    found = checkpoints.read(sharded).quantization
    assert (found.name, found.algorithm) == ("modelopt", "NVFP4")
    assert "lm_head" in found.ignore
    inline = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    edit(sharded / "config.json", lambda config: config.update(quantization_config=inline))
    edit(sharded / "hf_quant_config.json", lambda legacy: legacy["quantization"].update(kv_cache_quant_algo="FP8"))
    refused = refusal(lambda: checkpoints.read(sharded))
    assert refused.reason is R.CheckpointInvalid
    assert "config.json says kv_cache none, hf_quant_config.json says fp8" in refused.message


def test_weight_only_groups_make_the_algorithm_w4a16():
    """An NVFP4 checkpoint whose groups leave activations alone has no input scales (vLLM decides the same)."""
    groups = {"group_0": {"input_activations": None, "weights": {"num_bits": 4}}}
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups}}
    assert quantizations.parse(config, None).algorithm == "W4A16_NVFP4"
    groups["group_1"] = {"input_activations": {"num_bits": 4}}
    assert quantizations.parse(config, None).algorithm == "NVFP4"


@pytest.mark.parametrize(
    ("module", "parts", "ignore", "expected"),
    [
        ("lm_head", ["lm_head"], ["lm_head"], True),
        ("model.layers.1.mlp.gate", ["model.layers.1.mlp.gate"], ["model.layers.0.mlp.gate"], False),
        ("a.qkv_proj", ["a.q_proj", "a.k_proj", "a.v_proj"], ["a.q_proj", "a.k_proj", "a.v_proj"], True),
        ("a.qkv_proj", ["a.q_proj", "a.k_proj", "a.v_proj"], ["a.q_proj"], None),
        ("model.layers.0.self_attn.o_proj", ["model.layers.0.self_attn.o_proj"], ["model.layers.0.self_attn*"], True),
        ("model.layers.0.mlp.experts", [], ["model.layers.0.mlp.experts.7.gate_proj"], True),
        ("model.layers.0.mlp.experts", [], ["*.mlp.gate"], False),
        ("model.layers.0.mlp.down_proj", ["model.layers.0.mlp.down_proj"], ["*.mlp.*"], True),
    ],
)
def test_ignore_patterns_mean_what_the_engine_reads_in_them(module, parts, ignore, expected):
    """A layer that one end holds quantized and the other does not would be sliced apart."""
    found = quantizations.Quantization("modelopt", "NVFP4", "", tuple(ignore), {})
    assert quantizations.is_ignored(found, module, parts) is expected


def remake(path, change):
    """Write the checkpoint again with changed tensors."""
    config = json.loads((path / "config.json").read_text())
    tensors = support.make_tensors(config)
    change(tensors)
    for old in path.glob("*.safetensors*"):
        old.unlink()
    support.write_shards(path, tensors)


def test_missing_tensors_are_refused_by_name(sharded):
    """Answers W22: a tensor that the configuration calls for is never made up."""
    gone = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    remake(sharded, lambda tensors: tensors.pop(gone))
    refused = refusal(lambda: parameters.build_parameters(checkpoints.read(sharded)))
    assert refused.reason is R.CheckpointIncomplete
    assert f"1 tensors that config.json calls for are in no file: {gone}" in refused.message


def test_unknown_tensors_are_refused_by_name_and_known_buffers_are_not(sharded):
    """A tensor that nobody expects is a feature that would be left out in silence."""
    extra = "model.layers.0.mlp.shared_expert.up_proj.weight"
    remake(
        sharded,
        lambda tensors: tensors.update({
            extra: ("BF16", (1,), b"xx"),
            "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (1,), b"1234"),
        }),
    )  # fmt: skip
    refused = refusal(lambda: parameters.build_parameters(checkpoints.read(sharded)))
    assert refused.reason is R.CheckpointInvalid
    assert f"1 tensors are unknown to Qwen3MoeForCausalLM with this config.json: {extra}" in refused.message


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.norm.weight", ("F32", (64,), bytes(256)), ["F32 [64]", "BF16 [64]"]),
        ("model.norm.weight", ("BF16", (32,), bytes(64)), ["BF16 [32]", "BF16 [64]"]),
        ("model.norm.weight", ("BF16", (1, 64), bytes(128)), ["[1, 64]"]),
        ("model.layers.0.self_attn.q_proj.input_scale", ("F32", (2,), bytes(8)), ["F32 [2]", "F32 []"]),
        (
            "model.layers.0.self_attn.q_proj.weight_scale",
            ("F8_E4M3", (64, 2), bytes(128)),
            ["[64, 2]", "F8_E4M3 [64, 4]"],
        ),
    ],
)
def test_shapes_and_dtypes_are_compared_with_the_configuration(sharded, name, tensor, words):
    """Both values stand in the message, and nothing is cast or reshaped."""
    remake(sharded, lambda tensors: tensors.update({name: tensor}))
    refused = refusal(lambda: parameters.build_parameters(checkpoints.read(sharded)))
    assert refused.reason is R.CheckpointInvalid
    assert all(word in refused.message for word in ["model.safetensors", name, *words]), refused.message


@pytest.mark.parametrize("ignored", [True, False])
def test_an_ignore_list_that_the_files_contradict_is_refused(sharded, ignored):
    """A layer listed as unquantized that is quantized on disk, or the reverse, is named, not guessed."""
    router, attention = "model.layers.0.mlp.gate", "model.layers.0.self_attn.o_proj"
    lists = (
        ("config.json", "quantization_config", "ignore"),
        ("hf_quant_config.json", "quantization", "exclude_modules"),
    )
    for file, section, field in lists:
        value = json.loads((sharded / file).read_text())
        patterns = value[section][field]
        if ignored:
            patterns.append(attention)
        else:
            patterns.remove(router)
        (sharded / file).write_text(json.dumps(value))
    refused = refusal(lambda: parameters.build_parameters(checkpoints.read(sharded)))
    assert refused.reason is R.CheckpointInvalid
    assert refused.message.startswith(f"{attention if ignored else router} is {'' if ignored else 'not '}ignored")


def test_absurd_sizes_are_refused_before_they_are_listed(sharded):
    """Two billion layers in config.json cost no memory."""
    edit(sharded / "config.json", lambda config: config.update(num_hidden_layers=2**31 - 1))
    refused = refusal(lambda: parameters.build_parameters(checkpoints.read(sharded)))
    assert refused.reason is R.CheckpointIncomplete
    assert "2147483647 layers" in refused.message


def test_an_absent_head_is_missing_unless_embeddings_are_tied(tmp_path):
    """A lost lm_head must not be replaced by the embedding: that is another model."""
    path = support.make_checkpoint(tmp_path / "m", "llama")
    remake(path, lambda tensors: tensors.pop("lm_head.weight"))
    assert refusal(lambda: parameters.build_parameters(checkpoints.read(path))).reason is R.CheckpointIncomplete
    edit(path / "config.json", lambda config: config.update(tie_word_embeddings=True))
    names = {parameter.name for parameter in parameters.build_parameters(checkpoints.read(path))}
    assert "lm_head.weight" not in names


def test_scalars_may_be_written_with_one_dimension(sharded):
    """Exporters write a scale as [] or as [1]; the engine takes both."""
    name = "model.layers.0.self_attn.q_proj.input_scale"
    remake(sharded, lambda tensors: tensors.update({name: ("F32", (1,), tensors[name][2])}))
    parameters.build_parameters(checkpoints.read(sharded))


def test_headers_are_read_once_each(sharded, monkeypatch):
    """A checkpoint of 200 shards on network storage costs 200 small reads."""
    seen = []
    original = headers.read
    monkeypatch.setattr(headers, "read", lambda path, file: (seen.append(file), original(path, file))[1])
    checkpoints.read(sharded)
    assert sorted(seen) == sorted(set(seen))
    assert len(seen) == 3
