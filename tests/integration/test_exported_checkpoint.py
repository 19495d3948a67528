"""What nvidia-modelopt and transformers really write, through plan, load and attach, against slicing done by hand.

The checkpoints come from the exporter environment (``scripts/setup exporter``), the daemons and loaders are real
processes, and the expected bytes come from :mod:`demo.slicing`, which shares no code with the product.
"""

import contextlib
import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from demo import client, processes, slicing
from weightcache.daemon import settings
from weightcache.wire import reasons

EXPORTER = processes.TREE / ".venv-exporter" / "bin" / "python"
SHARDED = ["qwen3-moe", "llama-tied"]
WHOLE = [
    "qwen3-moe",
    "qwen3",
    "llama",
    "llama-tied",
    "qwen3-moe-bf16",
    "qwen3-moe-uncalibrated",
    "qwen3-moe-dead-expert",
]
EXPERTS = {"enabled": True}
ROUND_ROBIN = {"enabled": True, "placement": "round_robin"}

pytestmark = [
    pytest.mark.skipif(not EXPORTER.exists(), reason="no exporter environment: run scripts/setup exporter"),
    pytest.mark.timeout(240),  # the first test also makes the checkpoints
]


@pytest.fixture(scope="module")
def exported():
    """Directories by kind; a sharded one by kind and number of shards. Made once a machine, then kept."""
    found = dict(zip(WHOLE, export(*WHOLE), strict=True))
    return found | {f"{kind}-3": path for kind, path in zip(SHARDED, export(*SHARDED, "--shards", "3"), strict=True)}


def export(*arguments):
    """The exporter's own process; directories in the order asked for."""
    made = subprocess.run(
        [EXPORTER, processes.TREE / "demo" / "make_checkpoint.py", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return [Path(line) for line in made.stdout.split()]


@pytest.fixture
def place():
    """A short directory (socket paths are limited) and the processes in it, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="wc-") as directory, contextlib.ExitStack() as ends:
        yield Path(directory), ends


def start(place, checkpoint, parallelism, num_ranks):
    """A daemon on host slots; the spec's file and the daemon."""
    directory, ends = place
    spec = directory / "cache.yaml"
    document = {"model": {"hostPath": str(checkpoint)}, "memory": "Host", "parallelism": parallelism}
    spec.write_text(json.dumps(document))
    return spec, processes.Daemon(spec, directory / "root", num_ranks, ends)


LAYOUTS = [
    ("qwen3-moe", {"tensor": 2, "expert": EXPERTS}, 2),
    ("qwen3-moe", {"tensor": 2, "expert": ROUND_ROBIN}, 2),
    ("qwen3-moe", {"tensor": 2, "pipeline": 2}, 4),
    ("qwen3-moe", {"data": 2, "expert": EXPERTS}, 2),
    ("qwen3-moe-3", {"tensor": 4}, 4),
    ("qwen3-moe-bf16", {"tensor": 2, "expert": EXPERTS}, 2),
    ("qwen3", {"tensor": 2}, 2),
    ("qwen3", {"pipeline": 3}, 3),
    ("llama", {}, 1),
    ("llama-tied", {"tensor": 2}, 2),
    ("llama-tied-3", {"pipeline": 2}, 2),
]


def name_of(kind, parallelism, _):
    """The id of a case, such as ``qwen3-moe-tensor2-round_robin``."""
    sizes = [f"{axis}{size}" for axis, size in parallelism.items() if axis != "expert"]
    placements = [parallelism["expert"].get("placement", "linear")] if "expert" in parallelism else []
    return "-".join([kind, *sizes, *placements])


@pytest.mark.parametrize(("kind", "parallelism", "num_ranks"), LAYOUTS, ids=[name_of(*case) for case in LAYOUTS])
def test_every_tensor_of_an_exported_checkpoint_arrives_bit_for_bit(exported, place, kind, parallelism, num_ranks):
    """Each rank's names, shapes, dtypes and bytes are those cut by hand from the files. Answers W4, W5, W21, W22."""
    spec, daemon = start(place, exported[kind], parallelism, num_ranks)
    daemon.wait_until_ready()
    wanted, _ = settings.read_document(spec)
    attached = client.Client(wanted, place[0] / "root" / "s" / "by-name" / "default" / "cache", share=False)
    try:
        assert len(attached.ranks) == num_ranks
        assert attached.check()["faults"] == []
        if kind.startswith("llama-tied"):
            last = attached.ranks[-1].tensors
            assert last["lm_head.weight"] is last["model.embed_tokens.weight"]
    finally:
        attached.close()


def test_a_checkpoint_exported_without_calibration_is_refused(exported, place):
    """The exporter leaves every input scale out then; served, each activation would be scaled by garbage. W22, W23."""
    _, daemon = start(place, exported["qwen3-moe-uncalibrated"], {"tensor": 2, "expert": EXPERTS}, 2)
    code = daemon.process.wait(timeout=60)
    assert code == reasons.exit_code(reasons.Reason.CheckpointIncomplete), daemon.log_tail()
    assert "self_attn.q_proj.input_scale" in daemon.log_tail()


def test_an_exported_expert_of_zeros_is_refused_by_the_name_of_its_scale(exported, place):
    """The exporter writes NaN block scales and a global scale of 0 for it: NaN for some prompts only. Answers W23."""
    _, daemon = start(place, exported["qwen3-moe-dead-expert"], {"tensor": 2, "expert": EXPERTS}, 2)
    code = daemon.process.wait(timeout=60)
    assert code == reasons.exit_code(reasons.Reason.ScaleInvalid), daemon.log_tail()
    assert "model.layers.2.mlp.experts.5." in daemon.log_tail()


def test_the_exporter_really_quantized_and_every_expert_has_its_scales(exported):
    """Otherwise all of the above would be true of a bf16 checkpoint too."""
    quantization = json.loads((exported["qwen3-moe"] / "config.json").read_text())["quantization_config"]
    assert (quantization["quant_method"], quantization["quant_algo"]) == ("modelopt", "NVFP4")
    held = slicing.rank_tensors(exported["qwen3-moe"], slicing.Layout())
    for layer in range(4):
        for scale in ("w13_weight_scale_2", "w2_weight_scale_2", "w13_input_scale", "w2_input_scale"):
            values = held[f"model.layers.{layer}.mlp.experts.routed_experts.{scale}"]
            assert values.shape[0] == 8 and bool((values > 0).all())


def test_the_witness_tells_neighbouring_ranks_and_placements_apart(exported):
    """A witness to whom all ranks look alike would pass anything: shapes are equal, bytes are not. Answers W5."""
    linear = [slicing.Layout(2, rank, expert_parallel=True) for rank in range(2)]
    spread = slicing.Layout(2, 0, expert_parallel=True, placement="round_robin")
    first, second, other = (slicing.rank_tensors(exported["qwen3-moe"], layout) for layout in (*linear, spread))
    for found in (second, other):
        faults = slicing.compare(found, first)
        assert faults and all("bytes differ" in fault for fault in faults)
    assert {fault.split(":")[0].rsplit(".", 1)[1][:3] for fault in slicing.compare(other, first)} == {"w13", "w2_"}
    assert slicing.compare(first, first) == []
