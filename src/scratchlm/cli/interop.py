"""`scratchlm import` and `scratchlm export`: from and to Hugging Face checkpoints and GGUF."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scratchlm.cli.checkpoints import CheckpointOption, say_checkpoint, write_loaded
from scratchlm.cli.terminal import tell, warn
from scratchlm.durable import check_is_new
from scratchlm.interop.keys import FAMILIES

if TYPE_CHECKING:
    import torch

    from scratchlm.interop.stored_model import StoredModel
    from scratchlm.tokenizer.chat_template import ChatTemplate

MAX_SHARD_GB = 1_000_000
_FAMILY_HELP = "Families:\n\n" + "\n\n".join(
    f"- {model_type}: {family.description}" for model_type, family in FAMILIES.items()
)


class _DType(StrEnum):
    """The dtypes weights can be written in."""

    float64 = "float64"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class _Format(StrEnum):
    """The formats that quantised matrices of a GGUF file can have."""

    q8_0 = "q8_0"
    q6_k = "q6_k"
    q4_k = "q4_k"
    q4_k_m = "q4_k_m"
    q4_0 = "q4_0"


_DTypeOption = Annotated[
    _DType | None, typer.Option("--dtype", help="Convert the weights; otherwise they stay.")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("import", epilog=_FAMILY_HELP)(import_)
    app.command("export", epilog=_FAMILY_HELP)(export)
    app.command("merge")(merge)


def import_(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A directory with safetensors, or a GGUF file."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint to make.")],
    dtype: _DTypeOption = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Take NaN and infinite weights as they are.")
    ] = False,
) -> None:
    """Import a Hugging Face checkpoint or a GGUF file, with its tokenizer and chat template.

    Every tensor must be accounted for: unknown, missing and misshapen tensors are refused by
    name. Quantised weights are dequantised. Pickled weights (.bin, .pt) are never opened.
    """
    from scratchlm.checkpoint import write_checkpoint

    check_is_new(out)
    found = _open_gguf(source) if _is_gguf(source) else _open_hf(source)
    model, template = found.model, found.chat_template
    stream = model.tensors(dtype=_torch_dtype(dtype), allow_nonfinite=allow_nonfinite)
    write_checkpoint(
        out,
        model=dict(stream),
        config=model.config,
        tokenizer_file=found.tokenizer,
        tokenizer_config=None if template is None else template.to_bytes(),
        metadata={
            "imported": model.model_type,
            "eos_token_ids": list(model.eos_token_ids),
            **found.metadata,
        },
    )
    note = found.problem or "with its tokenizer"
    tell(f"{out}: {model.model_type}, {_size(model.shapes)} parameters, {note}")


@dataclass(frozen=True)
class _Found:
    """What is imported: the weights, the tokenizer or why there is none, the chat template."""

    model: StoredModel
    tokenizer: Path | bytes | None
    problem: str
    chat_template: ChatTemplate | None
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of a task head


def _is_gguf(path: Path) -> bool:
    from scratchlm.interop import is_gguf

    return path.suffix == ".gguf" or is_gguf(path)


def _open_hf(path: Path) -> _Found:
    from scratchlm.errors import ScratchLMError
    from scratchlm.interop import read_hf
    from scratchlm.tokenizer import load_tokenizer
    from scratchlm.tokenizer.chat_template import ChatTemplate

    model = read_hf(path, with_head=True)
    problem = "" if model.tokenizer_file else "no tokenizer.json there"
    if model.tokenizer_file:
        try:
            load_tokenizer(model.tokenizer_file)
        except (ScratchLMError, ValueError) as error:  # an export gives it back as it is
            problem = f"its tokenizer.json kept, but it cannot be used here: {error}"
    template = ChatTemplate.from_directory(path)
    metadata: dict[str, Any] = {}
    if model.head is not None:
        metadata["head"] = model.head.to_dict()
    if model.pad_token_id is not None:
        metadata["pad_token_id"] = model.pad_token_id
    return _Found(model, model.tokenizer_file, problem, template, metadata)


def _open_gguf(path: Path) -> _Found:
    from scratchlm.interop import read_gguf

    model = read_gguf(path)
    found = model.tokens
    data = None if found.tokenizer is None else found.tokenizer.to_bytes()
    problem = f"no tokenizer: {found.problem}" if found.problem else ""
    return _Found(model, data, problem, found.chat_template)


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, or a checkpoint.")],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The directory to make, or a file NAME.gguf."),
    ],
    checkpoint: CheckpointOption = None,
    dtype: _DTypeOption = None,
    max_shard_gb: Annotated[
        float | None,
        typer.Option("--max-shard-gb", help="Begin a new file after so many gigabytes (5)."),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a fine-tuned run: the adapter alone, for peft.")
    ] = False,
    quantize: Annotated[
        _Format | None, typer.Option("--quantize", help="Quantise a GGUF file's matrices.")
    ] = None,
) -> None:
    """Export a checkpoint in Hugging Face format, or as a GGUF file for llama.cpp and its kin.

    The family is the one that can represent the model; if none can, the reason is named. A run
    that learnt an adapter is exported merged, or with --adapter as the adapter alone.
    """
    from scratchlm.checkpoint import is_checkpoint, read_chosen, verify_checkpoint
    from scratchlm.errors import ScratchLMError

    if max_shard_gb is not None and not 0 < max_shard_gb <= MAX_SHARD_GB:
        raise ValueError(
            f"--max-shard-gb must be above 0 and at most {MAX_SHARD_GB:,}; got {max_shard_gb}"
        )
    if adapter and (out.suffix == ".gguf" or quantize is not None or max_shard_gb is not None):
        raise ValueError("--adapter writes a directory for peft, without --quantize or shards")
    write: Callable[[Path, Path], str]
    if adapter:
        write = partial(_export_adapter, out=out, dtype=dtype)
    elif out.suffix == ".gguf":
        if max_shard_gb is not None:
            raise ValueError("--max-shard-gb is for directories; a GGUF file is one file")
        write = partial(_export_gguf, out=out, dtype=dtype, quantize=quantize)
    elif quantize is not None:
        raise ValueError("--quantize is for GGUF files: OUT must end in .gguf")
    else:
        write = partial(_export_hf, hf_dir=out, dtype=dtype, max_shard_gb=max_shard_gb or 5.0)
    if is_checkpoint(model):
        if checkpoint is not None:
            raise ScratchLMError(f"{model} is a checkpoint: there is no {checkpoint!r} to choose")
        verify_checkpoint(model)
        told: str | None = write(model, model)
    else:
        told = read_chosen(model, lambda found: write(model, found), checkpoint or "best")
    if told is None:
        raise ScratchLMError(f"{model} is neither a checkpoint nor a run with checkpoints")
    tell(told)


def _export_gguf(
    model: Path, source: Path, out: Path, dtype: _DType | None, quantize: _Format | None
) -> str:
    """Write a verified checkpoint as a GGUF file; return what was written."""
    from scratchlm.checkpoint import read_config, read_manifest
    from scratchlm.errors import ScratchLMError
    from scratchlm.interop import write_gguf
    from scratchlm.interop.gguf_config import to_metadata
    from scratchlm.interop.shapes import parameter_shapes
    from scratchlm.quantization.rule import choose, described
    from scratchlm.tokenizer import Tokenizer, load_tokenizer
    from scratchlm.tokenizer.chat_template import ChatTemplate

    say_checkpoint(model, source)
    config = read_config(source)
    family, _ = to_metadata(config)  # before anything large is read
    if "head" in read_manifest(source)["metadata"]:
        raise ScratchLMError(f"{source} has a task head, which GGUF cannot say")
    has_tokenizer = (source / "tokenizer.json").is_file()
    tokenizer = load_tokenizer(source / "tokenizer.json") if has_tokenizer else None
    if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
        raise ScratchLMError("GGUF has no tokenizer of single characters; train one with merges")
    tensors = _merged_tensors(source)
    named = tokenizer.special_tokens if tokenizer is not None else {}
    end = [named["<|endoftext|>"]] if "<|endoftext|>" in named else []
    write_gguf(
        out,
        config,
        tensors,
        tokenizer,
        _torch_dtype(dtype),
        quantize=None if quantize is None else quantize.value,
        eos_token_ids=read_manifest(source)["metadata"].get("eos_token_ids") or end,
        chat_template=ChatTemplate.from_directory(source),
    )
    if quantize is not None:
        for line in described(choose(config, quantize.value)):
            tell(line)
    note = "with its tokenizer" if tokenizer is not None else "no tokenizer.json there"
    if tokenizer is not None and tokenizer.normalization is not None:
        note += f" (llama.cpp does not normalise texts to {tokenizer.normalization})"
    return f"{out}: {family}, {_size(dict(parameter_shapes(config)))} parameters, {note}"


def _export_hf(
    model: Path, source: Path, hf_dir: Path, dtype: _DType | None, max_shard_gb: float
) -> str:
    """Write a verified checkpoint as a Hugging Face directory; return what was written."""
    from scratchlm.checkpoint import read_config, read_manifest
    from scratchlm.errors import ScratchLMError
    from scratchlm.inference.heads import head_in
    from scratchlm.interop import to_hf_config, write_hf
    from scratchlm.tokenizer.chat_template import ChatTemplate
    from scratchlm.untrusted import shown

    say_checkpoint(model, source)
    quantised = read_manifest(source)["metadata"].get("quantization")
    if quantised is not None:
        raise ScratchLMError(f"{source} is quantised ({shown(quantised)}); export what it was of")
    config = read_config(source)
    family = to_hf_config(config)["model_type"]
    tokenizer, template = source / "tokenizer.json", ChatTemplate.from_directory(source)
    tensors = _merged_tensors(source)
    known = read_manifest(source)["metadata"]
    write_hf(
        hf_dir,
        config,
        tensors,
        tokenizer if tokenizer.is_file() else None,
        _torch_dtype(dtype),
        head=head_in(source),
        pad_token_id=_pad_token(known, tokenizer),
        eos_token_ids=known.get("eos_token_ids", ()),
        chat_template=None if template is None else template.to_config(),
        max_shard_bytes=max(1, int(max_shard_gb * 1e9)),
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return f"{hf_dir}: {family}, {_size(shapes)} parameters, {_tokenizer_note(hf_dir)}"


def _merged_tensors(source: Path) -> Mapping[str, torch.Tensor]:
    """Return a checkpoint's tensors; where it is an adapter, those of its base with it."""
    from scratchlm.checkpoint import read_manifest, read_tensors

    if "adapter" not in read_manifest(source)["metadata"]:
        return read_tensors(source)
    from scratchlm.inference import load_model

    return load_model(source, accelerate=False).model.state_dict()


