"""Makes the virtual environments of this tree; standard library only, since nothing else is there yet.

The problem: torch with its CUDA libraries is 5 GB and minutes of download, but a fresh clone, a second checkout and a
CI run must each be ready in seconds, and two checkouts must not see each other's sources. And a set-up is killed
half way now and then, or two of them run at once.

The solution is two layers:

    <cache>/venvs/dev-<key>        everything that is pinned in constraints.txt; shared by all trees with equal needs
    <cache>/venvs/exporter-<key>   what makes test checkpoints, on top of dev-<key> (its torch is not downloaded twice)
    <tree>/.venv                   thin: sees dev-<key> through a .pth file, and holds the editable install of this tree
    <tree>/.venv-exporter          a link to exporter-<key>

The key covers the interpreter, the requirements and their pins, never the sources. A shared environment is built under
another name and renamed when it is complete, so a half-made one never counts; one lock a key makes a second builder
wait for the first. What is there already needs no network. <cache> is $WEIGHTCACHE_CACHE_DIR, or else
${XDG_CACHE_HOME:-~/.cache}/weightcache; it may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TREE = Path(__file__).resolve().parent.parent
LAYOUT = 1  # raise it when the way an environment is built changes
DEV_EXTRAS = ("dev",)
STAMP = "weightcache-stamp"


class Layer(NamedTuple):
    """One shared environment: what goes in, what proves it, and how much room its making takes."""

    name: str
    requirements: list[str]
    constraints: Path
    below: Path | None  # site-packages of the layer that this one sees
    proof: str  # Python statements that must run in it before it counts
    needs_bytes: int


class SetupError(Exception):
    """Set-up cannot go on; the message says what to do."""


def say(text: str) -> None:
    """Print one line of progress at once, also into a pipe."""
    print(f"setup: {text}", flush=True)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Say what is being done, and the seconds it took once it is done."""
    say(f"{what} ...")
    begin = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - begin:.1f} s")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the file's lock; the kernel frees it when this process dies, however it dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up that holds {path}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_dir() -> Path:
    """The folder that all trees of this user share."""
    own = os.environ.get("WEIGHTCACHE_CACHE_DIR")
    if own:
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "weightcache"


def requirements(project: dict[str, Any], extras: tuple[str, ...]) -> list[str]:
    """Pure: the core dependencies and those of the extras, sorted; an extra that names our own extras is followed."""
    found = set(project["dependencies"])
    for extra in extras:
        for entry in project["optional-dependencies"][extra]:
            own = re.fullmatch(re.escape(project["name"]) + r"\[(.+)\]", entry)
            found.update(requirements(project, tuple(own[1].split(","))) if own else [entry])
    return sorted(found)


