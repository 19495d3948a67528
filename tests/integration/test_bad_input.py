"""Bad input at the front door: a real daemon, its exit code, its message, its status; and nothing left behind."""

import json
import os
import struct
import time
from typing import Any

import pytest

from tests.support import checkpoints, daemons
from weightcache.wire import reasons

R = reasons.Reason


@pytest.fixture
def checkpoint(tmp_path):
    return checkpoints.make_checkpoint(tmp_path / "model", "qwen3_moe", "nvfp4", num_shards=2)


def edit_config(checkpoint, **change):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def shards(checkpoint):
    return sorted(checkpoint.glob("*.safetensors"))


def header_of(path):
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    return json.loads(path.read_bytes()[8 : 8 + length]), 8 + length


def put_scale(checkpoint, value):
    """Overwrite one expert's global scale in place; returns its name."""
    for path in shards(checkpoint):
        header, start = header_of(path)
        for name, entry in header.items():
            if name.endswith("experts.3.up_proj.weight_scale_2"):
                with path.open("r+b") as file:
                    file.seek(start + entry["data_offsets"][0])
                    file.write(struct.pack("<f", value))
                return name
    raise AssertionError("no such scale")


def huge(checkpoint):
    """A checkpoint of 128 GiB that is one hole: read as far as its headers, it is sound."""
    rows = 1 << 29
    for path in shards(checkpoint):
        path.unlink()
    (checkpoint / "model.safetensors.index.json").unlink()
    for name in checkpoint.glob("hf_quant_config.json"):
        name.unlink()
    made = checkpoints.make_config("llama", "none", num_hidden_layers=1)
    tensors = checkpoints.make_tensors(made)
    (checkpoint / "config.json").write_text(json.dumps({**made, "vocab_size": rows}))
    entries, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        full = (rows, *shape[1:]) if shape[0] == made["vocab_size"] else shape
        size = len(data) // shape[0] * full[0]
        entries[name] = {"dtype": dtype, "shape": list(full), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(entries).encode()
    with (checkpoint / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        try:
            file.truncate(8 + len(text) + position)
        except OSError as error:
            pytest.skip(f"this file system holds no sparse file of 128 GiB: {error}")


CASES: dict[str, tuple[Any, dict[str, Any], reasons.Reason, list[str]]] = {
    "no such directory": (lambda c: c.rename(c.with_name("gone")), {}, R.CheckpointNotFound, ["model"]),
    "a shard is missing": (lambda c: shards(c)[1].unlink(), {}, R.CheckpointIncomplete, ["model-00002-of-00002"]),
    "a shard is cut off": (
        lambda c: os.truncate(shards(c)[0], 5000),
        {},
        R.CheckpointIncomplete,
        ["model-00001", "5000"],
    ),
    "unknown architecture": (
        lambda c: edit_config(c, architectures=["GPT9"]),
        {},
        R.UnsupportedArchitecture,
        ["GPT9", "Qwen3MoeForCausalLM"],
    ),
    "unknown quantization": (
        lambda c: edit_config(c, quantization_config={"quant_method": "awq"}),
        {},
        R.UnsupportedQuantization,
        ["awq"],
    ),
    "another quantization than expected": (
        lambda c: None,
        {"quantization": {"method": "none"}},
        R.UnsupportedQuantization,
        ["'none'", "modelopt/NVFP4"],
    ),
    "sizes that do not divide": (lambda c: None, {"parallelism": {"tensor": 3}}, R.ParallelismDoesNotDivide, ["3"]),
    "more memory than there is": (huge, {}, R.InsufficientHostMemory, ["needs", "are free", "short", "GiB"]),
    "a scale that is not a number": (
        lambda c: put_scale(c, float("nan")),
        {},
        R.ScaleInvalid,
        ["experts.3.up_proj.weight_scale_2", "nan"],
    ),
    "a scale of zero": (lambda c: put_scale(c, 0.0), {}, R.ScaleInvalid, ["experts.3.up_proj.weight_scale_2", "0.0"]),
    "a negative scale": (
        lambda c: put_scale(c, -1.0),
        {},
        R.ScaleInvalid,
        ["experts.3.up_proj.weight_scale_2", "-1.0"],
    ),
    "more GPUs than there are": (lambda c: None, {"gpus": {"perNode": 9}}, R.NotEnoughGPUs, ["9", "4"]),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_with_its_reason_and_leaves_nothing(tmp_path, checkpoint, case):
    """Exit code, message with the names and values, no socket, no lock (answers W12, W23)."""
    damage, change, reason, words = CASES[case]
    damage(checkpoint)
    spec = daemons.write_spec(tmp_path / "cache.json", checkpoint, **change)
    with daemons.DaemonProcess(spec, tmp_path / "root") as daemon:
        assert daemon.wait_ended() == reasons.exit_code(reason), daemon.log
        (line,) = [line for line in daemon.log.splitlines() if " refused " in line]
        for word in (str(reason), *words):
            assert word in line, line
        assert "Traceback" not in daemon.log
    assert not list((tmp_path / "root" / "s").glob("*/*.sock*"))


def test_a_waiting_daemon_shows_the_reason_and_recovers_when_it_is_mended(tmp_path, checkpoint):
    """A pod does not crash-loop: it says why, and starts by itself once the cause is gone."""
    hidden = shards(checkpoint)[1].rename(checkpoint / "elsewhere")
    spec = daemons.write_spec(tmp_path / "cache.json", checkpoint)
    with daemons.DaemonProcess(spec, tmp_path / "root", "--on-owned", "wait") as daemon:
        status = daemon.wait_for(lambda status: status.reason, "refused")
        assert (status.state, status.reason) == ("Refused", "CheckpointIncomplete")
        assert "model-00002-of-00002" in status.message
        hidden.rename(checkpoint / "model-00002-of-00002.safetensors")
        assert daemon.wait_ready().reason == ""


def test_a_checkpoint_that_changes_while_it_is_read_is_read_again(tmp_path, checkpoint):
    """Half old and half new must never be served: the load starts over with the new files."""
    spec = daemons.write_spec(tmp_path / "cache.json", checkpoint)
    with daemons.DaemonProcess(spec, tmp_path / "root", "--read-limit", "150KiB/s") as daemon:
        daemon.wait_for(lambda status: status.groups and status.groups[0].ranks[0].state == "Reading", "reading")
        path = shards(checkpoint)[0]
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        status = daemon.wait_ready()
        assert "reason=CheckpointChanged" in daemon.log
        content = status.key.content
    time.sleep(0.1)
    with daemons.DaemonProcess(spec, tmp_path / "root") as again:
        assert again.wait_ready().key.content == content, "the content that was proven is that of the new files"


# --- the root and the paths -----------------------------------------------------------------------------------------
def refused(tmp_path, checkpoint, root):
    spec = daemons.write_spec(tmp_path / "cache.json", checkpoint)
    with daemons.DaemonProcess(spec, root) as daemon:
        code = daemon.wait_ended()
        (line,) = [line for line in daemon.log.splitlines() if " refused " in line]
        return code, line


def test_a_root_that_is_a_file_is_refused(tmp_path, checkpoint):
    """The message names it."""
    (tmp_path / "root").touch()
    code, line = refused(tmp_path, checkpoint, tmp_path / "root")
    assert code == reasons.exit_code(R.RootInvalid) and str(tmp_path / "root") in line


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_root_of_another_owner_is_refused(tmp_path, checkpoint):
    """Whoever owns the root can replace every lock and socket."""
    (tmp_path / "root").mkdir()
    os.chown(tmp_path / "root", 65534, 65534)
    code, line = refused(tmp_path, checkpoint, tmp_path / "root")
    assert code == reasons.exit_code(R.RootInvalid) and "65534" in line


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_bound(tmp_path, checkpoint):
    """107 bytes are the kernel's limit; its own message would be `invalid argument` (answers K20)."""
    root = tmp_path / ("r" * 100)
    code, line = refused(tmp_path, checkpoint, root)
    assert code == reasons.exit_code(R.SocketPathTooLong) and "107" in line
    assert not list(root.glob("s/*/*.sock*"))


def test_an_unknown_field_of_the_spec_is_refused_with_its_path(tmp_path, checkpoint):
    """A typo must not become a default."""
    spec = daemons.write_spec(tmp_path / "cache.json", checkpoint, parallelism={"tensro": 2})
    with daemons.DaemonProcess(spec, tmp_path / "root") as daemon:
        assert daemon.wait_ended() == reasons.exit_code(R.SettingsInvalid)
        assert "tensro" in daemon.log and "$.spec.parallelism" in daemon.log and "Traceback" not in daemon.log
