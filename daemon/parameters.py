"""From the tables of :mod:`architectures` and a checkpoint to the engine's parameters, before any rank takes its share.

Here the checkpoint is compared with its own configuration: every tensor that the sizes call for must exist with that
dtype and shape, and every tensor that exists must be called for. A name that nobody expects is a feature that would be
left out in silence, so it is refused as well.

The result is the *loaded stage*: what the engine holds after loading and before post-processing. Fused parts lie one
after the other, scalars are kept for each part, and nothing is scaled, cast or swizzled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from weightcache.daemon import architectures, checkpoints, headers, quantizations
from weightcache.daemon import sizes as sizes_module
from weightcache.wire import manifests, reasons

__all__ = ["EMBEDDING", "HEAD", "Parameter", "build_parameters", "is_tied"]

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_Reason = reasons.Reason


@dataclass(frozen=True)
class Parameter:
    """One parameter of the whole model. ``layer``: -1 outside of layers.

    ``sources``: the checkpoint's tensors, one row an expert (one row without experts), one column a part; ``rows`` and
    ``heads`` (0: not cut by heads) of each part. ``columns``: logical columns of the matrix, 0 for a vector or scalar;
    ``packing``: logical columns an element; ``block``: logical columns that must stay together. ``all_experts``: every
    rank holds it of every expert. ``is_scale``: scalars that must be finite and positive.
    """

    name: str
    layer: int
    module: architectures.Module
    slicing: architectures.Slicing
    dtype: str
    columns: int
    packing: int
    block: int
    rows: tuple[int, ...]
    heads: tuple[int, ...]
    sources: tuple[tuple[headers.Tensor, ...], ...]
    all_experts: bool = False
    is_scale: bool = False

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return manifests.DTYPE_BITS[self.dtype] // 8

    @property
    def row_elements(self) -> int:
        """Elements of one whole row of the checkpoint's tensors; 1 for vectors and scalars."""
        return self.columns // self.packing if self.columns else 1

    def part_name(self, index: int) -> str:
        """A part's name in messages: the checkpoint's, of the first expert where there are several."""
        return self.sources[0][index].name


def build_parameters(checkpoint: checkpoints.Checkpoint) -> tuple[Parameter, ...]:
    """Every parameter of the whole model, in the order of the layers. Pure.

    Raises Refusal: ``CheckpointIncomplete`` (tensors are missing), ``CheckpointInvalid`` (sizes, shapes or dtypes
    contradict each other, or a tensor is not called for), ``UnsupportedQuantization`` (a size that cannot be packed).
    """
    _refuse_size_mismatch(checkpoint)
    builder = _Builder(checkpoint)
    parameters = sorted(builder.build(), key=lambda parameter: (parameter.layer, parameter.name))
    builder.refuse_unused()
    return tuple(parameters)


def is_tied(sizes: sizes_module.Sizes) -> bool:
    """Whether the head is the embedding itself. Pure."""
    return bool(sizes["tie_word_embeddings"])


