"""Which GPUs a daemon owns, and that nobody else does.

Two daemons that each take one GPU and wait for the other's never end; two that look first and lock later load two
models onto one card. So the choice is made under one short lock of the node, each GPU is tried and never waited for,
and a daemon gets all it wants or nothing. The lock is named by the GPU's UUID: neither the cache, its settings nor an
ordinal decides who collides with whom. Nothing below the root is opened here but lock files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

from weightcache.daemon import devices, locks, roots
from weightcache.wire import reasons

__all__ = ["CHOICE_SECONDS", "Owned", "choose_and_lock", "order"]

#: The choice lock is held while some files are opened: who waits longer than this waits for a stopped process.
CHOICE_SECONDS = 10.0


@dataclass(frozen=True)
class Owned:
    """Locked devices, in the order that groups are cut from. Close it, or leave it as a context manager, to free them.

    Guaranteed while it is open: no other process that asks here owns one of them, whatever its cache or settings.
    """

    devices: tuple[devices.Device, ...]
    locks: tuple[locks.HeldLock, ...]

    def descriptor_of(self, uuid: str) -> int:
        """The descriptor of a device's lock, for a child that must hold it too. KeyError when it is not ours."""
        return {device.uuid: lock.descriptor for device, lock in zip(self.devices, self.locks, strict=True)}[uuid]

    def close(self) -> None:
        """Let every lock go; twice is once. A child that inherited one keeps that one until it ends."""
        for lock in self.locks:
            lock.close()

    def __enter__(self) -> Owned:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def choose_and_lock(
    root: roots.Root,
    found: Sequence[devices.Device],
    count: int,
    holder: locks.Holder,
    preferred: Sequence[str] = (),
) -> Owned:
    """Lock ``count`` of the devices, all or none: ``preferred`` UUIDs first (as given), then in UUID order.

    Preferred devices that are not on the node are passed over. Waits for nothing but the node's choice lock, and for
    that at most ``CHOICE_SECONDS``. Raises Refusal ``NotEnoughGPUs``, ``MIGNotSupported``, ``GPUOwnedByAnother`` (with
    each holder), ``RootInvalid``; no lock is held then.
    """
    candidates = order(_without_mig(found, count), preferred)
    choice = locks.lock_within(root.gpu_directory / "choice.lock", holder, CHOICE_SECONDS)
    if isinstance(choice, locks.Holder):
        raise reasons.Refusal(
            reasons.Reason.GPUOwnedByAnother,
            f"another daemon has been choosing GPUs for over {CHOICE_SECONDS:g} s "
            f"({root.gpu_directory / 'choice.lock'}): {choice.describe()}",
        )
    with choice:
        return _lock(root, candidates, count, holder)


def order(found: Iterable[devices.Device], preferred: Sequence[str] = ()) -> list[devices.Device]:
    """Devices as they are tried: preferred ones as given, then GPUs by UUID, host slots by number. Pure."""
    rank = {uuid: place for place, uuid in reversed(list(enumerate(preferred)))}

    def place(device: devices.Device) -> tuple[int, int, str]:
        number = device.index if device.kind == devices.HOST else 0
        return rank.get(device.uuid, len(preferred)), number, device.uuid

    return sorted(found, key=place)


def _lock(root: roots.Root, candidates: list[devices.Device], count: int, holder: locks.Holder) -> Owned:
    taken: list[tuple[devices.Device, locks.HeldLock]] = []
    held: list[str] = []
    try:
        for device in candidates:
            if len(taken) == count:
                break
            lock = locks.try_lock(root.gpu_directory / f"{device.uuid}.lock", holder)
            if isinstance(lock, locks.HeldLock):
                taken.append((device, lock))
            else:
                held.append(f"{device.uuid} by {lock.describe()}")
        if len(taken) < count:
            raise reasons.Refusal(
                reasons.Reason.GPUOwnedByAnother,
                f"{count} of {len(candidates)} devices wanted, {len(taken)} free; held: {'; '.join(held)}",
            )
    except BaseException:
        for _, lock in taken:
            lock.close()
        raise
    return Owned(tuple(device for device, _ in taken), tuple(lock for _, lock in taken))


def _without_mig(found: Sequence[devices.Device], count: int) -> list[devices.Device]:
    if len(found) < count:
        names = ", ".join(device.uuid for device in found) or "none"
        raise reasons.Refusal(
            reasons.Reason.NotEnoughGPUs, f"{count} devices wanted, {len(found)} on the node: {names}"
        )
    whole = [device for device in found if not device.mig]
    if len(whole) < count:
        sliced = ", ".join(device.uuid for device in found if device.mig)
        raise reasons.Refusal(
            reasons.Reason.MIGNotSupported,
            f"{count} devices wanted, {len(whole)} of {len(found)} are whole; in MIG mode: {sliced}",
        )
    return whole
