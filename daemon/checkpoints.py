"""A checkpoint directory, read as the engine would read it, and doubted where the engine would not.

The directory promises much: config.json its sizes, an index its tensors, file names their places. A missing shard, an
index of another revision or a name that leads out of the directory shows up hours later as a wrong model, or not at
all. So everything that can be known without reading weights is read and compared here, in the order config.json,
quantization, index, headers; what is wrong is refused with the file and the name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from weightcache.daemon import architectures, headers, quantizations
from weightcache.daemon import sizes as sizes_module
from weightcache.wire import configs, evidence, reasons

__all__ = ["Checkpoint", "read"]

CONFIG = "config.json"
QUANTIZATION = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: dtypes that an engine serves without casting, by their names in config.json.
DTYPES = {"bfloat16": "BF16", "float16": "F16"}
_MAX_JSON_BYTES = 256 << 20
_Reason = reasons.Reason


@dataclass(frozen=True)
class Checkpoint:
    """What the headers and configuration say; no weight byte was read.

    ``config``: config.json as it is. ``sizes``: its values that decide tensors, resolved. ``dtype``: ``bfloat16`` or
    ``float16``, of all that is not quantized. ``tensors``: by name. ``stats``: of every shard, by name relative to
    ``directory``, taken when its header was read.
    """

    directory: Path
    config: Mapping[str, Any]
    sizes: sizes_module.Sizes
    architecture: str
    dtype: str
    quantization: quantizations.Quantization
    tensors: Mapping[str, headers.Tensor]
    stats: Mapping[str, evidence.FileStat]

    @property
    def num_experts(self) -> int:
        """Routed experts a layer, over all ranks; 0 for a dense model."""
        return int(self.sizes["num_experts"]) if architectures.ARCHITECTURES[self.architecture].sparse else 0


def read(directory: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint's configuration, index and headers.

    Raises Refusal: ``CheckpointNotFound`` (directory or config.json), ``CheckpointIncomplete`` (a shard or tensor is
    missing, a file is truncated), ``CheckpointInvalid`` (files contradict each other or their format),
    ``UnsupportedArchitecture``, ``UnsupportedQuantization``.
    """
    root = Path(directory)
    config = _read_config(root)
    architecture = _architecture(config)
    legacy = _read_object(root / QUANTIZATION, QUANTIZATION) if (root / QUANTIZATION).exists() else None
    quantization = quantizations.parse(config, legacy)
    dtype = _dtype(config)
    sizes = sizes_module.read_sizes(config, architectures.ARCHITECTURES[architecture])
    tensors, stats = _read_shards(root, _weight_map(root))
    return Checkpoint(root, config, sizes, architecture, dtype, quantization, tensors, stats)


def _read_config(root: Path) -> dict[str, Any]:
    if not root.is_dir():
        raise reasons.Refusal(_Reason.CheckpointNotFound, f"{root} is not a directory")
    if not (root / CONFIG).exists():
        raise reasons.Refusal(_Reason.CheckpointNotFound, f"{root / CONFIG} does not exist")
    return _read_object(root / CONFIG, CONFIG)


def _read_object(path: Path, file: str) -> dict[str, Any]:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_JSON_BYTES:
            raise reasons.Refusal(_Reason.CheckpointInvalid, f"{file}: not a regular file of at most 256 MiB")
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise reasons.Refusal(_Reason.CheckpointIncomplete, f"{file}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise reasons.Refusal(_Reason.CheckpointInvalid, f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise reasons.Refusal(_Reason.CheckpointInvalid, f"{file}: a JSON object is expected")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"one of {[name for name, _ in pairs[:8]]!r:.200} ... has two values")
    return found


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or name not in architectures.ARCHITECTURES:
        raise reasons.Refusal(
            _Reason.UnsupportedArchitecture,
            f"{CONFIG}: architectures is {names!r:.200}; supported: {', '.join(sorted(architectures.ARCHITECTURES))}",
        )
    return name


def _dtype(config: Mapping[str, Any]) -> str:
    source = configs.text_config(config)
    fields = (found.get(name) for found in (source, config) for name in ("dtype", "torch_dtype"))
    value = next((field for field in fields if field is not None), None)
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise reasons.Refusal(
            _Reason.UnsupportedQuantization,
            f"{CONFIG}: dtype (torch_dtype) is {value!r:.100}; supported: {', '.join(DTYPES)}; nothing is cast here",
        )
    return name


def _weight_map(root: Path) -> dict[str, str] | None:
    """Tensor -> file as the index says; None for a checkpoint of one file without an index."""
    has_index, has_single = (root / INDEX).exists(), (root / SINGLE).exists()
    if not has_index:
        if has_single:
            return None
        others = sorted(path.name for path in root.iterdir() if path.suffix in (".safetensors", ".bin", ".pt"))
        found = f"; found {', '.join(others[:5])}" if others else ""
        raise reasons.Refusal(_Reason.CheckpointIncomplete, f"{root}: neither {INDEX} nor {SINGLE} exists{found}")
    weight_map = _read_object(root / INDEX, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise reasons.Refusal(_Reason.CheckpointInvalid, f"{INDEX}: weight_map is not a map of tensors to files")
    inside: set[str] = set()  # looked at once a file, not once a tensor: there are 100,000 tensors in large models
    for tensor, file in weight_map.items():
        if isinstance(file, str) and file in inside:
            continue
        if not _is_inside(file):
            raise reasons.Refusal(
                _Reason.CheckpointInvalid,
                f"{INDEX}: {tensor!r:.200} is in {file!r:.200}, which is no file below {root}",
            )
        inside.add(file)
    if has_single and SINGLE not in weight_map.values():
        raise reasons.Refusal(
            _Reason.CheckpointInvalid, f"{root}: {SINGLE} and {INDEX} give two answers: remove the one that is stale"
        )
    return weight_map


def _is_inside(file: Any) -> bool:
    if not isinstance(file, str) or not file.endswith(".safetensors") or not file.isprintable():
        return False
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and str(path) == file


def _read_shards(
    root: Path, weight_map: dict[str, str] | None
) -> tuple[dict[str, headers.Tensor], dict[str, evidence.FileStat]]:
    files = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE]
    missing = [file for file in files if not (root / file).exists()]
    if missing:
        raise reasons.Refusal(
            _Reason.CheckpointIncomplete, f"{root}: {len(missing)} of {len(files)} shards are missing: {_list(missing)}"
        )
    tensors: dict[str, headers.Tensor] = {}
    stats: dict[str, evidence.FileStat] = {}
    for file in files:
        header = headers.read(root / file, file)
        stats[file] = header.stat
        for tensor in header.tensors:
            if tensor.name in tensors:
                other = tensors[tensor.name].file
                raise reasons.Refusal(_Reason.CheckpointInvalid, f"{tensor.name} is in {other} and in {file}")
            tensors[tensor.name] = tensor
    if weight_map is not None:
        _compare_index(weight_map, tensors)
    return tensors, stats


def _compare_index(weight_map: dict[str, str], tensors: dict[str, headers.Tensor]) -> None:
    """Every tensor of the index must be where it says. Engines load tensors that it leaves out as well, so do we."""
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        raise reasons.Refusal(
            _Reason.CheckpointIncomplete,
            f"{INDEX}: {len(missing)} tensors are in no file: {_list([f'{n} ({weight_map[n]})' for n in missing])}",
        )
    for name, file in weight_map.items():
        if tensors[name].file != file:
            raise reasons.Refusal(
                _Reason.CheckpointInvalid, f"{INDEX}: {name} should be in {file}, it is in {tensors[name].file}"
            )


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
