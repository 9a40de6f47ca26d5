"""`scratchlm quantize`: store a model's matrices in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scratchlm.cli.checkpoints import CheckpointOption, say_checkpoint, write_loaded
from scratchlm.cli.terminal import tell, warn
from scratchlm.durable import check_is_new
from scratchlm.quantization.rule import TARGETS, check_target

if TYPE_CHECKING:
    from scratchlm.quantization.rule import Choice


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("quantize")(quantize)


def quantize(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="A run, a checkpoint, a Hugging Face directory, or a GGUF file."
        ),
    ],
    to: Annotated[str, typer.Option("--to", help=f"{', '.join(TARGETS)}.")],
    out: Annotated[Path, typer.Option("--out", help="The checkpoint to make.")],
    checkpoint: CheckpointOption = None,
) -> None:
    """Quantise a model: a checkpoint that takes an eighth to a quarter of float32.

    It says which matrices take which format and which stay wide. The result is loaded, generated
    from, served and evaluated like any checkpoint, and exported to GGUF as the bytes it has; it
    cannot be trained, nor exported to Hugging Face.
    """
    import torch

    from scratchlm.inference import load_model
    from scratchlm.quantization.rule import choose

    check_target(to)
    check_is_new(out)
    loaded = load_model(
        model,
        dtype=torch.float32,
        accelerate=False,
        checkpoint=checkpoint,
        quantize=to,
        warn=warn,
    )
    say_checkpoint(model, loaded.source)
    write_loaded(out, loaded, {"quantization": to})
    _say_rule(choose(loaded.config, to))
    note = "with its tokenizer" if loaded.tokenizer_file else "no tokenizer.json there"
    tell(f"{out}: {to}, {note}")


def _say_rule(choices: list[Choice]) -> None:
    from scratchlm.quantization.rule import described, stored_bytes

    for line in described(choices):
        tell(line)
    weights, size = sum(choice.weights for choice in choices), stored_bytes(choices)
    tell(f"{size / 1e6:,.1f} MB, {8 * size / weights:.2f} bits a weight")
