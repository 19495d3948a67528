"""The Triton kernels on a real GPU: against the plain references, on large shapes, and in front of Marlin itself.

Two tests ask vLLM's own operators, when ``WEIGHTCACHE_VLLM_LIBRARY`` names its ``_C_stable_libtorch.abi3.so``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

pytest.importorskip("torch", reason="the kernels work on torch's tensors")
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

from tests.support import move_cases, nvfp4
from weightcache.kernels import backends, experts, layouts, linears, moves, moving, shuffles

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
LIBRARY = "WEIGHTCACHE_VLLM_LIBRARY"
FLOAT4_E2M1F = 562949953487106  # ``vllm.scalar_type.scalar_types.float4_e2m1f.id``
_Order, _RowOrder = moves.Order, moves.RowOrder


@pytest.fixture(autouse=True)
def only_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers W24. A CUDA tensor that quietly took the reference would pass every comparison and be slow."""

    def refuse(source: torch.Tensor, *arguments: Any) -> torch.Tensor:
        assert not source.is_cuda, "a CUDA tensor went to the reference"
        return reference(source, *arguments)

    reference = moving._by_reference
    monkeypatch.setattr(moving, "_by_reference", refuse)


def test_every_kernel_moves_the_same_bytes_as_the_reference() -> None:
    """Edge and random shapes, paddings, row orders and starts off alignment, into poisoned memory: bit for bit."""
    wrong = [*move_cases.faults(move_cases.edges(), "cuda"), *move_cases.faults(move_cases.random_cases(300), "cuda")]
    assert wrong == []
    assert "triton" in sys.modules


@pytest.mark.parametrize(
    "case",
    [
        # 128 experts of Qwen3-30B-A3B; 32 of DeepSeek-V3; one tall matrix; odd everywhere.
        (128, 1536, 128, _Order.Swizzled, _RowOrder.UpFirstShuffled, 1536, 128),
        (128, 1536, 1024, _Order.RowByRow, _RowOrder.UpFirstShuffled, 1536, 1024),
        (128, 2048, 48, _Order.Swizzled, _RowOrder.Shuffled, 2048, 48),
        (128, 2048, 384, _Order.RowByRow, _RowOrder.Shuffled, 2048, 384),
        (128, 1536, 1024, _Order.MarlinWeights, None, 1536, 1024),
        (128, 2048, 48, _Order.MarlinScales, None, 2048, 48),
        (32, 4096, 3584, _Order.RowByRow, _RowOrder.UpFirstInterleaved, 4096, 3584),
        (32, 4096, 448, _Order.Swizzled, _RowOrder.UpFirstInterleaved, 4096, 448),
        (32, 4096, 3584, _Order.MarlinWeights, None, 4096, 3584),
        (1, 151936, 128, _Order.Swizzled, None, 151936, 128),
        (16, 2880, 1440, _Order.MarlinWeights, _RowOrder.GateFirst, 2944, 1472),
        (16, 2880, 90, _Order.MarlinScales, _RowOrder.GateFirst, 2944, 92),
        (16, 2880, 90, _Order.Swizzled, _RowOrder.UpFirstShuffled, 2944, 96),
        (16, 2880, 1441, _Order.RowByRow, _RowOrder.UpFirst, 2944, 1472),
    ],
    ids=str,
)
def test_large_shapes_of_real_models(case: tuple[int, int, int, moves.Order, moves.RowOrder | None, int, int]) -> None:
    """Grids of many programs, whole experts: what tiny cases cannot reach."""
    num, rows, columns, order, rows_order, padded_rows, padded_columns = case
    wanted_rows = None if rows_order is None else moves.Rows(rows_order, rows, padded_rows)
    dtypes = {_Order.RowByRow: "U8", _Order.MarlinWeights: "I32"}
    move = moves.Move(order, dtypes.get(order, "F8_E4M3"), padded_rows, padded_columns, wanted_rows)
    made = move_cases.Case(num, rows, columns, move, 4.0)
    assert move_cases.faults(iter([made]), "cuda") == []


