"""Make a small NVFP4 checkpoint with the exporter that the field uses, on a CPU.

A checkpoint written by our own code proves only that our code agrees with itself. So the demo and the tests read what
``nvidia-modelopt`` and ``transformers`` write: random weights of a fixed seed, quantized with ``NVFP4_DEFAULT_CFG``,
exported with ``export_hf_checkpoint``. Both packages are test tools: this script runs in a virtual environment of its
own (``scripts/setup exporter``) and imports nothing of weightcache.

    python demo/make_checkpoint.py qwen3-moe llama --shards 3

prints one directory a kind, in the order asked for. A directory that exists is printed at once: its name is a digest
of this script and of the versions that shape the bytes, and it appears by a rename, whole or not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED = 20260101
#: Distributions whose version can change the files.
SHAPING = ("nvidia-modelopt", "transformers", "torch", "safetensors", "tokenizers")
SENTENCES = (
    "a weight cache keeps finished weights in memory",
    "an engine that restarts maps them in milliseconds",
    "every expert of this model has seen a token",
    "the quick brown fox jumps over the lazy dog",
)


@dataclass(frozen=True)
class Kind:
    """One model. ``calibrate``: run tokens through it, as a sane export does. ``dead_expert``: (layer, expert) whose
    weights are all zero, as pruning leaves them."""

    architecture: str
    sizes: dict[str, Any] = field(default_factory=dict)
    quantized: bool = True
    calibrate: bool = True
    dead_expert: tuple[int, int] | None = None


# Sizes that two ranks divide for tensor and for expert parallelism: 64 / 2 is a multiple of 16, NVFP4's group.
# 500 words, not 512: engines pad the vocabulary to a multiple of 64, and the padding must be zero.
_COMMON: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
_MOE: dict[str, Any] = {**_COMMON, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
_QWEN3_MOE = Kind("Qwen3Moe", {**_MOE, "tie_word_embeddings": False})

KINDS: dict[str, Kind] = {
    "qwen3-moe": _QWEN3_MOE,
    "qwen3": Kind("Qwen3", {**_COMMON, "tie_word_embeddings": False}),
    "llama": Kind("Llama", {**_COMMON, "tie_word_embeddings": False}),
    "llama-tied": Kind("Llama", {**_COMMON, "tie_word_embeddings": True}),
    "qwen3-moe-bf16": Kind("Qwen3Moe", _QWEN3_MOE.sizes, quantized=False),
    # Two that a loader must refuse. No calibration: modelopt writes no input_scale at all. An expert of zeros: it
    # writes NaN block scales beside a weight_scale_2 of 0 (and warns). An expert that merely saw no token is harmless
    # with these versions: all experts of a layer share one input quantizer, and weight scales come from the weights.
    "qwen3-moe-uncalibrated": Kind("Qwen3Moe", _QWEN3_MOE.sizes, calibrate=False),
    "qwen3-moe-dead-expert": Kind("Qwen3Moe", _QWEN3_MOE.sizes, dead_expert=(2, 5)),
}


def cache_directory() -> Path:
    """Where finished checkpoints lie, outside the tree: by this script's bytes and the shaping versions."""
    own, shared = os.environ.get("WEIGHTCACHE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own else Path(shared or Path.home() / ".cache") / "weightcache"
    versions = [f"{name}=={importlib.metadata.version(name)}" for name in SHAPING]
    digest = hashlib.sha256(Path(__file__).read_bytes() + "\n".join(versions).encode())
    return root / "checkpoints" / digest.hexdigest()[:20]


def checkpoint_for(name: str, num_shards: int) -> Path:
    """The directory of a checkpoint, made now unless it is there. ``num_shards``: safetensors files at least."""
    final = cache_directory() / (name if num_shards == 1 else f"{name}-{num_shards}")
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            _make(KINDS[name], num_shards, unfinished)
        unfinished.chmod(0o755)
        _rename_unless_there(unfinished, final)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return final


def _rename_unless_there(unfinished: Path, final: Path) -> None:
    try:
        unfinished.rename(final)
    except OSError:
        if not final.is_dir():  # else another process was faster, with the same bytes
            raise


def _make(kind: Kind, num_shards: int, directory: Path) -> None:
    import torch

    # One thread: the order of additions, and with it the calibrated scales, must not depend on the machine.
    torch.set_num_threads(1)
    whole_bytes = 0
    if num_shards > 1:  # export consumes the model, so a first one is written whole to learn the size
        with tempfile.TemporaryDirectory(dir=directory.parent) as measured:
            _export(kind, Path(measured), max_shard_bytes=1 << 40)
            whole_bytes = sum(file.stat().st_size for file in Path(measured).glob("*.safetensors"))
    _export(kind, directory, max_shard_bytes=whole_bytes // num_shards or 1 << 40)
    _save_tokenizer(directory)
    for file in directory.iterdir():  # the exporter leaves the weights 0600
        file.chmod(0o644)


def _export(kind: Kind, directory: Path, max_shard_bytes: int) -> None:
    import torch

    model = _build(kind)
    if not kind.quantized:
        model.save_pretrained(directory, max_shard_size=max_shard_bytes)
        return
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, _calibrate if kind.calibrate else None)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=directory, max_shard_size=max_shard_bytes)


