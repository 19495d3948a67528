"""What a daemon owns on the node: the root it stands on, its cache's name, and its GPUs, all by lock.

Two locks have to be held before anything is touched: the GPUs', so that no memory has two owners, and the cache's,
so that ``daemon.sock`` has one. All of it is taken together, given back together, and freed by the kernel whatever
happens.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from weightcache.crds import specs
from weightcache.daemon import devices, locks, modelfiles, ownership, roots, settings
from weightcache.wire import reasons

__all__ = ["Holding"]


class Holding:
    """The locks of one daemon. Use it as a context manager: leaving frees everything."""

    def __init__(self, config: settings.Settings) -> None:
        self._settings = config
        self._cache_lock: locks.HeldLock | None = None
        self._owned: ownership.Owned | None = None
        self._root: roots.Root | None = None

    def __enter__(self) -> Holding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned:
            self._owned.close()
        if self._cache_lock:
            self._cache_lock.close()

    @property
    def root(self) -> roots.Root:
        """The node's root, checked."""
        assert self._root is not None, "lock() comes first"
        return self._root

    @property
    def owned(self) -> tuple[devices.Device, ...]:
        """The owned GPUs or host slots, in the order that groups are cut from."""
        return tuple(self._ours.devices)

    def lock_descriptor(self, device: str) -> int:
        """The descriptor of a device's lock, to be inherited by its loader."""
        return self._ours.descriptor_of(device)

    def lock(self) -> None:
        """Take the cache's lock and every GPU's, all or none.

        Blocks for at most the choice lock's limit. Raises Refusal ``RootInvalid``, ``SocketPathTooLong``,
        ``GPUOwnedByAnother``, ``NotEnoughGPUs``, ``GPUNotFound``, ``MIGNotSupported``.
        """
        config = self._settings
        if config.prepare_root and _may_prepare(config.root):
            roots.prepare(config.root, socket_group=config.spec.socket.group)
        self._root = roots.open_root(config.root)
        holder = locks.Holder(
            namespace=config.cache.namespace,
            name=config.cache.name,
            uid=config.cache.uid,
            pid=os.getpid(),
            pod=os.environ.get("POD_NAME", ""),
            since=time.time(),
        )
        self._cache_lock = self._lock_cache(self._root, holder)
        found = self._list_devices()
        roots.check_socket_paths(self._root, config.cache.uid, [device.uuid for device in found])
        world = specs.world_size(config.spec.parallelism)
        self._owned = ownership.choose_and_lock(self._root, found, config.spec.gpus.per_node or world, holder)

    def make_directory(self, checkpoint: str) -> Path:
        """The cache's socket directory with ``model/`` in it. Raises Refusal ``RootInvalid``."""
        config = self._settings
        directory = roots.make_cache_directory(self.root, config.cache, config.spec.socket.group)
        modelfiles.fill_model_directory(directory, Path(checkpoint))
        return directory

    @property
    def _ours(self) -> ownership.Owned:
        assert self._owned is not None, "lock() comes first"
        return self._owned

    def _lock_cache(self, root: roots.Root, holder: locks.Holder) -> locks.HeldLock:
        short = roots.short_uid(self._settings.cache.uid)
        found = locks.try_lock(root.gpu_directory / f"cache-{short}.lock", holder)
        if isinstance(found, locks.HeldLock):
            return found
        raise reasons.Refusal(
            reasons.Reason.GPUOwnedByAnother,
            f"cache {holder.namespace}/{holder.name} ({holder.uid}) is served on this node by {found.describe()}",
        )

    def _list_devices(self) -> list[devices.Device]:
        if self._settings.spec.memory is specs.Memory.Host:
            return devices.list_host_slots(self._settings.host_slots)
        return devices.list_gpus()


def _may_prepare(root: Path) -> bool:
    """Whether the root is missing, or incomplete and ours. A foreign one is not mended but refused, by its reason."""
    try:
        return root.stat().st_uid in (0, os.geteuid()) and root.is_dir() and not (root / "gpu").is_dir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
