"""Which checkpoint of a run a command takes, and how one is made of a model that was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scratchlm.cli.terminal import say

if TYPE_CHECKING:
    from scratchlm.inference import Loaded

CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="best|last|STEP",
        help="Of a run: the best on held-out data, the last, or that of a step.",
        show_default="best",
    ),
]


def say_checkpoint(run: str | Path, chosen: Path) -> None:
    """Say on stderr which checkpoint of a run was taken, where there was a choice."""
    from scratchlm.checkpoint import best_step, find_checkpoints, step_of

    found = find_checkpoints(run)
    if chosen not in found:
        return
    step, last = step_of(chosen), step_of(found[-1])
    best = best_step(chosen if step == last else found[-1]) if found else None
    what = [name for name, at in (("the best", best), ("the last", last)) if at == step]
    text = f"checkpoint: step {step:,}" + (f", {' and '.join(what)}" if what else "")
    if best == step != last:
        text += f" on held-out data (--checkpoint last: step {last:,})"
    say(text, err=True)


def write_loaded(out: Path, loaded: Loaded, metadata: dict[str, Any]) -> None:
    """Write a loaded model as a checkpoint, with its tokenizer and its chat template."""
    from scratchlm.checkpoint import write_checkpoint

    template = loaded.chat_template
    write_checkpoint(
        out,
        model=loaded.model.state_dict(),
        config=loaded.config,
        tokenizer_file=loaded.tokenizer_file,
        tokenizer_config=None if template is None else template.to_bytes(),
        metadata={**metadata, "eos_token_ids": list(loaded.eos_ids)},
    )
