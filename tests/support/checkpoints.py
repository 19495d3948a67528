"""Tiny checkpoints as exporters write them, made from a seed, without torch and without the product's code.

The tests of headers, plans, loaders and engines all need checkpoints whose every byte is known. Sizes are the smallest
that still divide over four tensor-parallel ranks with NVFP4's blocks of 16.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
EXPERT_SIZES: dict[str, Any] = {
    "num_experts": 8,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
#: A tensor on its way to a file: dtype as safetensors names it, shape in elements, bytes.
Tensor = tuple[str, tuple[int, ...], bytes]


def make_checkpoint(
    path: Path,
    architecture: str = "qwen3_moe",
    quantization: str = "none",
    *,
    num_shards: int = 1,
    seed: int = 0,
    kv_scales: bool = False,
    **config: Any,
) -> Path:
    """Write a checkpoint directory and return its path.

    ``quantization``: ``none``, ``nvfp4`` or ``w4a16_nvfp4`` (ModelOpt's files and names). ``num_shards``: more than one
    writes an index. ``kv_scales``: FP8 KV-cache scales. ``config``: fields of config.json that replace the defaults,
    such as ``tie_word_embeddings=True``, ``attention_bias=True`` or ``torch_dtype="float16"``.
    """
    path.mkdir(parents=True, exist_ok=True)
    fields = make_config(architecture, quantization, kv_scales=kv_scales, **config)
    (path / "config.json").write_text(json.dumps(fields, indent=1))
    if quantization != "none":
        (path / "hf_quant_config.json").write_text(json.dumps(_legacy_quantization(fields["quantization_config"])))
    write_shards(path, make_tensors(fields, seed, kv_scales=kv_scales), num_shards)
    return path


def make_config(architecture: str, quantization: str, *, kv_scales: bool = False, **config: Any) -> dict[str, Any]:
    """config.json of such a checkpoint."""
    fields = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        **SIZES,
        **(EXPERT_SIZES if architecture == "qwen3_moe" else {}),
        **config,
    }
    if quantization != "none":
        layers = range(fields["num_hidden_layers"])
        routers = [f"model.layers.{layer}.mlp.gate" for layer in layers if has_experts(fields, layer)]
        fields.setdefault(
            "quantization_config",
            {
                "quant_method": "modelopt",
                "quant_algo": quantization.upper(),
                "group_size": 16,
                "ignore": ["lm_head", *routers],
                **({"kv_cache_scheme": {"type": "float", "num_bits": 8, "dynamic": False}} if kv_scales else {}),
            },
        )
    return fields


def _legacy_quantization(inline: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": inline.get("quant_algo"),
            "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in inline else None,
            "group_size": 16,
            "exclude_modules": inline.get("ignore"),
        },
    }


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether that layer of the model has experts."""
    if not config.get("num_experts") or layer in config["mlp_only_layers"]:
        return False
    return bool((layer + 1) % config["decoder_sparse_step"] == 0)


def make_tensors(config: Mapping[str, Any], seed: int = 0, *, kv_scales: bool = False) -> dict[str, Tensor]:
    """Every tensor of the checkpoint that ``config`` describes, by name."""
    return _Maker(config, seed).make(kv_scales)


def write_shards(path: Path, tensors: Mapping[str, Tensor], num_shards: int = 1) -> None:
    """Write the tensors as ``model.safetensors``, or dealt out over shards with an index."""
    if num_shards == 1:
        write_safetensors(path / "model.safetensors", tensors)
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[shard * len(names) // num_shards : (shard + 1) * len(names) // num_shards]
        write_safetensors(path / file, {name: tensors[name] for name in mine})
        weight_map.update(dict.fromkeys(mine, file))
    total = sum(len(data) for _, _, data in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file: header length, JSON padded with spaces to 8 bytes, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)


class _Maker:
    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = config
        self._random = numpy.random.default_rng(seed)
        self._algorithm = config.get("quantization_config", {}).get("quant_algo", "")
        self._tensors: dict[str, Tensor] = {}

    def make(self, kv_scales: bool) -> dict[str, Tensor]:
        config = self._config
        hidden, head = config["hidden_size"], config["head_dim"]
        self._plain("model.embed_tokens.weight", (config["vocab_size"], hidden))
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            self._attention(prefix, hidden, head)
            if kv_scales:
                self._scalar(f"{prefix}self_attn.k_proj.k_scale")
                self._scalar(f"{prefix}self_attn.v_proj.v_scale")
            if has_experts(config, layer):
                self._experts(f"{prefix}mlp.", hidden)
            else:
                self._mlp(f"{prefix}mlp.", hidden, config["intermediate_size"], config.get("mlp_bias", False))
        self._plain("model.norm.weight", (hidden,))
        if not config["tie_word_embeddings"]:
            self._plain("lm_head.weight", (config["vocab_size"], hidden))
        return self._tensors

    def _attention(self, prefix: str, hidden: int, head: int) -> None:
        config = self._config
        heads, pairs = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        bias = config.get("attention_bias", False)
        for name in ("input_layernorm", "post_attention_layernorm"):
            self._plain(f"{prefix}{name}.weight", (hidden,))
        for name, rows in (("q_proj", heads), ("k_proj", pairs), ("v_proj", pairs)):
            self._linear(f"{prefix}self_attn.{name}", rows, hidden, bias)
        self._linear(f"{prefix}self_attn.o_proj", hidden, heads, bias and config["model_type"] == "llama")
        if config["model_type"] != "llama":
            self._plain(f"{prefix}self_attn.q_norm.weight", (head,))
            self._plain(f"{prefix}self_attn.k_norm.weight", (head,))

    def _mlp(self, prefix: str, hidden: int, inner: int, bias: bool = False) -> None:
        self._linear(f"{prefix}gate_proj", inner, hidden, bias)
        self._linear(f"{prefix}up_proj", inner, hidden, bias)
        self._linear(f"{prefix}down_proj", hidden, inner, bias)

    def _experts(self, prefix: str, hidden: int) -> None:
        self._plain(f"{prefix}gate.weight", (self._config["num_experts"], hidden))
        for expert in range(self._config["num_experts"]):
            self._mlp(f"{prefix}experts.{expert}.", hidden, self._config["moe_intermediate_size"])

    def _linear(self, name: str, rows: int, columns: int, bias: bool) -> None:
        if not self._algorithm:
            self._plain(f"{name}.weight", (rows, columns))
        else:
            self._add(f"{name}.weight", "U8", (rows, columns // 2), self._random.bytes(rows * columns // 2))
            # e4m3 bit patterns of 0.25 to 240: positive, finite.
            scales = self._random.integers(0x28, 0x77, rows * columns // 16, dtype=numpy.uint8)
            self._add(f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16), scales.tobytes())
            self._scalar(f"{name}.weight_scale_2")
            if self._algorithm == "NVFP4":
                self._scalar(f"{name}.input_scale")
        if bias:
            self._plain(f"{name}.bias", (rows,))

    def _plain(self, name: str, shape: tuple[int, ...]) -> None:
        values = self._random.normal(0, 0.05, shape).astype("<f4")
        if self._config["torch_dtype"] == "bfloat16":
            self._add(name, "BF16", shape, (values.view("<u4") >> 16).astype("<u2").tobytes())
        else:
            self._add(name, "F16", shape, values.astype("<f2").tobytes())

    def _scalar(self, name: str) -> None:
        self._add(name, "F32", (), self._random.uniform(1e-3, 1e-2, 1).astype("<f4").tobytes())

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        self._tensors[name] = dtype, shape, data
