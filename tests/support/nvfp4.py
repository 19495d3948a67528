"""Random NVFP4 layers as loaded, and what their values are, by nothing but the format's own table.

Codes are four bits over {0, .5, 1, 1.5, 2, 3, 4, 6} with a sign (OCP Microscaling, E2M1), two a byte, the even element
in the low nibble; a value is code x block scale (e4m3, one for 16 columns) x global scale.
"""

from __future__ import annotations

from typing import Any

import torch

from weightcache.kernels import experts, linears

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def codes(*shape: int, seed: int) -> torch.Tensor:
    """Random packed codes, uint8; ``shape`` in bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def block_scales(*shape: int, seed: int, largest: float = 448.0) -> torch.Tensor:
    """Random e4m3 from zero and the subnormals up to ``largest``, every byte as likely as another."""
    limit = int(torch.tensor(largest).to(torch.float8_e4m3fn).view(torch.uint8)) + 1
    made = torch.randint(0, limit, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return made.view(torch.float8_e4m3fn)


def scalars(*shape: int, seed: int, divisors: bool = False) -> torch.Tensor:
    """Random global scales of the size that quantizers write (about 1e-4); their inverses as ``divisors``."""
    made = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 1e-3 + 1e-5
    return 1.0 / made if divisors else made


def linear(
    n: int, k: int, *, parts: int = 3, weight_only: bool = False, divisors: bool = False, largest: float = 448.0
) -> linears.LoadedLinear:
    """A linear layer of ``parts`` fused parts with different global scales."""
    return linears.LoadedLinear(
        codes(n, k // 2, seed=1),
        block_scales(n, k // 16, seed=2, largest=largest),
        scalars(parts, seed=3, divisors=divisors),
        None if weight_only else scalars(parts, seed=4, divisors=divisors),
        divisors=divisors,
    )


def moe(
    sizes: tuple[int, int],
    *,
    num_experts: int = 6,
    local: tuple[int, ...] = (3, 4, 5),
    weight_only: bool = False,
    divisors: bool = False,
    largest: float = 448.0,
) -> experts.LoadedExperts:
    """Local experts of a layer of ``num_experts``; each input scale of the others is larger than any local one."""
    (i, h), e = sizes, len(local)
    a13, a2 = scalars(num_experts, 2, seed=5), scalars(num_experts, seed=6)
    for other in set(range(num_experts)) - set(local):
        a13[other] *= 1000
        a2[other] *= 1000
    return experts.LoadedExperts(
        codes(e, 2 * i, h // 2, seed=1),
        block_scales(e, 2 * i, h // 16, seed=2, largest=largest),
        scalars(e, 2, seed=3, divisors=divisors),
        None if weight_only else 1.0 / a13 if divisors else a13,
        codes(e, h, i // 2, seed=7),
        block_scales(e, h, i // 16, seed=8, largest=largest / 2),
        scalars(e, seed=9, divisors=divisors),
        None if weight_only else 1.0 / a2 if divisors else a2,
        local,
        divisors,
    )


def on_gpu(layer: Any) -> Any:
    """A loaded layer with its tensors on the GPU."""
    return layer._replace(
        **{name: one.cuda() for name, one in layer._asdict().items() if isinstance(one, torch.Tensor)}
    )


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """``[..., N, K/2]`` bytes -> ``[..., N, K]`` codes, one by one."""
    out = torch.empty(*packed.shape[:-1], 2 * packed.shape[-1], dtype=torch.uint8)
    out[..., 0::2], out[..., 1::2] = packed % 16, packed // 16
    return out


def values(packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor | float) -> torch.Tensor:
    """``[N, K]`` float64: what the layer's weights are."""
    wide = scales.to(torch.float64).repeat_interleave(16, dim=-1)
    return E2M1.to(torch.float64)[unpacked(packed).long()] * wide * global_scale


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes (NaN and -0 included)."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    pair = [one.contiguous().reshape(-1).view(torch.uint8) for one in (left, right)]
    return torch.equal(*pair)
