"""What each architecture's tensors are called, how big they are, and how ranks share them: as data.

A checkpoint names ``q_proj``, ``k_proj`` and ``v_proj``; the engine holds one ``qkv_proj``. A rank gets rows of one
matrix and columns of another. Written as code, that knowledge hides in loaders, one for each model; here it is tables,
so that a new architecture is a new entry, and a mistake in one can be seen.

Names are those of the engine (vLLM 0.32: ``models/qwen3.py``, ``qwen3_moe.py``, ``llama.py``). Sizes are named by the
fields of config.json (:func:`weightcache.wire.configs.resolve`), or by the products in :data:`PRODUCTS`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = [
    "ARCHITECTURES",
    "FORMATS",
    "PRODUCTS",
    "Architecture",
    "Module",
    "Part",
    "Place",
    "Scalar",
    "Slicing",
    "Suffix",
]


class Slicing(enum.Enum):
    """How tensor-parallel ranks share a module's matrix [rows, columns]."""

    Whole = "every rank holds all of it"
    Rows = "column-parallel: each part's rows in equal consecutive shares"
    Columns = "row-parallel: columns in equal consecutive shares, bias whole"
    Vocabulary = "rows padded with zeros to a multiple of 64, then in equal consecutive shares"


class Place(enum.Enum):
    """Which pipeline stages hold a module."""

    Layer = "the stage of its layer"
    First = "the first stage, and the last as well when embeddings are tied"
    Last = "the last stage"
    Every = "every stage"


@dataclass(frozen=True)
class Part:
    """One checkpoint module that becomes rows of an engine module. ``source``: its name, below the layer if it is in
    one; ``{expert}`` stands for the expert's number. ``heads``: the field that counts its attention heads, where rows
    are shared by whole heads; ``replicated``: fewer heads than ranks are repeated instead of refused.
    """

    source: str
    rows: str
    heads: str = ""
    replicated: bool = False


@dataclass(frozen=True)
class Module:
    """One engine module: ``name`` (below the layer if in one), its parts in order, and its columns.

    ``columns``: empty for a vector. ``bias``: the config switch that adds one. ``quantized``: quantization reaches it
    unless it is ignored. ``experts``: one such matrix an expert, stacked; parameter names join by ``_`` then.
    """

    name: str
    slicing: Slicing
    parts: tuple[Part, ...]
    columns: str = ""
    bias: str = ""
    quantized: bool = True
    experts: bool = False
    place: Place = Place.Layer


@dataclass(frozen=True)
class Scalar:
    """A float32 scalar that a quantized checkpoint may have: engine's name and checkpoint's, below the layer."""

    name: str
    source: str


@dataclass(frozen=True)
class Suffix:
    """One tensor of a quantized matrix. ``packing``: logical columns an element holds, 0 for a scalar of each part.
    ``all_experts``: a rank holds it of every expert, since the engine takes the maximum over all.
    """

    name: str
    dtype: str
    packing: int
    all_experts: bool = False


