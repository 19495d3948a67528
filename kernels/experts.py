"""NVFP4 mixture-of-experts layers as the selected backend reads them.

Each MoE kernel wants the experts' rows in its own order, its own padding and its own scalars. The four big tensors are
moved as :mod:`weightcache.kernels.layouts` says; the scalars, which depend on the backend more than on the layout, are
computed here. Sources: vLLM 0.32 ``fused_moe/oracle/nvfp4.py``, ``flashinfer_fp4_moe.py``, ``marlin_utils_fp4.py``, and
``process_weights_after_loading`` of the classes in ``fused_moe/experts``.

Common to all: w13_weight_scale_2 is w1's column (the engine ignores w3's); and where a backend multiplies the weight's
and the activation's global scale into one alpha, the product is made here, once: the result is called
``w13_weight_scale_2`` by the engine and holds g1_alphas, which is why a prepared layer must never be prepared again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from weightcache.kernels import backends, layouts, marlin, moving

__all__ = ["LoadedExperts", "prepare", "requirement_not_met"]

Prepared = dict[str, torch.Tensor]


class LoadedExperts(NamedTuple):
    """One rank's experts after loading; E local experts, X all experts of the layer.

    ``w13_weight`` uint8 [E, 2I, H/2] rows [gate; up]; ``w2_weight`` uint8 [E, H, I/2]; scales e4m3 [E, 2I, H/16] and
    [E, H, I/16]; ``w13_weight_scale_2`` fp32 [E, 2]; ``w2_weight_scale_2`` fp32 [E]; ``w13_input_scale`` fp32 [X, 2];
    ``w2_input_scale`` fp32 [X] (both None for W4A16); ``local``: the global ids of the E local experts, in order.
    ``divisors``: the scalars are what compressed-tensors stores, to be divided by.
    """

    w13_weight: torch.Tensor
    w13_weight_scale: torch.Tensor
    w13_weight_scale_2: torch.Tensor
    w13_input_scale: torch.Tensor | None
    w2_weight: torch.Tensor
    w2_weight_scale: torch.Tensor
    w2_weight_scale_2: torch.Tensor
    w2_input_scale: torch.Tensor | None
    local: tuple[int, ...]
    divisors: bool = False

    @property
    def sizes(self) -> layouts.ExpertSizes:
        """I (of this rank) and H."""
        return layouts.ExpertSizes(2 * self.w2_weight.shape[2], self.w2_weight.shape[1])


class _Scalars(NamedTuple):
    """The scalars as multipliers: [E], [E], and of the activations [X, 2], [X]."""

    w13: torch.Tensor
    w2: torch.Tensor
    a13: torch.Tensor | None
    a2: torch.Tensor | None


def prepare(
    backend: str, layer: LoadedExperts, dtype: torch.dtype, into: Mapping[str, torch.Tensor] | None = None
) -> Prepared:
    """The finished tensors by parameter name. ``dtype``: the model's activation dtype. Pure.

    ``into``: contiguous tensors to write, by name; names it does not hold are made new, and what changes nothing is the
    loaded tensor itself. The sizes are those of :func:`weightcache.kernels.backends.expert_tensors`; what a kernel
    object must be told besides is :func:`weightcache.kernels.backends.expert_metadata`. Raises KeyError for a backend
    that is not in the table, ValueError for sizes, dtype or scales that it cannot take.
    """
    found = backends.expert_backend(backend)
    fault = requirement_not_met(backend, layer)
    if fault:
        raise ValueError(fault)
    into = into or {}
    factors = {"w13_weight_scale": 1.0, "w2_weight_scale": 1.0}
    if found.layout == "marlin":
        factors = {name: marlin.scale_factor(getattr(layer, name), dtype) for name in factors}
    scalars = _finished_scalars(found, layer, dtype, factors)
    prepared = {name: moving.placed(tensor, into.get(name)) for name, tensor in scalars.items()}
    made = layouts.EXPERTS[found.layout].moves(layer.sizes, layouts.padded_experts(found.layout, layer.sizes))
    for name, move in made.items():
        source = getattr(layer, name)
        prepared[name] = moving.move(source, move, factor=factors.get(name, 1.0), out=into.get(name))
    return prepared


def requirement_not_met(backend: str, layer: LoadedExperts) -> str:
    """Why a backend cannot take these experts, naming size and multiple; empty if it can. Pure."""
    found = backends.expert_backend(backend)
    for axis, size, multiple in zip("IH", layer.sizes, found.multiples, strict=True):
        if size % multiple:
            return f"{backend} needs {axis} a multiple of {multiple}, the layer has {axis} {size}"
    missing = layer.w13_input_scale is None or layer.w2_input_scale is None
    return f"{backend} needs input scales, the layer has none" if missing and not found.weight_only else ""


def _finished_scalars(
    found: backends.ExpertBackend, layer: LoadedExperts, dtype: torch.dtype, factors: dict[str, float]
) -> Prepared:
    scalars = _multipliers(layer)
    if found.layout == "marlin":
        return {
            "w13_weight_scale_2": marlin.global_scale(scalars.w13, dtype, factors["w13_weight_scale"]),
            "w2_weight_scale_2": marlin.global_scale(scalars.w2, dtype, factors["w2_weight_scale"]),
        }
    a13, a2 = _input_scales(found, layer, scalars)
    fused = found.fuses_alphas
    prepared = {
        "w13_weight_scale_2": scalars.w13 * a13 if fused else scalars.w13,
        "w2_weight_scale_2": scalars.w2 * a2 if fused else scalars.w2,
        "w13_input_scale": a13,
        "w2_input_scale": a2,
    }
    if "g1_scale_c" in found.scalars:
        prepared["g1_scale_c"] = prepared["w13_weight_scale_2"] * (1.0 / a2)
    return prepared


def _multipliers(layer: LoadedExperts) -> _Scalars:
    given = (layer.w13_weight_scale_2, layer.w2_weight_scale_2, layer.w13_input_scale, layer.w2_input_scale)
    w13, w2, a13, a2 = (1.0 / scale if layer.divisors and scale is not None else scale for scale in given)
    assert w13 is not None and w2 is not None
    return _Scalars(w13[:, 0].contiguous(), w2, a13, a2)


def _input_scales(
    found: backends.ExpertBackend, layer: LoadedExperts, scalars: _Scalars
) -> tuple[torch.Tensor, torch.Tensor]:
    """a13 and a2 as the backend keeps them: one for all experts, one each, or the inverse of one."""
    assert scalars.a13 is not None and scalars.a2 is not None
    if found.all_experts:
        a13, a2 = (each.max().to(torch.float32).repeat(len(layer.local)) for each in (scalars.a13, scalars.a2))
        return a13, a2
    local = torch.tensor(layer.local, device=scalars.a13.device)
    a13, a2 = scalars.a13[local].to(torch.float32), scalars.a2[local].to(torch.float32)
    if found.layout == "emulation":
        return 1.0 / a13.max(), 1.0 / a2.max()
    return a13.max(dim=1).values, a2
