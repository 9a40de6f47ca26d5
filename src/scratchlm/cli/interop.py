"""`scratchlm import` and `scratchlm export`: convert from and to Hugging Face checkpoints."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scratchlm.cli.checkpoints import CheckpointOption, say_checkpoint
from scratchlm.cli.terminal import say
from scratchlm.interop.keys import FAMILIES

if TYPE_CHECKING:
    import torch

_FAMILY_HELP = "Families:\n\n" + "\n\n".join(
    f"- {model_type}: {family.description}" for model_type, family in FAMILIES.items()
)


class _DType(StrEnum):
    """The dtypes weights can be written in."""

    float64 = "float64"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


_DTypeOption = Annotated[
    _DType | None, typer.Option("--dtype", help="Convert the weights; otherwise they stay.")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("import", epilog=_FAMILY_HELP)(import_)
    app.command("export", epilog=_FAMILY_HELP)(export)


def import_(
    hf_dir: Annotated[Path, typer.Argument(metavar="HF_DIR", help="config.json and safetensors.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint to make.")],
    dtype: _DTypeOption = None,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Take NaN and infinite weights as they are.")
    ] = False,
) -> None:
    """Import a Hugging Face checkpoint, with its tokenizer.json.

    Every tensor must be accounted for: unknown, missing and misshapen tensors are refused by
    name. Pickled weights (.bin, .pt) are never opened.
    """
    from scratchlm.checkpoint import write_checkpoint
    from scratchlm.errors import ScratchLMError
    from scratchlm.interop import read_hf

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ScratchLMError(f"{out} exists already and is not overwritten")
    source = read_hf(hf_dir)
    stream = source.tensors(dtype=_torch_dtype(dtype), allow_nonfinite=allow_nonfinite)
    write_checkpoint(
        out,
        model=dict(stream),
        config=source.config,
        tokenizer_file=source.tokenizer_file,
        metadata={
            "imported": source.model_type,
            "eos_token_ids": list(source.eos_token_ids),
        },
    )
    tokenizer = "with its tokenizer" if source.tokenizer_file else "no tokenizer.json there"
    say(f"{out}: {source.model_type}, {_size(source.shapes)} parameters, {tokenizer}")


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, or a checkpoint.")],
    hf_dir: Annotated[Path, typer.Argument(metavar="HF_DIR", help="The directory to make.")],
    checkpoint: CheckpointOption = None,
    dtype: _DTypeOption = None,
    max_shard_gb: Annotated[
        float, typer.Option("--max-shard-gb", help="Begin a new file after so many gigabytes.")
    ] = 5.0,
) -> None:
    """Export a checkpoint in Hugging Face format, for transformers and compatible tools.

    The family is the one that can represent the model; if none can, the reason is named.
    """
    from scratchlm.checkpoint import is_checkpoint, read_chosen, verify_checkpoint
    from scratchlm.errors import ScratchLMError

    if not 0 < max_shard_gb < math.inf:
        raise ValueError(f"--max-shard-gb must be finite and above 0; got {max_shard_gb}")
    if is_checkpoint(model):
        if checkpoint is not None:
            raise ScratchLMError(f"{model} is a checkpoint: there is no {checkpoint!r} to choose")
        verify_checkpoint(model)
        told: str | None = _export(model, model, hf_dir, dtype, max_shard_gb)
    else:
        told = read_chosen(
            model,
            lambda found: _export(model, found, hf_dir, dtype, max_shard_gb),
            checkpoint or "best",
        )
    if told is None:
        raise ScratchLMError(f"{model} is neither a checkpoint nor a run with checkpoints")
    say(told)


def _export(
    model: Path, source: Path, hf_dir: Path, dtype: _DType | None, max_shard_gb: float
) -> str:
    """Write a verified checkpoint as a Hugging Face directory; return what was written."""
    from scratchlm.checkpoint import read_config, read_manifest, read_tensors
    from scratchlm.interop import to_hf_config, write_hf

    say_checkpoint(model, source)
    config = read_config(source)
    family = to_hf_config(config)["model_type"]
    tokenizer = source / "tokenizer.json"
    tensors = read_tensors(source)
    write_hf(
        hf_dir,
        config,
        tensors,
        tokenizer if tokenizer.is_file() else None,
        _torch_dtype(dtype),
        eos_token_ids=read_manifest(source)["metadata"].get("eos_token_ids", ()),
        max_shard_bytes=max(1, int(max_shard_gb * 1e9)),
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return f"{hf_dir}: {family}, {_size(shapes)} parameters, {_tokenizer_note(hf_dir)}"


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
