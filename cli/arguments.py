"""Every command and option, in one place and without the weight of what they do.

A command line that imports torch to print its help is slow and fails on machines where the help is needed most. So
this module is the standard library's argparse alone; a command names its function as ``module:function`` (as package
entry points do), and :mod:`weightcache.cli.main` imports it when it is called.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

__all__ = ["COMMANDS", "Command", "build_parser", "size_bytes"]

DEFAULT_ROOT = Path("/run/weightcache")
_SIZE = re.compile(r"(?P<count>\d+(?:\.\d+)?)\s*(?P<prefix>[KMGT]?)(?:iB|i|B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class Command(NamedTuple):
    """``name`` as typed (two words for a command of a command); ``run``: ``module:function`` below this package."""

    name: str
    run: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def size_bytes(text: str) -> int:
    """Bytes from ``512MiB``, ``1.5G``, ``4096`` or, for a rate, ``2GiB/s``; powers of 1024 throughout. Pure.

    Raises argparse.ArgumentTypeError.
    """
    found = _SIZE.fullmatch(text.strip().removesuffix("/s"))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 2GiB/s")
    return round(float(found["count"]) * float(1024 ** _POWERS[found["prefix"].upper()]))


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Unknown options end the process with exit code 2, as SettingsInvalid does."""
    parser = _Parser(
        prog="weightcache",
        description="Keeps finished LLM weights in memory outside the engine. Every failure has a fixed reason and "
        "exit code: `weightcache reasons`.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    families: dict[str, argparse._SubParsersAction[_Parser]] = {}
    for command in COMMANDS:
        family, _, name = command.name.rpartition(" ")
        if family and family not in families:
            summary = _FAMILIES[family]
            above = commands.add_parser(family, help=summary, description=summary)
            families[family] = above.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
        place = families[family] if family else commands
        added = place.add_parser(name, help=command.summary, description=command.summary)
        command.add_arguments(added)
        added.set_defaults(run=command.run)
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse, but an abbreviated option is unknown, and errors read like all others of this program."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"weightcache: SettingsInvalid: {message}\nnext step: {self.prog} --help\n")


def _whole(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return value

    return count


def _seconds(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _group_id(text: str) -> int:
    if text == "-1" or text.isdecimal():
        return int(text)
    import grp

    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a group of this machine nor a group id") from None


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", choices=("table", "json"), default="table", help="for people, or for programs")


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, metavar="DIR", help="default: %(default)s")


def _add_target(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    which = parser.add_mutually_exclusive_group()
    name = "namespace/name, or a name that is the only such one"
    if positional:
        which.add_argument("cache", nargs="?", metavar="CACHE", help=name)
    else:
        which.add_argument("--cache", metavar="CACHE", help=name)
    which.add_argument("--socket", type=Path, metavar="PATH", help="the daemon's socket, instead of cache and root")
    _add_root(parser)


def _add_timeout(parser: argparse.ArgumentParser, seconds: float) -> None:
    parser.add_argument(
        "--timeout", type=_seconds, default=seconds, metavar="SECONDS", help="for the answer; default: %(default)g"
    )


def _daemon(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--spec", type=Path, required=True, metavar="FILE", help="a WeightCache, or its spec (YAML)")
    _add_root(parser)
    parser.add_argument("--status-socket", type=Path, metavar="PATH", help="private socket, answers from the start on")
    parser.add_argument("--on-owned", choices=("exit", "wait"), default="exit", help="when it cannot start")
    parser.add_argument("--gate-slots", type=_whole(1), default=1, metavar="N", help="loaders that read at once")
    parser.add_argument("--host-slots", type=_whole(1), default=8, metavar="N", help="slots for Host memory")
    parser.add_argument("--load-buffer", type=size_bytes, default=1 << 30, metavar="SIZE", help="a node; default: 1GiB")
    parser.add_argument("--reader-threads", type=_whole(1), default=16, metavar="N", help="a loader")
    parser.add_argument("--read-limit", type=size_bytes, default=0, metavar="SIZE/s", help="default: none")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--namespace", default="", metavar="NS", help="instead of the file's")
    parser.add_argument("--name", default="", help="instead of the file's")
    parser.add_argument("--uid", default="", help="instead of the file's")


def _prepare_root(parser: argparse.ArgumentParser) -> None:
    _add_root(parser)
    parser.add_argument("--daemons-group", type=_group_id, default=-1, metavar="GROUP", help="name or id: may own GPUs")
    parser.add_argument("--socket-group", type=_group_id, default=-1, metavar="GROUP", help="name or id: may connect")


def _status(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    _add_output(parser)
    parser.add_argument("--watch", action="store_true", help="until interrupted")
    parser.add_argument("--interval", type=_seconds, default=0.5, metavar="SECONDS", help="of --watch")
    _add_timeout(parser, 10)


def _verify(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--deep", action="store_true", default=True, help="recompute every digest (default)")
    depth.add_argument("--shallow", dest="deep", action="store_false", help="tell the last verdict")
    _add_output(parser)
    _add_timeout(parser, 3600)


def _release(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    parser.add_argument("--key", required=True, metavar="DIGEST", help="of the weights to free, as status shows it")
    parser.add_argument("--force", action="store_true", help="end leases that are still open after --grace")
    parser.add_argument("--grace", type=_seconds, default=0, metavar="SECONDS", help="with --force; default: 0")
    _add_timeout(parser, 60)


def _drain(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    _add_timeout(parser, 10)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="directory with config.json and weights")
    for name in ("tensor", "pipeline", "data"):
        parser.add_argument(f"--{name}", type=_whole(1), default=1, metavar="N", help=f"{name}-parallel size")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts a rank")
    parser.add_argument("--expert-placement", choices=("linear", "round_robin"), default="linear")
    parser.add_argument("--memory", choices=("GPU", "Host"), default="GPU")
    parser.add_argument("--digest", action="store_true", help="compute the content digest: reads the whole checkpoint")
    _add_output(parser)


def _diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="A", help="spec file")
    parser.add_argument("b", type=Path, nargs="?", metavar="B", help="spec file; else a running daemon")
    _add_target(parser, positional=False)
    parser.add_argument("--digest", action="store_true", help="compute content digests: reads the whole checkpoints")
    _add_output(parser)
    _add_timeout(parser, 10)


def _bench_attach(parser: argparse.ArgumentParser) -> None:
    _add_target(parser, positional=False)
    parser.add_argument("--runs", type=_whole(1), default=10, metavar="N", help="fresh processes; default: 10")
    parser.add_argument("--share", action="store_true", help="also when another engine holds the group")
    _add_output(parser)
    _add_timeout(parser, 60)


def _version(parser: argparse.ArgumentParser) -> None:
    _add_output(parser)


def _reasons(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", choices=("table", "json", "markdown"), default="table")


_FAMILIES = {"bench": "Measure a running daemon"}

COMMANDS = (
    Command("daemon", "starting:run_daemon", "Load a checkpoint, hold it, serve it", _daemon),
    Command("prepare-root", "starting:prepare_root", "Make the directories below the root, with their modes",
            _prepare_root),
    Command("status", "showing:show_status", "What daemons hold, how far they are, who uses it", _status),
    Command("verify", "controlling:verify", "Judge the resident bytes", _verify),
    Command("drain", "controlling:drain", "Give no new leases", _drain),
    Command("resume", "controlling:resume", "Give leases again, load again what was released", _drain),
    Command("release", "controlling:release", "Free the weights of a key", _release),
    Command("inspect", "inspecting:inspect", "Plan a checkpoint without loading it: ranks, bytes, key, refusals",
            _inspect),
    Command("diff", "diffing:diff", "Which key fields differ between two specs, or a spec and a daemon", _diff),
    Command("bench attach", "benching:bench_attach", "Attach every rank from fresh processes, and time it",
            _bench_attach),
    Command("reasons", "explaining:list_reasons", "Every reason of failure: exit code, meaning, next step", _reasons),
    Command("version", "explaining:show_version", "Versions of package, protocol and layout", _version),
)  # fmt: skip
