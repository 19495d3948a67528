"""A dry run must say what a load would do, and refuse what a load would refuse."""

import json

import pytest
import xxhash

from tests.support import checkpoints
from weightcache.cli import main
from weightcache.wire import reasons

BLOCK = 4 << 20


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return checkpoints.make_checkpoint(tmp_path_factory.mktemp("m") / "moe", "qwen3_moe", "nvfp4", num_shards=2)


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    """Digests that this user has kept must not answer for a test's files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def inspect(capsys, *line):
    code = main.main(["inspect", *map(str, line), "--output", "json"])
    return code, json.loads(capsys.readouterr().out or "null")


def test_a_group_reads_every_byte_and_holds_every_tensor(moe, capsys):
    """What one rank leaves out another must read: nothing of the files may escape the content digest."""
    _, whole = inspect(capsys, moe)
    code, found = inspect(capsys, moe, "--tensor", 2, "--expert-parallel")
    size = sum(path.stat().st_size for path in moe.glob("*.safetensors"))
    assert code == 0
    assert found["files"] == {path.name: path.stat().st_size for path in moe.glob("*.safetensors")}
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert [rank["experts"] for rank in found["ranks"]] == ["0-3", "4-7"]
    assert whole["ranks"][0]["read_bytes"] == size <= sum(rank["read_bytes"] for rank in found["ranks"])
    assert all(rank["arena_bytes"] < whole["ranks"][0]["arena_bytes"] for rank in found["ranks"])


def test_placement_decides_which_experts_a_rank_holds(moe, capsys):
    """The wrong placement gives fluent garbage, so it is shown rank by rank (answers W5)."""
    line = ("--tensor", 2, "--expert-parallel", "--expert-placement", "round_robin")
    _, found = inspect(capsys, moe, *line)
    assert [rank["experts"] for rank in found["ranks"]] == ["0,2,4,6", "1,3,5,7"]


def test_the_digest_is_the_content_and_completes_the_key(moe, capsys):
    """Recomputed here from the format's description: blocks, files, table."""
    _, without = inspect(capsys, moe)
    _, found = inspect(capsys, moe, "--digest")
    rows = []
    for path in sorted(moe.glob("*.safetensors")):
        data = path.read_bytes()
        blocks = [xxhash.xxh3_128_digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
        rows.append([path.name, len(data), xxhash.xxh3_128_digest(b"".join(blocks))])
    import msgspec

    table = msgspec.msgpack.encode(["xxh3-128/4MiB", rows])
    assert found["content"] == found["key"]["content"] == xxhash.xxh3_128_hexdigest(table)
    assert len(found["key_digest"]) == 32
    assert without["content"] == without["key_digest"] == "", "a digest without content would pass for the daemon's"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--tensor", 3), reasons.Reason.ParallelismDoesNotDivide),
        (("--pipeline", 4), reasons.Reason.ParallelismDoesNotDivide),
        (("--tensor", 16, "--expert-parallel"), reasons.Reason.ParallelismDoesNotDivide),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_their_reason(moe, options, reason, capsys):
    """An hour in a queue for GPUs is not the way to learn this."""
    code = main.main(["inspect", str(moe), *map(str, options)])
    assert code == reasons.exit_code(reason)
    assert capsys.readouterr().err.startswith(f"weightcache: {reason}: ")


def test_a_missing_directory_and_an_unknown_architecture_have_their_own_codes(tmp_path, capsys):
    """The reason must be the true one (answers W12)."""
    assert main.main(["inspect", str(tmp_path / "nowhere")]) == 20
    strange = checkpoints.make_checkpoint(tmp_path / "strange", "llama", architectures=["MysteryForCausalLM"])
    assert main.main(["inspect", str(strange)]) == 25
    assert "MysteryForCausalLM" in capsys.readouterr().err


def test_a_bad_scale_is_found_when_the_bytes_are_read(tmp_path, capsys):
    """A zero scale is 1/0 in a kernel: the full dry run refuses it with the tensor's name (answers W23)."""
    path = tmp_path / "bad"
    config = checkpoints.make_config("llama", "nvfp4")
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    tensors = checkpoints.make_tensors(config)
    name = "model.layers.1.mlp.down_proj.weight_scale_2"
    tensors[name] = ("F32", (), b"\0\0\0\0")
    checkpoints.write_shards(path, tensors)
    assert main.main(["inspect", str(path)]) == 0
    capsys.readouterr()
    assert main.main(["inspect", str(path), "--digest"]) == reasons.exit_code(reasons.Reason.ScaleInvalid)
    assert name in capsys.readouterr().err


def test_the_table_is_for_people(moe, capsys):
    """The same figures, readable, with what memory it takes."""
    assert main.main(["inspect", str(moe), "--tensor", "2", "--memory", "Host"]) == 0
    said = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM, bfloat16, 8 experts a layer" in said
    assert "modelopt" in said and "NVFP4" in said
    assert "this machine has" in said
    assert "digest unknown: --digest" in said and "position.tensor_rank" in said
