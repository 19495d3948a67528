"""What an engine offers as proof that it means the same checkpoint bytes as the daemon.

The cheap evidence (stat and hub blob of each file, or the cache's UID) is offered first. Where the daemon finds that
it decides nothing, the full digest is computed: once for a file, as :class:`weightcache.wire.evidence.DigestStore`
keeps it beside the file's stat.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from weightcache.wire import evidence, reasons

__all__ = ["Prover", "default_store", "weight_files"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class Prover:
    """Evidence for one checkpoint (a directory), or for one cache by its UID. ``proof``: what is offered now."""

    def __init__(self, checkpoint: str | os.PathLike[str] | None, cache_uid: str, content: str) -> None:
        """``content``: a full digest that is known already (32 hex) or empty.

        Raises Refusal ``SettingsInvalid`` when there is nothing to prove anything with, ``CheckpointNotFound``.
        """
        self._checkpoint = None if checkpoint is None else os.fspath(checkpoint)
        if self._checkpoint is None and not cache_uid and not content:
            raise reasons.Refusal(
                reasons.Reason.SettingsInvalid,
                "nothing proves which weights are meant: name the checkpoint's directory, or the cache's UID when "
                "configuration and tokenizer come from the cache's own model/",
            )
        if self._checkpoint is None or content:
            self.proof = evidence.Evidence(cache_uid=cache_uid, digest=content)
        else:
            self.proof = _cheap(self._checkpoint, cache_uid)

    @classmethod
    def repeat(cls, proof: evidence.Evidence) -> Prover:
        """Evidence that was found good before: by the front end that holds the claim."""
        prover = cls.__new__(cls)
        prover._checkpoint, prover.proof = None, proof
        return prover

    def can_strengthen(self) -> bool:
        """Whether there is stronger evidence than what is offered now."""
        return self._checkpoint is not None and not self.proof.digest

    def strengthen(self, store: evidence.DigestStore | None = None) -> None:
        """Compute the full digest (reads every file that ``store`` does not know) and offer it from now on.

        Raises Refusal ``CheckpointChanged`` when a file changes meanwhile or cannot be read.
        """
        assert self._checkpoint is not None, "can_strengthen() was asked before"
        names = weight_files(self._checkpoint)
        try:
            digest = evidence.checkpoint_digest(self._checkpoint, names, store or default_store())
        except OSError as error:
            raise reasons.Refusal(reasons.Reason.CheckpointChanged, f"{self._checkpoint}: {error}") from error
        self.proof = evidence.Evidence(digest=digest)


def default_store() -> evidence.DigestStore:
    """Digests of files this user has digested before: ``${XDG_CACHE_HOME:-~/.cache}/weightcache/digests``."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return evidence.DigestStore(Path(home) / "weightcache" / "digests")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def weight_files(checkpoint: str) -> list[str]:
    """The weight files that a daemon counts as this checkpoint, sorted: those of its index, or the single file.

    Raises OSError, Refusal ``CheckpointInvalid``.
    """
    index = os.path.join(checkpoint, _INDEX)
    try:
        with open(index, "rb") as file:
            found = msgspec.json.decode(file.read(), type=_Index)
    except FileNotFoundError:
        return [_SINGLE]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise reasons.Refusal(reasons.Reason.CheckpointInvalid, f"{index}: {error}") from error
    return sorted(set(found.weight_map.values()))


def _cheap(checkpoint: str, cache_uid: str) -> evidence.Evidence:
    try:
        return evidence.gather(checkpoint, weight_files(checkpoint), cache_uid)
    except OSError as error:
        raise reasons.Refusal(reasons.Reason.CheckpointNotFound, f"{checkpoint}: {error}") from error
