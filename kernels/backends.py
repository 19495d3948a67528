"""Backends: which kernels of the engine can be prepared for, what they read, and what they need.

Whether a checkpoint can be finished is a property of the kernel that the engine *selected*, never of the quantization
method: one method runs on a dozen kernels that read different bytes. So every kernel that is supported stands in one
of two tables, with the layout of the bytes it reads; kernels that read the same bytes name the same layout, and
whatever stands in no table is refused before loading. No torch in here.

Sources, vLLM 0.32: ``is_supported`` of each class in ``kernels/linear/nvfp4``; ``_supports_current_device`` and
``_supports_quant_scheme`` of each class in ``fused_moe/experts``; ``fused_moe/oracle/nvfp4.py``. Where vLLM only asks
whether flashinfer can be imported, the GPUs are those of flashinfer's ``mm_fp4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from weightcache.kernels import layouts, moves
from weightcache.wire import reasons

__all__ = [
    "EXPERTS",
    "LINEAR",
    "ExpertBackend",
    "ExpertLayer",
    "LinearKernel",
    "LinearLayer",
    "can_preprocess",
    "expert_backend",
    "expert_metadata",
    "expert_tensors",
    "linear_kernel",
    "linear_tensors",
    "refuse_backend_cannot_preprocess",
]

_Shapes = dict[str, tuple[str, tuple[int, ...]]]


class LinearKernel(NamedTuple):
    """One linear kernel. ``layout``: of the bytes it reads. ``word``: its name in ``--linear-backend``.

    ``families``: majors of the compute capabilities it runs on, empty for any; ``minimum``: the lowest capability.
    ``multiples``: of N and K. ``weight_only``: it quantizes no activations, and so takes W4A16 checkpoints as well.
    """

    layout: str
    word: str
    families: tuple[int, ...] = ()
    minimum: tuple[int, int] = (0, 0)
    multiples: tuple[int, int] = (1, 16)
    weight_only: bool = False


class ExpertBackend(NamedTuple):
    """One backend for experts; fields of the same name as :class:`LinearKernel`'s, ``multiples`` of I and H.

    ``steps``: what is done, in words. ``scalars``: name -> whether there is one an expert (else one in all).
    ``all_experts``: one input scale, the largest of *all* experts of the layer, those of other ranks included; else
    those of local experts. ``fuses_alphas``: the engine's post-processing multiplies the input scales into
    ``*_weight_scale_2``, which holds g1_alphas and g2_alphas from then on. ``one_offset``: the kernel finds its experts
    by one offset, so that they must be consecutive and equally many on each rank. ``tells_sizes``: the engine's kernel
    object must be told the padded sizes.
    """

    layout: str
    word: str
    steps: tuple[str, ...]
    scalars: Mapping[str, bool]
    families: tuple[int, ...] = ()
    minimum: tuple[int, int] = (0, 0)
    multiples: tuple[int, int] = (16, 16)
    weight_only: bool = False
    all_experts: bool = False
    fuses_alphas: bool = False
    one_offset: bool = False
    tells_sizes: bool = False


class LinearLayer(NamedTuple):
    """What decides for a linear layer, on one rank: N outputs, K inputs. ``weight_only``: a W4A16 checkpoint."""

    n: int
    k: int
    weight_only: bool = False
    dtype: str = "bfloat16"


class ExpertLayer(NamedTuple):
    """What decides for a layer of experts. ``sizes``: of one expert on this rank. ``num_ranks``: over which whole
    experts are spread, 1 without expert parallelism. ``placement``: as it takes effect, ``linear`` or ``round_robin``.
    """

    sizes: layouts.ExpertSizes
    num_experts: int
    num_ranks: int = 1
    placement: str = "linear"
    weight_only: bool = False
    dtype: str = "bfloat16"


_BLACKWELL = (10, 11, 12)
_FOUR = {"w13_weight_scale_2": True, "w2_weight_scale_2": True, "w13_input_scale": True, "w2_input_scale": True}
_SWIZZLE = "block scales swizzled in tiles of 128 x 4"
_UP_FIRST = "w13 rows to [up; gate]"
_PAD = "I padded to 64 in each half, H to 256"
_MAXIMUM = "one input scale: the largest of all experts"
_ALPHAS = "input scales multiplied into the weights' global scales"

#: Linear kernels by the engine's class name.
LINEAR: dict[str, LinearKernel] = {
    "FlashInferCuteDslNvFp4LinearKernel": LinearKernel("padded_swizzled", "flashinfer_cutedsl", (10,)),
    "FlashInferCutlassNvFp4LinearKernel": LinearKernel("padded_swizzled", "flashinfer_cutlass", _BLACKWELL),
    "FlashInferB12xNvFp4LinearKernel": LinearKernel("padded_swizzled", "flashinfer_b12x", (12,)),
    "CutlassNvFp4LinearKernel": LinearKernel("padded_swizzled", "cutlass", _BLACKWELL),
    "FlashInferCudnnNvFp4LinearKernel": LinearKernel("padded_swizzled", "flashinfer_cudnn", _BLACKWELL),
    "FlashInferTrtllmNvFp4LinearKernel": LinearKernel("trtllm", "flashinfer_trtllm", (10,), multiples=(128, 64)),
    "MarlinNvFp4LinearKernel": LinearKernel("marlin", "marlin", minimum=(7, 5), weight_only=True),
    "EmulationNvFp4LinearKernel": LinearKernel("emulation", "emulation"),
}

#: Backends for experts by the engine's name.
EXPERTS: dict[str, ExpertBackend] = {
    "FLASHINFER_TRTLLM": ExpertBackend(
        "trtllm",
        "flashinfer_trtllm",
        (_UP_FIRST, _PAD, "w13 rows interleaved, all rows shuffled", _SWIZZLE, _MAXIMUM, _ALPHAS, "g1_scale_c"),
        {**_FOUR, "g1_scale_c": True},
        (10,),
        all_experts=True,
        fuses_alphas=True,
        one_offset=True,
        tells_sizes=True,
    ),
    "FLASHINFER_CUTEDSL": ExpertBackend(
        "cutedsl",
        "flashinfer_cutedsl",
        (_UP_FIRST, _PAD, "w13 rows interleaved in groups of 64", _SWIZZLE, _MAXIMUM, _ALPHAS),
        _FOUR,
        (10,),
        all_experts=True,
        fuses_alphas=True,
        one_offset=True,
        tells_sizes=True,
    ),
    "FLASHINFER_CUTLASS": ExpertBackend(
        "up_gate_swizzled",
        "flashinfer_cutlass",
        (_UP_FIRST, _SWIZZLE, _MAXIMUM, _ALPHAS),
        _FOUR,
        (10, 12),
        multiples=(64, 16),
        all_experts=True,
        fuses_alphas=True,
        one_offset=True,
    ),
    "VLLM_CUTLASS": ExpertBackend(
        "gate_up_swizzled",
        "cutlass",
        (_SWIZZLE, "an input scale for each local expert: the larger of gate and up", _ALPHAS),
        _FOUR,
        _BLACKWELL,
        multiples=(64, 16),
        fuses_alphas=True,
    ),
    "MARLIN": ExpertBackend(
        "marlin",
        "marlin",
        (
            "I padded to 64 in each half (128 where H is no multiple of 128)",
            "codes and block scales in Marlin's order, one factor for all local experts",
            "global scales raised by the exponent biases",
        ),
        {"w13_weight_scale_2": True, "w2_weight_scale_2": True},
        minimum=(7, 5),
        multiples=(16, 64),
        weight_only=True,
    ),
    "EMULATION": ExpertBackend(
        "emulation",
        "emulation",
        ("one inverse input scale: of the largest of the local experts",),
        {"w13_weight_scale_2": True, "w2_weight_scale_2": True, "w13_input_scale": False, "w2_input_scale": False},
    ),
}


def can_preprocess(backend: str, capability: str, layer: LinearLayer | ExpertLayer) -> str:
    """Why a layer cannot be prepared for a backend; empty if it can. Pure.

    ``backend``: the engine's name or the word of its command line. ``capability``: of the GPU, such as ``10.0``, or
    empty without one. The reason names the backend, the field, its value, and what is supported.
    """
    if isinstance(layer, LinearLayer):
        return _linear_fault(backend, capability, layer)
    return _expert_fault(backend, capability, layer)


def refuse_backend_cannot_preprocess(
    backend: str, capability: str, layer: LinearLayer | ExpertLayer, where: str = ""
) -> None:
    """Raise Refusal ``BackendCannotPreprocess`` with :func:`can_preprocess`'s reason. ``where``: the layer's name."""
    fault = can_preprocess(backend, capability, layer)
    if fault:
        raise reasons.Refusal(reasons.Reason.BackendCannotPreprocess, f"{where}: {fault}" if where else fault)


def linear_kernel(name: str) -> LinearKernel:
    """A row of :data:`LINEAR` by the engine's name or word. Pure. Raises KeyError."""
    return _find(LINEAR, name)[1]


