"""Finished experts: by hand, by flashinfer's orders, by undoing them, and against vLLM's own post-processing."""

import pytest
import torch

from tests.support import nvfp4, vllm_sources
from weightcache.kernels import backends, experts, layouts, linears, shuffles, swizzles

BF16, FP16 = torch.bfloat16, torch.float16
ALIGNED, ODD = (128, 512), (96, 320)
NAMES = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
PADDED = {
    "FLASHINFER_TRTLLM": {ALIGNED: (128, 512), ODD: (128, 512)},
    "FLASHINFER_CUTEDSL": {ALIGNED: (128, 512), ODD: (128, 512)},
    "FLASHINFER_CUTLASS": {ALIGNED: (128, 512)},
    "VLLM_CUTLASS": {ALIGNED: (128, 512)},
    "MARLIN": {ALIGNED: (128, 512), ODD: (128, 320), (64, 192): (128, 192), (32, 128): (64, 128)},
    "EMULATION": {ALIGNED: (128, 512), ODD: (96, 320)},
}
TAKEN = [(backend, sizes) for backend, padded in PADDED.items() for sizes in padded]


def source_of_w13(backend, row, i, padded_i):
    """Which loaded row of [gate; up] a finished row of w13 is, -1 for padding: written down from the kernels' docs."""
    if backend == "FLASHINFER_TRTLLM":  # the epilogue's lanes, over up and gate row by row in turn
        row = 32 * (row // 32) + 4 * (row % 8) + (row % 32) // 8
        half, within = row % 2, row // 2
    elif backend == "FLASHINFER_CUTEDSL":  # 64 rows of up, 64 of gate
        half, within = row % 128 // 64, row // 128 * 64 + row % 64
    else:
        half, within = row // padded_i, row % padded_i
    if backend in ("MARLIN", "VLLM_CUTLASS", "EMULATION"):  # gate first
        half = 1 - half
    return -1 if within >= i else within if half else i + within


def source_of_w2(backend, row, h):
    """The same for w2: only TRT-LLM shuffles."""
    if backend == "FLASHINFER_TRTLLM":
        row = 32 * (row // 32) + 4 * (row % 8) + (row % 32) // 8
    return row if row < h else -1


def input_scales(layer):
    """Both, of a checkpoint that has them."""
    assert layer.w13_input_scale is not None and layer.w2_input_scale is not None
    return layer.w13_input_scale, layer.w2_input_scale


def placed_by_hand(matrix, sources, columns):
    """Row by row, zeros where there is no source."""
    out = torch.zeros(matrix.shape[0], len(sources), columns, dtype=torch.uint8)
    for row, source in enumerate(sources):
        if source >= 0:
            out[:, row, : matrix.shape[2]] = matrix[:, source].view(torch.uint8)
    return out


def swizzled_by_hand(matrix):
    """cuBLAS' formula over a stack, by index arithmetic: not the reshape that is tested."""
    e, rows, columns = matrix.shape
    padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    place = ((r // 128) * (padded_columns // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    out = torch.zeros(e, padded_rows * padded_columns, dtype=torch.uint8)
    out[:, place.flatten()] = matrix.flatten(1)
    return out.view(e, padded_rows, padded_columns)


@pytest.mark.parametrize(("backend", "sizes"), [case for case in TAKEN if case[0] != "MARLIN"])
def test_every_row_and_scale_lies_where_the_kernels_formula_says(backend, sizes):
    """Gate and up exchanged, or a row of another expert, is fluent garbage."""
    (i, h), (padded_i, padded_h) = sizes, PADDED[backend][sizes]
    layer = nvfp4.moe(sizes)
    prepared = experts.prepare(backend, layer, BF16)
    w13 = [source_of_w13(backend, row, i, padded_i) for row in range(2 * padded_i)]
    w2 = [source_of_w2(backend, row, h) for row in range(padded_h)]
    wanted = {
        "w13_weight": placed_by_hand(layer.w13_weight, w13, padded_h // 2),
        "w13_weight_scale": placed_by_hand(layer.w13_weight_scale, w13, padded_h // 16),
        "w2_weight": placed_by_hand(layer.w2_weight, w2, padded_i // 2),
        "w2_weight_scale": placed_by_hand(layer.w2_weight_scale, w2, padded_i // 16),
    }
    for name, plain in wanted.items():
        scale = name.endswith("scale")
        by_hand = swizzled_by_hand(plain) if scale and backend != "EMULATION" else plain
        assert torch.equal(prepared[name].view(torch.uint8), by_hand), name


@pytest.mark.parametrize("sizes", [ALIGNED, ODD])
def test_marlin_gets_each_expert_as_a_linear_layer_of_padded_halves(sizes):
    """An expert is a linear layer, whose bytes are proven one by one (test_linears); all share one factor."""
    (i, h), (padded_i, _) = sizes, PADDED["MARLIN"][sizes]
    layer = nvfp4.moe(sizes, largest=100.0)
    layer.w13_weight_scale[1:] = (layer.w13_weight_scale[1:].to(torch.float32) / 8).to(torch.float8_e4m3fn)
    prepared = experts.prepare("MARLIN", layer, BF16)
    assert set(prepared) == {*NAMES, "w13_weight_scale_2", "w2_weight_scale_2"}
    assert tuple(prepared["w13_weight"].shape) == (3, h // 16, 4 * padded_i)
    rows = [source_of_w13("MARLIN", row, i, padded_i) for row in range(2 * padded_i)]
    codes = placed_by_hand(layer.w13_weight, rows, h // 2)
    scales = placed_by_hand(layer.w13_weight_scale, rows, h // 16).view(torch.float8_e4m3fn)
    # The largest, 96, is raised by 4; so are the others, whose own largest, 12, would be raised by 32.
    assert scales.to(torch.float32).amax((1, 2)).tolist() == [96.0, 12.0, 12.0]
    for expert in range(3):
        alone = linears.LoadedLinear(codes[expert], scales[expert], layer.w13_weight_scale_2[expert, :1], None)
        wanted = linears.prepare("marlin", alone, BF16)
        assert torch.equal(prepared["w13_weight"][expert], wanted["weight"])
        factor = 1 if expert == 0 else 8  # alone it would be raised by so much more
        assert prepared["w13_weight_scale_2"][expert] == wanted["weight_global_scale"] * factor
        if expert == 0:
            assert nvfp4.same_bytes(prepared["w13_weight_scale"][expert], wanted["weight_scale"])


@pytest.mark.parametrize("sizes", [ALIGNED, ODD])
def test_trtllms_orders_are_flashinfers_own(sizes):
    """flashinfer's index functions, composed as its kernel's documentation composes them, over [up; gate]."""
    core = pytest.importorskip("flashinfer.fused_moe.core", reason="flashinfer-python is the witness of these orders")
    i, h = sizes
    padded_i, padded_h = PADDED["FLASHINFER_TRTLLM"][sizes]
    layer = nvfp4.moe(sizes)
    pad = torch.nn.functional.pad
    up, gate = (pad(half, (0, (padded_h - h) // 2, 0, padded_i - i)) for half in reversed(layer.w13_weight.split(i, 1)))
    w13 = torch.cat((up, gate), dim=1)
    w2 = pad(layer.w2_weight, (0, (padded_i - i) // 2, 0, padded_h - h))
    prepared = experts.prepare("FLASHINFER_TRTLLM", layer, BF16)
    order = core._maybe_get_cached_w3_w1_permute_indices({}, w13[0], 128)
    assert torch.equal(prepared["w13_weight"], w13[:, order])
    order = core.get_w2_permute_indices_with_cache({}, w2[0], 128)
    assert torch.equal(prepared["w2_weight"], w2[:, order])


@pytest.mark.parametrize(("backend", "sizes"), [case for case in TAKEN if case[0] != "MARLIN"])
def test_undoing_a_layout_gives_back_the_loaded_bytes(backend, sizes):
    """Nothing of the checkpoint is lost, and what was added is zero."""
    layer = nvfp4.moe(sizes)
    layout = backends.expert_backend(backend).layout
    made = layouts.EXPERTS[layout].moves(layer.sizes, layouts.padded_experts(layout, layer.sizes))
    prepared = experts.prepare(backend, layer, BF16)
    for name in NAMES:
        move, found, wanted = made[name], prepared[name], getattr(layer, name)
        if name.endswith("scale") and backend != "EMULATION":
            found = swizzles.unswizzle_block_scales(found, move.num_rows, move.num_columns)
        if move.rows is not None:
            found = shuffles.gather_rows(found, shuffles.inverse(shuffles.index_of(move.rows)))
        held = found.view(torch.uint8)[..., : wanted.shape[-1]]
        assert torch.equal(held, wanted.view(torch.uint8)), name
        assert prepared[name].view(torch.uint8).count_nonzero() == wanted.view(torch.uint8).count_nonzero()


@pytest.mark.parametrize("backend", ["FLASHINFER_TRTLLM", "FLASHINFER_CUTEDSL", "FLASHINFER_CUTLASS"])
def test_the_input_scale_is_the_largest_of_all_experts_of_the_layer(backend):
    """An expert of another rank decides too: the ranks of a group quantize the same activations."""
    layer = nvfp4.moe(ALIGNED)
    a13, a2 = input_scales(layer)
    prepared = experts.prepare(backend, layer, BF16)
    assert prepared["w13_input_scale"].tolist() == [a13.max().item()] * 3
    assert prepared["w2_input_scale"].tolist() == [a2.max().item()] * 3
    assert a13.max() > a13[list(layer.local)].max()


def test_vllm_cutlass_keeps_an_input_scale_for_each_local_expert():
    """The larger of gate and up; the others' are not kept and do not count."""
    layer = nvfp4.moe(ALIGNED)
    a13, a2 = input_scales(layer)
    prepared = experts.prepare("VLLM_CUTLASS", layer, BF16)
    assert prepared["w13_input_scale"].tolist() == [max(a13[e].tolist()) for e in layer.local]
    assert prepared["w2_input_scale"].tolist() == [a2[e].item() for e in layer.local]


def test_emulation_keeps_the_inverse_of_the_largest_local_scale():
    """0-D, inverted, and no product: its kernel takes the weights' global scale as it is."""
    layer = nvfp4.moe(ODD)
    (a13, a2), local = input_scales(layer), list(layer.local)
    prepared = experts.prepare("EMULATION", layer, BF16)
    assert prepared["w13_input_scale"].shape == () == prepared["w2_input_scale"].shape
    assert prepared["w13_input_scale"] == 1.0 / a13[local].max()
    assert prepared["w2_input_scale"] == 1.0 / a2[local].max()
    assert torch.equal(prepared["w13_weight_scale_2"], layer.w13_weight_scale_2[:, 0])


@pytest.mark.parametrize("backend", sorted(set(PADDED) - {"MARLIN", "EMULATION"}))
def test_alphas_are_the_products_and_gates_scale_counts(backend):
    """Answers W15. By hand: g1 = w1's global scale x a13, g2 = w2's x a2, and TRT-LLM's third scalar g1 / a2."""
    layer = nvfp4.moe(ALIGNED)
    prepared = experts.prepare(backend, layer, BF16)
    a13, a2 = prepared["w13_input_scale"], prepared["w2_input_scale"]
    for e in range(3):
        g1 = layer.w13_weight_scale_2[e, 0] * a13[e]
        assert prepared["w13_weight_scale_2"][e] == g1 != layer.w13_weight_scale_2[e, 1] * a13[e]
        assert prepared["w2_weight_scale_2"][e] == layer.w2_weight_scale_2[e] * a2[e]
        if backend == "FLASHINFER_TRTLLM":
            assert prepared["g1_scale_c"][e] == g1 * (1.0 / a2[e])
    assert backends.expert_metadata(backend, layer.sizes)["alphas_fused"] is True


def test_a_prepared_layer_cannot_be_prepared_again():
    """Answers W15. Finished tensors lack the shapes of loaded ones, so a second pass fails instead of scaling."""
    for backend in PADDED:
        layer = nvfp4.moe(ALIGNED)
        finished = experts.prepare(backend, layer, BF16)
        again = experts.LoadedExperts(**{**layer._asdict(), **{n: t for n, t in finished.items() if hasattr(layer, n)}})
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            experts.prepare(backend, again, BF16)


@pytest.mark.parametrize(("backend", "sizes"), TAKEN)
def test_the_plan_knows_names_dtypes_and_sizes_before_anything_is_loaded(backend, sizes):
    """An arena is laid out from these, and a kernel object is told the padded sizes."""
    layer = nvfp4.moe(sizes)
    prepared = experts.prepare(backend, layer, BF16)
    dtypes = {torch.uint8: "U8", torch.int32: "I32", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
    found = {name: (dtypes[tensor.dtype], tuple(tensor.shape)) for name, tensor in prepared.items()}
    assert found == backends.expert_tensors(backend, 3, layer.sizes)
    told = backends.expert_metadata(backend, layer.sizes)
    padded = (told["padded_intermediate_size"], told["padded_hidden_size"])
    assert padded == PADDED[backend][sizes] and (told["intermediate_size"], told["hidden_size"]) == sizes


@pytest.mark.parametrize(("backend", "sizes"), TAKEN)
def test_finished_tensors_can_be_written_where_they_stay(backend, sizes):
    """The loader writes into its arena: the same bytes as without, whatever lay there before."""
    layer = nvfp4.moe(sizes)
    wanted = experts.prepare(backend, layer, BF16)
    into = {
        name: torch.full_like(tensor.view(torch.uint8), 0xA5).view(tensor.dtype)
        if tensor.dim()
        else torch.empty_like(tensor)
        for name, tensor in wanted.items()
    }
    found = experts.prepare(backend, layer, BF16, into)
    assert all(found[name] is into[name] and nvfp4.same_bytes(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("backend", "sizes", "named"),
    [
        ("FLASHINFER_CUTLASS", ODD, "I a multiple of 64, the layer has I 96"),
        ("VLLM_CUTLASS", (80, 512), "I a multiple of 64, the layer has I 80"),
        ("MARLIN", (128, 96), "H a multiple of 64, the layer has H 96"),
        ("FLASHINFER_TRTLLM", (128, 264), "H a multiple of 16, the layer has H 264"),
    ],
)
def test_sizes_that_a_backend_cannot_take_are_named(backend, sizes, named):
    """The engine refuses them too, after minutes of loading."""
    with pytest.raises(ValueError, match=named):
        experts.prepare(backend, nvfp4.moe(sizes), BF16)


def test_weight_only_checkpoints_go_to_marlin_alone():
    """Answers W11. Without input scales there is nothing to quantize activations by."""
    layer = nvfp4.moe(ALIGNED, weight_only=True)
    assert "w13_input_scale" not in experts.prepare("MARLIN", layer, BF16)
    for backend in set(PADDED) - {"MARLIN"}:
        with pytest.raises(ValueError, match=f"{backend} needs input scales"):
            experts.prepare(backend, layer, BF16)


def vllms_parameters(layer, all_experts):
    """As vLLM holds them before post-processing; of divisors its compressed-tensors method takes the inverse first."""
    found = {name: getattr(layer, name) for name in NAMES}
    scalars = {name: getattr(layer, name) for name in ("w13_weight_scale_2", "w2_weight_scale_2")}
    for name in ("w13_input_scale", "w2_input_scale"):
        if getattr(layer, name) is not None:
            scalars[name] = getattr(layer, name) if all_experts else getattr(layer, name)[list(layer.local)]
    return found | {name: 1.0 / scalar if layer.divisors else scalar for name, scalar in scalars.items()}


@pytest.mark.skipif(bool(vllm_sources.missing()), reason=vllm_sources.missing())
@pytest.mark.parametrize("backend", sorted(PADDED))
def test_every_backend_gets_the_bytes_that_vllm_itself_would_give_it(backend):
    """vLLM's whole post-processing, its experts' own step included: every tensor bit for bit, and the padded sizes."""
    found = backends.expert_backend(backend)
    compared = 0
    with vllm_sources.witness() as vllm:
        for sizes in (*PADDED[backend], (768, 2048)):
            for weight_only in (False, True) if found.weight_only else (False,):
                for divisors, largest, dtype in ((False, 448.0, BF16), (True, 100.0, BF16), (False, 30.0, FP16)):
                    layer = nvfp4.moe(sizes, weight_only=weight_only, divisors=divisors, largest=largest)
                    theirs, config, _ = vllm_sources.finish_experts(
                        vllm, backend, vllms_parameters(layer, found.all_experts), dtype
                    )
                    ours = experts.prepare(backend, layer, dtype)
                    assert set(ours) == set(theirs)
                    wrong = [name for name in ours if not nvfp4.same_bytes(ours[name], theirs[name])]
                    assert not wrong, f"{sizes}: {wrong}"
                    told = layouts.padded_experts(found.layout, layer.sizes) if found.tells_sizes else sizes
                    assert (config.intermediate_size_per_partition, config.hidden_dim) == tuple(told)
                    compared += len(ours)
    assert compared >= 48


@pytest.mark.skipif(bool(vllm_sources.missing()), reason=vllm_sources.missing())
@pytest.mark.parametrize(
    ("backend", "sizes"), [("FLASHINFER_CUTLASS", ODD), ("VLLM_CUTLASS", ODD), ("MARLIN", (128, 96))]
)
def test_what_we_refuse_vllm_refuses_too(backend, sizes):
    """A refusal that the engine does not share would turn users away for nothing."""
    layer = nvfp4.moe(sizes)
    assert experts.requirement_not_met(backend, layer)
    with vllm_sources.witness() as vllm, pytest.raises((NotImplementedError, AssertionError)):
        vllm_sources.finish_experts(
            vllm, backend, vllms_parameters(layer, backends.expert_backend(backend).all_experts), BF16
        )
