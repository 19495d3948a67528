"""Finished linear layers: by hand element by element, by their values, by undoing them, and against vLLM's own code."""

import pytest
import torch

from tests.support import nvfp4, vllm_sources
from weightcache.kernels import backends, layouts, linears, marlin, shuffles, swizzles

BF16, FP16 = torch.bfloat16, torch.float16
SIZES = [(128, 512), (96, 320), (130, 48), (384, 64), (64, 48), (1, 16)]


def shuffled_row(n):
    """flashinfer's shuffle with an epilogue tile of 128, as its formula reads: which row output row n takes."""
    return 32 * (n // 32) + 4 * (n % 8) + (n % 32) // 8


def swizzled_place(r, c, columns):
    """cuBLAS' formula: where scale (r, c) lies in a matrix padded to ``columns``."""
    return ((r // 128) * (columns // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


def marlin_place(n, k, padded_n):
    """Word and nibble of code (n, k), from the order in which ``mma.m16n8k16`` hands fragments to lanes."""
    run, j, b, c = n // 64, n % 64 // 16, n % 16 // 8, n % 8
    tile, h, p, odd = k // 16, k % 16 // 8, k % 8 // 2, k % 2
    word = tile * 2 * padded_n + 128 * run + 16 * c + 4 * p + j
    return word, (0, 2, 4, 6, 1, 3, 5, 7).index(4 * b + 2 * h + odd)


def taken_apart(layout, prepared, n, k):
    """Codes [N, K] and the bytes of the scales [N, K/16] of a finished layer, looked up element by element."""
    codes, scales = torch.empty(n, k, dtype=torch.uint8), torch.empty(n, k // 16, dtype=torch.uint8)
    weight, block = prepared["weight"], prepared["weight_scale"].view(torch.uint8)
    found = nvfp4.unpacked(weight) if layout != "marlin" else (weight.flatten().to(torch.int64) & 0xFFFFFFFF).tolist()
    flat = block.flatten().tolist()
    back = {shuffled_row(row): row for row in range(n)} if layout == "trtllm" else {row: row for row in range(n)}
    for row in range(n):
        at = back[row]
        for column in range(k):
            if layout == "marlin":
                word, nibble = marlin_place(row, column, prepared["weight"].shape[1] // 2)
                codes[row, column] = found[word] >> (4 * nibble) & 0xF
            else:
                codes[row, column] = found[at, column]
        for group in range(k // 16):
            if layout == "emulation":
                scales[row, group] = block[row, group]
            elif layout == "marlin":  # in runs of 64: 8 i + j is i + 8 j; in runs of 4: 0, 2, 1, 3
                place = 8 * (row % 8) + row % 64 // 8
                place = place // 4 * 4 + (0, 2, 1, 3)[place % 4]
                scales[row, group] = block[group, row // 64 * 64 + place]
            else:
                scales[row, group] = flat[swizzled_place(at, group, block.shape[1])]
    return codes, scales


@pytest.mark.parametrize("layout", sorted(layouts.LINEAR))
@pytest.mark.parametrize(("n", "k"), [(128, 64), (96, 48), (33, 80)])
def test_every_code_and_scale_lies_where_the_kernels_formula_says(layout, n, k):
    """A code or scale in another place is another model; the formulas here are looked up one element at a time."""
    if linears.requirement_not_met(layout, n, k):
        pytest.skip(f"{layout} takes no {n} x {k}")
    layer = nvfp4.linear(n, k)
    codes, scales = taken_apart(layout, linears.prepare(layout, layer, FP16), n, k)
    assert torch.equal(codes, nvfp4.unpacked(layer.weight))
    wanted = layer.weight_scale
    if layout == "marlin":  # S0E5M3: the upper bits of fp16, of which values below 2^-6 are lost in fp16 models
        raised = wanted.to(FP16) * 128
        wanted = (torch.where(raised < 2, 0, raised).to(FP16).view(torch.int16) >> 7).to(torch.uint8)
    assert torch.equal(scales, wanted.view(torch.uint8))


@pytest.mark.parametrize("layout", sorted(layouts.LINEAR))
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_small_matrix_keeps_its_values(layout, dtype):
    """By hand: E2M1 table x block scale x global scale, read out of the finished tensors, is the checkpoint's value."""
    n, k = 128, 64
    layer = nvfp4.linear(n, k, parts=1, largest=1.0)
    layer = layer._replace(weight_scale=layer.weight_scale.to(torch.float32).clamp(min=2.0**-6).to(torch.float8_e4m3fn))
    layer.weight[0, 0] = 0xF1  # element 0 is 0.5, element 1 is -6
    layer.weight_scale[0, 0] = 0.5
    layer = layer._replace(weight_scale_2=torch.tensor([0.25]))
    prepared = linears.prepare(layout, layer, dtype)
    codes, scales = taken_apart(layout, prepared, n, k)
    scale = prepared["weight_global_scale"].to(torch.float64)
    if layout == "marlin":  # the kernel shifts the byte up to fp16 and gets codes without their exponents' bias
        block, bias = (scales.to(torch.int16) << 7).view(FP16), 126 if dtype is BF16 else 14
        scale = scale * 2.0**-bias
    else:
        block = scales.view(torch.float8_e4m3fn)
    values = nvfp4.values(marlin.pack_nibbles(codes), block, scale)
    assert values[0, :2].tolist() == [0.5 * 0.5 * 0.25, -6 * 0.5 * 0.25]
    assert torch.equal(values, nvfp4.values(layer.weight, layer.weight_scale, 0.25))


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_undoing_a_layout_gives_back_the_loaded_bytes(n, k):
    """Nothing of the checkpoint is lost: the swizzled and shuffled layouts are undone exactly, and padding is zero."""
    layer = nvfp4.linear(n, k)
    padded = linears.prepare("padded_swizzled", layer, BF16)
    assert torch.equal(padded["weight"][:n, : k // 2], layer.weight)
    assert int(padded["weight"].count_nonzero()) == int(layer.weight.count_nonzero())
    undone = swizzles.unswizzle_block_scales(padded["weight_scale"], n, k // 16)
    assert nvfp4.same_bytes(undone, layer.weight_scale)
    if linears.requirement_not_met("trtllm", n, k):
        return
    shuffled, back = linears.prepare("trtllm", layer, BF16), shuffles.inverse(shuffles.shuffled_rows(n))
    assert torch.equal(shuffled["weight"][back], layer.weight)
    undone = swizzles.unswizzle_block_scales(shuffled["weight_scale"], n, k // 16).view(torch.uint8)[back]
    assert torch.equal(undone, layer.weight_scale.view(torch.uint8))


def test_scalars_are_the_largest_of_the_fused_parts():
    """By hand, for q, k, v: the engine takes the maximum and rescales nothing; alpha is the product, made once."""
    layer = nvfp4.linear(32, 32)._replace(
        weight_scale_2=torch.tensor([0.25, 1.0, 0.5]), input_scale=torch.tensor([2.0, 0.5, 8.0])
    )
    prepared = linears.prepare("emulation", layer, BF16)
    wanted = {"weight_global_scale": 1.0, "input_global_scale": 8.0, "input_global_scale_inv": 0.125, "alpha": 8.0}
    assert {name: prepared[name].item() for name in wanted} == wanted
    assert all(prepared[name].shape == () and prepared[name].dtype == torch.float32 for name in wanted)
    without = linears.prepare("emulation", layer._replace(input_scale=None), BF16)
    assert set(without) == {"weight", "weight_scale", "weight_global_scale"}


def test_divisors_are_inverted_as_the_engine_inverts_them():
    """compressed-tensors stores what to divide by: the largest divisor counts, and stays as it is where it is used."""
    layer = nvfp4.linear(32, 32)._replace(
        weight_scale_2=torch.tensor([4.0, 2.0]), input_scale=torch.tensor([61.0, 1.0]), divisors=True
    )
    prepared = linears.prepare("emulation", layer, BF16)
    inverse = 1.0 / torch.tensor(61.0)
    assert (1.0 / inverse).item() != 61.0  # in fp32 the inverse of the inverse is another number
    assert prepared["weight_global_scale"].item() == 0.25
    assert prepared["input_global_scale_inv"].item() == 61.0
    assert prepared["input_global_scale"].item() == inverse.item()
    assert prepared["alpha"].item() == (inverse * 0.25).item()


def test_marlins_global_scale_undoes_the_exponents_and_the_factor():
    """By hand: the largest scale is 96, so scales are raised by 4; 2^119 / 4 for bf16, 2^7 for fp16, never raised."""
    layer = nvfp4.linear(64, 128, parts=1)._replace(weight_scale_2=torch.tensor([0.5]))
    layer = layer._replace(weight_scale=torch.full((64, 8), 96.0).to(torch.float8_e4m3fn))
    assert linears.prepare("marlin", layer, BF16)["weight_global_scale"].item() == 0.5 * 2.0**119 / 4
    assert linears.prepare("marlin", layer, FP16)["weight_global_scale"].item() == 0.5 * 2.0**7
    with pytest.raises(ValueError, match=r"float16 or bfloat16, not torch\.float32"):
        linears.prepare("marlin", layer, torch.float32)


def test_a_bias_goes_where_marlin_adds_it():
    """By hand: the lane that owns outputs 0, 1, 8, 9, 16, 17, 24, 25 reads them side by side; padding adds nothing."""
    bias = torch.arange(1.0, 97.0).to(BF16)
    layer = nvfp4.linear(96, 128)._replace(bias=bias)
    for layout in ("emulation", "padded_swizzled"):
        assert torch.equal(linears.prepare(layout, layer, BF16)["bias"], bias)
    moved = linears.prepare("marlin", layer, BF16)["bias"].tolist()
    assert len(moved) == 128 and moved[:8] == [1, 2, 9, 10, 17, 18, 25, 26]
    assert sorted(moved[:96]) == bias.tolist() and not any(moved[96:])


@pytest.mark.parametrize("layout", sorted(layouts.LINEAR))
@pytest.mark.parametrize("weight_only", [False, True])
def test_the_plan_knows_names_dtypes_and_sizes_before_anything_is_loaded(layout, weight_only):
    """An arena is laid out from these: one that was wrong by a byte would be filled beyond its end."""
    for n, k in SIZES:
        if linears.requirement_not_met(layout, n, k):
            continue
        layer = nvfp4.linear(n, k, weight_only=weight_only)._replace(bias=torch.ones(n, dtype=BF16))
        prepared = linears.prepare(layout, layer, BF16)
        planned = backends.linear_tensors(layout, n, k, weight_only=weight_only, bias="BF16")
        assert {name: (SAFETENSORS[one.dtype], tuple(one.shape)) for name, one in prepared.items()} == planned


@pytest.mark.parametrize("layout", sorted(layouts.LINEAR))
def test_finished_tensors_can_be_written_where_they_stay(layout):
    """The loader writes into its arena: the same bytes as without, and nothing beside it."""
    layer = nvfp4.linear(128, 320)
    wanted = linears.prepare(layout, layer, BF16)
    into = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    found = linears.prepare(layout, layer, BF16, into)
    assert all(found[name] is into[name] and nvfp4.same_bytes(found[name], wanted[name]) for name in wanted)
    with pytest.raises(ValueError, match="the result is"):
        linears.prepare(layout, layer, BF16, {"weight": torch.empty(3, dtype=torch.uint8)})


def test_preparing_leaves_the_loaded_tensors_alone():
    """A loader may prepare again after a failure: what it loaded must still be what it loaded."""
    layer = nvfp4.linear(128, 64)
    before = [one.clone() for one in (layer.weight, layer.weight_scale, layer.weight_scale_2)]
    for layout in layouts.LINEAR:
        linears.prepare(layout, layer, BF16)
    assert all(map(nvfp4.same_bytes, before, (layer.weight, layer.weight_scale, layer.weight_scale_2)))


@pytest.mark.parametrize(("n", "k", "named"), [(96, 64, "N a multiple of 128"), (128, 48, "K a multiple of 64")])
def test_sizes_that_trtllm_cannot_take_are_named(n, k, named):
    """Its layout has no padding: a remainder would be dropped."""
    with pytest.raises(ValueError, match=named):
        linears.prepare("trtllm", nvfp4.linear(n, k), BF16)


def test_a_block_scale_that_is_not_a_number_is_refused():
    """Answers W23. One NaN would decide the factor of a whole layer."""
    layer = nvfp4.linear(64, 64)
    layer.weight_scale.view(torch.uint8)[5, 1] = 0x7F
    with pytest.raises(ValueError, match="not a number"):
        linears.prepare("marlin", layer, BF16)


@pytest.mark.skipif(bool(vllm_sources.missing()), reason=vllm_sources.missing())
@pytest.mark.parametrize("kernel", sorted(backends.LINEAR))
def test_every_kernel_gets_the_bytes_that_vllm_itself_would_give_it(kernel):
    """vLLM's whole post-processing of a layer, both dialects: every tensor bit for bit, no more and no fewer names."""
    layout = backends.linear_kernel(kernel).layout
    compared = 0
    with vllm_sources.witness() as vllm:
        for n, k in SIZES:
            if linears.requirement_not_met(layout, n, k):
                continue
            for dialect in ("modelopt", "compressed-tensors"):
                for weight_only, largest, dtype in ((False, 448.0, BF16), (False, 60.0, BF16), (True, 448.0, FP16)):
                    divisors = dialect == "compressed-tensors"
                    layer = nvfp4.linear(n, k, weight_only=weight_only, divisors=divisors, largest=largest)
                    layer = layer._replace(bias=torch.arange(n).to(dtype))
                    theirs = vllm_sources.finish_linear(vllm, kernel, by_name(layer), dtype, dialect)
                    ours = linears.prepare(layout, layer, dtype)
                    assert set(ours) == set(theirs)
                    wrong = [name for name in ours if not nvfp4.same_bytes(ours[name], theirs[name])]
                    assert not wrong, f"{n} x {k}, {dialect}: {wrong}"
                    compared += len(ours)
    assert compared >= 50


def by_name(layer):
    """The parameters as the dialect names them."""
    names = ("weight_packed", "weight_global_scale", "input_global_scale")
    names = names if layer.divisors else ("weight", "weight_scale_2", "input_scale")
    found = dict(zip(names, (layer.weight, layer.weight_scale_2, layer.input_scale), strict=True))
    found |= {"weight_scale": layer.weight_scale, "bias": layer.bias}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


SAFETENSORS = {
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    BF16: "BF16",
}
