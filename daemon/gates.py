"""How many loaders of a node read at once.

Each loader's buffers are bounded, but eight ranks of three caches that start together still ask the node for
twenty-four times that, and a disk that is read in twenty-four places is slower than one that is read in one. So
reading passes a gate: a few slots, each a lock file, shared by every rank of every daemon and pod of the node. A
killed loader's slot is free at once, because the kernel holds the lock and not a counter.

A slot is held around reading only, never around anything in which ranks wait for each other: a gate of one slot would
then be a deadlock. Not guaranteed: an order of arrival (a waiter looks again after a random pause).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from weightcache.daemon import locks
from weightcache.wire import reasons

__all__ = ["Gate", "GateSlot", "Stopped"]


class Stopped(Exception):
    """The waiter was told to stop; it holds nothing."""


class GateSlot:
    """A slot in this process's hands. ``number``: which."""

    def __init__(self, number: int, lock: locks.HeldLock) -> None:
        self.number = number
        self._lock = lock

    def release(self) -> None:
        """Give the slot back; twice is once."""
        self._lock.close()

    def __enter__(self) -> GateSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Gate:
    """The node's slots. ``holder``: one line that says who waits here and then holds, for the others' messages.

    ``num_slots`` is a setting of the installation. Slot files beyond it (it was larger once) are left alone, so a
    loader that still holds one of those does not count.
    """

    def __init__(self, directory: str | os.PathLike[str], num_slots: int, holder: str) -> None:
        if num_slots < 1:
            raise reasons.Refusal(reasons.Reason.SettingsInvalid, f"gate slots: {num_slots}, wanted 1 or more")
        self._paths = [Path(directory) / f"slot-{number}.lock" for number in range(num_slots)]
        self._holder = holder

    def acquire(
        self,
        on_wait: Callable[[str], None] = lambda holders: None,
        poll_seconds: float = 0.2,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> GateSlot:
        """Wait for a slot. ``on_wait`` is told who holds them, once and whenever that changes.

        Waits without a limit: a checkpoint of terabytes may be ahead. Looks every ``poll_seconds``, give or take half.
        Raises Stopped when ``should_stop`` says so, Refusal ``RootInvalid`` when a slot file cannot be used.
        """
        told = None
        while not should_stop():
            slot = self._try()
            if isinstance(slot, GateSlot):
                return slot
            if slot != told:
                on_wait(slot)
                told = slot
            time.sleep(poll_seconds * random.uniform(0.5, 1.5))
        raise Stopped(f"stopped waiting for the load gate {self._paths[0].parent}")

    def _try(self) -> GateSlot | str:
        """A free slot, tried from a random one on, or who holds them all."""
        start = random.randrange(len(self._paths))
        holders = {}
        for step in range(len(self._paths)):
            number = (start + step) % len(self._paths)
            mine = locks.Holder(detail=self._holder, pid=os.getpid(), since=time.time())
            found = locks.try_lock(self._paths[number], mine)
            if isinstance(found, locks.HeldLock):
                return GateSlot(number, found)
            holders[number] = found.describe()
        return "; ".join(f"slot {number}: {holders[number]}" for number in sorted(holders))
