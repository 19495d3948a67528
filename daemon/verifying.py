"""The verifier: another process than the one that filled an arena says whether its bytes are what was sealed.

A loader that published before its copies were done would digest the same half-written bytes it serves. So the arena is
read back through the door that engines use, a read-only mapping of the descriptors, by a process without torch that
starts in a moment and ends with its CUDA context. What it cannot judge it does not call damaged.
"""

from __future__ import annotations

import os
import sys
import time

from weightcache.arenas import extents, memory
from weightcache.daemon import children, orders, states
from weightcache.wire import manifests, reasons

__all__ = ["compare", "verify"]


def verify(child: children.Child, order: orders.VerifyOrder, descriptors: list[int]) -> None:
    """Follow an order to its ``Verdict``. What it raises is not a judgement: see ``_run``."""
    child.enter(states.VERIFYING)
    manifest = manifests.decode(order.manifest)
    spans = [
        extents.Extent(manifest.offsets[index], manifests.padded(manifest.size_bytes_of(index)))
        for index in range(len(manifest))
    ]
    mapping = memory.map_readonly(order.memory, descriptors, order.chunk_sizes, device_uuid=order.device)
    began = time.monotonic()
    try:
        found = mapping.digests(spans)
    finally:
        mapping.close()
    seconds = time.monotonic() - began
    child.send(
        orders.Verdict(
            damaged=compare(manifest, found),
            bytes_checked=sum(span.size_bytes for span in spans),
            digest_seconds=seconds,
        )
    )


def compare(manifest: manifests.Manifest, found: list[bytes]) -> list[orders.Damage]:
    """The tensors whose digests differ. Pure."""
    return [
        orders.Damage(manifest.names[index], manifest.digest_of(index).hex(), digest.hex())
        for index, digest in enumerate(found)
        if digest != manifest.digest_of(index)
    ]


def _run(child: children.Child) -> None:
    order, descriptors = child.order()
    if not isinstance(order, orders.VerifyOrder):
        raise reasons.Refusal(reasons.Reason.InternalError, f"a verifier got {type(order).__name__}")
    try:
        verify(child, order, descriptors)
    except reasons.Refusal as refusal:
        raise _impossible(f"{refusal.reason}: {refusal.message}") from refusal
    except MemoryError as error:
        raise _impossible("the process could not allocate memory") from error
    except Exception as error:  # a driver without room for a context, a lost GPU, a fault of ours: no judgement
        raise _impossible(f"{type(error).__name__}: {error}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _impossible(what: str) -> reasons.Refusal:
    return reasons.Refusal(reasons.Reason.VerifyImpossible, f"the arena could not be read back: {what}")


if __name__ == "__main__":
    sys.exit(children.main(_run))
