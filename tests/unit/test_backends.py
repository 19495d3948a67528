"""Backends: what can be prepared for is the table's to say, before a byte is loaded."""

import subprocess
import sys

import pytest

from weightcache.kernels import backends, layouts
from weightcache.wire import reasons

SIZES = layouts.ExpertSizes(768, 2048)
EXPERTS = backends.ExpertLayer(SIZES, num_experts=128)
LINEAR = backends.LinearLayer(2048, 1024)
MOST_CAPABLE = {"FlashInferB12xNvFp4LinearKernel": "12.0"}


@pytest.mark.parametrize("kernel", sorted(backends.LINEAR))
def test_every_linear_kernel_of_the_table_can_be_prepared_for_on_its_gpu(kernel):
    """By the engine's class name, and by the word of its command line."""
    capability = MOST_CAPABLE.get(kernel, "10.0")
    assert backends.can_preprocess(kernel, capability, LINEAR) == ""
    assert backends.can_preprocess(backends.LINEAR[kernel].word, capability, LINEAR) == ""
    assert backends.LINEAR[kernel].layout in layouts.LINEAR


@pytest.mark.parametrize("backend", sorted(backends.EXPERTS))
def test_every_backend_for_experts_can_be_prepared_for_on_its_gpu(backend):
    """By the engine's name, and by the word of its command line."""
    assert backends.can_preprocess(backend, "10.0", EXPERTS) == ""
    assert backends.can_preprocess(backends.EXPERTS[backend].word, "10.0", EXPERTS) == ""
    assert backends.EXPERTS[backend].layout in layouts.EXPERTS


def test_kernels_that_read_the_same_bytes_share_a_layout():
    """An engine that selects another of these on its next start still matches the key."""
    same = ("FlashInferCuteDsl", "FlashInferCutlass", "FlashInferB12x", "Cutlass", "FlashInferCudnn")
    assert {backends.LINEAR[f"{name}NvFp4LinearKernel"].layout for name in same} == {"padded_swizzled"}
    assert len({row.layout for row in backends.LINEAR.values()}) == 4
    assert len({row.layout for row in backends.EXPERTS.values()}) == len(backends.EXPERTS)


@pytest.mark.parametrize(
    ("name", "layer", "supported"),
    [
        ("FbgemmNvFp4LinearKernel", LINEAR, "MarlinNvFp4LinearKernel (marlin)"),
        ("B12xNvFp4W4A16LinearKernel", LINEAR, "CutlassNvFp4LinearKernel (cutlass)"),
        ("FLASHINFER_CUTEDSL_BATCHED", EXPERTS, "FLASHINFER_TRTLLM (flashinfer_trtllm)"),
        ("HUMMING", EXPERTS, "EMULATION (emulation)"),
        ("", EXPERTS, "MARLIN (marlin)"),
    ],
)
def test_what_stands_in_no_table_is_refused_with_what_does(name, layer, supported):
    """Answers W11, W12. The user learns which backend is meant and what to select instead, before loading."""
    with pytest.raises(reasons.Refusal) as caught:
        backends.refuse_backend_cannot_preprocess(name, "10.0", layer, "model.layers.3.mlp")
    assert caught.value.reason is reasons.Reason.BackendCannotPreprocess
    assert caught.value.message.startswith(f"model.layers.3.mlp: {name or '(none)'} is no ")
    assert supported in caught.value.message


@pytest.mark.parametrize(
    ("name", "capability", "layer", "named"),
    [
        ("FLASHINFER_TRTLLM", "9.0", EXPERTS, "compute capability 10.x, this is 9.0"),
        ("FLASHINFER_CUTLASS", "11.0", EXPERTS, "compute capability 10.x, 12.x, this is 11.0"),
        ("MARLIN", "7.0", EXPERTS, "7.5 or more, this is 7.0"),
        ("cutlass", "9.0", LINEAR, "10.x, 11.x, 12.x, this is 9.0"),
        ("marlin", "", LINEAR, "7.5 or more, this is no GPU"),
        ("FLASHINFER_TRTLLM", "10.0", EXPERTS._replace(weight_only=True), "W4A16 checkpoint has no input scales"),
        ("emulation", "", LINEAR._replace(weight_only=True), "W4A16 checkpoint has no input scales"),
        ("MARLIN", "9.0", EXPERTS._replace(dtype="float32"), "the model's dtype is float32"),
        (
            "VLLM_CUTLASS",
            "10.0",
            EXPERTS._replace(sizes=SIZES._replace(intermediate=96)),
            "I a multiple of 64, .* I 96",
        ),
        ("flashinfer_trtllm", "10.0", LINEAR._replace(n=192), "N a multiple of 128, .* N 192"),
        ("flashinfer_trtllm", "10.0", EXPERTS._replace(num_ranks=8, placement="round_robin"), "this is round_robin"),
        ("FLASHINFER_CUTEDSL", "10.3", EXPERTS._replace(num_ranks=3), "128 experts do not divide by 3"),
    ],
)
def test_a_reason_names_the_backend_the_value_and_what_is_needed(name, capability, layer, named):
    """Answers W5, W11. A GPU, a checkpoint, a size or a placement that the selected backend cannot take."""
    with pytest.raises(reasons.Refusal, match=named) as caught:
        backends.refuse_backend_cannot_preprocess(name, capability, layer)
    found = backends.EXPERTS if isinstance(layer, backends.ExpertLayer) else backends.LINEAR
    known = [each for each, row in found.items() if name in (each, row.word)]
    assert caught.value.message.startswith(known[0])


def test_backends_with_an_expert_map_take_any_placement():
    """Every n-th expert, and uneven shares, are theirs to look up."""
    layer = EXPERTS._replace(num_ranks=3, placement="round_robin")
    for backend in ("VLLM_CUTLASS", "MARLIN", "EMULATION"):
        assert backends.can_preprocess(backend, "10.0", layer) == ""


def test_one_rank_alone_has_no_placement():
    """Without expert parallelism the word means nothing, and must refuse nothing."""
    assert backends.can_preprocess("FLASHINFER_TRTLLM", "10.0", EXPERTS._replace(placement="round_robin")) == ""


def test_weight_only_checkpoints_find_marlin():
    """Answers W11. The one kernel here that needs no input scales."""
    assert backends.can_preprocess("marlin", "9.0", LINEAR._replace(weight_only=True)) == ""
    assert backends.can_preprocess("MARLIN", "9.0", EXPERTS._replace(weight_only=True)) == ""


def test_asking_needs_no_torch():
    """The daemon's front and the command line refuse before anything heavy is imported."""
    program = (
        "import sys; from weightcache.kernels import backends, layouts; "
        "backends.expert_tensors('MARLIN', 4, layouts.ExpertSizes(96, 320)); "
        "print('torch' in sys.modules, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
