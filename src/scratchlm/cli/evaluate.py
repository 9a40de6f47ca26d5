"""`scratchlm evaluate` and `scratchlm compare`: evaluate a model, compare runs."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scratchlm.cli.checkpoints import CheckpointOption, say_checkpoint
from scratchlm.cli.terminal import say, visible

if TYPE_CHECKING:
    from scratchlm.training import Plan


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("evaluate")(evaluate)
    app.command("compare")(compare)


def evaluate(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint, or a Hugging Face folder.")],
    data: Annotated[
        str, typer.Argument(help="A prepared folder (its val.bin), a token file, or text.")
    ],
    context_length: Annotated[
        int | None, typer.Option(help="Tokens in a sequence.", show_default="the model's, ≤ 1024")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at a time.")] = 8,
    checkpoint: CheckpointOption = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …, or auto.")] = "auto",
    accelerate: Annotated[bool, typer.Option(help="Use fused layers.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a model on held-out text: loss, perplexity, bits per byte."""
    from scratchlm.cli.train import bytes_of_ids, choose_device
    from scratchlm.cli.training_setup import is_prepared, is_token_file
    from scratchlm.data import TokenFile, ValidationBatches, prepare
    from scratchlm.data.token_file import read_sidecar
    from scratchlm.errors import ScratchLMError
    from scratchlm.inference.loading import load_model
    from scratchlm.training import evaluate as measure

    loaded = load_model(
        model,
        device=choose_device(device),
        accelerate=accelerate,
        checkpoint=checkpoint,
        warn=lambda text: say(f"warning: {text}", err=True),
    )
    context = context_length or min(loaded.config.context_length, 1024)
    if context > loaded.config.context_length:
        raise ValueError(
            f"--context-length must not exceed the model's {loaded.config.context_length}; "
            f"got {context}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(data)
        if is_prepared(path):
            file = path / ("val" if (path / "val.bin").exists() else "train")
        elif is_token_file(path):
            file = path
        else:
            prepare([path], loaded.need_tokenizer(), folder, val_fraction=0.0)
            file = Path(folder) / "train"
            if read_sidecar(file).count < 2:
                raise ScratchLMError(f"{data} is too short to evaluate on: less than 2 tokens")
        tokenizer = loaded.tokenizer
        known = None if tokenizer is None else tokenizer.fingerprint()
        with TokenFile(
            file, expect_fingerprint=known, vocab_size=loaded.config.vocab_size
        ) as tokens:
            tokens.validate()
            vocab_size = loaded.config.vocab_size
            sizes = None if tokenizer is None else bytes_of_ids(tokenizer, vocab_size)
            batches = ValidationBatches(tokens, context, batch_size)
            found = measure(loaded.model, batches, bytes_per_id=sizes)
    assert found is not None
    say_checkpoint(model, loaded.source)
    figures = {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.targets,
        "bytes": found.num_bytes,
        "checkpoint": str(loaded.source),
    }
    if as_json:
        say(json.dumps(figures))
        return
    for name, value in figures.items():
        shown = f"{value:,.4f}" if isinstance(value, float) else value
        shown = f"{value:,}" if isinstance(value, int) else shown
        say(f"{name.replace('_', ' '):<14} {'unknown' if value is None else shown}")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="The picture to write.")] = Path("compare.png"),
) -> None:
    """Draw the loss curves of several runs together, and print where they ended."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from scratchlm.accounting import count_parameters
    from scratchlm.durable import write_atomically
    from scratchlm.training import read_metrics, read_plan
    from scratchlm.training.plots import draw_comparison
    from scratchlm.training.report import mean_rate

    logs = {str(run): read_metrics(run) for run in runs}
    plans = {str(run): read_plan(run) for run in runs}
    names = [Path(name).absolute().name for name in logs]
    short = names if len(set(names)) == len(names) else list(logs)
    table = Table("run", box=None, pad_edge=False)
    for title in ("parameters", "steps", "training loss", "held-out loss", "at step", "tokens/s"):
        table.add_column(title, justify="right")
    table.add_column("differs in")
    base = next(iter(plans.values()))
    for name, (path, records) in zip(short, logs.items(), strict=True):
        steps = [record for record in records if "loss" in record]
        held_out = [record for record in records if record.get("val_loss") is not None]
        best = min(held_out, key=lambda record: record["val_loss"], default=None)
        table.add_row(
            Text(visible(name)),
            f"{count_parameters(plans[path].model).unique:,}",
            f"{steps[-1]['step']:,}" if steps else "0",
            f"{steps[-1]['loss']:.4f}" if steps else "",
            f"{best['val_loss']:.4f}" if best else "",
            f"{best['step']:,}" if best else "",
            f"{mean_rate(steps[-1]):,.0f}" if steps else "",
            ", ".join(_differences(base, plans[path])),
        )
    Console(width=None if Console().is_terminal else 160).print(table)
    write_atomically(out, draw_comparison(dict(zip(short, logs.values(), strict=True))))
    say(out)


def _differences(base: Plan, other: Plan) -> list[str]:
    """Name the fields in which a run differs from the first."""
    found = []
    for section in ("model", "train"):
        a, b = getattr(base, section), getattr(other, section)
        found += [
            f"{section}.{field.name}"
            for field in fields(a)
            if getattr(a, field.name) != getattr(b, field.name)
        ]
    return found