class _Builder:
    """The walk over one checkpoint: what was asked for and is missing, what was used."""

    def __init__(self, checkpoint: checkpoints.Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._architecture = architectures.ARCHITECTURES[checkpoint.architecture]
        self._dtype = checkpoints.DTYPES[checkpoint.dtype]
        self._sizes = checkpoint.sizes
        self._used: set[str] = set()
        self._missing: list[str] = []

    def build(self) -> Iterator[Parameter]:
        sizes, architecture = self._sizes, self._architecture
        for module in architecture.outside:
            if module.name != HEAD.removesuffix(".weight") or not is_tied(sizes):
                yield from self._module(module, -1, "")
        for layer in range(sizes["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            mlp = architecture.sparse if _has_experts(sizes, architecture, layer) else architecture.dense
            for module in (*architecture.layer, *mlp):
                yield from self._module(module, layer, prefix)
            yield from self._scalars(layer, prefix)
        if self._missing:
            raise reasons.Refusal(
                _Reason.CheckpointIncomplete,
                f"{self._checkpoint.directory}: {len(self._missing)} tensors that config.json calls for are in no "
                f"file: {', '.join(self._missing[:5])}",
            )

    def refuse_unused(self) -> None:
        """Refuse tensors that nothing called for, but for buffers and a tied head's own copy."""
        ignored = self._architecture.ignored
        dropped = (".input_scale",) if self._checkpoint.quantization.algorithm == quantizations.NVFP4_WEIGHTS else ()
        unused = [
            name
            for name in self._checkpoint.tensors
            if name not in self._used
            and not name.endswith((*ignored, *dropped))
            and not (name == HEAD and is_tied(self._sizes))
        ]
        if unused:
            raise reasons.Refusal(
                _Reason.CheckpointInvalid,
                f"{self._checkpoint.directory}: {len(unused)} tensors are unknown to {self._checkpoint.architecture} "
                f"with this config.json: {', '.join(sorted(unused)[:5])}",
            )

    def _module(self, module: architectures.Module, layer: int, prefix: str) -> Iterator[Parameter]:
        columns = self._sizes[module.columns] if module.columns else 0
        joint = "_" if module.experts else "."
        suffixes = self._suffixes(module, prefix)
        for suffix in suffixes:
            scalar = not suffix.packing
            yield Parameter(
                name=f"{prefix}{module.name}{joint}{suffix.name}",
                layer=layer,
                module=module,
                slicing=architectures.Slicing.Whole if scalar else module.slicing,
                dtype=suffix.dtype,
                columns=0 if scalar else columns,
                packing=suffix.packing or 1,
                block=max(each.packing for each in suffixes),
                rows=tuple(1 if scalar else self._sizes[part.rows] for part in module.parts),
                heads=tuple(0 if scalar or not part.heads else self._sizes[part.heads] for part in module.parts),
                sources=self._sources(module, prefix, suffix, columns),
                all_experts=suffix.all_experts and module.experts,
                is_scale=scalar,
            )
        if module.bias and self._sizes[module.bias]:
            yield self._bias(module, layer, prefix)

    def _suffixes(self, module: architectures.Module, prefix: str) -> tuple[architectures.Suffix, ...]:
        """The tensors of this module: as its quantization has it, and as the files must agree."""
        plain = (architectures.Suffix("weight", self._dtype, 1),)
        quantization = self._checkpoint.quantization
        if not module.quantized or not quantization.algorithm:
            return plain
        parts = [prefix + part.source for part in module.parts]
        name = prefix + (module.name.rsplit(".", 2)[0] if module.experts else module.name)
        ignored = quantizations.is_ignored(quantization, name, () if module.experts else parts)
        if ignored is None:
            raise reasons.Refusal(
                _Reason.CheckpointInvalid,
                f"{name}: the quantization's ignore list names only some of {', '.join(parts)}",
            )
        first = parts[0].format(expert=0)
        tensors = self._checkpoint.tensors
        if f"{first}.weight" in tensors and ignored is (f"{first}.weight_scale" in tensors):
            raise reasons.Refusal(
                _Reason.CheckpointInvalid,
                f"{first} is {'ignored' if ignored else 'not ignored'} by the quantization's ignore list, but in the "
                f"files it {'has' if ignored else 'lacks'} a weight_scale",
            )
        return plain if ignored else architectures.FORMATS[quantization.algorithm]

    def _sources(
        self, module: architectures.Module, prefix: str, suffix: architectures.Suffix, columns: int
    ) -> tuple[tuple[headers.Tensor, ...], ...]:
        shapes = [self._shape(module, part, prefix, suffix, columns) for part in module.parts]
        experts = range(self._sizes["num_experts"]) if module.experts else range(1)
        patterns = [f"{prefix}{part.source}.{suffix.name}" for part in module.parts]
        find = self._find
        return tuple(
            tuple(
                find(pattern.format(expert=expert) if module.experts else pattern, suffix.dtype, shape)
                for pattern, shape in zip(patterns, shapes, strict=True)
            )
            for expert in experts
        )

    def _shape(
        self,
        module: architectures.Module,
        part: architectures.Part,
        prefix: str,
        suffix: architectures.Suffix,
        columns: int,
    ) -> tuple[int, ...]:
        if not suffix.packing:
            return ()
        if not module.columns:
            return (self._sizes[part.rows],)
        if columns % suffix.packing:
            raise reasons.Refusal(
                _Reason.UnsupportedQuantization,
                f"{prefix}{module.name}: {module.columns} is {columns}, {suffix.name} needs a multiple of "
                f"{suffix.packing}",
            )
        return self._sizes[part.rows], columns // suffix.packing

    def _bias(self, module: architectures.Module, layer: int, prefix: str) -> Parameter:
        """A bias is cut with the rows; a row-parallel module adds it once, so every rank holds it whole."""
        rows = tuple(self._sizes[part.rows] for part in module.parts)
        names = [f"{prefix}{part.source}.bias" for part in module.parts]
        whole = module.slicing is architectures.Slicing.Columns
        return Parameter(
            name=f"{prefix}{module.name}.bias",
            layer=layer,
            module=module,
            slicing=architectures.Slicing.Whole if whole else module.slicing,
            dtype=self._dtype,
            columns=0,
            packing=1,
            block=1,
            rows=rows,
            heads=tuple(self._sizes[part.heads] if part.heads else 0 for part in module.parts),
            sources=(tuple(self._find(name, self._dtype, (size,)) for name, size in zip(names, rows, strict=True)),),
        )

    def _scalars(self, layer: int, prefix: str) -> Iterator[Parameter]:
        if not self._checkpoint.quantization.algorithm:
            return
        for scalar in self._architecture.scalars:
            if f"{prefix}{scalar.source}" not in self._checkpoint.tensors:
                continue
            module = architectures.Module(scalar.name, architectures.Slicing.Whole, ())
            source = self._find(f"{prefix}{scalar.source}", "F32", ())
            yield Parameter(
                name=prefix + scalar.name,
                layer=layer,
                module=module,
                slicing=module.slicing,
                dtype="F32",
                columns=0,
                packing=1,
                block=1,
                rows=(1,),
                heads=(0,),
                sources=((source,),),
                is_scale=True,
            )

    def _find(self, name: str, dtype: str, shape: tuple[int, ...]) -> headers.Tensor:
        """The tensor of that name; a missing one is remembered, so that the message can name several."""
        found = self._checkpoint.tensors.get(name)
        if found is None:
            self._missing.append(name)
            return headers.Tensor(name, "", dtype, shape, 0, 0)
        self._used.add(name)
        # Exporters write scalars as [] or as [1]; the engine takes both.
        if found.dtype != dtype or (found.shape != shape and not (shape == () and found.shape == (1,))):
            _refuse_tensor(found, dtype, shape)
        return found


def _refuse_tensor(found: headers.Tensor, dtype: str, shape: tuple[int, ...]) -> NoReturn:
    raise reasons.Refusal(
        _Reason.CheckpointInvalid,
        f"{found.file}: {found.name} is {found.dtype} {list(found.shape)}, config.json calls for {dtype} "
        f"{list(shape)}; nothing is cast or reshaped here",
    )


def _has_experts(sizes: sizes_module.Sizes, architecture: architectures.Architecture, layer: int) -> bool:
    """Whether a layer has experts (``qwen3_moe.py``, ``Qwen3MoeDecoderLayer``)."""
    if not architecture.sparse or not sizes["num_experts"] or layer in sizes["mlp_only_layers"]:
        return False
    return bool((layer + 1) % sizes["decoder_sparse_step"] == 0)


def _refuse_size_mismatch(checkpoint: checkpoints.Checkpoint) -> None:
    """A configuration that calls for absurdly many tensors must not make us list them first."""
    num_layers, num_tensors = checkpoint.sizes["num_hidden_layers"], len(checkpoint.tensors)
    if num_layers > num_tensors or checkpoint.num_experts > num_tensors:
        raise reasons.Refusal(
            _Reason.CheckpointIncomplete,
            f"config.json calls for {num_layers} layers and {checkpoint.num_experts} experts, the files of "
            f"{checkpoint.directory} hold {num_tensors} tensors in all",
        )