def _pad_token(metadata: Mapping[str, Any], tokenizer: Path) -> int | None:
    """Return the token that fills rows up: the model's own, or its end of text."""
    from scratchlm.interop.tokens import end_tokens

    own = metadata.get("pad_token_id")
    file = tokenizer if tokenizer.is_file() else None
    ends = end_tokens(file, metadata.get("eos_token_ids", ())).ids
    return own if type(own) is int else next(iter(ends), None)


def _export_adapter(model: Path, source: Path, out: Path, dtype: _DType | None) -> str:
    """Write the adapter of a checkpoint for PEFT; return what was written."""
    from dataclasses import replace

    from scratchlm.checkpoint import read_config, read_manifest
    from scratchlm.inference.adapters import read_adapter
    from scratchlm.interop.peft import write_peft

    say_checkpoint(model, source)
    found = read_adapter(source)
    if dtype is not None:
        tensors = {name: tensor.to(_torch_dtype(dtype)) for name, tensor in found.tensors.items()}
        found = replace(found, tensors=tensors)
    base = read_manifest(source)["metadata"]["adapter"]["base"]
    write_peft(out, read_config(source), found, base)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.tensors.items()}
    # PEFT's format has no place for it
    beside = "" if found.quantize is None else f", which it learnt beside in {found.quantize}"
    rank, size = found.config.rank, _size(shapes)
    return f"{out}: an adapter of rank {rank}, {size} parameters, for {base}{beside}"


