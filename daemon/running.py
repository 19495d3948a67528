"""The life of a daemon, in the order that keeps its promises.

    private status socket -> lock the cache, then every GPU -> read headers, refuse what cannot work -> bind sockets
    -> a loader per rank (gate, read, digest, seal) -> verify -> serve -> on SIGTERM: sockets away, locks last

Nothing below the root but lock files is opened before the locks are held. Sockets are bound before loading, so
that an engine that waits is told the progress, and one that asks for something else is told at once. A daemon that
cannot start says why on the private socket, in its log and as its exit code; with ``--on-owned wait`` it stays and
tries again.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from weightcache.daemon import backoff, caches, holdings, logs, ranks, roots, serving, settings, supervising
from weightcache.wire import reasons, sockets, versions

__all__ = ["Daemon", "run"]

TERMINATION_MESSAGE = Path("/dev/termination-log")


def run(config: settings.Settings, observe: Callable[..., None] | None = None) -> int:
    """Run a daemon until SIGTERM or SIGINT, or until it cannot start; returns the process exit code."""
    _raise_open_files_limit()
    return asyncio.run(Daemon(config, observe or logs.Narrator()).main())


class Daemon:
    """One daemon process: starts, retries, ends. The work is in the modules it puts together."""

    def __init__(self, config: settings.Settings, observe: Callable[..., None]) -> None:
        self._settings = config
        self._observe = observe
        self._stop = asyncio.Event()
        self.cache = caches.Cache(
            ref=config.cache,
            spec=config.spec,
            model=str(settings.checkpoint_directory(config.spec)),
            version=versions.version(),
            instance=secrets.token_hex(8),
            clock=time.time,
            started_at=time.time(),
        )

    async def main(self) -> int:
        """The whole life; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        supervisor = supervising.Supervisor(max_children=max(64, 2 * self._settings.host_slots))
        keeper = ranks.Ranks(self._settings, self.cache, supervisor, self._observe)
        server = serving.Server(self.cache, keeper)
        keeper.server = server
        self._observe(
            "starting",
            cache=f"{self.cache.ref.namespace}/{self.cache.ref.name}",
            uid=self.cache.ref.uid,
            model=self.cache.model,
            version=self.cache.version,
            pid=os.getpid(),
        )
        try:
            if self._settings.status_socket is not None:
                _open_private(server, self._settings.status_socket)
            return await self._until_started(keeper, server)
        except reasons.Refusal as refusal:
            return self._refused(refusal)
        finally:
            await server.close()
            supervisor.close()
            self._observe("stopped", cache=self.cache.ref.name)

    async def _until_started(self, keeper: ranks.Ranks, server: serving.Server) -> int:
        attempt = 0
        while not self._stop.is_set():
            try:
                with holdings.Holding(self._settings) as holding:
                    await asyncio.to_thread(holding.lock)
                    attempt = 0
                    await self._serve(holding, keeper, server)
                return 0
            except reasons.Refusal as refusal:
                self.cache.groups = []
                code = self._refused(refusal)
                if self._settings.on_owned == "exit" and refusal.reason is not reasons.Reason.CheckpointChanged:
                    return code
                attempt += 1
                await self._pause(backoff.retry_seconds(attempt))
        return 0

    async def _serve(self, holding: holdings.Holding, keeper: ranks.Ranks, server: serving.Server) -> None:
        self._observe("owns", gpus=",".join(device.uuid for device in holding.owned))
        try:
            await keeper.plan(holding)
            self.cache.refusal = None
            directory = await asyncio.to_thread(holding.make_directory, self.cache.model)
            server.open_public(directory, keeper.all_ranks(), self._settings.spec.socket.group)
            keeper.start()
            await keeper.serve_until(self._stop)
        finally:
            server.close_public()
            await keeper.close()

    def _refused(self, refusal: reasons.Refusal) -> int:
        self.cache.refusal = refusal
        code = reasons.exit_code(refusal.reason)
        next_step = reasons.MEANINGS[refusal.reason].next_step
        self._observe("refused", reason=str(refusal.reason), message=refusal.message, next_step=next_step, code=code)
        try:
            if TERMINATION_MESSAGE.is_file():
                TERMINATION_MESSAGE.write_text(f"{refusal.reason}: {refusal.message}\n")
        except OSError:
            pass
        return code

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return


def _open_private(server: serving.Server, path: Path) -> None:
    limit = sockets.PATH_LIMIT_BYTES - len(roots.TEMPORARY_SUFFIX)
    if len(os.fsencode(path)) > limit:
        raise reasons.Refusal(
            reasons.Reason.SocketPathTooLong,
            f"status socket {path}: {len(os.fsencode(path))} bytes, {limit} are the limit",
        )
    try:
        server.open_private(path)
    except OSError as error:
        raise reasons.Refusal(reasons.Reason.SettingsInvalid, f"status socket {path}: {error}") from error


def _raise_open_files_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
