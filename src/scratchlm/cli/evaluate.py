"""`scratchlm evaluate` and `scratchlm compare`: evaluate a model, compare runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scratchlm.cli.checkpoints import CheckpointOption, say_checkpoint
from scratchlm.cli.device import Device
from scratchlm.cli.terminal import does_fit, say, visible

if TYPE_CHECKING:
    from scratchlm.training import Plan

MAX_SEQUENCES = 1 << 24  # at a time; and tokens in one


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("evaluate")(evaluate)
    app.command("compare")(compare)


def evaluate(
    model: Annotated[
        str, typer.Argument(help="A run, a checkpoint, a Hugging Face folder, or GGUF.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]... [TASK]...",
            help="More models; then tasks (.jsonl), or held-out text: a prepared folder (its "
            "val.bin), a token file, or text.",
            show_default=False,
        ),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a sequence of held-out text.", show_default="the model's, ≤ 1024"
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences of held-out text at a time.", show_default="8")
    ] = None,
    lm_eval: Annotated[
        list[str] | None,
        typer.Option(help="A task of lm-evaluation-harness, by name; may be repeated."),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="A folder of lm-evaluation-harness tasks of your own.")
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(help="Examples before each case of --lm-eval.", show_default="the task's"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Take the first cases of each --lm-eval task only.")
    ] = None,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Put --lm-eval prompts into the chat template.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="A picture of the figures (.png).")] = None,
    cases: Annotated[
        Path | None, typer.Option(help="Where to write what each case gave, as JSON Lines.")
    ] = None,
    checkpoint: CheckpointOption = None,
    device: Device = "auto",
    accelerate: Annotated[bool, typer.Option(help="Use fused layers.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure models on tasks and on held-out text, several side by side.

    Figures come with 95 % confidence intervals. The format of tasks: docs/howto/evaluate.md.
    """
    from scratchlm.cli import evaluation_output as output
    from scratchlm.cli import evaluation_run as running

    output.check_places(plot, "--plot", cases)
    models, names = running.split_arguments(model, data or [])
    tasks = [running.open_task(name) for name in names]
    for option, value in (("--batch-size", batch_size), ("--context-length", context_length)):
        if value is not None and not 1 <= value <= MAX_SEQUENCES:
            raise ValueError(f"{option} must be from 1 to {MAX_SEQUENCES:,}; got {value}")
        if value is not None and not any(isinstance(task, str) for task in tasks):
            raise ValueError(f"{option} is for held-out text; none was given")
    if cases is not None and not lm_eval and all(isinstance(task, str) for task in tasks):
        raise ValueError("--cases is for tasks; held-out text has no cases")
    wanted = running.Wanted(
        tasks=tasks,
        context_length=context_length,
        batch_size=batch_size or 8,
        harness=running.harness_tasks(
            lm_eval, include_path, num_fewshot, limit, chat_template, bool(tasks)
        ),
    )
    found = []
    for name in models:
        loaded = running.load(name, device, accelerate, checkpoint)
        found.append(output.OfModel(name, loaded.source, running.run(loaded, wanted)))
        say_checkpoint(name, loaded.source)
        del loaded
    if cases is not None:
        output.write_cases(cases, found)
    if plot is not None:
        output.write_plot(plot, found)
    (output.print_json if as_json else output.print_tables)(found)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="The picture (.png) to write.")] = Path("compare.png"),
) -> None:
    """Draw the losses and tasks of several runs together, and print where they ended."""
    from scratchlm.cli.evaluation_output import check_places
    from scratchlm.durable import write_atomically
    from scratchlm.training import read_metrics, read_plan
    from scratchlm.training.plots import all_tasks, draw_comparison

    check_places(out, "--out")
    logs = {str(run): read_metrics(run) for run in runs}
    plans = [read_plan(Path(run)) for run in logs]
    names = [Path(name).absolute().name for name in logs]
    short = names if len(set(names)) == len(names) else list(logs)
    tasks = all_tasks(logs)
    pairs = zip(plans, logs.values(), strict=True)
    figures = [_figures(plan, records, tasks) for plan, records in pairs]
    notes = [
        f"{name} differs from {short[0]}: {', '.join(differences)}"
        for name, plan in zip(short, plans, strict=True)
        if (differences := _differences(plans[0], plan))
    ]
    _print_figures(short, figures, tasks, notes)
    write_atomically(out, draw_comparison(dict(zip(short, logs.values(), strict=True))))
    say(out)


