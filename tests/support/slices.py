"""What a tensor-parallel rank of the tiny Qwen3-MoE NVFP4 checkpoint must hold, cut with numpy from the files.

The files are read by the safetensors library; the cuts follow the engine's layers: rows of q, k, v, gate and up,
columns of o and down, vocabulary rows padded to 64, experts sliced and stacked. Neither uses the product's code.
"""

from pathlib import Path

import numpy as np
import safetensors

LAYERS, EXPERTS, KEY_VALUE_HEADS = 3, 8, 2
SUFFIXES = ("weight", "weight_scale", "weight_scale_2", "input_scale")


def raw_tensors(directory):
    """Every tensor as an array of bytes, its last dimension in bytes, and every dtype, by name."""
    arrays, dtypes = {}, {}
    for path in Path(directory).glob("*.safetensors"):
        for name, found in safetensors.deserialize(path.read_bytes()):
            rows = found["shape"][:-1] if found["shape"] else []
            arrays[name] = np.frombuffer(found["data"], np.uint8).reshape(*rows, -1)
            dtypes[name] = found["dtype"]
    return arrays, dtypes


def rank_of(directory, rank, size):
    """The rank's tensors, name -> bytes; nothing is left out."""
    source, _ = raw_tensors(directory)
    found = {"model.norm.weight": source["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole = source[name]
        padding = np.zeros((-len(whole) % 64, whole.shape[1]), np.uint8)
        found[name] = np.split(np.concatenate([whole, padding]), size)[rank]
    for layer in range(LAYERS):
        found |= _layer(source, f"model.layers.{layer}.", rank, size)
    return {name: tensor.tobytes() for name, tensor in found.items()}


def _layer(source, prefix, rank, size):
    def rows(name):
        # With fewer key-value heads than ranks, each head serves several ranks that follow each other.
        parts = min(size, KEY_VALUE_HEADS) if "k_proj" in name or "v_proj" in name else size
        return np.split(source[name], parts)[rank * parts // size]

    def columns(name):
        return np.split(source[name], size, axis=1)[rank]

    plain = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate")
    found = {f"{prefix}{name}.weight": source[f"{prefix}{name}.weight"] for name in plain}
    for suffix in SUFFIXES:
        is_scalar = suffix in SUFFIXES[2:]
        rows_of, columns_of = (source.get, source.get) if is_scalar else (rows, columns)
        qkv = [rows_of(f"{prefix}self_attn.{letter}_proj.{suffix}") for letter in "qkv"]
        found[f"{prefix}self_attn.qkv_proj.{suffix}"] = np.concatenate(qkv)
        found[f"{prefix}self_attn.o_proj.{suffix}"] = columns_of(f"{prefix}self_attn.o_proj.{suffix}")
        w13, w2 = [], []
        for expert in range(EXPERTS):
            name = f"{prefix}mlp.experts.{expert}."
            w13 += [rows_of(f"{name}{part}_proj.{suffix}") for part in ("gate", "up")]
            w2.append(columns_of(f"{name}down_proj.{suffix}"))
        found[f"{prefix}mlp.experts.routed_experts.w13_{suffix}"] = np.concatenate(w13)
        found[f"{prefix}mlp.experts.routed_experts.w2_{suffix}"] = np.concatenate(w2)
    return found