def test_offsets_beyond_four_gibibytes() -> None:
    """A stack of 5 GiB: a 32-bit offset would wrap and write over another expert."""
    num, rows, columns = 80, 16384, 4096
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of GPU memory")
    source = torch.randint(0, 256, (num, rows, columns), dtype=torch.uint8, device="cuda")
    order = moves.Rows(_RowOrder.UpFirstShuffled, rows, rows)
    index = shuffles.index_of(order).to("cuda")
    out = moving.move(source, moves.Move(_Order.RowByRow, "U8", rows, columns, order))
    assert all(torch.equal(out[expert], source[expert].index_select(0, index)) for expert in range(num))
    del out
    move = moves.Move(_Order.MarlinWeights, "I32", rows, columns)
    packed = moving.move(source, move)
    assert torch.equal(packed[-1], move_cases.expected(source[-1:], move, 1.0)[0])


@pytest.mark.parametrize("backend", sorted(backends.EXPERTS))
def test_experts_finished_on_the_gpu_are_those_finished_on_the_cpu(backend: str) -> None:
    """The loader may prepare on either; an engine must not be able to tell."""
    layer = nvfp4.moe((768, 2048) if backends.EXPERTS[backend].multiples[0] == 64 else (720, 2048))
    wanted = experts.prepare(backend, layer, BF16)
    into = {name: torch.empty_like(tensor, device="cuda") for name, tensor in wanted.items()}
    found = experts.prepare(backend, nvfp4.on_gpu(layer), BF16, into)
    assert [name for name in wanted if not nvfp4.same_bytes(found[name].cpu(), wanted[name])] == []
    assert all(found[name] is into[name] for name in into)


@pytest.mark.parametrize("layout", sorted(layouts.LINEAR))
def test_linear_layers_finished_on_the_gpu_are_those_finished_on_the_cpu(layout: str) -> None:
    """The loader may prepare on either; an engine must not be able to tell."""
    layer = nvfp4.linear(2048 if layout == "trtllm" else 2000, 4096, largest=100.0)
    wanted, found = linears.prepare(layout, layer, BF16), linears.prepare(layout, nvfp4.on_gpu(layer), BF16)
    assert [name for name in wanted if not nvfp4.same_bytes(found[name].cpu(), wanted[name])] == []


@pytest.fixture(scope="module")
def operators() -> Any:
    """vLLM's compiled operators, from its library alone."""
    library = os.environ.get(LIBRARY, "")
    if not library:
        pytest.skip(f"{LIBRARY} names no library of vLLM to compare with")
    torch.ops.load_library(library)
    return torch.ops._C


@pytest.mark.parametrize(("n", "k"), [(64, 128), (1536, 2048), (2048, 768), (4096, 7168)])
def test_the_repack_is_that_of_vllms_own_operator(operators: Any, n: int, k: int) -> None:
    """The operator that the engine runs at every start, on the same codes: every word."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    wanted = operators.gptq_marlin_repack(codes.view(torch.int32).T.contiguous(), k, n, 4, False)
    assert torch.equal(moving.move(codes, moves.Move(_Order.MarlinWeights, "I32", n, k // 2)), wanted)


@pytest.mark.parametrize(("n", "k"), [(256, 512), (96, 320)])
def test_marlin_multiplies_with_our_bytes(operators: Any, n: int, k: int) -> None:
    """Its GEMM over a finished layer gives the product with the values that the checkpoint means, padding included."""
    layer = nvfp4.linear(n, k, parts=1)
    layer = layer._replace(weight_scale_2=torch.tensor([1e-3]))
    prepared = linears.prepare("marlin", nvfp4.on_gpu(layer), BF16)
    padded_n, padded_k = layouts.padded_marlin(n, k)
    activations = torch.randn(8, k, dtype=BF16, device="cuda")
    locks = torch.zeros(4 * torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int, device="cuda")
    found = operators.marlin_gemm(
        torch.nn.functional.pad(activations, (0, padded_k - k)),
        None,
        prepared["weight"],
        None,
        prepared["weight_scale"],
        None,
        prepared["weight_global_scale"],
        None,
        locks,
        FLOAT4_E2M1F,
        8,
        padded_n,
        padded_k,
        False,
        True,
        False,
    )[:, :n]
    weights = nvfp4.values(layer.weight, layer.weight_scale, 1e-3).cuda()
    wanted = activations.to(torch.float64) @ weights.T
    error = (found.to(torch.float64) - wanted).abs().max() / wanted.abs().max()
    assert error < 0.01, f"relative error {error.item():.4f}"
    assert (wanted.abs() > 0).any()