_TITLES = ("parameters", "steps", "training loss", "held-out loss", "at step", "tokens/s")


def _figures(plan: Plan, records: Sequence[Mapping[str, Any]], tasks: Sequence[str]) -> list[str]:
    """Return what stands below the titles for one run, and its last figure of each task."""
    from scratchlm.accounting import count_parameters
    from scratchlm.training.plots import task_curves
    from scratchlm.training.report import mean_rate

    steps = [record for record in records if "loss" in record]
    held_out = [record for record in records if record.get("val_loss") is not None]
    best = min(held_out, key=lambda record: record["val_loss"], default=None)
    return [
        f"{count_parameters(plan.model).unique:,}",
        f"{steps[-1]['step']:,}" if steps else "0",
        f"{steps[-1]['loss']:.4f}" if steps else "",
        f"{best['val_loss']:.4f}" if best else "",
        f"{best['step']:,}" if best else "",
        f"{mean_rate(steps[-1]):,.0f}" if steps else "",
        *(_last_figure(task_curves(records).get(task)) for task in tasks),
    ]


def _print_figures(
    names: Sequence[str],
    figures: Sequence[Sequence[str]],
    tasks: Sequence[str],
    notes: Sequence[str],
) -> None:
    """Print a row for each run; where that does not fit, names below and tasks on their own."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if Console().is_terminal else 160)
    titles, labels = [*_TITLES, *tasks], list(names)

    def table_of(first: int, last: int) -> Table:
        table = Table("run", box=None, pad_edge=False)
        for title in titles[first:last]:
            table.add_column(Text(visible(title)), justify="right")
        for label, row in zip(labels, figures, strict=True):
            table.add_row(Text(visible(label)), *(Text(cell) for cell in row[first:last]))
        return table

    parts = [(0, len(titles))]
    if not does_fit(console, table_of(*parts[0])):
        titles = [*(title.replace(" ", "\n") for title in _TITLES), *tasks]
    if not does_fit(console, table_of(*parts[0])):
        labels = [f"{i}" for i in range(1, len(names) + 1)]
        parts = [(0, len(_TITLES)), *((at, at + 1) for at in range(len(_TITLES), len(titles)))]
    for part in parts:
        console.print(table_of(*part))
    for label, name in zip(labels, names, strict=True):
        if label != name:
            console.print(Text(f"{label}: {visible(name)}"))
    for note in notes:  # whole names: a column would cut them
        console.print(Text(visible(note)))


def _last_figure(curve: tuple[str, list[tuple[int, Any]]] | None) -> str:
    """Format a task's figure at the last evaluation, with its name."""
    if curve is None:
        return ""
    name, points = curve
    return f"{points[-1][1]['value']:.4f} {name.replace('_', ' ')}"


def _differences(base: Plan, other: Plan) -> list[str]:
    """Name the fields in which a run differs from the first, with both values where short."""
    found, mine, theirs = [], _settings(base), _settings(other)
    for name in dict.fromkeys((*mine, *theirs)):
        a, b = mine.get(name, "none"), theirs.get(name, "none")
        short = all(isinstance(value, int | float | str) for value in (a, b))
        no_adapter = name.startswith("lora.") and "none" in (a, b)
        if a != b and not no_adapter:
            found.append(name + (f" {_plain(a)} → {_plain(b)}" if short else ""))
    return found


def _settings(plan: Plan) -> dict[str, Any]:
    """Gather what a run was asked for: of the model, of training, and of fine-tuning."""
    tuning = {} if plan.tuning is None else plan.tuning.to_dict()
    lora = tuning.pop("lora", {})
    sections = {
        "model": {field.name: getattr(plan.model, field.name) for field in fields(plan.model)},
        "train": {field.name: getattr(plan.train, field.name) for field in fields(plan.train)},
        "tuning": {"lora": bool(lora), **tuning},
        "lora": lora,
    }
    return {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
    }


def _plain(value: object) -> str:
    """Write a value as a person would: 0.00037, not 0.00037000000000000005."""
    return f"{value:.6g}" if isinstance(value, float) else str(value) or "none"
