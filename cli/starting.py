"""``weightcache daemon`` and ``weightcache prepare-root``: from a command line to settings.

The daemon's own modules decide everything; what is done here is to translate, and to choose how its life is told: bars
on a terminal, lines in a log.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import msgspec

from weightcache.crds import specs
from weightcache.daemon import logs, settings
from weightcache.wire import protocol

__all__ = ["build_settings", "prepare_root", "run_daemon"]


def run_daemon(options: argparse.Namespace) -> int:
    """Run a daemon until it is ended; returns its exit code. Raises Refusal ``SettingsInvalid`` for a bad spec."""
    config = build_settings(options)
    if options.log_format == "text" and sys.stderr.isatty():
        from weightcache.cli import bars

        with bars.Bars() as observer:
            return _run(config, observer)
    return _run(config, logs.Narrator(style=options.log_format))


def build_settings(options: argparse.Namespace) -> settings.Settings:
    """Settings from parsed options. Reads the spec file; raises Refusal ``SettingsInvalid`` with file and path."""
    spec, cache = settings.read_document(options.spec)
    if options.namespace or options.name or options.uid:
        spec, cache = _renamed(spec, cache, options)
    return settings.Settings(
        spec=spec,
        cache=cache,
        root=options.root,
        status_socket=options.status_socket,
        on_owned=options.on_owned,
        gate_slots=options.gate_slots,
        host_slots=options.host_slots,
        load_buffer_bytes=options.load_buffer,
        reader_threads=options.reader_threads,
        bytes_per_second=options.read_limit,
    )


def prepare_root(options: argparse.Namespace) -> int:
    """Make what is missing below the root; repeating it changes nothing. Raises Refusal ``RootInvalid``."""
    from weightcache.daemon import roots

    roots.prepare(options.root, daemons_group=options.daemons_group, socket_group=options.socket_group)
    print(f"{options.root} is ready for daemons; engines mount {options.root / 's'}")
    return 0


def _renamed(
    spec: specs.WeightCacheSpec, cache: protocol.CacheRef, options: argparse.Namespace
) -> tuple[specs.WeightCacheSpec, protocol.CacheRef]:
    """The same spec under another identity, checked as if the file had said so."""
    identity = (options.namespace or cache.namespace, options.name or cache.name)
    same_name = identity == (cache.namespace, cache.name)
    document = {
        "apiVersion": settings.API_VERSION,
        "kind": "WeightCache",
        "metadata": {
            "namespace": identity[0],
            "name": identity[1],
            "uid": options.uid or (cache.uid if same_name else ""),
        },
        "spec": msgspec.to_builtins(spec),
    }
    return settings.parse_document(document, f"{options.spec} with --namespace, --name, --uid")


def _run(config: settings.Settings, observe: Callable[..., None]) -> int:
    from weightcache.daemon import running

    return running.run(config, observe)