def expert_backend(name: str) -> ExpertBackend:
    """A row of :data:`EXPERTS` by the engine's name or word. Pure. Raises KeyError."""
    return _find(EXPERTS, name)[1]


def linear_tensors(layout: str, n: int, k: int, *, weight_only: bool = False, bias: str = "") -> _Shapes:
    """Name -> dtype (safetensors' name) and shape of a finished linear layer. Pure. ``bias``: its dtype, if any."""
    made = layouts.LINEAR[layout](n, k)
    names = ("weight_global_scale",) if weight_only else _LINEAR_SCALARS
    tensors: _Shapes = {name: (move.dtype, move.shape) for name, move in made.items()}
    tensors |= dict.fromkeys(names, ("F32", ()))
    return {**tensors, "bias": (bias, (made["weight"].num_rows if layout == "marlin" else n,))} if bias else tensors


def expert_tensors(backend: str, num_local: int, sizes: layouts.ExpertSizes) -> _Shapes:
    """Name -> dtype (safetensors' name) and shape of the finished local experts of a layer. Pure."""
    found = expert_backend(backend)
    made = layouts.EXPERTS[found.layout].moves(sizes, layouts.padded_experts(found.layout, sizes))
    tensors: _Shapes = {name: (move.dtype, (num_local, *move.shape)) for name, move in made.items()}
    return tensors | {name: ("F32", (num_local,) if each else ()) for name, each in found.scalars.items()}


