"""`scratchlm finetune`: make a model one's own, by an adapter or with all its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scratchlm.cli.device import Device
from scratchlm.cli.errors import named_as_options

if TYPE_CHECKING:
    from scratchlm.cli.training_run import Figures
    from scratchlm.cli.tuning_setup import TuneArgs
    from scratchlm.training import Plan
    from scratchlm.training.choosing import Machine


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("finetune")(finetune)


@named_as_options("rank", "alpha", "dropout", "targets", "quantize", "preference", "beta")
def finetune(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A run, a checkpoint or a Hugging Face folder, with its tokenizer.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Argument(
            help="Chats, pairs, texts or preferences: JSON Lines or Parquet.", show_default=False
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Changes to the settings, such as train.lr=1e-4."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("run"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, or begin it.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="All weights learn; otherwise an adapter does (LoRA).")
    ] = False,
    rank: Annotated[int | None, typer.Option(help="The adapter's rank.", show_default="16")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="The adapter's factor is α / rank.", show_default="32")
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Of the adapter's input.", show_default="0")
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help="Layers to adapt, such as q_proj,v_proj or 'layers.0.*'.",
            show_default="all of the blocks",
        ),
    ] = None,
    rslora: Annotated[bool, typer.Option("--rslora", help="The factor is α / √rank.")] = False,
    dora: Annotated[bool, typer.Option("--dora", help="Learn magnitudes, too.")] = False,
    quantize: Annotated[
        str | None,
        typer.Option(help="nf4 or int8: the model itself in few bits meanwhile (QLoRA)."),
    ] = None,
    preference: Annotated[
        str | None, typer.Option(help="dpo: learn from chosen and rejected answers.")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="Of dpo: smaller goes farther.", show_default="0.1")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="classification or qa: train that head, with all weights."),
    ] = None,
    pack: Annotated[
        bool | None, typer.Option(help="Put several examples into a row.", show_default="yes")
    ] = None,
    epochs: Annotated[
        float | None, typer.Option(help="How often to read the data.", show_default="3")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates to make.")] = None,
    val: Annotated[Path | None, typer.Option(help="Records to validate on.")] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="How many records to hold out.", show_default="0.05")
    ] = None,
    device: Device = "auto",
    gpus: Annotated[
        int | None,
        typer.Option(help="Learn on this many GPUs of this machine, a process each.", min=1),
    ] = None,
    accelerate: Annotated[
        bool | None,
        typer.Option(help="Use fused layers and kernels.", show_default="where available"),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard.")
    ] = False,
) -> None:
    """Fine-tune a model on chats, pairs, texts, preferences or a task, and write a report.

    Only what the assistant says is learnt. Ctrl-C saves and stops; --resume goes on from there,
    bit for bit. `merge` puts an adapter into its model, `export --adapter` writes it for peft.
    With --task, data are texts with labels, or questions with contexts and answers; `predict` uses
    such a model.
    """
    from scratchlm.cli.train import set_by_option
    from scratchlm.cli.training_run import RunArgs, run
    from scratchlm.cli.training_setup import absolute_tasks
    from scratchlm.cli.tuning_setup import TuneArgs
    from scratchlm.training.settings import parse_overrides

    overrides = parse_overrides(changes or [])
    for section in overrides.keys() - {"train"}:
        raise ValueError(f"fine-tuning keeps the model and its data: {section}. cannot be set")
    table = overrides.get("train", {})
    if table.get("tasks"):
        table["tasks"] = absolute_tasks(table["tasks"])
    set_by_option(table, steps=steps, accelerate=accelerate)
    words = None if targets is None else tuple(word.strip() for word in targets.split(","))
    lora = {"rank": rank, "alpha": alpha, "dropout": dropout, "targets": words}
    lora |= {"rslora": rslora or None, "dora": dora or None}
    args = TuneArgs(
        model=model,
        data=data,
        out=out,
        full=full,
        lora={name: value for name, value in lora.items() if value is not None},
        quantize=quantize,
        preference=preference,
        beta=beta,
        task=task,
        packed=pack,
        epochs=epochs,
        val=val,
        val_fraction=val_fraction,
        overrides=table,
    )
    asked = RunArgs("finetune", out, resume, device, gpus, tensorboard, table, table)
    run(asked, lambda machine: _plan(args, machine), _figures)


def _plan(args: TuneArgs, machine: Machine) -> Plan:
    """Make the plan of a run, or read that of the one that was begun."""
    from scratchlm.cli.training_run import say_progress
    from scratchlm.cli.training_setup import TrainArgs, continue_plan
    from scratchlm.cli.tuning_setup import check_same_tuning, make_tuning_plan
    from scratchlm.training import has_run, read_plan

    if has_run(args.out):
        check_same_tuning(args, read_plan(args.out))
        own = [str(path) for path in (args.data, args.val) if path is not None]
        again = TrainArgs(
            data=own,
            out=args.out,
            val_fraction=args.val_fraction,
            overrides={"train": args.overrides},
        )
        return continue_plan(again, machine, say_progress)
    return make_tuning_plan(args, machine, say_progress)


def _figures(plan: Plan) -> Figures:
    """Return what a run shows at every evaluation: answers and tasks, or how a head does."""
    from scratchlm.cli.task_setup import head_figures
    from scratchlm.cli.training_figures import make_answerer, make_task_runner
    from scratchlm.cli.training_run import Figures

    if plan.tuning is not None and plan.tuning.head is not None:
        return Figures(run_tasks=head_figures(plan))
    return Figures(make_answerer(plan), run_tasks=make_task_runner(plan))
