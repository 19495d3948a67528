"""The command ``weightcache``: finds the command's function, and makes every failure read the same.

A person on call sees a reason, the figures and the next step, a script sees the reason's exit code; neither sees a
traceback for what weightcache foresaw. A fault that it did not foresee keeps its traceback, under ``InternalError``.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from weightcache.cli import arguments
from weightcache.wire import reasons

__all__ = ["main"]

INTERRUPTED = 128 + 2  # SIGINT, as shells count it
BROKEN_PIPE = 128 + 13  # SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the process exit code. argparse ends the process itself for --help and errors."""
    options = arguments.build_parser().parse_args(argv)
    try:
        module, _, function = options.run.partition(":")
        code = getattr(importlib.import_module(f"weightcache.cli.{module}"), function)(options)
        sys.stdout.flush()
        return int(code)
    except reasons.Refusal as refusal:
        return report(refusal)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`| head`). Python would complain again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        traceback.print_exc()
        return report(reasons.Refusal(reasons.Reason.InternalError, f"{type(error).__name__}: {error}"))


def report(refusal: reasons.Refusal) -> int:
    """Say on standard error why a command failed and what to do; returns the reason's exit code."""
    print(f"weightcache: {refusal.reason}: {refusal.message}", file=sys.stderr)
    print(f"next step: {reasons.MEANINGS[refusal.reason].next_step}", file=sys.stderr)
    return reasons.exit_code(refusal.reason)


if __name__ == "__main__":
    sys.exit(main())
