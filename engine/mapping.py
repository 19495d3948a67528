"""From a daemon's answer to tensors: nothing is believed before it is compared, nothing is mapped before that.

A descriptor says nothing about what it is: the wrong one maps cleanly and reads as weights, or fails as "unknown
error" deep in a driver. So the GPU's UUID, the kind of memory, the number of descriptors and their sizes are compared
with the claim and the manifest first, and each refusal names both values.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weightcache.arenas import contexts, driver, extents, host, memory, vmm  # noqa: F401 - see below
from weightcache.engine import views
from weightcache.wire import manifests, protocol, reasons

__all__ = ["Mapped", "check", "damaged", "device_of", "map_arena"]

_HOST_SLOT = "host-"
# Both backends and the driver's binding are imported with this module: an engine pays for that at its start, and does
# not wait for 30 ms of imports between a restart and its weights. None of them touches a GPU.
with contextlib.suppress(reasons.Refusal):  # not installed: then there are no GPU arenas to map
    driver.bindings()


class Mapped(NamedTuple):
    """An arena in this process. ``seconds``: of decoding, mapping and making views."""

    manifest: manifests.Manifest
    mapping: memory.Mapping
    tensors: dict[str, torch.Tensor]
    seconds: tuple[float, float, float]


def map_arena(answer: protocol.Attached, descriptors: Sequence[int], claimed_gpu: str, greeted_gpu: str) -> Mapped:
    """Decode, compare, map read-only, make views. The descriptors stay the caller's.

    ``claimed_gpu``: UUID that the claim gave to this rank; ``greeted_gpu``: what the socket's greeting said. Raises
    Refusal ``ArenaInvalid``, ``ProtocolViolated``, ``GPUNotFound``; nothing stays mapped then.
    """
    times = [time.perf_counter()]
    with views.collection_paused():
        manifest = manifests.decode(answer.manifest)
        check(manifest, answer, len(descriptors), claimed_gpu, greeted_gpu)
        times.append(time.perf_counter())
        device = device_of(answer)
        mapping = memory.map_readonly(answer.memory, descriptors, answer.chunk_sizes, device_uuid=answer.gpu)
        times.append(time.perf_counter())
        try:
            tensors = views.build_views(manifest, views.base_of(mapping.buffer, device))
        except BaseException:
            mapping.close()
            raise
    times.append(time.perf_counter())
    decode, mapped, viewed = (after - before for before, after in itertools.pairwise(times))
    return Mapped(manifest, mapping, tensors, (decode, mapped, viewed))


def check(
    manifest: manifests.Manifest, answer: protocol.Attached, num_descriptors: int, claimed_gpu: str, greeted_gpu: str
) -> None:
    """Refuse an arena that is not the claimed one, or not as large as its table says. Pure.

    Raises Refusal ``ArenaInvalid`` with both values.
    """
    if not answer.gpu == greeted_gpu == claimed_gpu:
        raise _invalid(
            f"the claim gave this rank {claimed_gpu}, the socket belongs to {greeted_gpu or '(no rank)'} and the arena "
            f"to {answer.gpu}: other weights would be mapped"
        )
    wanted = memory.HOST if claimed_gpu.startswith(_HOST_SLOT) else memory.GPU
    if answer.memory != wanted:
        raise _invalid(f"the arena on {claimed_gpu} is in memory {answer.memory!r}, {wanted!r} expected")
    if num_descriptors != len(answer.chunk_sizes):
        raise _invalid(f"{num_descriptors} descriptors came for {len(answer.chunk_sizes)} chunks of {claimed_gpu}")
    if min(answer.chunk_sizes, default=0) <= 0 or sum(answer.chunk_sizes) < manifest.arena_bytes:
        raise _invalid(
            f"chunks of {sum(answer.chunk_sizes)} bytes ({len(answer.chunk_sizes)}) cannot hold the "
            f"{manifest.arena_bytes} bytes of the manifest"
        )


def device_of(answer: protocol.Attached) -> torch.device:
    """This process's torch device for the arena: found by UUID, as ordinals differ between processes.

    torch counts devices as the driver does. Raises Refusal ``GPUNotFound`` when the GPU is not visible here.
    """
    if answer.memory == memory.HOST:
        return torch.device("cpu")
    seen = contexts.visible_uuids()
    wanted = contexts.parse_uuid(answer.gpu)
    ordinals = [ordinal for ordinal, text in enumerate(seen) if contexts.parse_uuid(text) == wanted]
    if not ordinals:
        raise reasons.Refusal(
            reasons.Reason.GPUNotFound,
            f"the weights are on {answer.gpu}, this process sees {', '.join(seen) or 'no GPU'}: set "
            "CUDA_VISIBLE_DEVICES to the UUIDs of the claim, in rank order",
        )
    return torch.device("cuda", ordinals[0])


def damaged(manifest: manifests.Manifest, mapping: memory.Mapping) -> list[str]:
    """Names of the tensors whose resident bytes differ from their digests; reads the whole arena."""
    spans = [
        extents.Extent(offset, manifests.padded(manifest.size_bytes_of(index)))
        for index, offset in enumerate(manifest.offsets)
    ]
    found = mapping.digests(spans)
    return [name for index, name in enumerate(manifest.names) if found[index] != manifest.digest_of(index)]


def _invalid(message: str) -> reasons.Refusal:
    return reasons.Refusal(reasons.Reason.ArenaInvalid, message)
