"""What a daemon is told: the spec of its cache, and the settings of the installation it runs in.

The two are kept apart: which checkpoint in which layout belongs to the cache; where the root is, how many loaders may
read at once and how much memory they share belongs to the node, or two caches would disagree about it.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec
import yaml

from weightcache.crds import specs
from weightcache.wire import protocol, reasons

__all__ = ["DEFAULT_ROOT", "Settings", "checkpoint_directory", "parse_document", "read_document"]

DEFAULT_ROOT = Path("/run/weightcache")
API_VERSION = "weightcache.dev/v1alpha1"
#: Namespace of the UIDs of caches that no API server named: the same file name and namespace give the same UID.
_LOCAL_UID_NAMESPACE = uuid.UUID("6e9c2d5e-3a54-4f29-9b0e-6a7f0a3a41b7")


@dataclass(frozen=True)
class Settings:
    """Everything a daemon needs to know.

    ``on_owned``: ``exit`` ends with the reason's exit code when the daemon cannot start; ``wait`` stays, not ready,
    with that reason, and tries again with back-off. ``gate_slots``, ``host_slots`` and ``load_buffer_bytes`` are per
    node. ``bytes_per_second``: limit of reading, 0 for none. ``prepare_root``: make what is missing below the root.
    """

    spec: specs.WeightCacheSpec
    cache: protocol.CacheRef
    root: Path = DEFAULT_ROOT
    status_socket: Path | None = None
    on_owned: Literal["exit", "wait"] = "exit"
    gate_slots: int = 1
    host_slots: int = 8
    load_buffer_bytes: int = 1 << 30
    reader_threads: int = 16
    bytes_per_second: int = 0
    prepare_root: bool = True


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    namespace: str = "default"
    uid: str = ""


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    api_version: str
    kind: str
    spec: specs.WeightCacheSpec
    metadata: _Metadata = _Metadata()
    status: Any = None


def read_document(path: str | os.PathLike[str]) -> tuple[specs.WeightCacheSpec, protocol.CacheRef]:
    """The spec and the cache's name from a YAML or JSON file: a ``WeightCache`` document, or a bare spec.

    A bare spec is named after the file. Raises Refusal ``SettingsInvalid`` with the file and the path of the fault.
    """
    try:
        with open(path, encoding="utf-8") as file:
            value = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _invalid(f"{os.fspath(path)}: {error}") from error
    return parse_document(value, os.fspath(path))


def parse_document(value: Any, origin: str) -> tuple[specs.WeightCacheSpec, protocol.CacheRef]:
    """As :func:`read_document`, from plain data; ``origin`` names its source in messages. Pure."""
    try:
        if isinstance(value, dict) and "kind" in value:
            document = msgspec.convert(value, _Document)
            if (document.api_version, document.kind) != (API_VERSION, "WeightCache"):
                raise _invalid(f"{origin}: {document.api_version} {document.kind}, expected {API_VERSION} WeightCache")
            spec, metadata = document.spec, document.metadata
        else:
            spec, metadata = specs.parse(value), _Metadata()
    except msgspec.ValidationError as error:
        raise _invalid(f"{origin}: {error}") from error
    name = metadata.name or PurePosixPath(origin).stem
    _check_spec(spec, origin)
    uid = metadata.uid or str(uuid.uuid5(_LOCAL_UID_NAMESPACE, f"{metadata.namespace}/{name}"))
    _check_identity(metadata.namespace, name, uid, origin)
    return spec, protocol.CacheRef(namespace=metadata.namespace, name=name, uid=uid)


def checkpoint_directory(spec: specs.WeightCacheSpec) -> Path:
    """The checkpoint's directory on this node. Pure."""
    return Path(spec.model.host_path) / spec.model.path


def _check_spec(spec: specs.WeightCacheSpec, origin: str) -> None:
    world = specs.world_size(spec.parallelism)
    if not spec.model.host_path.startswith("/"):
        raise _invalid(f"{origin}: model.hostPath {spec.model.host_path!r} is not absolute")
    if PurePosixPath(spec.model.path).is_absolute() or ".." in PurePosixPath(spec.model.path).parts:
        raise _invalid(f"{origin}: model.path {spec.model.path!r} leaves model.hostPath")
    if spec.gpus.per_node % world:
        raise _invalid(
            f"{origin}: gpus.perNode {spec.gpus.per_node} is not a multiple of the world size {world} "
            f"(tensor {spec.parallelism.tensor} x pipeline {spec.parallelism.pipeline} x data {spec.parallelism.data})"
        )


def _check_identity(namespace: str, name: str, uid: str, origin: str) -> None:
    for label, text in (("metadata.namespace", namespace), ("metadata.name", name)):
        if not text or text in {".", ".."} or "/" in text or "\0" in text or len(text.encode()) > 253:
            raise _invalid(f"{origin}: {label} {text!r} cannot be a name of a directory")
    if len(uid.replace("-", "")) < 10 or not set(uid.replace("-", "")) <= set("0123456789abcdef"):
        raise _invalid(f"{origin}: metadata.uid {uid!r} is not a UUID")


def _invalid(message: str) -> reasons.Refusal:
    return reasons.Refusal(reasons.Reason.SettingsInvalid, message)
