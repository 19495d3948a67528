"""The version that both ends of a connection tell each other."""

from __future__ import annotations

import importlib.metadata

__all__ = ["version"]


def version() -> str:
    """The installed version of weightcache, ``0.0.0`` when run from files that were never installed."""
    try:
        return importlib.metadata.version("weightcache")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0"
