"""The real serving code over arenas made by hand: for tests and benchmarks that need no checkpoint.

Everything above the arena is the product's: sockets, sessions, claims, leases. Only the loader is left out, so that
ten thousand tensors or a damaged byte can be had without a model that has them.
"""

import asyncio
import os
import threading
import time

from weightcache.arenas import memory
from weightcache.crds import specs
from weightcache.daemon import caches, devices, groups, roots, serving, states
from weightcache.wire import digests, evidence, keys, manifests, protocol

KEY = keys.Key(
    layout_version=keys.LAYOUT_VERSION,
    content="",
    config="c" * 32,
    architecture="TestForCausalLM",
    dtype="bfloat16",
    quantization="none",
    quantization_config="",
    linear_layout="loaded",
    preparer="Native",
)
CONTENT = evidence.HeldContent(digest="1" * 32, files=[], cache_uid="01234567-89ab-cdef-0123-456789abcdef")
REF = protocol.CacheRef(namespace="default", name="served", uid=CONTENT.cache_uid)


def make_arena(  # noqa: PLR0913 - every part of an arena may be what a test is about
    tensors, *, kind="Host", device="host-0", generation="a" * 16, aliases=None, metadata=None, chunk_bytes=None
):
    """An arena with ``tensors``: a list of (name, dtype, shape, bytes or None); None leaves zeros."""
    offsets, offset = [], 0
    for _, dtype, shape, _ in tensors:
        offsets.append(offset)
        offset += manifests.padded(manifests.tensor_bytes(dtype, shape, manifests.contiguous_strides(shape)))
    arena = memory.create(kind, offset, device_uuid=device, chunk_bytes=chunk_bytes)
    for (_, _, _, data), at in zip(tensors, offsets, strict=True):
        if data:
            arena.put(at, memoryview(data).cast("B"))
    from weightcache.arenas import extents

    ends = [*offsets[1:], offset]
    spans = [extents.Extent(at, end - at) for at, end in zip(offsets, ends, strict=True)]
    found = arena.digests(spans)
    dtypes = sorted({dtype for _, dtype, _, _ in tensors})
    manifest = manifests.Manifest(
        arena_bytes=offset,
        names=[name for name, _, _, _ in tensors],
        kind_names=["loaded"],
        kinds=[0] * len(tensors),
        dtype_names=dtypes,
        dtypes=[dtypes.index(dtype) for _, dtype, _, _ in tensors],
        shapes=[tuple(shape) for _, _, shape, _ in tensors],
        strides=[manifests.contiguous_strides(shape) for _, _, shape, _ in tensors],
        offsets=offsets,
        digests=b"".join(found),
        aliases=aliases or {},
        metadata=metadata or {},
    )
    sizes = list(arena.chunk_sizes)
    return groups.HeldArena(
        memory=kind,
        device=device,
        descriptors=tuple(arena.seal()),
        chunk_sizes=sizes,
        manifest=manifests.encode(manifest),
        arena_bytes=offset,
        num_tensors=len(tensors),
        generation=generation,
        blocks=(),
        settled={},
    )


class NoOperations:
    """Stands where the supervisor would: these servers neither verify nor reload."""

    def __init__(self, cache):
        self.cache = cache

    async def verify(self, *, deep):
        """The verdict of a supervisor that is not there."""
        return self.cache.not_ready()

    async def release(self, grace_seconds):
        """Drop nothing."""
        return protocol.Released(bytes_freed=0, clients=[])

    def resume(self):
        """Load nothing."""


class ArenaServer:
    """Serve ``arenas`` as one ready group a list, from a thread of this process. A context manager.

    ``arena_groups``: one list of HeldArena a group, in rank order. ``key``: of rank 0; positions are filled in.
    """

    def __init__(self, root, arena_groups, key=KEY, content=CONTENT, ref=REF, memory_kind="Host"):
        self.root = roots.prepare(root)
        self.key = key
        spec = specs.parse({"model": {"hostPath": "/nowhere"}, "memory": memory_kind})
        self.cache = caches.Cache(
            ref=ref,
            spec=spec,
            model="/nowhere",
            version="0",
            instance="i" * 16,
            clock=time.time,
            started_at=time.time(),
        )
        for index, arenas in enumerate(arena_groups):
            ranks = [self._rank(index, rank, arena, key) for rank, arena in enumerate(arenas)]
            self.cache.groups.append(groups.Group(index=index, ranks=ranks, content=content))
        self.directory = roots.make_cache_directory(self.root, ref)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def _rank(self, group, rank, arena, key):
        import msgspec

        position = msgspec.structs.replace(key.position, tensor_rank=rank)
        device = devices.Device(
            uuid=arena.device,
            kind=arena.memory,
            index=rank,
            name="",
            capability="",
            total_bytes=0,
            free_bytes=0,
            mig=False,
        )
        made = groups.Rank(index=rank, group=group, device=device, key=msgspec.structs.replace(key, position=position))
        made.arena, made.state = arena, states.READY
        return made

    async def _main(self):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = serving.Server(self.cache, NoOperations(self.cache))
        server.open_public(self.directory, [rank for group in self.cache.groups for rank in group.ranks], -1)
        self.server = server
        self._ready.set()
        await self._stop.wait()
        server.close_public()
        await server.close()

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        for group in self.cache.groups:
            for rank in group.ranks:
                if rank.arena:
                    for descriptor in rank.arena.descriptors:
                        os.close(descriptor)


def digest_by_library(data):
    """A tensor's digest computed from xxhash alone: the independent witness of ``wire.digests`` over an extent."""
    import xxhash

    padded = bytes(data) + bytes(-len(data) % 256 or (256 if not data else 0))
    pieces = [padded[start : start + digests.BLOCK_BYTES] for start in range(0, len(padded), digests.BLOCK_BYTES)]
    return xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces))
