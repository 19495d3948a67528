"""From the daemon's command line to its settings."""

import json
from pathlib import Path

import pytest

from weightcache.cli import arguments, main, starting
from weightcache.daemon import settings
from weightcache.wire import reasons


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "llama.json"
    path.write_text(json.dumps({"model": {"hostPath": "/models/llama"}, "parallelism": {"tensor": 2}}))
    return path


def settings_of(*line):
    return starting.build_settings(arguments.build_parser().parse_args(["daemon", *map(str, line)]))


def test_without_options_the_settings_are_the_daemons_own(spec):
    """Two sets of defaults would part one day."""
    found = settings_of("--spec", spec)
    assert found == settings.Settings(spec=found.spec, cache=found.cache)
    assert (found.cache.namespace, found.cache.name) == ("default", "llama")


def test_every_option_reaches_its_setting(spec):
    """An option that is parsed and dropped is worse than none."""
    line = "--root /r --status-socket /p.sock --on-owned wait --gate-slots 2 --host-slots 3 --load-buffer 64MiB"
    found = settings_of("--spec", spec, *line.split(), "--reader-threads", 5, "--read-limit", "1GiB/s")
    assert (found.root, found.status_socket, found.on_owned) == (Path("/r"), Path("/p.sock"), "wait")
    assert (found.gate_slots, found.host_slots, found.load_buffer_bytes) == (2, 3, 64 << 20)
    assert (found.reader_threads, found.bytes_per_second) == (5, 1 << 30)


def test_identity_on_the_command_line_wins_and_decides_the_uid(spec):
    """In a pod the operator names the cache; the UID belongs to that name and to no other."""
    named = settings_of("--spec", spec, "--namespace", "research", "--name", "llama")
    uid = "01234567-89ab-cdef-0123-456789abcdef"
    given = settings_of("--spec", spec, "--namespace", "research", "--uid", uid)
    for found in (named, given):
        assert (found.cache.namespace, found.cache.name) == ("research", "llama")
    assert named.cache.uid not in (settings_of("--spec", spec).cache.uid, "")
    assert given.cache.uid == uid
    assert named.spec == given.spec == settings_of("--spec", spec).spec


def test_a_uid_in_the_file_stays_when_the_name_does(tmp_path):
    """Overriding with the same value changes nothing."""
    uid = "01234567-89ab-cdef-0123-456789abcdef"
    path = tmp_path / "wc.json"
    head = {"apiVersion": settings.API_VERSION, "kind": "WeightCache", "metadata": {"name": "a", "uid": uid}}
    path.write_text(json.dumps({**head, "spec": {"model": {"hostPath": "/m"}}}))
    assert settings_of("--spec", path, "--name", "a").cache.uid == uid
    assert settings_of("--spec", path, "--name", "b").cache.uid != uid


@pytest.mark.parametrize("identity", [("--name", "../x"), ("--uid", "no-uuid"), ("--namespace", "a/b")])
def test_an_identity_that_cannot_be_a_directory_is_refused(spec, identity):
    """Names become directories and links below the root."""
    with pytest.raises(reasons.Refusal) as refusal:
        settings_of("--spec", spec, *identity)
    assert refusal.value.reason is reasons.Reason.SettingsInvalid


def test_an_unknown_field_is_refused_with_its_path_before_anything_starts(tmp_path, capsys):
    """A misspelt setting must not be ignored."""
    path = tmp_path / "wc.yaml"
    path.write_text("model: {hostPath: /m}\nparallelism: {tensro: 2}\n")
    assert main.main(["daemon", "--spec", str(path)]) == 2
    said = capsys.readouterr().err
    assert "SettingsInvalid" in said and "tensro" in said and "$.parallelism" in said


def test_a_prepared_root_can_be_prepared_again(tmp_path, capsys):
    """Init containers run at every start."""
    for _ in range(2):
        assert main.main(["prepare-root", "--root", str(tmp_path / "root")]) == 0
    assert {path.name for path in (tmp_path / "root").iterdir()} == {"gpu", "gate", "keeper", "s"}
    assert str(tmp_path / "root" / "s") in capsys.readouterr().out


def test_a_root_that_cannot_be_is_refused_with_its_reason(tmp_path, capsys):
    """A file where the root should be."""
    (tmp_path / "file").write_text("")
    code = main.main(["prepare-root", "--root", str(tmp_path / "file")])
    assert code == reasons.exit_code(reasons.Reason.RootInvalid)
    assert str(tmp_path / "file") in capsys.readouterr().err
