"""NVML on a real GPU says what nvidia-smi says, and costs no CUDA context."""

import shutil
import subprocess

import pytest

from weightcache.daemon import devices
from weightcache.wire import reasons

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpus():
    """The GPUs of this machine; skips with the reason where there is none."""
    try:
        found = devices.list_gpus()
    except reasons.Refusal as refusal:
        pytest.skip(refusal.message)
    if not found:
        pytest.skip("NVML lists no GPU")
    return found


def smi(fields):
    """What nvidia-smi answers: a list of values for each GPU."""
    if not shutil.which("nvidia-smi"):
        pytest.skip("nvidia-smi, the independent witness, is not here")
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [[value.strip() for value in line.split(",")] for line in lines]


def test_gpus_are_those_that_nvidia_smi_lists(gpus):
    """A wrong UUID is another rank's lock and socket (answers W2)."""
    seen = smi("uuid,name,compute_cap,mig.mode.current")
    assert [[gpu.uuid, gpu.name, gpu.capability] for gpu in gpus] == [row[:3] for row in seen]
    assert [gpu.mig for gpu in gpus] == [row[3] == "Enabled" for row in seen]


def test_memory_is_what_nvidia_smi_shows(gpus):
    """Need and free are compared before a byte is read; a wrong figure is a crash while loading."""
    for gpu, (total, free) in zip(gpus, smi("memory.total,memory.free"), strict=True):
        assert abs(gpu.total_bytes / 2**20 - int(total)) <= 1
        assert abs(devices.free_bytes(gpu) / 2**20 - int(free)) <= 64, "MiB; others may come and go in between"


def test_asking_takes_no_memory_on_the_gpu(gpus):
    """The serving process must hold no CUDA context, on any GPU it looks at."""
    before = devices.free_bytes(gpus[0])
    for _ in range(3):
        devices.list_gpus()
    assert before - devices.free_bytes(gpus[0]) < 64 << 20, "a context takes hundreds of MiB"
