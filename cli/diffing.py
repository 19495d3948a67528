"""``weightcache diff``: in which key fields two specs differ, or a spec and what a daemon holds.

Two deployments that look alike and do not match cost an afternoon. The keys say why, field by field, with what to
change. Sameness of content is shown by evidence where files can prove it, and never guessed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich import table

from weightcache.cli import asking, consoles, inspecting, targets
from weightcache.daemon import checkpoints, keying, settings
from weightcache.wire import evidence, keys, protocol, reasons

__all__ = ["Side", "compare", "diff", "judge_content"]

NOT_COMPARED = "not compared; use --digest"


@dataclass(frozen=True)
class Side:
    """One of the two: its name for messages, the key of its rank 0, and its files where they are at hand.

    ``taken_at``: when the files' stats were taken, Unix seconds.
    """

    name: str
    key: keys.Key
    files: evidence.Evidence | None = None
    taken_at: float = 0.0


def diff(options: argparse.Namespace) -> int:
    """Print the fields that differ; 0 when none does, else the exit code of ``KeyMismatch``. Content that nothing
    proves is said to be so, and does not count as a difference."""
    left = _read_spec(options.a, compute_digest=options.digest)
    right = _read_spec(options.b, compute_digest=options.digest) if options.b else _ask_daemon(options)
    found, content = compare(left, right)
    if options.output == "json":
        rows = msgspec.to_builtins(found)
        print(json.dumps({"a": left.name, "b": right.name, "content": content, "differences": rows}, indent=2))
    else:
        _print(left, right, found, content)
    return reasons.exit_code(reasons.Reason.KeyMismatch) if found else 0


def compare(left: Side, right: Side) -> tuple[list[keys.Difference], str]:
    """Every field that differs, and what is known of the content. Pure.

    Rank 0 stands for the group: the other ranks' keys follow from the same fields.
    """
    found = [part for part in keys.differences(left.key, right.key) if part.field != "content"]
    verdict, why = judge_content(left, right)
    if verdict is evidence.Verdict.Different:
        advice = "point both ends at the same checkpoint files"
        wanted, held = (side.key.content or "(not digested)" for side in (left, right))
        found.insert(0, keys.Difference("content", wanted, held, advice))
    return found, f"{verdict.value}: {why}"


def judge_content(left: Side, right: Side) -> tuple[evidence.Verdict, str]:
    """Whether both mean the same bytes, and why: by digest, else by the evidence of their files. Pure."""
    if left.key.content and right.key.content:
        if left.key.content == right.key.content:
            return evidence.Verdict.Same, "equal content digests"
        return evidence.Verdict.Different, "different content digests"
    if left.files is None or right.files is None:
        return evidence.Verdict.Unproven, NOT_COMPARED
    held = evidence.HeldContent(
        digest="",
        cache_uid="",
        files=[
            evidence.HeldFile(file.name, file.stat, evidence.is_settled(file.stat, right.taken_at), file.blob, b"")
            for file in right.files.files
        ],
    )
    verdict, why = evidence.judge(left.files, held)
    return verdict, f"{why}; {NOT_COMPARED}" if verdict is evidence.Verdict.Unproven else why


def _read_spec(path: Path, *, compute_digest: bool) -> Side:
    spec, cache = settings.read_document(path)
    checkpoint = checkpoints.read(settings.checkpoint_directory(spec))
    key = keying.build_keys(spec, checkpoint)[0]
    if compute_digest:
        key = msgspec.structs.replace(key, content=inspecting.content_digest(checkpoint))
    try:
        files = evidence.gather(checkpoint.directory, checkpoint.stats)
    except OSError as error:
        raise reasons.Refusal(reasons.Reason.CheckpointChanged, f"{checkpoint.directory}: {error}") from error
    return Side(f"{path} ({cache.namespace}/{cache.name})", key, files, time.time())


def _ask_daemon(options: argparse.Namespace) -> Side:
    target = targets.find_one(options.root, options.cache, options.socket)
    status = asking.ask(target.socket, protocol.Status(), protocol.DaemonStatus, options.timeout)
    if status.key is None:
        trouble = f": {status.reason}: {status.message}" if status.reason else ""
        raise reasons.Refusal(reasons.Reason.NotReady, f"{target.name} has no key yet, it is {status.state}{trouble}")
    return Side(f"daemon {target.name}", status.key)


def _print(left: Side, right: Side, found: list[keys.Difference], content: str) -> None:
    print(f"A: {left.name}\nB: {right.name}\ncontent: {content}")
    if not found:
        print("no key field differs")
        return
    built = table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    built.add_column("FIELD", no_wrap=True)
    for name in ("A", "B", "ADVICE"):
        built.add_column(name, overflow="fold")
    for part in found:
        built.add_row(part.field, part.wanted, part.held, part.advice)
    consoles.show(built)