def _build(kind: Kind) -> Any:
    import torch
    import transformers

    torch.manual_seed(SEED)
    config_class = getattr(transformers, f"{kind.architecture}Config")
    model_class = getattr(transformers, f"{kind.architecture}ForCausalLM")
    # architectures: the exporter reads it, and only from_pretrained would set it.
    config = config_class(**kind.sizes, architectures=[model_class.__name__], bos_token_id=0, eos_token_id=1)
    model = model_class(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # all ones otherwise, and then no check could tell two layers apart
                parameter.add_(0.1 * torch.randn_like(parameter))
        if kind.dead_expert:
            layer, expert = kind.dead_expert
            experts = model.model.layers[layer].mlp.experts
            experts.gate_up_proj[expert].zero_()
            experts.down_proj[expert].zero_()
    return model


def _calibrate(model: Any) -> None:
    """Run random tokens through the model; every expert must see some."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with _token_counts(model) as counts:
        for _ in range(4):
            model(torch.randint(0, model.config.vocab_size, (2, 64), generator=generator))
    for router, seen in counts.items():
        if int(seen.min()) == 0:
            raise SystemExit(f"{router}: an expert saw no token ({seen.tolist()}); calibrate with more")
        print(f"{router}: tokens by expert {seen.tolist()}")


@contextlib.contextmanager
def _token_counts(model: Any) -> Iterator[dict[str, Any]]:
    """Tokens that each expert was chosen for, by the name of its router."""
    import torch

    counts: dict[str, Any] = {}
    routers = [(name, module) for name, module in model.named_modules() if name.endswith("mlp.gate")]

    def watch(name: str) -> Callable[..., None]:
        def count(_module: Any, _inputs: Any, outputs: Any) -> None:
            chosen = outputs[2].flatten()  # (logits, weights, indices)
            counts[name] = counts.get(name, 0) + torch.bincount(chosen, minlength=model.config.num_experts)

        return count

    hooks = [module.register_forward_hook(watch(name)) for name, module in routers]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _save_tokenizer(directory: Path) -> None:
    import tokenizers
    import transformers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_COMMON["vocab_size"],
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(directory)


def main(arguments: list[str] | None = None) -> int:
    """Print the directory of each checkpoint asked for; make those that are missing."""
    parser = argparse.ArgumentParser(description="Make small NVFP4 checkpoints with nvidia-modelopt.")
    parser.add_argument("kinds", nargs="+", choices=sorted(KINDS), metavar="KIND", help=", ".join(sorted(KINDS)))
    parser.add_argument("--shards", type=int, default=1, help="safetensors files, at least (default: 1)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in options.kinds:
        print(checkpoint_for(name, options.shards), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
