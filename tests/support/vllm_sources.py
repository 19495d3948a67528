"""vLLM's own weight preparation as a witness, from its Python source alone.

The functions that prepare NVFP4 weights are plain torch, but importing them imports the whole engine. Here the modules
that hold them are loaded from a source tree under their own names, and whatever else of vllm they import is a stand-in
that accepts anything. Two things have no CPU form and are replaced by formulas of vLLM's own: the block-scale
interleave on the GPU (by vLLM's swizzle), and the Marlin repack operator (by vLLM's Python reference of it).

``WEIGHTCACHE_VLLM_SOURCE`` names the directory that holds ``vllm/``: a checkout, or the site-packages of an
installation. Without it, or without flashinfer for the row orders, the tests that need the witness are skipped.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

VARIABLE = "WEIGHTCACHE_VLLM_SOURCE"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
#: Backend -> module and class of its experts, whose post-processing multiplies scalars.
EXPERTS = {
    "FLASHINFER_TRTLLM": ("trtllm_nvfp4_moe", "TrtLlmNvFp4ExpertsModular"),
    "FLASHINFER_CUTEDSL": ("flashinfer_cutedsl_moe", "FlashInferCuteDSLExperts"),
    "FLASHINFER_CUTLASS": ("flashinfer_cutlass_moe", "FlashInferExperts"),
    "VLLM_CUTLASS": ("cutlass_moe", "CutlassExpertsFp4"),
    "MARLIN": ("marlin_moe", "MarlinExperts"),
    "EMULATION": ("nvfp4_emulation_moe", "Nvfp4QuantizationEmulationTritonExperts"),
}
#: Linear kernel -> module.
LINEAR = {
    "CutlassNvFp4LinearKernel": "cutlass",
    "EmulationNvFp4LinearKernel": "emulation",
    "FlashInferB12xNvFp4LinearKernel": "flashinfer",
    "FlashInferCudnnNvFp4LinearKernel": "flashinfer",
    "FlashInferCuteDslNvFp4LinearKernel": "flashinfer",
    "FlashInferCutlassNvFp4LinearKernel": "flashinfer",
    "FlashInferTrtllmNvFp4LinearKernel": "flashinfer",
    "MarlinNvFp4LinearKernel": "marlin",
}
_REAL = {
    "vllm.scalar_type",
    "vllm.utils.math_utils",
    "vllm.model_executor.utils",
    "vllm.model_executor.kernels.linear.nvfp4.base",
    "vllm.model_executor.kernels.linear.nvfp4.cutlass",
    "vllm.model_executor.kernels.linear.nvfp4.emulation",
    "vllm.model_executor.kernels.linear.nvfp4.flashinfer",
    "vllm.model_executor.kernels.linear.nvfp4.marlin",
    "vllm.model_executor.layers.fused_moe.activation",
    "vllm.model_executor.layers.fused_moe.oracle.nvfp4",
    *(f"vllm.model_executor.layers.fused_moe.experts.{module}" for module, _ in EXPERTS.values()),
    f"{_QUANTIZATION}.modelopt",
    f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4",
    f"{_QUANTIZATION}.utils.flashinfer_fp4_moe",
    f"{_QUANTIZATION}.utils.flashinfer_utils",
    f"{_QUANTIZATION}.utils.marlin_utils",
    f"{_QUANTIZATION}.utils.marlin_utils_fp4",
    f"{_QUANTIZATION}.utils.marlin_utils_test",
    f"{_QUANTIZATION}.utils.nvfp4_utils",
    f"{_QUANTIZATION}.utils.quant_utils",
}


def missing() -> str:
    """Why the witness cannot be asked; empty if it can."""
    root = os.environ.get(VARIABLE, "")
    if not root:
        return f"{VARIABLE} names no vLLM source to compare with"
    if not (Path(root) / "vllm").is_dir():
        return f"{VARIABLE} is {root}, which holds no vllm/"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed: vLLM takes its row orders"
    return ""


@contextmanager
def witness() -> Iterator[types.SimpleNamespace]:
    """vLLM's modules by short name; on the way out everything of vllm is forgotten again."""
    flashinfer: Any = importlib.import_module("flashinfer")
    finder = _Finder(Path(os.environ[VARIABLE]))
    sys.meta_path.insert(0, finder)
    cuda, interleave = torch.Tensor.cuda, flashinfer.nvfp4_block_scale_interleave
    scales_shuffle = flashinfer.shuffle_matrix_sf_a
    try:
        load = importlib.import_module
        linear, fused = "vllm.model_executor.kernels.linear.nvfp4", "vllm.model_executor.layers.fused_moe"
        modules = types.SimpleNamespace(
            oracle=load(f"{fused}.oracle.nvfp4"),
            modelopt=load(f"{_QUANTIZATION}.modelopt"),
            compressed=load(f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"),
            marlin=load(f"{_QUANTIZATION}.utils.marlin_utils_fp4"),
            linear={name: getattr(load(f"{linear}.{module}"), name) for name, module in LINEAR.items()},
            experts={
                backend: getattr(load(f"{fused}.experts.{module}"), name) for backend, (module, name) in EXPERTS.items()
            },
        )
        swizzle = load(f"{_QUANTIZATION}.utils.nvfp4_utils").swizzle_blockscale
        reference = load(f"{_QUANTIZATION}.utils.marlin_utils_test")
        modules.marlin.ops = types.SimpleNamespace(gptq_marlin_repack=_repack_with(reference))
        torch.Tensor.cuda = lambda self: self  # type: ignore[assignment, method-assign]

        def swizzled(scales: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = swizzle(scales.view(torch.float8_e4m3fn))
            return made.view(torch.uint8).flatten()

        def shuffled(scales: torch.Tensor, tile: int) -> torch.Tensor:
            return swizzled(scales[flashinfer.utils.get_shuffle_matrix_sf_a_row_indices(scales, tile)])

        flashinfer.nvfp4_block_scale_interleave = swizzled
        flashinfer.shuffle_matrix_sf_a = shuffled
        yield modules
    finally:
        torch.Tensor.cuda = cuda  # type: ignore[method-assign]
        flashinfer.nvfp4_block_scale_interleave = interleave
        flashinfer.shuffle_matrix_sf_a = scales_shuffle
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
            del sys.modules[name]


def _repack_with(reference: Any) -> Any:
    """``gptq_marlin_repack`` by vLLM's own Python reference: int32 [K/8, N] -> int32 [K/16, 2 N]."""
    order = reference.get_weight_perm(4)

    def repack(b_q_weight: torch.Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool) -> torch.Tensor:
        assert (num_bits, is_a_8bit, tuple(b_q_weight.shape)) == (4, False, (size_k // 8, size_n))
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        codes = ((b_q_weight[:, None, :] >> shifts[None, :, None]) & 0xF).reshape(size_k, size_n)
        packed: torch.Tensor = reference.marlin_weights(codes, size_k, size_n, 4, order)
        return packed

    return repack


class _StandInType(type):
    """A class whose every attribute is another stand-in: it can be called, inherited from and used as a decorator."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _stand_in()

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __contains__(cls, item: object) -> bool:
        return False


class _StandIn(metaclass=_StandInType):
    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __new__(cls, *arguments: Any, **__: Any) -> Any:
        decorated = len(arguments) == 1 and isinstance(arguments[0], (type, types.FunctionType))
        return arguments[0] if decorated and "is_stand_in" in vars(cls) else super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _StandIn()

    def __call__(self, *_: object, **__: object) -> Any:
        return _StandIn()

    def __class_getitem__(cls, _: object) -> Any:
        return cls


def _stand_in() -> Any:
    """A class of its own each time, so that several can be bases of one class."""
    return _StandInType("StandIn", (_StandIn,), {"is_stand_in": True})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The real modules from the tree; packages without their ``__init__``; a stand-in for everything else of vllm."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name != "vllm" and not name.startswith("vllm."):
            return None
        place = self._root.joinpath(*name.split("."))
        if name in _REAL:
            return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class _StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _stand_in()


def finish_linear(
    modules: types.SimpleNamespace, kernel: str, parameters: dict[str, torch.Tensor], dtype: torch.dtype, dialect: str
) -> dict[str, torch.Tensor]:
    """A linear layer's tensors after vLLM's own post-processing. ``parameters``: as loaded, by the engine's names."""
    layer = _layer(parameters)
    packed = parameters["weight_packed" if dialect == "compressed-tensors" else "weight"]
    layer.params_dtype = dtype
    layer.output_size_per_partition, layer.input_size_per_partition = packed.shape[0], 2 * packed.shape[1]
    weight_only = not {"input_scale", "input_global_scale"} & parameters.keys()
    if dialect == "compressed-tensors":
        method = object.__new__(modules.compressed.CompressedTensorsW4A4Fp4)
        method.use_a16 = weight_only
    else:
        method = object.__new__(modules.modelopt.ModelOptLinearMethod)
        method.wkey = modules.modelopt.KNvfp4Static()
        method.akey = None if weight_only else modules.modelopt.KNvfp4Dynamic()
        method.spec = types.SimpleNamespace(weight=method.wkey.key, activation=method.akey and method.akey.key)
        method.fmt = modules.modelopt.FormatScheme()
    method.kernel = object.__new__(modules.linear[kernel])
    method.process_weights_after_loading(layer)
    return _tensors(layer)


def finish_experts(
    modules: types.SimpleNamespace, backend: str, parameters: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], types.SimpleNamespace, dict[str, Any]]:
    """A layer of experts after vLLM's own post-processing: its tensors, its ``moe_config``, its quantization config."""
    method = object.__new__(modules.modelopt.ModelOptNvFp4FusedMoE)
    intermediate, hidden = 2 * parameters["w2_weight"].shape[2], parameters["w2_weight"].shape[1]
    config = types.SimpleNamespace(
        is_act_and_mul=True,
        hidden_dim=hidden,
        hidden_dim_unpadded=None,
        intermediate_size_per_partition=intermediate,
        moe_parallel_config=types.SimpleNamespace(enable_eplb=False),
    )
    layer = _layer(parameters)
    layer.moe_config, layer.params_dtype, layer.num_experts = config, dtype, parameters["w2_weight"].shape[0]
    layer.hidden_size, layer.intermediate_size_per_partition = hidden, intermediate
    layer.activation = types.SimpleNamespace(is_gated=True)
    layer._expert_routing_tables = lambda: None
    method.moe, method.use_a16, method.per_token_activation = config, "w13_input_scale" not in parameters, False
    if method.use_a16:
        layer.w13_input_scale = layer.w2_input_scale = None
    method.nvfp4_backend, method.experts_cls = modules.oracle.NvFp4MoeBackend[backend], modules.experts[backend]
    seen: dict[str, Any] = {}

    def quant_config(**arguments: Any) -> types.SimpleNamespace:
        seen.update(arguments)
        return types.SimpleNamespace(use_nvfp4_w4a4=True, **arguments)

    def kernel(*, moe_quant_config: Any, moe_config: Any, experts_cls: Any, **_: Any) -> types.SimpleNamespace:
        experts = object.__new__(experts_cls)
        experts.quant_config, experts.moe_config, experts.is_situ = moe_quant_config, moe_config, False
        experts._gemm1_clamp_limit_unfolded = experts._gemm1_beta_unfolded = experts.gemm1_alpha = None
        return types.SimpleNamespace(fused_experts=experts)

    modules.oracle.nvfp4_moe_quant_config = modules.oracle.nvfp4_w4a16_moe_quant_config = quant_config
    modules.oracle.nvfp4_swizzled_scale_to_cutedsl_mma_view = lambda scale: scale
    modules.modelopt.make_nvfp4_moe_kernel = kernel
    modules.marlin.get_marlin_input_dtype = lambda prefix="": None
    method.process_weights_after_loading(layer)
    return _tensors(layer), config, seen


def _layer(parameters: dict[str, torch.Tensor]) -> Any:
    layer: Any = torch.nn.Module()
    for name, tensor in parameters.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return layer


def _tensors(layer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in layer.named_parameters()}
