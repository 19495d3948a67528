"""Which values of a model's configuration decide its tensors.

An engine started with a longer context or another RoPE setting needs no other weights: those values live in buffers,
which are the engine's own. An engine started with another hidden size does. A digest over the whole configuration
would miss for nothing; no digest at all would let shapes decide. So the values that decide tensors are named here,
resolved (defaults filled in, so that a value left out equals the value written out), and digested.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightcache.wire import digests

__all__ = ["TENSOR_FIELDS", "config_digest", "resolve", "text_config"]

#: Sizes, counts and switches that change which tensors exist, or their shapes. Not: lengths, RoPE, token ids,
#: dropout, activation names, top-k; those change what an engine computes, not what it holds.
TENSOR_FIELDS = (
    "attention_bias",
    "decoder_sparse_step",
    "first_k_dense_replace",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "mlp_bias",
    "mlp_only_layers",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "num_attention_heads",
    "num_experts",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "num_nextn_predict_layers",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "shared_expert_intermediate_size",
    "tie_word_embeddings",
    "v_head_dim",
    "vocab_size",
)
_DEFAULTS: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}
#: Two names for one count: transformers 5 writes ``num_local_experts`` where Qwen3-MoE read ``num_experts``.
_SYNONYMS = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration (multimodal ones nest it under ``text_config``). Pure."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def resolve(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values that decide tensors, with defaults filled in and synonyms folded. Pure.

    ``head_dim`` defaults to hidden_size / num_attention_heads and ``num_key_value_heads`` to num_attention_heads, as
    transformers' Llama and Qwen configurations define them.
    """
    source = text_config(config)
    found = {_SYNONYMS.get(name, name): source[name] for name in TENSOR_FIELDS if source.get(name) is not None}
    resolved = {**_DEFAULTS, **found}
    if "num_attention_heads" in found:
        resolved.setdefault("num_key_value_heads", found["num_attention_heads"])
        if isinstance(found.get("hidden_size"), int) and isinstance(found["num_attention_heads"], int):
            resolved.setdefault("head_dim", found["hidden_size"] // max(1, found["num_attention_heads"]))
    if not resolved.get("mlp_only_layers"):
        resolved.pop("mlp_only_layers", None)
    if resolved.get("decoder_sparse_step") == 1:
        resolved.pop("decoder_sparse_step")
    return resolved


def config_digest(config: Mapping[str, Any]) -> str:
    """32 hex characters over :func:`resolve`: part of the key. Pure."""
    return digests.digest_of_value(resolve(config))
