"""Configuration and tokenizer beside the sockets, so that an engine pod needs no weight files.

An engine builds its model from config.json and its tokenizer, and takes the weights from memory. Mounting the whole
checkpoint into each engine pod for some small files would bring back the volume that the cache made unnecessary. So
the small files are copied to ``model/`` beside the sockets, each whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from weightcache.daemon import directories
from weightcache.wire import reasons

__all__ = ["FILE_LIMIT_BYTES", "TOTAL_LIMIT_BYTES", "fill_model_directory", "is_model_file"]

#: A file of this size or more is weights, or nothing an engine's start needs.
FILE_LIMIT_BYTES = 64 << 20
#: The root is usually memory (/run is a tmpfs): a checkpoint full of odd files must not fill it.
TOTAL_LIMIT_BYTES = 256 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".npz")
_TEMPORARY = ".new"


def is_model_file(name: str, size_bytes: int) -> bool:
    """Whether a checkpoint's file belongs into ``model/``: small, and neither weights nor their index. Pure."""
    lower = name.lower()
    return (
        size_bytes < FILE_LIMIT_BYTES
        and not lower.startswith(".")
        and not lower.endswith(_WEIGHTS)
        and not lower.endswith(".index.json")
    )


def fill_model_directory(cache_directory: Path, checkpoint: Path) -> Path:
    """Make ``model/`` hold exactly the checkpoint's small files, read-only; twice is once. Returns it.

    Links (a hub cache is made of them) are followed, folders are not entered. A reader sees each file old or new,
    never half. Raises Refusal ``CheckpointNotFound``, ``CheckpointInvalid`` (too many bytes), ``RootInvalid``.
    """
    wanted = _wanted(checkpoint)
    model = cache_directory / "model"
    directories.make(model, directories.Kind.Sockets, 0o2750, cache_directory.stat().st_gid)
    for name in wanted:
        _copy(checkpoint / name, model, name)
    with directories.refusing(model):
        for leftover in set(os.listdir(model)) - set(wanted):
            os.unlink(model / leftover)
    return model


def _wanted(checkpoint: Path) -> list[str]:
    try:
        sizes = dict(_small_files(checkpoint))
    except OSError as error:
        raise _not_found(error, checkpoint) from error
    total = sum(sizes.values())
    if total > TOTAL_LIMIT_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise reasons.Refusal(
            reasons.Reason.CheckpointInvalid,
            f"{checkpoint}: the {len(sizes)} files beside the weights have {total} bytes, {TOTAL_LIMIT_BYTES} are the "
            f"limit; the largest is {largest} with {sizes[largest]}; move away what is neither configuration nor "
            "tokenizer",
        )
    return sorted(sizes)


def _small_files(checkpoint: Path) -> Iterator[tuple[str, int]]:
    with os.scandir(checkpoint) as entries:
        for entry in entries:
            if entry.is_file():
                size = entry.stat().st_size
                if is_model_file(entry.name, size):
                    yield entry.name, size


def _copy(source: Path, model: Path, name: str) -> None:
    temporary = model / _TEMPORARY
    try:
        # Non-blocking: what was a file a moment ago may be a FIFO now, and opening one would wait for ever.
        reading = open(os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise _not_found(error, source) from error
    with reading, directories.refusing(model / name):
        if not stat.S_ISREG(os.fstat(reading.fileno()).st_mode):
            raise reasons.Refusal(reasons.Reason.CheckpointChanged, f"{source}: no longer a regular file")
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as writing:
            shutil.copyfileobj(reading, writing, 1 << 20)
        temporary.chmod(0o444)
        temporary.rename(model / name)


def _not_found(error: OSError, path: Path) -> reasons.Refusal:
    return reasons.Refusal(reasons.Reason.CheckpointNotFound, f"{path}: {error.strerror}")
