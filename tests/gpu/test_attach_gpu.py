"""Attaching to GPU memory: claim, descriptors, mapping and views over a real arena, as an engine does it."""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import servers
from weightcache.engine import attaching, filling, leases
from weightcache.wire import protocol

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu]

WEIGHT = struct.pack("<6f", 1, 2, 3, 4, 5, 6)
SIZE_BYTES = 64 << 20


@pytest.fixture
def server(device_uuid: str, tmp_path: Path) -> Iterator[Any]:
    """One rank in two allocations on the first GPU; the second tensor lies across their border."""
    tensors = [("weight", "F32", [2, 3], WEIGHT), ("large", "U8", [SIZE_BYTES], b"\x07"), ("last", "F32", [6], WEIGHT)]
    arena = servers.make_arena(
        tensors, kind="GPU", device=device_uuid, aliases={"tied": "weight"}, chunk_bytes=32 << 20
    )
    with servers.ArenaServer(tmp_path / "root", [[arena]], memory_kind="GPU") as running:
        yield running


def attach(server: Any, **options: Any) -> attaching.Attached:
    """Attach as an engine without weight files."""
    return attaching.attach(server.directory, servers.KEY, cache_uid=servers.REF.uid, **options)


def test_an_engine_gets_views_on_its_gpu_whose_bytes_are_verified(server: Any, device_uuid: str) -> None:
    """Values, device, aliases and digests, over several allocations in one range (answers W1, W2)."""
    with attach(server, verify=True) as attached:
        assert attached.gpu == device_uuid and attached.tensors["weight"].is_cuda
        assert attached.tensors["weight"].tolist() == [[1, 2, 3], [4, 5, 6]]
        assert attached.tensors["last"].tolist() == [1, 2, 3, 4, 5, 6]
        assert (attached.tensors["large"][0].item(), attached.tensors["large"].sum(dtype=torch.int64).item()) == (7, 7)
        assert attached.tensors["tied"] is attached.tensors["weight"]


def test_a_module_computes_with_the_mapped_weights(server: Any) -> None:
    """Built on meta, filled without a copy, used by a kernel."""
    with torch.device("cuda"), filling.meta_parameters():
        layer = torch.nn.Linear(3, 2, bias=False)
    with attach(server) as attached:
        filling.fill(layer, {"weight": attached.tensors["weight"]})
        assert layer.weight.data_ptr() == attached.tensors["weight"].data_ptr()
        assert layer(torch.ones(3, device="cuda")).tolist() == [6, 15]


def test_views_are_on_the_gpu_whatever_device_is_the_default(server: Any) -> None:
    """Engines attach inside `with torch.device(...)`."""
    with torch.device("meta"), attach(server) as attached:
        assert attached.tensors["weight"].is_cuda


def test_tensors_outlive_close_and_give_the_memory_back_with_the_last_one(server: Any) -> None:
    """Never a dangling pointer on the GPU either; other engines still map the arena."""
    attached = attach(server)
    kept = attached.tensors["last"]
    attached.close()
    gc.collect()
    assert kept.tolist() == [1, 2, 3, 4, 5, 6] and attached.state is leases.State.Closed
    with attach(server, client=protocol.Client(name="second")) as second:
        del kept
        gc.collect()
        assert second.tensors["last"].sum().item() == 21
