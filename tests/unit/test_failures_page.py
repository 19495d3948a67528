"""docs/failures.md is a promise: every line has an answer, and every test that it names exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text()


def functions_of(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_line_of_the_list_is_answered():
    """A failure that somebody else paid for must not be met here unprepared."""
    lines = re.findall(r"^([WK]\d+)\. .*\n\n> (.+)$", PAGE, re.MULTILINE)
    assert [name for name, _ in lines] == [f"W{n}" for n in range(1, 40)] + [f"K{n}" for n in range(1, 33)]
    assert all(answer.strip() and "@" not in answer for _, answer in lines)


def test_every_test_that_the_page_names_exists():
    """An answer that was renamed away is no answer."""
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE))
    assert len(named) > 20
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(ROOT / path)]
    assert missing == []
