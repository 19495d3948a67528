"""Views: the right bytes, shapes and identities over one mapping, and memory that lives as long as the last of them."""

import gc
import os
import struct

import pytest
import torch

from weightcache.arenas import memory
from weightcache.engine import views
from weightcache.wire import manifests, reasons

CPU = torch.device("cpu")


def manifest_of(rows, aliases=None):
    """``rows``: (name, dtype, shape, strides, offset)."""
    dtypes = sorted({row[1] for row in rows})
    end = max(offset + manifests.tensor_bytes(dtype, shape, strides) for _, dtype, shape, strides, offset in rows)
    return manifests.Manifest(
        arena_bytes=manifests.padded(end),
        names=[row[0] for row in rows],
        kind_names=["loaded"],
        kinds=[0] * len(rows),
        dtype_names=dtypes,
        dtypes=[dtypes.index(row[1]) for row in rows],
        shapes=[tuple(row[2]) for row in rows],
        strides=[tuple(row[3]) for row in rows],
        offsets=[row[4] for row in rows],
        digests=bytes(16 * len(rows)),
        aliases=aliases or {},
    )


def mapped(content):
    """A sealed arena that begins with ``content``, mapped read-only."""
    arena = memory.create(memory.HOST, max(len(content), 1))
    arena.put(0, memoryview(content))
    sizes = arena.chunk_sizes
    [descriptor] = arena.seal()
    try:
        return memory.map_readonly(memory.HOST, [descriptor], sizes)
    finally:
        os.close(descriptor)


def build(content, rows, aliases=None):
    """The views of a manifest over a sealed arena with that content."""
    mapping = mapped(content)
    return views.build_views(manifest_of(rows, aliases), views.base_of(mapping.buffer, CPU))


def arenas_mapped():
    """How many arenas this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:weightcache" in line for line in maps)


def test_each_tensor_shows_the_bytes_at_its_offset_in_its_shape():
    """Little-endian numbers written by struct come out as the tensors' values."""
    content = struct.pack("<6f", 1, 2, 3, 4, 5, 6).ljust(256, b"\0") + struct.pack("<3q", -1, 7, 1 << 40)
    found = build(content, [("a", "F32", [2, 3], [3, 1], 0), ("b", "I64", [3], [1], 256)])
    assert found["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert found["b"].tolist() == [-1, 7, 1 << 40]


def test_strides_are_followed():
    """A transposed weight stays transposed: an engine that reads it row by row must not get columns."""
    content = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
    found = build(content, [("t", "F32", [3, 2], [1, 3], 0)])["t"]
    assert found.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert found.stride() == (1, 3)


def test_scalars_and_empty_tensors_are_tensors_too():
    """A scale without dimensions and a tensor without elements do not disturb the others."""
    content = struct.pack("<f", 0.5).ljust(512, b"\0")
    found = build(content, [("s", "F32", [], [], 0), ("e", "I8", [0, 4], [4, 1], 256)])
    assert found["s"].shape == () and found["s"].item() == 0.5
    assert found["e"].shape == (0, 4) and found["e"].dtype == torch.int8


@pytest.mark.parametrize("name", sorted(manifests.DTYPE_BITS))
def test_every_dtype_of_the_wire_has_a_torch_dtype_of_its_size(name):
    """A dtype that a manifest may carry and no engine can show would fail at the first attach in production."""
    found = build(bytes(512), [("x", name, [4], [1], 256)])["x"]
    assert found.element_size() * 8 == manifests.DTYPE_BITS[name]
    assert found.data_ptr() % 256 == 0


def test_bfloat16_and_float8_are_read_as_such_and_not_as_their_namesakes():
    """Equal sizes, other values: 0x3f80 is 1.0 in bfloat16; 0x38 is 1.0 in e4m3, 0x3c in e5m2, 0x7f in e8m0."""
    content = bytearray(1024)
    content[0:2], content[256], content[512], content[768] = b"\x80\x3f", 0x38, 0x3C, 0x7F
    rows = [(name, name, [1], [1], 256 * at) for at, name in enumerate(("BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"))]
    assert [build(bytes(content), rows)[row[0]].float().item() for row in rows] == [1.0, 1.0, 1.0, 1.0]


def test_a_dtype_that_this_torch_lacks_is_refused_by_name(monkeypatch):
    """An older torch must say what is missing, not show bytes as something else."""
    monkeypatch.delitem(views.DTYPES, "F8_E8M0")
    with pytest.raises(reasons.Refusal, match="no dtype for F8_E8M0"):
        build(bytes(256), [("x", "F8_E8M0", [4], [1], 0)])


def test_an_alias_is_the_identical_object():
    """Tied weights stay tied: a stale second object would be an uninitialised head (answers W21)."""
    found = build(bytes(256), [("embed", "F32", [2], [1], 0)], aliases={"head": "embed"})
    assert found["head"] is found["embed"]


def test_views_copy_nothing():
    """Every tensor points into the mapping: a copy would be a second model in memory."""
    mapping = mapped(bytes(4096))
    found = views.build_views(
        manifest_of([("a", "U8", [256], [1], 0), ("b", "BF16", [8], [1], 512)]), views.base_of(mapping.buffer, CPU)
    )
    assert [found[name].data_ptr() - mapping.address for name in "ab"] == [0, 512]


def test_a_view_keeps_the_memory_and_the_last_one_frees_it():
    """Closing the mapping under an engine must not leave a dangling pointer, nor keep the memory for ever."""
    before = arenas_mapped()
    mapping = mapped(struct.pack("<2f", 3, 4))
    found = views.build_views(manifest_of([("a", "F32", [2], [1], 0)]), views.base_of(mapping.buffer, CPU))
    part = found["a"][1:]
    mapping.close()
    del mapping, found
    gc.collect()
    assert arenas_mapped() == before + 1
    assert part.tolist() == [4]
    del part
    gc.collect()
    assert arenas_mapped() == before


def test_views_are_made_where_the_memory_is_whatever_device_is_the_default():
    """Engines build models under `with torch.device(...)`: the weights must neither move there nor become meta."""
    with torch.device("meta"):
        found = build(struct.pack("<2f", 3, 4), [("a", "F32", [2], [1], 0)])["a"]
    assert found.device == CPU and found.tolist() == [3, 4]


def test_views_want_no_gradient():
    """A gradient for 64 GiB of weights that nobody trains would be the next 64 GiB."""
    assert not build(bytes(256), [("a", "F32", [2], [1], 0)])["a"].requires_grad


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_as_before_even_after_an_error(was_enabled):
    """An engine that switched it off keeps it off, and one that did not is not left without."""
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), views.collection_paused():
            raise KeyError if not gc.isenabled() else AssertionError
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
