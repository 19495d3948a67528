"""The verifier as the daemon starts it: it names what differs, and never calls damaged what it could not judge."""

import fcntl
import os
import time

import msgspec
import pytest
import xxhash

from tests.support import checkpoints, loaders
from weightcache.arenas import host
from weightcache.daemon import orders, states
from weightcache.wire import manifests, reasons


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What a real loader sealed, and a copy of its bytes."""
    directory = tmp_path_factory.mktemp("verify")
    path = checkpoints.make_checkpoint(directory / "model", "qwen3_moe", "nvfp4")
    time.sleep(2.1)
    with loaders.Child("loading", loaders.make_order(path, directory / "gate")) as loader:
        sealed = loader.finish()
        yield sealed, os.pread(loader.descriptors[0], sealed.chunk_sizes[0], 0), loader.descriptors[0]


def arena_with(data, seals=host.SEALS):
    """A memfd with these bytes, sealed as a loader does."""
    descriptor = os.memfd_create("copy", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def verdict_on(order, descriptor):
    with loaders.Child("verifying", order, [descriptor]) as verifier:
        return verifier.finish()


def test_what_a_loader_sealed_is_sound(loaded):
    """Another process, another mapping, the same digests; every tensor was looked at (answers W28)."""
    sealed, _, descriptor = loaded
    verdict = verdict_on(loaders.make_verify_order(sealed), descriptor)
    manifest = manifests.decode(sealed.manifest)
    assert verdict.damaged == []
    assert verdict.bytes_checked == sum(
        manifests.padded(manifest.size_bytes_of(index)) for index in range(len(manifest))
    )


@pytest.mark.parametrize("victim", ["first", "middle", "last"])
@pytest.mark.parametrize("where", [0, -1])
def test_one_flipped_bit_names_its_tensor_and_no_other(loaded, victim, where):
    """First and last byte of the first, a middle and the last tensor: none is out of sight (answers W28)."""
    sealed, data, _ = loaded
    manifest = manifests.decode(sealed.manifest)
    index = {"first": 0, "middle": len(manifest) // 2, "last": len(manifest) - 1}[victim]
    changed = bytearray(data)
    changed[manifest.offsets[index] + where % manifest.size_bytes_of(index)] ^= 0x10
    descriptor = arena_with(changed)
    (damage,) = verdict_on(loaders.make_verify_order(sealed), descriptor).damaged
    os.close(descriptor)
    assert damage.tensor == manifest.names[index]
    assert damage.wanted == manifest.digest_of(index).hex() != damage.found


def test_two_tensors_that_changed_places_are_both_named(loaded):
    """Right bytes at the wrong place are wrong."""
    sealed, data, _ = loaded
    manifest = manifests.decode(sealed.manifest)
    one, other = (manifest.names.index(f"model.layers.{layer}.self_attn.q_norm.weight") for layer in (0, 1))
    changed = bytearray(data)
    first, second = manifest.offsets[one], manifest.offsets[other]
    size = manifest.size_bytes_of(one)
    changed[first : first + size], changed[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )
    descriptor = arena_with(changed)
    found = verdict_on(loaders.make_verify_order(sealed), descriptor).damaged
    os.close(descriptor)
    assert [damage.tensor for damage in found] == [manifest.names[one], manifest.names[other]]


def test_a_tensor_without_elements_does_not_disturb():
    """Real checkpoints have them; their padding is digested like any."""
    tensors = manifests.Manifest(
        arena_bytes=512,
        names=["empty", "full"],
        kind_names=["loaded"],
        kinds=[0, 0],
        dtype_names=["U8"],
        dtypes=[0, 0],
        shapes=[(0, 4), (256,)],
        strides=[(4, 1), (1,)],
        offsets=[0, 256],
        digests=b"".join(host_digest(data) for data in (bytes(256), bytes(range(256)))),
    )
    descriptor = arena_with(bytes(256) + bytes(range(256)) + bytes(4096 - 512))
    order = orders.VerifyOrder(memory="Host", device="host-0", chunk_sizes=[4096], manifest=manifests.encode(tensors))
    assert verdict_on(order, descriptor).damaged == []
    os.close(descriptor)


def host_digest(data):
    """The written rule for a tensor of one piece, by xxhash alone."""
    return xxhash.xxh3_128_digest(xxhash.xxh3_128_digest(data))


# --- what cannot be judged ------------------------------------------------------------------------------------------
def impossible(order, *descriptors, **environment):
    """The message of its VerifyImpossible; there was no verdict."""
    with loaders.Child("verifying", order, descriptors, **environment) as verifier:
        refusal = verifier.refusal()
        assert refusal.reason is reasons.Reason.VerifyImpossible, refusal
        assert not [event for event in verifier.events if isinstance(event, orders.Verdict)]
        return refusal.message


def test_an_arena_that_anyone_could_still_write_is_no_proof(loaded):
    """Without its seals a memfd may change after it was looked at."""
    sealed, data, _ = loaded
    descriptor = arena_with(data, seals=fcntl.F_SEAL_SHRINK)
    assert "seals" in impossible(loaders.make_verify_order(sealed), descriptor)
    os.close(descriptor)


def test_a_descriptor_that_is_missing_or_of_another_size_is_said(loaded):
    """The message has both values."""
    sealed, data, _ = loaded
    assert "0 descriptors" in impossible(loaders.make_verify_order(sealed))
    longer = arena_with(data + bytes(4096))
    assert f"{len(data) + 4096} bytes, {len(data)} announced" in impossible(loaders.make_verify_order(sealed), longer)
    os.close(longer)


def test_a_manifest_that_is_none_is_said(loaded):
    """Garbage in the order is a fault of the order, not of the weights."""
    sealed, _, descriptor = loaded
    order = msgspec.structs.replace(loaders.make_verify_order(sealed), manifest=b"\xc1garbage")
    assert "manifest" in impossible(order, descriptor)


def test_a_manifest_that_leads_out_of_the_arena_reads_nothing(loaded):
    """Offsets beyond the descriptor must not become a crash by SIGBUS."""
    sealed, _, descriptor = loaded
    manifest = manifests.decode(sealed.manifest)
    moved = msgspec.structs.replace(
        manifest, arena_bytes=1 << 40, offsets=[offset + (1 << 30) for offset in manifest.offsets]
    )
    order = msgspec.structs.replace(loaders.make_verify_order(sealed), manifest=manifests.encode(moved))
    assert "outside" in impossible(order, descriptor)


def test_a_gpu_that_is_not_there_is_said(loaded):
    """A lost GPU, or one without room for a context, proves nothing about the bytes."""
    sealed, _, descriptor = loaded
    device = "GPU-00000000-0000-0000-0000-000000000000"
    order = msgspec.structs.replace(
        loaders.make_verify_order(sealed), memory="GPU", device=device, chunk_sizes=[2 << 20]
    )
    assert "GPUNotFound" in impossible(order, descriptor)


def test_a_verifier_without_memory_is_said(loaded, tmp_path):
    """An address-space limit that leaves no room for the arena's mapping."""
    sealed, _, _ = loaded
    size = 4 << 30
    descriptor = os.memfd_create("large", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.truncate(descriptor, size)  # a hole: nothing is taken
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, host.SEALS)
    order = msgspec.structs.replace(loaders.make_verify_order(sealed), chunk_sizes=[size])
    (tmp_path / "sitecustomize.py").write_text(
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))"
    )
    search_path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert "could not be read back" in impossible(order, descriptor, PYTHONPATH=search_path)
    os.close(descriptor)


def test_a_verifier_ends_when_its_daemon_lets_go(loaded):
    """It holds descriptors of the arena: one that lived on would keep the memory."""
    sealed, _, descriptor = loaded
    order = loaders.make_verify_order(sealed)
    with loaders.Child("verifying", order, [descriptor], hold=states.VERIFYING) as verifier:
        verifier.wait_phase(states.VERIFYING)
        verifier.socket.close()
        assert verifier.process.wait(1.0) == 1
