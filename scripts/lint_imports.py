"""Runs import-linter over the rooms, seen through the links in .typing.

import-linter cannot read the package where setuptools' editable finder serves it: the finder adds a place that is no
folder to each package's path, and modules go missing from the graph. The links show the same files as plain folders.
"""

from __future__ import annotations

import sys
from pathlib import Path

from importlinter.cli import lint_imports_command

sys.path[:] = [entry for entry in sys.path if not entry.startswith("__editable__")]
sys.meta_path[:] = [
    finder for finder in sys.meta_path if not getattr(finder, "__module__", "").startswith("__editable__")
]
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / ".typing"))
lint_imports_command()
