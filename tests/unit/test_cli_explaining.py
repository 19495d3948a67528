"""What the documentation says of the command line is what the command line says of itself."""

import argparse
import json
import re
from pathlib import Path

import pytest

from weightcache.cli import arguments, explaining, main
from weightcache.wire import reasons

PAGE = (Path(__file__).parents[2] / "docs" / "CLI.md").read_text()


def test_the_documented_exit_codes_are_those_of_the_program():
    """Scripts are written after the page; renew the table with `weightcache reasons --output markdown`."""
    assert explaining.markdown_table() in PAGE


def test_the_table_has_one_row_for_each_reason():
    """The generator itself must not leave one out."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", explaining.markdown_table(), re.MULTILINE)
    assert [(int(code), name) for code, name in rows] == [
        (meaning.exit_code, str(reason)) for reason, meaning in reasons.MEANINGS.items()
    ]


def parsers():
    """Every command's parser by its name."""
    top = next(a for a in arguments.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in top.choices.items():
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if below:
            yield from ((f"{name} {word}", found) for word, found in below[0].choices.items())
        else:
            yield name, parser


@pytest.mark.parametrize(("name", "parser"), list(parsers()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_and_option_is_documented(name, parser):
    """An option that only the source knows does not exist for its user."""
    section = re.search(rf"^## weightcache {re.escape(name)}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section, f"docs/CLI.md has no section for {name}"
    options = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
    missing = [option for option in options if not re.search(rf"{re.escape(option)}\b", section[1])]
    assert missing == []


def test_reasons_are_readable_by_programs(capsys):
    """An alert rule wants codes and whether waiting helps, not prose."""
    assert main.main(["reasons", "--output", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"reason": "DaemonUnreachable", "exit_code": 42, "retry": True} in [
        {name: row[name] for name in ("reason", "exit_code", "retry")} for row in rows
    ]


def test_the_table_of_reasons_is_not_cut_in_a_pipe(capsys):
    """`weightcache reasons | grep` must find the end of every line."""
    assert main.main(["reasons"]) == 0
    said = capsys.readouterr().out
    for meaning in reasons.MEANINGS.values():
        assert f"{meaning.next_step}\n" in said
