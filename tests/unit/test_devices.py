"""What counts as a device and as free memory, from recorded files and from an NVML that is told what to say."""

import logging
from types import SimpleNamespace

import pytest

from weightcache.daemon import devices
from weightcache.wire import reasons

GIB = 1 << 30
# The first lines of /proc/meminfo of a 24 GiB machine (kernel 6.18).
MEMINFO = "MemTotal:       24683584 kB\nMemFree:        17266940 kB\nMemAvailable:   24039944 kB\nBuffers:  54300 kB\n"
AVAILABLE = 24039944 * 1024
# /proc/self/cgroup of the same machine: version 1 for memory, version 2 beside it (hybrid).
HYBRID = "9:name=systemd:/\n8:pids:/\n5:devices:/\n4:memory:/kubepods/pod1/c1\n3:cpuset:/\n1:cpu:/\n0::/\n"
NO_LIMIT_V1 = 9223372036854771712  # what memory.limit_in_bytes says there when nothing is limited
V1_STAT = (
    "cache 999\ninactive_anon 421888\ninactive_file 16384\ntotal_inactive_anon 172896256\ntotal_inactive_file {}\n"
)
# memory.stat of version 2 in the order and with the names of Documentation/admin-guide/cgroup-v2.rst.
V2_STAT = (
    "anon 1234\nfile 5678\nkernel 90\nshmem 12\ninactive_anon 34\nactive_anon 56\ninactive_file {}\nactive_file 78\n"
)


@pytest.fixture
def node(tmp_path):
    """An empty ``proc`` and ``cgroup`` that a test fills; ``free()`` asks the code."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text(MEMINFO)

    def v1(path, limit, usage, cache):
        _write(cgroups / "memory" / path, "memory.limit_in_bytes", limit, "memory.usage_in_bytes", usage)
        (cgroups / "memory" / path / "memory.stat").write_text(V1_STAT.format(cache))

    def v2(path, limit, usage, cache):
        _write(cgroups / path, "memory.max", limit, "memory.current", usage)
        (cgroups / path / "memory.stat").write_text(V2_STAT.format(cache))

    return SimpleNamespace(
        proc=proc,
        v1=v1,
        v2=v2,
        belongs=(proc / "self" / "cgroup").write_text,
        free=lambda: devices.host_free_bytes(proc, cgroups),
    )


def _write(directory, limit_name, limit, usage_name, usage):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / limit_name).write_text(f"{limit}\n")
    (directory / usage_name).write_text(f"{usage}\n")


def test_without_a_cgroup_what_the_node_has_available_counts(node):
    """A workstation has no limits to read, and the daemon must start there."""
    assert node.free() == AVAILABLE
    node.belongs("0::/\n")
    assert node.free() == AVAILABLE


def test_a_container_limit_of_version_2_counts_with_its_page_cache_given_back(node):
    """A loader that trusts the node's figure in an 8 GiB pod is killed without a word."""
    node.belongs("0::/\n")
    node.v2("", 8 * GIB, 5 * GIB, 2 * GIB)
    assert node.free() == 8 * GIB - (5 * GIB - 2 * GIB)


def test_a_container_limit_of_version_1_counts_with_its_page_cache_given_back(node):
    """In version 1 the cache of child groups stands in the total line only, while usage counts them."""
    node.belongs(HYBRID)
    node.v1("kubepods/pod1/c1", 8 * GIB, 5 * GIB, 2 * GIB)
    assert node.free() == 5 * GIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_tightest_group_above_decides(node, version):
    """The pod's limit holds for its containers together, whatever each of them may use."""
    node.belongs(HYBRID if version == "v1" else "0::/kubepods/pod1/c1\n")
    limit = NO_LIMIT_V1 if version == "v1" else "max"
    write = getattr(node, version)
    write("", limit, 20 * GIB, GIB)
    write("kubepods", 16 * GIB, 10 * GIB, 0)
    write("kubepods/pod1", 6 * GIB, 4 * GIB, GIB)
    write("kubepods/pod1/c1", limit, 3 * GIB, 0)
    assert node.free() == 3 * GIB


@pytest.mark.parametrize(("version", "limit"), [("v1", NO_LIMIT_V1), ("v2", "max")])
def test_a_group_without_a_limit_is_no_limit(node, version, limit):
    """ "max" is no number and 9223372036854771712 is not a machine."""
    node.belongs(HYBRID if version == "v1" else "0::/a\n")
    getattr(node, version)("kubepods/pod1/c1" if version == "v1" else "a", limit, 3 * GIB, 0)
    assert node.free() == AVAILABLE


def test_a_path_of_the_host_seen_from_inside_a_container_leads_to_the_container(node):
    """Without a cgroup namespace the path is the host's, and the mount begins at the container's own group."""
    node.belongs("4:memory:/docker/0123456789abcdef\n0::/\n")
    node.v1("", 2 * GIB, GIB, 0)
    assert node.free() == GIB


def test_a_path_out_of_the_namespace_is_read_from_its_top(node):
    """A process moved out of its namespace's root has a path that begins with /.. (cgroup_namespaces(7))."""
    node.belongs("0::/../other\n")
    node.v2("", 2 * GIB, GIB, 0)
    assert node.free() == GIB


