"""`scratchlm quantize`: store a model's matrices in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scratchlm.cli.checkpoints import CheckpointOption, say_checkpoint
from scratchlm.cli.terminal import say, tell
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

    from scratchlm.checkpoint import write_checkpoint
    from scratchlm.errors import ScratchLMError
    from scratchlm.inference import load_model
    from scratchlm.quantization.rule import choose

    check_target(to)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ScratchLMError(f"{out} exists already and is not overwritten")
    loaded = load_model(
        model,
        dtype=torch.float32,
        accelerate=False,
        checkpoint=checkpoint,
        quantize=to,
        warn=lambda text: say(f"warning: {text}", err=True),
    )
    say_checkpoint(model, loaded.source)
    choices, template = choose(loaded.config, to), loaded.chat_template
    write_checkpoint(
        out,
        model=loaded.model.state_dict(),
        config=loaded.config,
        tokenizer_file=loaded.tokenizer_file,
        tokenizer_config=None if template is None else template.to_bytes(),
        metadata={"quantization": to, "eos_token_ids": list(loaded.eos_ids)},
    )
    _say_rule(choices)
    note = "with its tokenizer" if loaded.tokenizer_file else "no tokenizer.json there"
    tell(f"{out}: {to}, {note}")


def _say_rule(choices: list[Choice]) -> None:
    from scratchlm.quantization.rule import described, stored_bytes

    for line in described(choices):
        tell(line)
    weights, size = sum(choice.weights for choice in choices), stored_bytes(choices)
    tell(f"{size / 1e6:,.1f} MB, {8 * size / weights:.2f} bits a weight")
