"""``weightcache reasons`` and ``weightcache version``: what this program can say, without a daemon.

The table of exit codes in the documentation is this module's output, so that the two cannot part.
"""

from __future__ import annotations

import argparse
import json
import platform

from weightcache.cli import consoles
from weightcache.wire import reasons

__all__ = ["list_reasons", "markdown_table", "show_version"]


def list_reasons(options: argparse.Namespace) -> int:
    """Print every reason with exit code, meaning and next step."""
    if options.output == "markdown":
        print(markdown_table(), end="")
    elif options.output == "json":
        rows = [{"reason": str(reason), **meaning._asdict()} for reason, meaning in reasons.MEANINGS.items()]
        print(json.dumps(rows, indent=2))
    else:
        from rich import table

        built = table.Table(box=None, pad_edge=False, header_style="bold")
        built.add_column("CODE", justify="right")
        for name in ("REASON", "MEANING", "NEXT STEP"):
            built.add_column(name, no_wrap=name == "REASON")
        for reason, meaning in reasons.MEANINGS.items():
            built.add_row(str(meaning.exit_code), reason, meaning.meaning, meaning.next_step)
        consoles.show(built)
    return 0


def markdown_table() -> str:
    """The table of exit codes as Markdown. Pure."""
    rows = ["| code | reason | meaning | waiting can help | next step |", "|---:|---|---|---|---|"]
    rows += [
        f"| {found.exit_code} | `{reason}` | {found.meaning} | {'yes' if found.retry else 'no'} | {found.next_step} |"
        for reason, found in reasons.MEANINGS.items()
    ]
    return "\n".join(rows) + "\n"


def show_version(options: argparse.Namespace) -> int:
    """Print the versions that both ends of a connection compare."""
    from weightcache.wire import keys, protocol, versions

    found = {
        "weightcache": versions.version(),
        "protocol": protocol.PROTOCOL,
        "layout": keys.LAYOUT_VERSION,
        "python": platform.python_version(),
    }
    if options.output == "json":
        print(json.dumps(found))
    else:
        print("weightcache {weightcache} (protocol {protocol}, layout {layout}, Python {python})".format(**found))
    return 0
