"""Which checkpoint of a run a command takes: one rule for all of them, said where it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scratchlm.cli.terminal import say

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