def test_a_group_over_its_limit_leaves_nothing_rather_than_less_than_nothing(node):
    """Usage may stand above a limit that was lowered; page cache may be counted above usage."""
    node.belongs("0::/\n")
    node.v2("", GIB, 2 * GIB, 0)
    assert node.free() == 0
    node.v2("", GIB, GIB // 2, 2 * GIB)
    assert node.free() == GIB


def test_garbage_in_a_cgroup_file_is_no_limit_and_a_missing_meminfo_is_a_refusal(node):
    """What cannot be read is said, and never ends as a stack trace."""
    node.belongs("garbage\n0::/\n::\n")
    node.v2("", "lots", GIB, 0)
    assert node.free() == AVAILABLE
    (node.proc / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(reasons.Refusal, match="MemAvailable") as caught:
        node.free()
    assert caught.value.reason is reasons.Reason.InsufficientHostMemory


def test_host_slots_are_numbered_devices_over_one_memory():
    """Everything above must work on a machine without a GPU."""
    slots = devices.list_host_slots(3)
    assert [slot.uuid for slot in slots] == ["host-0", "host-1", "host-2"]
    assert {slot.kind for slot in slots} == {devices.HOST}
    assert all(0 < slot.free_bytes <= slot.total_bytes for slot in slots)
    assert abs(devices.free_bytes(slots[0]) - slots[0].free_bytes) < 4 * GIB


class NVML:
    """As much of pynvml as is asked for; ``gpus``: dicts of what each GPU answers, or an error code to raise."""

    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_DRIVER_NOT_LOADED = 3, 15, 9
    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        def __init__(self, value):
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(self, gpus, init=None):
        self.gpus, self.init, self.open = gpus, init, 0

    def nvmlInit(self):  # noqa: N802 - NVML's name, as below
        if self.init:
            raise self.NVMLError(self.init)
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if isinstance(self.gpus[index], int):
            raise self.NVMLError(self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        found = [gpu for gpu in self.gpus if not isinstance(gpu, int) and gpu["uuid"] == uuid]
        if not found:
            raise self.NVMLError(6)
        return found[0]

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return handle["uuid"]

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle):  # noqa: N802
        return 9, 0

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=141 * GIB, free=handle.get("free", 140 * GIB))

    def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        mig = handle.get("mig", self.NVMLError(self.NVML_ERROR_NOT_SUPPORTED))
        if isinstance(mig, Exception):
            raise mig
        return mig


def test_gpus_are_listed_by_uuid_with_what_decides_a_key():
    """The capability goes into the key, the UUID into every name (answers W2, W7)."""
    nvml = NVML([{"uuid": "GPU-b"}, {"uuid": "GPU-a", "free": 7}])
    assert devices.list_gpus(nvml) == [
        devices.Device("GPU-b", "GPU", 0, "NVIDIA H200", "9.0", 141 * GIB, 140 * GIB, mig=False),
        devices.Device("GPU-a", "GPU", 1, "NVIDIA H200", "9.0", 141 * GIB, 7, mig=False),
    ]
    assert nvml.open == 0, "NVML is left as it was found"


def test_mig_mode_counts_when_it_is_on_and_not_when_it_waits_for_a_reset():
    """Memory cannot be shared across slices; a GPU that will be cut after the next reset is whole today."""
    nvml = NVML([{"uuid": "GPU-a", "mig": (1, 1)}, {"uuid": "GPU-b", "mig": (0, 1)}, {"uuid": "GPU-c"}])
    assert [gpu.mig for gpu in devices.list_gpus(nvml)] == [True, False, False]


def test_a_lost_gpu_does_not_take_the_others_with_it(caplog):
    """One card that fell off the bus must not make a node of eight useless, nor vanish in silence (answers K15)."""
    nvml = NVML([{"uuid": "GPU-a"}, NVML.NVML_ERROR_GPU_IS_LOST, {"uuid": "GPU-c", "mig": NVML.NVMLError(15)}])
    with caplog.at_level(logging.WARNING, "weightcache.daemon"):
        assert [gpu.uuid for gpu in devices.list_gpus(nvml)] == ["GPU-a"]
    assert [record.getMessage() for record in caplog.records] == [
        "GPU with NVML index 1 is left out: NVML error 15",
        "GPU with NVML index 2 is left out: NVML error 15",
    ]


def test_a_node_without_a_driver_is_told_so():
    """The reason reads the same in log, exit code and condition; the text is NVML's own."""
    nvml = NVML([], init=NVML.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(reasons.Refusal, match="NVML error 9; is the NVIDIA driver loaded") as caught:
        devices.list_gpus(nvml)
    assert caught.value.reason is reasons.Reason.GPUNotFound


def test_free_memory_is_asked_anew_and_by_uuid():
    """A figure from the start of the daemon says nothing about now (answers K13)."""
    nvml = NVML([{"uuid": "GPU-a", "free": 5}, {"uuid": "GPU-b", "free": 9}])
    _, second = devices.list_gpus(nvml)
    nvml.gpus.reverse()
    nvml.gpus[0]["free"] = 3
    assert devices.free_bytes(second, nvml) == 3
    nvml.gpus.pop(0)
    with pytest.raises(reasons.Refusal, match="GPU-b: NVML does not tell"):
        devices.free_bytes(second, nvml)
    assert nvml.open == 0
