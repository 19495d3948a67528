"""What each rank must hold, cut out of a checkpoint by hand.

A check that asks the product's own tables for the expected bytes can only agree with them. So this module knows
nothing of weightcache: it reads the files with the safetensors library and cuts, joins and stacks with torch, written
out layer by layer from the rules that vLLM's parameters follow (names and shapes of vLLM 0.32, ModelOpt NVFP4, before
post-processing). It is slow and reads whole files, which is what a witness may do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

__all__ = ["Layout", "compare", "held_experts", "rank_tensors"]

Tensors = dict[str, torch.Tensor]
#: An NVFP4 linear has two sliced tensors and two scalars; a bf16 one has only the first.
SLICED = ("weight", "weight_scale")
SCALARS = ("weight_scale_2", "input_scale")
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True)
class Layout:
    """Sizes of a group and this rank's place in it. Experts are spread, or cut, over data x tensor ranks."""

    tensor_size: int = 1
    tensor_rank: int = 0
    pipeline_size: int = 1
    pipeline_rank: int = 0
    data_size: int = 1
    data_rank: int = 0
    expert_parallel: bool = False
    placement: str = "linear"

    @property
    def flat_size(self) -> int:
        """Ranks that share the experts of a pipeline stage."""
        return self.tensor_size * self.data_size

    @property
    def flat_rank(self) -> int:
        """This rank among them."""
        return self.data_rank * self.tensor_size + self.tensor_rank


def rank_tensors(directory: Path, layout: Layout) -> Tensors:
    """Every tensor that the rank must hold, by vLLM's name; a tied head stands under both names."""
    config = json.loads((directory / "config.json").read_text())
    source: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        source.update(safetensors.torch.load_file(file))
    first, last = layout.pipeline_rank == 0, layout.pipeline_rank == layout.pipeline_size - 1
    tied = bool(config["tie_word_embeddings"])
    if config["architectures"] == ["Qwen3MoeForCausalLM"]:  # vLLM builds all that is outside layers on every stage
        first = last = True
    expected: Tensors = {}
    if first or (last and tied):
        expected["model.embed_tokens.weight"] = _vocabulary_rows(source["model.embed_tokens.weight"], layout)
    for layer in _layers(config["num_hidden_layers"], layout):
        expected |= _layer(source, f"model.layers.{layer}", config, layout)
    if last:
        head = source["model.embed_tokens.weight" if tied else "lm_head.weight"]
        expected["model.norm.weight"] = source["model.norm.weight"]
        expected["lm_head.weight"] = _vocabulary_rows(head, layout)
    return expected


def held_experts(num_experts: int, layout: Layout) -> list[int]:
    """Global ids of the experts that the rank holds, in the order in which they lie."""
    if not layout.expert_parallel:
        return list(range(num_experts))
    if layout.placement == "round_robin":
        return list(range(layout.flat_rank, num_experts, layout.flat_size))
    return [int(expert) for expert in torch.arange(num_experts).tensor_split(layout.flat_size)[layout.flat_rank]]


