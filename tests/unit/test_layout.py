"""Guards of the house: the rooms are mapped onto one package, and every mistake in that mapping shows here.

A folder called ``operator`` at the root shadows the standard library as soon as it is a regular package, and a module
that the mapping misses works in a checkout and is missing for users. Neither is seen by any other test.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

TREE = Path(__file__).resolve().parent.parent.parent
SETTINGS = tomllib.loads((TREE / "pyproject.toml").read_text())
MAPPING = {
    package.removeprefix("weightcache."): folder
    for package, folder in SETTINGS["tool"]["setuptools"]["package-dir"].items()
}
NOT_ROOMS = {"benchmarks", "build", "demo", "dist", "docs", "manifests", "scripts", "tests"}
VAGUE = {"base", "common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}


def room_files() -> list[Path]:
    """Every file of every room, relative to the tree, without byte code."""
    found = (path for folder in MAPPING.values() for path in (TREE / folder).rglob("*"))
    return sorted(path.relative_to(TREE) for path in found if path.is_file() and "__pycache__" not in path.parts)


def test_every_folder_with_modules_is_a_mapped_room():
    """A new room that nobody mapped would work in the checkout and be missing from the wheel."""
    folders = {path.parent.name for path in TREE.glob("*/*.py")}
    rooms = {name for name in folders if not name.startswith(".")} - NOT_ROOMS
    assert rooms == set(MAPPING.values()), "pyproject.toml maps other folders than those that hold modules"


def test_a_room_has_the_name_of_its_folder_and_stands_in_every_list():
    """The package list, the import contracts and the mapping name the same rooms."""
    packages = {f"weightcache.{name}" for name in MAPPING}
    assert all(name == folder for name, folder in MAPPING.items())
    assert set(SETTINGS["tool"]["setuptools"]["packages"]) == packages
    assert set(SETTINGS["tool"]["importlinter"]["root_packages"]) == packages


def test_no_room_is_a_regular_package():
    """An __init__.py in operator/ breaks `python -m pip`, and one in weightcache/ breaks the mapping."""
    inits = [path for path in room_files() if path.name == "__init__.py"]
    assert inits == []
    assert not (TREE / "__init__.py").exists()
    assert not (TREE / "weightcache").exists()


def test_rooms_are_flat():
    """A module in a sub-folder is importable in the checkout and silently left out of the wheel."""
    deep = [path for path in room_files() if len(path.parts) > 2]
    assert deep == []


def test_no_module_hides_a_standard_one_or_says_nothing():
    """`python daemon/x.py` puts the room on the path, where a module called `queue` would replace the standard one."""
    names = {path.stem for path in room_files() if path.suffix == ".py"} - {"__main__"}
    assert names & (sys.stdlib_module_names | VAGUE) == set()


@pytest.mark.parametrize("room", sorted(MAPPING))
def test_type_checkers_see_the_room_through_a_relative_link(room: str):
    """A missing or absolute link makes mypy pass by checking nothing, or another checkout."""
    link = TREE / ".typing" / "weightcache" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{MAPPING[room]}"


def test_no_link_is_left_of_a_room_that_is_gone():
    """A dangling link is skipped by type checkers without a word."""
    assert {path.name for path in (TREE / ".typing" / "weightcache").iterdir()} == set(MAPPING)


@pytest.mark.parametrize("statement", ["import dataclasses", "import operator, random; assert operator.add(1, 2) == 3"])
def test_the_standard_library_works_from_the_root(statement: str):
    """The folder called operator must never be found before the standard module, not even without site."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", statement], cwd=TREE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree with the setuptools that is installed here, offline."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(TREE / name, source / name)
    for folder in MAPPING.values():
        shutil.copytree(TREE / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-index", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--wheel-dir", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("weightcache-*.whl")
    return built


def test_the_wheel_holds_every_file_of_every_room_and_nothing_else(wheel: Path):
    """Modules and data files (CUDA sources, PTX) that exist in the checkout reach the user."""
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {name for name in names if ".dist-info/" not in name}
    expected = {str(PurePosixPath("weightcache", *path.parts)) for path in room_files()}
    assert shipped == expected


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path):
    """Users get the Apache licence text and a `weightcache` command that points at a function that exists."""
    archive = zipfile.ZipFile(wheel)
    entries, licence = (
        next(archive.read(name).decode() for name in archive.namelist() if name.endswith(end))
        for end in ("entry_points.txt", "licenses/LICENSE")
    )
    assert "weightcache = weightcache.cli.main:main" in entries
    assert "Apache License" in licence
    assert re.search(r"^def main\(", (TREE / "cli" / "main.py").read_text(), re.MULTILINE)


def test_every_test_says_what_it_promises():
    """A red test without a sentence tells whoever broke it nothing."""
    silent = [
        f"{path.relative_to(TREE)}::{node.name}"
        for path in (TREE / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-exporter.txt"])
def test_pins_are_exact_and_name_no_address(name: str):
    """A pin with an address or a range would make the set-up depend on one registry, or on the day."""
    lines = [line for line in (TREE / name).read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line)] == []
