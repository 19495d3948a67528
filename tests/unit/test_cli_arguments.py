"""The command line itself: what it accepts, what it refuses, and that it stays light."""

import argparse
import importlib
import json
import subprocess
import sys

import pytest

from weightcache.cli import arguments
from weightcache.daemon import settings


@pytest.mark.parametrize("command", arguments.COMMANDS, ids=lambda command: command.name)
def test_every_command_leads_to_a_function(command):
    """A command whose function was renamed would fail only when somebody needs it."""
    module, _, function = command.run.partition(":")
    assert callable(getattr(importlib.import_module(f"weightcache.cli.{module}"), function))


def test_asking_for_help_imports_nothing_heavy():
    """Help must work, and quickly, where torch, a GPU or even the daemon's own libraries are broken."""
    code = (
        "import sys, json; before = set(sys.modules); import weightcache.cli.main as main;"
        "main.arguments.build_parser(); print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    loaded = {name.partition(".")[0] for name in json.loads(ended.stdout)}
    assert loaded.isdisjoint({"torch", "numpy", "msgspec", "rich", "yaml", "xxhash", "asyncio", "cuda", "pynvml"})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("4096", 4096),
        ("1KiB", 1024),
        ("512MiB", 536_870_912),
        ("1.5G", 1_610_612_736),
        ("2Gi", 2_147_483_648),
        ("2GiB/s", 2_147_483_648),
        (" 3 tib ", 3_298_534_883_328),
    ],
)
def test_sizes_are_read_as_people_write_them(text, wanted):
    """A buffer of 1 GiB must not become one of 1 GB, or of one byte."""
    assert arguments.size_bytes(text) == wanted


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1PiB", "2GX/s", "1e9", "0x10", "1 2"])
def test_what_is_no_size_is_refused(text):
    """A typo must not start a daemon with another limit."""
    with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
        arguments.size_bytes(text)


@pytest.mark.parametrize(
    "line",
    [
        "status --outptu json",
        "status --out json",  # an abbreviation would change its meaning with the next option
        "status cache --socket s",
        "stat",
        "daemon",
        "daemon --spec f --gate-slots 0",
        "daemon --spec f --read-limit fast",
        "daemon --spec f --on-owned hope",
        "verify --deep --shallow",
        "release",
        "bench",
        "prepare-root --socket-group no-such-group-here",
        "verify --timeout nan",
    ],
)
def test_what_is_not_understood_ends_with_exit_code_2_and_its_reason(line, capsys):
    """A script sees the code of SettingsInvalid, a person what was wrong and where to look."""
    with pytest.raises(SystemExit) as ended:
        arguments.build_parser().parse_args(line.split())
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert said[0].startswith("weightcache: SettingsInvalid: ") and said[1].startswith("next step: weightcache")


def test_the_default_root_is_the_daemons():
    """A status that looks below another root than the daemon's says that nothing runs."""
    assert arguments.DEFAULT_ROOT == settings.DEFAULT_ROOT


def test_groups_are_accepted_by_name_and_by_number():
    """Images have numbers, workstations have names."""
    line = ["prepare-root", "--socket-group", "root", "--daemons-group", "123"]
    parsed = arguments.build_parser().parse_args(line)
    assert (parsed.socket_group, parsed.daemons_group) == (0, 123)