def merge(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run that learnt an adapter.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint to make.")],
    adapter: Annotated[
        Path | None,
        typer.Option(help="Put this one into MODEL: a run that learnt it, or of peft's format."),
    ] = None,
    checkpoint: CheckpointOption = None,
    dtype: _DTypeOption = None,
) -> None:
    """Put an adapter into its base model's weights, and write that as one model."""
    from scratchlm.checkpoint import is_checkpoint, read_manifest
    from scratchlm.errors import ScratchLMError
    from scratchlm.inference import load_model

    check_is_new(out)
    loaded = load_model(
        model,
        accelerate=False,
        dtype=_torch_dtype(dtype),
        checkpoint=checkpoint,
        adapter=adapter,
        warn=warn,
    )
    source = loaded.source
    known = read_manifest(source)["metadata"] if is_checkpoint(source) else {}
    if adapter is None and "adapter" not in known:
        raise ScratchLMError(f"{model} holds a whole model; --adapter names what to put into it")
    say_checkpoint(model, source)
    write_loaded(out, loaded, {"merged": str(adapter or source)})
    shapes = {name: tuple(tensor.shape) for name, tensor in loaded.model.state_dict().items()}
    tell(f"{out}: {_size(shapes)} parameters, the adapter in its weights")


def _tokenizer_note(directory: Path) -> str:
    """Describe whether the tokenizer was exported."""
    if (directory / "tokenizer_config.json").is_file():
        return "with its tokenizer"
    if (directory / "tokenizer.json").is_file():
        return "with a tokenizer.json that only scratchlm reads"
    return "no tokenizer.json there"


def _torch_dtype(dtype: _DType | None) -> torch.dtype | None:
    import torch

    return None if dtype is None else getattr(torch, dtype.value)


def _size(shapes: dict[str, tuple[int, ...]]) -> str:
    return f"{sum(math.prod(shape) for shape in shapes.values()):,}"