def key(layer: Layer) -> str:
    """16 hex digits over everything that decides what the environment holds."""
    pins = [line for line in layer.constraints.read_text().splitlines() if line and not line.startswith("#")]
    parts = [
        LAYOUT, layer.name, layer.requirements, sorted(pins), str(layer.below),
        sys.version, sys.base_prefix, platform.machine(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def site_packages(venv: Path) -> Path:
    """Where the environment keeps its packages; all are made by the interpreter that runs this."""
    return venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def run(*command: str | Path) -> None:
    """Run a command to its end, its output to ours; raises SetupError naming it."""
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SetupError(f"this command failed with exit status {done.returncode}: {' '.join(map(str, command))}")


def see_below(venv: Path, below: Path) -> None:
    """Let an environment import what another one holds; addsitedir also obeys the .pth files found there."""
    (site_packages(venv) / "weightcache-below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")


def drop_scripts(venv: Path) -> None:
    """Remove console scripts: their first line names the folder under which the environment was built.

    Everything is started as `python -m`. Machine code (ruff) stays: its package looks for it there.
    """
    for path in (venv / "bin").iterdir():
        if path.is_symlink() or path.name.startswith("python"):
            continue
        with path.open("rb") as file:
            if file.read(2) == b"#!" or path.name.lower().startswith("activate"):
                path.unlink()


def check_room(layer: Layer, folder: Path) -> None:
    """Raise SetupError before the download rather than in its middle."""
    free = shutil.disk_usage(folder).free
    if free < layer.needs_bytes:
        raise SetupError(
            f"{folder} has {free / 1e9:.1f} GB free, and making the {layer.name} environment takes about "
            f"{layer.needs_bytes / 1e9:.1f} GB: free some, or set WEIGHTCACHE_CACHE_DIR to a folder on another disk"
        )


def build(layer: Layer, venv: Path) -> None:
    """Make the environment at `venv` from nothing; the caller holds its lock."""
    for left in venv.parent.glob(f".{venv.name}.partial-*"):
        shutil.rmtree(left, ignore_errors=True)  # by a set-up that was killed
    # Never that one's name again: its pip may outlive it for a while, and would write into ours.
    partial = venv.with_name(f".{venv.name}.partial-{os.getpid()}")
    check_room(layer, venv.parent)
    python = partial / "bin" / "python"
    with timed(f"building the {layer.name} environment in {venv}"):
        run(sys.executable, "-m", "venv", *(["--without-pip"] if layer.below else []), partial)
        if layer.below:
            see_below(partial, layer.below)  # pip is seen there too
        # No pip cache: the environment itself is the cache, and a second copy of the wheels is 3 GB.
        pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-cache-dir", "--retries", "8")
        run(*pip, "install", "--quiet", "--progress-bar", "off", "-c", layer.constraints, *layer.requirements)
        run(python, "-W", "ignore", "-c", layer.proof)
        drop_scripts(partial)
        partial.rename(venv)


def ensure(layer: Layer) -> Path:
    """The complete shared environment of this layer, built if it is not there."""
    venv = cache_dir() / "venvs" / f"{layer.name}-{key(layer)}"
    if not venv.is_dir():
        with locked(venv.with_name(f".{venv.name}.lock")):
            if not venv.is_dir():
                build(layer, venv)
    say(f"{layer.name} environment: {venv}")
    return venv


def install_tree(shared: Path, settings: dict[str, Any]) -> None:
    """Make <tree>/.venv see `shared` and this tree's own sources; does nothing when it does already.

    New modules need no new install, since whole folders are mapped; a changed [project] or [tool.setuptools] does.
    """
    venv = TREE / ".venv"
    below = json.dumps([LAYOUT, str(TREE), str(shared)])
    mapping = json.dumps([settings["project"], settings["tool"]["setuptools"]])
    with locked(TREE / "pyproject.toml"):  # any file of the tree would do: the lock is on its inode
        stamps = (venv / STAMP).read_text().splitlines() if (venv / STAMP).is_file() else []
        if stamps == [below, mapping]:
            say(f"this tree: {venv} is up to date")
            return
        with timed(f"installing this tree into {venv}"):
            if stamps[:1] != [below]:
                shutil.rmtree(venv, ignore_errors=True)
                run(sys.executable, "-m", "venv", "--without-pip", venv)
                see_below(venv, site_packages(shared))
            (venv / STAMP).write_text(f"{below}\n")  # until the install is complete this tree has none
            python = venv / "bin" / "python"
            pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet")
            run(*pip, "--no-index", "--no-deps", "--no-build-isolation", "--editable", TREE)
            (venv / STAMP).write_text(f"{below}\n{mapping}\n")


def link_exporter(shared: Path) -> None:
    """Point <tree>/.venv-exporter at the environment that makes checkpoints."""
    partial = TREE / f".venv-exporter.{os.getpid()}"
    partial.symlink_to(shared)
    partial.rename(TREE / ".venv-exporter")


def main(arguments: list[str]) -> int:
    """`dev` (the default) readies .venv; `exporter` readies .venv-exporter as well. Returns the exit status."""
    if arguments not in ([], ["dev"], ["exporter"]):
        print("usage: scripts/setup [dev|exporter]", file=sys.stderr)
        return 2
    settings = tomllib.loads((TREE / "pyproject.toml").read_text())
    dev = Layer(
        "dev", requirements(settings["project"], DEV_EXTRAS), TREE / "constraints.txt", None,
        "import hypothesis, msgspec, mypy, numpy, pytest, setuptools, torch, xxhash, yaml", 9_000_000_000,
    )  # fmt: skip
    try:
        shared = ensure(dev)
        install_tree(shared, settings)
        if arguments == ["exporter"]:
            exporter = Layer(
                "exporter", settings["dependency-groups"]["exporter"], TREE / "constraints-exporter.txt",
                site_packages(shared), "import modelopt.torch.quantization, transformers, accelerate", 2_000_000_000,
            )  # fmt: skip
            link_exporter(ensure(exporter))
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
