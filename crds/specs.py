"""What a user writes: the spec of a WeightCache, declared once.

A daemon started by hand reads the same spec from a file as an operator hands to a daemon in a pod, so that what was
tried on a workstation is what runs in a cluster. Unknown fields are errors with their path, and an enum value exists
only when it works.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

__all__ = [
    "Expert",
    "ExpertPlacement",
    "GPUAccess",
    "GPUs",
    "Memory",
    "Model",
    "Parallelism",
    "Preparer",
    "Quantization",
    "Socket",
    "WeightCacheSpec",
    "world_size",
]


class Memory(enum.StrEnum):
    """Where the finished weights live: ``GPU`` (CUDA VMM) or ``Host`` (sealed memfds)."""

    GPU = "GPU"
    Host = "Host"


class Preparer(enum.StrEnum):
    """Who turns the checkpoint into finished tensors: ``Native`` is weightcache's own."""

    Native = "Native"


class ExpertPlacement(enum.StrEnum):
    """Which experts a rank holds: consecutive ones, or every n-th."""

    linear = "linear"
    round_robin = "round_robin"


class GPUAccess(enum.StrEnum):
    """How a daemon comes to its GPUs: it sees them all and chooses."""

    Visible = "Visible"


_Size = Annotated[int, Meta(ge=1, le=4096)]


class _Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    pass


class Model(_Base, frozen=True):
    """The checkpoint: a directory on the node, and a directory below it."""

    host_path: Annotated[str, Meta(min_length=1, max_length=4096, description="Absolute directory on the node.")]
    path: Annotated[str, Meta(max_length=4096, description="Directory below it; must not leave it.")] = ""
    revision: Annotated[str, Meta(max_length=253, description="For people: which revision the files are.")] = ""


class Quantization(_Base, frozen=True):
    """The quantization that the checkpoint must have; empty takes what the checkpoint says."""

    method: Annotated[str, Meta(max_length=63, description="Such as modelopt; empty: as the checkpoint says.")] = ""


class Expert(_Base, frozen=True):
    """Expert parallelism: whole experts a rank instead of slices of each."""

    enabled: Annotated[bool, Meta(description="Spread experts over tensor x data ranks.")] = False
    placement: Annotated[ExpertPlacement, Meta(description="Which experts a rank holds.")] = ExpertPlacement.linear


class Parallelism(_Base, frozen=True):
    """Sizes of the parallel layout. A group has tensor x pipeline x data ranks."""

    tensor: Annotated[_Size, Meta(description="Tensor-parallel size.")] = 1
    pipeline: Annotated[_Size, Meta(description="Pipeline-parallel size.")] = 1
    data: Annotated[_Size, Meta(description="Data-parallel size.")] = 1
    expert: Annotated[Expert, Meta(description="Expert parallelism.")] = Expert()


class GPUs(_Base, frozen=True):
    """How many GPUs (or host slots) a node gives to this cache. 0: one group."""

    access: Annotated[GPUAccess, Meta(description="How the daemon comes to its GPUs.")] = GPUAccess.Visible
    per_node: Annotated[int, Meta(ge=0, le=4096, description="GPUs a node; a multiple of the world size.")] = 0


class Socket(_Base, frozen=True):
    """Who may connect."""

    group: Annotated[int, Meta(ge=-1, le=2**31 - 1, description="Group id of sockets; -1: the daemon's own.")] = -1


class WeightCacheSpec(_Base, frozen=True):
    """Which checkpoint, in which layout, in which memory."""

    model: Annotated[Model, Meta(description="The checkpoint.")]
    quantization: Annotated[Quantization, Meta(description="Expected quantization.")] = Quantization()
    preparer: Annotated[Preparer, Meta(description="Who prepares the weights.")] = Preparer.Native
    parallelism: Annotated[Parallelism, Meta(description="The parallel layout.")] = Parallelism()
    memory: Annotated[Memory, Meta(description="Where the weights live.")] = Memory.GPU
    gpus: Annotated[GPUs, Meta(description="GPUs a node.")] = GPUs()
    socket: Annotated[Socket, Meta(description="Who may connect.")] = Socket()


def world_size(parallelism: Parallelism) -> int:
    """Ranks in a group. Pure."""
    return parallelism.tensor * parallelism.pipeline * parallelism.data


def parse(value: Any) -> WeightCacheSpec:
    """A spec from plain data (as YAML or JSON gives it). Pure. Raises msgspec.ValidationError with the path."""
    return msgspec.convert(value, WeightCacheSpec)
