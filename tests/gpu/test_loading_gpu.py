"""The loader and the verifier on a real GPU: bytes, memory that comes back, and refusals that name what is short."""

import os
import time

import numpy as np
import pytest

from tests.support import checkpoints, loaders, slices
from weightcache.arenas import driver, memory
from weightcache.daemon import orders, states
from weightcache.wire import digests, manifests, reasons

MIB = 1 << 20
STAGES = [states.WAITING_FOR_GATE, states.READING, states.DIGESTING, states.SEALING]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = checkpoints.make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", "nvfp4", num_shards=2)
    time.sleep(2.1)
    return made


def order_of(checkpoint, tmp_path, device_uuid, **fields):
    return loaders.make_order(checkpoint, tmp_path / "gate", memory="GPU", device=device_uuid, **fields)


def read_from(mapping):
    def read(offset, size_bytes):
        data = bytearray(size_bytes)
        driver.call("cuMemcpyDtoH", memory_of(data), mapping.address + offset, size_bytes)
        return bytes(data)

    return read


def memory_of(data):
    return np.frombuffer(data, np.uint8).ctypes.data


def settled(context, free_bytes, what):
    """Wait until the GPU has that much free memory again: the driver needs a moment after a process has died."""
    limit = time.monotonic() + 20
    while context.memory_bytes()[0] < free_bytes - 32 * MIB:
        assert time.monotonic() < limit, f"{what}: {free_bytes - context.memory_bytes()[0]} bytes are still taken"
        time.sleep(0.05)


@pytest.mark.parametrize("size", [1, 2])
def test_a_loaded_arena_holds_every_byte_and_the_verifier_agrees(tmp_path, checkpoint, context, device_uuid, size):
    """Scalars by the table, rows by the copy engine, digests by the kernel: all as numpy cuts them (answers W28)."""
    free_bytes = context.memory_bytes()[0]
    blocks = {}
    for rank in range(size):
        order = order_of(checkpoint, tmp_path, device_uuid, rank=rank, parallelism={"tensor": size})
        with loaders.Child("loading", order) as loader:
            sealed = loader.finish()
            blocks |= {(row.file, row.block): row.digest for row in sealed.blocks}
            mapping = memory.map_readonly("GPU", loader.descriptors, sealed.chunk_sizes, device_uuid=device_uuid)
            with context.current():
                found = loaders.tensors_of(sealed, read_from(mapping))
            mapping.close()
            assert {name: data for name, (_, _, data) in found.items()} == slices.rank_of(checkpoint, rank, size)
            verify = loaders.make_verify_order(sealed, "GPU", device_uuid)
            with loaders.Child("verifying", verify, loader.descriptors) as verifier:
                assert verifier.finish().damaged == []
    for path in checkpoint.glob("*.safetensors"):
        wanted = digests.digest_of_file(path)
        assert digests.combine([blocks[path.name, 0]]) == wanted, "the content digest is the CPU's"
    settled(context, free_bytes, "descriptors closed")


def test_a_changed_byte_in_gpu_memory_is_found_by_name(tmp_path, checkpoint, context, device_uuid):
    """A hostile or faulty holder writes one byte; the verifier names the tensor (answers W28)."""
    with loaders.Child("loading", order_of(checkpoint, tmp_path, device_uuid)) as loader:
        sealed = loader.finish()
        manifest = manifests.decode(sealed.manifest)
        victim = manifest.names.index("model.norm.weight")
        mapping = memory.map_readonly("GPU", loader.descriptors, sealed.chunk_sizes, device_uuid=device_uuid)
        with context.current():
            api = driver.bindings()
            rights = api.CUmemAccessDesc()
            rights.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            rights.location.id = context.ordinal
            rights.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            driver.call("cuMemSetAccess", mapping.address, sum(sealed.chunk_sizes), [rights], 1)
            driver.call("cuMemsetD8", mapping.address + manifest.offsets[victim] + 5, 0xA5, 1)
        mapping.close()
        verify = loaders.make_verify_order(sealed, "GPU", device_uuid)
        with loaders.Child("verifying", verify, loader.descriptors) as verifier:
            assert [damage.tensor for damage in verifier.finish().damaged] == ["model.norm.weight"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_loader_killed_at_any_stage_gives_its_gpu_memory_back(tmp_path, checkpoint, context, device_uuid, stage):
    """kill -9 with memory allocated, copies under way or descriptors exported: all of it is free again."""
    free_bytes = context.memory_bytes()[0]
    with loaders.Child("loading", order_of(checkpoint, tmp_path, device_uuid), hold=stage) as loader:
        loader.wait_phase(stage)
        assert context.memory_bytes()[0] < free_bytes - 256 * MIB, "its context and arena were there"
        loader.process.kill()
        loader.process.wait()
    settled(context, free_bytes, stage)


def test_a_gpu_without_room_is_refused_with_figures(tmp_path, checkpoint, context, device_uuid):
    """Need, free and shortfall; for the verifier it is an impossibility, never damage."""
    with loaders.Child("loading", order_of(checkpoint, tmp_path, device_uuid)) as loader:
        sealed = loader.finish()
        with context.current():
            taken = driver.call("cuMemAlloc", context.memory_bytes()[0] - 100 * MIB)
        try:
            with loaders.Child("loading", order_of(checkpoint, tmp_path, device_uuid)) as second:
                refusal = second.refusal()
            assert refusal.reason is reasons.Reason.InsufficientGPUMemory
            for word in (device_uuid, "needs", "are free", "short", "GiB"):
                assert word in refusal.message
            assert second.phases == [], "refused before it waited or read"
            verify = loaders.make_verify_order(sealed, "GPU", device_uuid)
            with loaders.Child("verifying", verify, loader.descriptors) as verifier:
                assert verifier.refusal().reason is reasons.Reason.VerifyImpossible
                assert not [event for event in verifier.events if isinstance(event, orders.Verdict)]
        finally:
            with context.current():
                driver.call("cuMemFree", taken)


def test_a_file_of_many_blocks_is_digested_by_the_gpu_as_by_the_cpu(tmp_path, context, device_uuid):
    """Buffers of one block, blocks across buffers, rows across both: 40 MiB, throttled by nothing."""
    path = checkpoints.make_checkpoint(
        tmp_path / "model",
        "llama",
        head_dim=256,
        hidden_size=1024,
        intermediate_size=4096,
        vocab_size=4000,
        num_hidden_layers=2,
    )
    order = order_of(path, tmp_path, device_uuid, buffer_bytes=16 * MIB, rank=1, parallelism={"tensor": 2})
    with loaders.Child("loading", order) as loader:
        rows = {(row.file, row.block): row.digest for row in loader.finish().blocks}
    (file,) = path.glob("*.safetensors")
    data = file.read_bytes()
    assert rows, "this rank owns some"
    for (_, block), digest in rows.items():
        assert digest == digests.digest_block(data[block * 4 * MIB : (block + 1) * 4 * MIB])
    assert os.path.getsize(file) > 40 * MIB