def expert_metadata(backend: str, sizes: layouts.ExpertSizes) -> dict[str, object]:
    """What an engine needs besides the tensors to restore a layer of experts: for the manifest. Pure.

    ``alphas_fused``: the engine must not multiply again. ``tells_sizes``: the padded sizes go into its ``moe_config``.
    """
    name, found = _find(EXPERTS, backend)
    padded = layouts.padded_experts(found.layout, sizes)
    return {
        "backend": name,
        "layout": found.layout,
        "intermediate_size": sizes.intermediate,
        "hidden_size": sizes.hidden,
        "padded_intermediate_size": padded.intermediate,
        "padded_hidden_size": padded.hidden,
        "tells_sizes": found.tells_sizes,
        "alphas_fused": found.fuses_alphas,
        "epilogue_tile": moves.TILE_ROWS if found.layout == "trtllm" else 0,
    }


_LINEAR_SCALARS = ("weight_global_scale", "input_global_scale", "input_global_scale_inv", "alpha")
_Row = TypeVar("_Row", LinearKernel, ExpertBackend)


def _find(table: Mapping[str, _Row], name: str) -> tuple[str, _Row]:
    if name in table:
        return name, table[name]
    by_word = {row.word: (key, row) for key, row in table.items()}
    return by_word[name]


def _linear_fault(backend: str, capability: str, layer: LinearLayer) -> str:
    try:
        name, found = _find(LINEAR, backend)
    except KeyError:
        return _unknown("linear kernel", backend, LINEAR)
    return _device_fault(name, found, capability, layer) or _multiple_fault(
        name, (("N", layer.n, found.multiples[0]), ("K", layer.k, found.multiples[1]))
    )


def _expert_fault(backend: str, capability: str, layer: ExpertLayer) -> str:
    try:
        name, found = _find(EXPERTS, backend)
    except KeyError:
        return _unknown("backend for experts", backend, EXPERTS)
    fault = _device_fault(name, found, capability, layer) or _multiple_fault(
        name,
        (("I", layer.sizes.intermediate, found.multiples[0]), ("H", layer.sizes.hidden, found.multiples[1])),
    )
    return fault or (_offset_fault(name, layer) if found.one_offset else "")


def _device_fault(
    name: str, found: LinearKernel | ExpertBackend, capability: str, layer: LinearLayer | ExpertLayer
) -> str:
    major, minor = (int(part) for part in (capability or "0.0").split("."))
    if (found.families and major not in found.families) or (major, minor) < found.minimum:
        lowest = "{}.{} or more".format(*found.minimum)
        wanted = ", ".join(f"{family}.x" for family in found.families) or lowest
        return f"{name} needs a GPU of compute capability {wanted}, this is {capability or 'no GPU'}"
    if layer.weight_only and not found.weight_only:
        return f"{name} quantizes activations, and a W4A16 checkpoint has no input scales: select a weight-only kernel"
    if found.layout == "marlin" and layer.dtype not in ("float16", "bfloat16"):
        return f"{name} multiplies with float16 or bfloat16, the model's dtype is {layer.dtype}"
    return ""


def _multiple_fault(name: str, sizes: tuple[tuple[str, int, int], ...]) -> str:
    for axis, size, multiple in sizes:
        if size % multiple:
            return f"{name} needs {axis} a multiple of {multiple}, the layer has {axis} {size} on this rank"
    return ""


def _offset_fault(name: str, layer: ExpertLayer) -> str:
    if layer.num_ranks > 1 and layer.placement != "linear":
        return (
            f"{name} finds its experts by one offset and needs linear expert placement, this is {layer.placement}: "
            "set parallelism.expert.placement to linear, or select a backend with an expert map"
        )
    if layer.num_experts % layer.num_ranks:
        return (
            f"{name} finds its experts by one offset and needs equally many on each rank, {layer.num_experts} experts "
            f"do not divide by {layer.num_ranks} ranks"
        )
    return ""


def _unknown(what: str, backend: str, table: Mapping[str, LinearKernel | ExpertBackend]) -> str:
    known = ", ".join(f"{name} ({row.word})" for name, row in table.items())
    return f"{backend or '(none)'} is no {what} that weightcache prepares for; supported: {known}"