def compare(found: Tensors, expected: Tensors) -> list[str]:
    """Every difference in names, dtypes, shapes and bytes, one line each; empty means equal."""
    faults = [f"{name}: missing" for name in sorted(expected.keys() - found.keys())]
    faults += [f"{name}: not of this rank" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(found.keys() & expected.keys()):
        have, want = found[name], expected[name]
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            faults.append(f"{name}: {have.dtype} {list(have.shape)}, expected {want.dtype} {list(want.shape)}")
        elif not torch.equal(_bytes(have), _bytes(want)):
            count = int((_bytes(have) != _bytes(want)).sum())
            faults.append(f"{name}: {count} of {want.numel() * want.element_size()} bytes differ")
    return faults


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _layers(count: int, layout: Layout) -> range:
    """Equal stages; what is left over goes one each to the stages before the last, from the back."""
    sizes = [count // layout.pipeline_size] * layout.pipeline_size
    for extra in range(count % layout.pipeline_size):
        sizes[-2 - extra] += 1
    begin = sum(sizes[: layout.pipeline_rank])
    return range(begin, begin + sizes[layout.pipeline_rank])


def _layer(source: Tensors, name: str, config: dict[str, Any], layout: Layout) -> Tensors:
    expected = {
        full: tensor
        for full, tensor in source.items()
        if full.startswith(f"{name}.") and full.endswith(("layernorm.weight", "_norm.weight"))
    }
    attention = f"{name}.self_attn"
    expected |= _joined(source, attention, "qkv_proj", "qkv", layout, config["num_key_value_heads"])
    expected |= _columns(source, f"{attention}.o_proj", layout)
    router = f"{name}.mlp.gate.weight"
    if router in source:
        expected[router] = source[router]
        return expected | _experts(source, f"{name}.mlp.experts", config, layout)
    expected |= _joined(source, f"{name}.mlp", "gate_up_proj", ("gate", "up"), layout)
    return expected | _columns(source, f"{name}.mlp.down_proj", layout)


def _joined(
    source: Tensors, name: str, joined: str, parts: Iterable[str], layout: Layout, num_kv_heads: int | None = None
) -> Tensors:
    """Column-parallel: this rank's rows of each part, one under the other; the parts' scalars side by side."""
    parts = list(parts)
    expected: Tensors = {}
    for suffix in SLICED:
        if f"{name}.{parts[0]}_proj.{suffix}" in source:
            rows = [_rows(source[f"{name}.{part}_proj.{suffix}"], part, layout, num_kv_heads) for part in parts]
            expected[f"{name}.{joined}.{suffix}"] = torch.cat(rows)
    for suffix in SCALARS:
        if f"{name}.{parts[0]}_proj.{suffix}" in source:
            scalars = [source[f"{name}.{part}_proj.{suffix}"] for part in parts]
            expected[f"{name}.{joined}.{suffix}"] = torch.stack(scalars)
    return expected


def _rows(tensor: torch.Tensor, part: str, layout: Layout, num_kv_heads: int | None) -> torch.Tensor:
    size, rank = layout.tensor_size, layout.tensor_rank
    if part in ("k", "v") and num_kv_heads is not None and num_kv_heads < size:  # heads are repeated over ranks
        return tensor.chunk(num_kv_heads)[rank // (size // num_kv_heads)]
    return tensor.chunk(size)[rank]


def _columns(source: Tensors, name: str, layout: Layout) -> Tensors:
    """Row-parallel: this rank's columns of packed weights and of block scales."""
    expected: Tensors = {}
    for suffix in SLICED:
        if f"{name}.{suffix}" in source:
            expected[f"{name}.{suffix}"] = source[f"{name}.{suffix}"].chunk(layout.tensor_size, dim=1)[
                layout.tensor_rank
            ]
    for suffix in SCALARS:
        if f"{name}.{suffix}" in source:
            expected[f"{name}.{suffix}"] = source[f"{name}.{suffix}"].reshape(1)
    return expected


def _experts(source: Tensors, name: str, config: dict[str, Any], layout: Layout) -> Tensors:
    """w13 = gate over up, w2 = down, stacked over the rank's experts: whole ones, or slices of all.

    Input scales are those of all experts on every rank: the engine takes their maximum.
    """
    num_experts = config.get("num_local_experts") or config["num_experts"]
    mine = held_experts(num_experts, layout)
    size, rank = (1, 0) if layout.expert_parallel else (layout.flat_size, layout.flat_rank)
    expected: Tensors = {}
    for suffix in (*SLICED, *SCALARS):
        if f"{name}.0.gate_proj.{suffix}" not in source:
            continue
        w13, w2 = [], []
        for expert in range(num_experts) if suffix == "input_scale" else mine:
            gate, up, down = (source[f"{name}.{expert}.{part}_proj.{suffix}"] for part in ("gate", "up", "down"))
            if suffix in SCALARS:
                w13.append(torch.stack([gate, up]))
                w2.append(down)
            else:
                w13.append(torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]]))
                w2.append(down.chunk(size, dim=1)[rank])
        expected[f"{name}.routed_experts.w13_{suffix}"] = torch.stack(w13)
        expected[f"{name}.routed_experts.w2_{suffix}"] = torch.stack(w2)
    return expected


def _vocabulary_rows(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Rows padded with zeros to a multiple of 64, then cut by rank."""
    missing = -tensor.shape[0] % VOCABULARY_MULTIPLE
    padded = torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])])
    return padded.chunk(layout.tensor_size)[layout.tensor_rank]