@dataclass(frozen=True)
class Architecture:
    """``dense`` and ``sparse``: what a layer without and with experts adds to ``layer``. ``outside``: not in a layer.
    ``ignored``: endings of checkpoint tensors that are buffers which the engine computes itself.
    """

    layer: tuple[Module, ...]
    dense: tuple[Module, ...]
    outside: tuple[Module, ...]
    sparse: tuple[Module, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    ignored: tuple[str, ...] = ()


_WEIGHT = Suffix("weight", "U8", 2)
_BLOCK_SCALE = Suffix("weight_scale", "F8_E4M3", 16)
_GLOBAL_SCALE = Suffix("weight_scale_2", "F32", 0)
_INPUT_SCALE = Suffix("input_scale", "F32", 0, all_experts=True)

#: ModelOpt's tensors by algorithm: two 4-bit values a byte, one scale for 16 columns, scalars for each part.
FORMATS: dict[str, tuple[Suffix, ...]] = {
    "NVFP4": (_WEIGHT, _BLOCK_SCALE, _GLOBAL_SCALE, _INPUT_SCALE),
    "W4A16_NVFP4": (_WEIGHT, _BLOCK_SCALE, _GLOBAL_SCALE),
}

#: Sizes that are products of fields of config.json.
PRODUCTS: dict[str, tuple[str, str]] = {
    "query_size": ("num_attention_heads", "head_dim"),
    "key_value_size": ("num_key_value_heads", "head_dim"),
}

_ROTARY = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_KV_SCALES = (
    Scalar("self_attn.attn.k_scale", "self_attn.k_proj.k_scale"),
    Scalar("self_attn.attn.v_scale", "self_attn.v_proj.v_scale"),
)


def _norm(name: str, rows: str = "hidden_size", place: Place = Place.Layer) -> Module:
    return Module(name, Slicing.Whole, (Part(name, rows),), quantized=False, place=place)


def _attention(bias: str, output_bias: str) -> tuple[Module, ...]:
    heads = Part("self_attn.q_proj", "query_size", "num_attention_heads")
    keys = Part("self_attn.k_proj", "key_value_size", "num_key_value_heads", replicated=True)
    values = Part("self_attn.v_proj", "key_value_size", "num_key_value_heads", replicated=True)
    output = Part("self_attn.o_proj", "hidden_size")
    return (
        Module("self_attn.qkv_proj", Slicing.Rows, (heads, keys, values), "hidden_size", bias),
        Module("self_attn.o_proj", Slicing.Columns, (output,), "query_size", output_bias),
    )


def _mlp(bias: str = "") -> tuple[Module, ...]:
    gate, up = Part("mlp.gate_proj", "intermediate_size"), Part("mlp.up_proj", "intermediate_size")
    return (
        Module("mlp.gate_up_proj", Slicing.Rows, (gate, up), "hidden_size", bias),
        Module("mlp.down_proj", Slicing.Columns, (Part("mlp.down_proj", "hidden_size"),), "intermediate_size", bias),
    )


def _outside(embedding: Place, head: Place) -> tuple[Module, ...]:
    rows = Part("model.embed_tokens", "vocab_size"), Part("lm_head", "vocab_size")
    return (
        Module("model.embed_tokens", Slicing.Vocabulary, rows[:1], "hidden_size", quantized=False, place=embedding),
        _norm("model.norm", place=head),
        Module("lm_head", Slicing.Vocabulary, rows[1:], "hidden_size", place=head),
    )


_NORMS = (_norm("input_layernorm"), _norm("post_attention_layernorm"))
_QK_NORMS = (_norm("self_attn.q_norm", "head_dim"), _norm("self_attn.k_norm", "head_dim"))
_EXPERT = "mlp.experts.{expert}"
_EXPERTS = (
    Module("mlp.gate", Slicing.Whole, (Part("mlp.gate", "num_experts"),), "hidden_size"),
    Module(
        "mlp.experts.routed_experts.w13",
        Slicing.Rows,
        (Part(f"{_EXPERT}.gate_proj", "moe_intermediate_size"), Part(f"{_EXPERT}.up_proj", "moe_intermediate_size")),
        "hidden_size",
        experts=True,
    ),
    Module(
        "mlp.experts.routed_experts.w2",
        Slicing.Columns,
        (Part(f"{_EXPERT}.down_proj", "hidden_size"),),
        "moe_intermediate_size",
        experts=True,
    ),
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        layer=(*_NORMS, *_attention("attention_bias", "attention_bias")),
        dense=_mlp("mlp_bias"),
        outside=_outside(Place.First, Place.Last),
        scalars=_KV_SCALES,
        ignored=_ROTARY,
    ),
    "Qwen3ForCausalLM": Architecture(
        layer=(*_NORMS, *_QK_NORMS, *_attention("attention_bias", "")),
        dense=_mlp(),
        outside=_outside(Place.First, Place.Last),
        scalars=_KV_SCALES,
        ignored=_ROTARY,
    ),
    # The engine builds this model's embedding, norm and head on every pipeline stage, needed there or not.
    "Qwen3MoeForCausalLM": Architecture(
        layer=(*_NORMS, *_QK_NORMS, *_attention("attention_bias", "")),
        dense=_mlp(),
        sparse=_EXPERTS,
        outside=_outside(Place.Every, Place.Every),
        scalars=_KV_SCALES,
        ignored=_ROTARY,
    ),
}
