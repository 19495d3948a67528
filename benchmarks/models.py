"""Checkpoints of real shapes with made-up bytes, for benchmarks that need gigabytes of them.

Loading speed depends on what tensors a model has: a dense bf16 model is a few hundred large ones, a quantized mixture
of experts is tens of thousands, half of them four bytes long. So there is one of each: ``dense`` is Llama-3.1-8B,
``experts`` is Qwen3-30B-A3B as ModelOpt exports it to NVFP4. Size is the number of layers; the vocabulary is 32,000 in
both, so that small ones are possible.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NAMES = ("dense", "experts")
ELEMENT_BYTES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
LAYERS_PER_FILE = 4
_POOL_BYTES = 64 << 20


class Tensor(NamedTuple):
    """One tensor of a file: dtype by safetensors' name, shape in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def make(directory: Path, model: str, size_bytes: float) -> Path:
    """Write a checkpoint of about this size into ``directory``; no two files are alike, scales are valid."""
    config = _DENSE if model == "dense" else _EXPERTS
    per_layer, ends = (sum(one.size_bytes for one in some) for some in (_layer(config, 0), _ends(config)))
    num_layers = max(1, round((size_bytes - ends) / per_layer))
    shards: list[list[Tensor]] = [list(_ends(config))]
    for first in range(0, num_layers, LAYERS_PER_FILE):
        layers = range(first, min(first + LAYERS_PER_FILE, num_layers))
        shards.append([tensor for layer in layers for tensor in _layer(config, layer)])
    pool = np.random.default_rng(0).integers(0, 256, _POOL_BYTES, dtype=np.uint8).tobytes()
    names = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(lambda index: _write(directory / names[index], shards[index], pool, index), range(len(shards)))
        )
    weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
    return directory


def _write(path: Path, tensors: Sequence[Tensor], pool: bytes, turn: int) -> None:
    """As safetensors writes: large elements first, then by name; the header padded to 8 bytes."""
    order = list(ELEMENT_BYTES)
    tensors = sorted(tensors, key=lambda tensor: (order.index(tensor.dtype), tensor.name))
    ends = list(itertools.accumulate(tensor.size_bytes for tensor in tensors))
    header = {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end - tensor.size_bytes, end],
        }
        for tensor, end in zip(tensors, ends, strict=True)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    num_scales = sum(1 for tensor in tensors if tensor.dtype == "F32")
    left, start = ends[-1] - 4 * num_scales, 4099 * turn % _POOL_BYTES
    with path.open("wb") as file, memoryview(pool) as view:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(np.linspace(1e-3, 1e-2, num_scales, dtype="<f4").tobytes())
        while left:
            part = view[start : start + left]
            file.write(part)
            left, start = left - len(part), 0


# --- shapes ---------------------------------------------------------------------------------------------------------
_DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", "*mlp.gate"],
    },
}


def _ends(config: dict[str, Any]) -> Iterator[Tensor]:
    hidden = config["hidden_size"]
    yield Tensor("model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden))
    yield Tensor("model.norm.weight", "BF16", (hidden,))
    yield Tensor("lm_head.weight", "BF16", (config["vocab_size"], hidden))


def _layer(config: dict[str, Any], layer: int) -> Iterator[Tensor]:
    prefix, hidden, head = f"model.layers.{layer}.", config["hidden_size"], config["head_dim"]
    heads, pairs = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{prefix}{name}.weight", "BF16", (hidden,))
    shapes = {
        "q_proj": (heads, hidden),
        "k_proj": (pairs, hidden),
        "v_proj": (pairs, hidden),
        "o_proj": (hidden, heads),
    }
    for name, shape in shapes.items():
        yield from _linear(config, f"{prefix}self_attn.{name}", *shape)
    if "num_experts" not in config:
        yield from _mlp(config, f"{prefix}mlp.", hidden, config["intermediate_size"])
        return
    for name in ("q_norm", "k_norm"):
        yield Tensor(f"{prefix}self_attn.{name}.weight", "BF16", (head,))
    yield Tensor(f"{prefix}mlp.gate.weight", "BF16", (config["num_experts"], hidden))
    for expert in range(config["num_experts"]):
        yield from _mlp(config, f"{prefix}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])


def _mlp(config: dict[str, Any], prefix: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield from _linear(config, f"{prefix}gate_proj", inner, hidden)
    yield from _linear(config, f"{prefix}up_proj", inner, hidden)
    yield from _linear(config, f"{prefix}down_proj", hidden, inner)


def _linear(config: dict[str, Any], name: str, rows: int, columns: int) -> Iterator[Tensor]:
    if "quantization_config" not in config:
        yield Tensor(f"{name}.weight", "BF16", (rows, columns))
        return
    yield Tensor(f"{name}.weight", "U8", (rows, columns // 2))
    yield Tensor(f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16))
    yield Tensor(f"{name}.weight_scale_2", "F32", ())
    yield Tensor(f"{name}.input_scale", "F32", ())
