"""`scratchlm finetune`: make a model one's own, by an adapter or with all its weights."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from scratchlm.parallel.ranks import Ranks
    from scratchlm.training import Plan
    from scratchlm.training.choosing import Machine
    from scratchlm.training.loop import Sampler


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("finetune")(finetune)


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
    pack: Annotated[bool, typer.Option(help="Put several examples into a row.")] = True,
    epochs: Annotated[
        float | None, typer.Option(help="How often to read the data.", show_default="3")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates to make.")] = None,
    val: Annotated[Path | None, typer.Option(help="Records to validate on.")] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="How many records to hold out.", show_default="0.05")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …, or auto.")] = "auto",
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
    from scratchlm.cli.train import join, rank_settings, set_by_option
    from scratchlm.cli.training_setup import absolute_tasks
    from scratchlm.cli.tuning_setup import TuneArgs
    from scratchlm.parallel.launch import launched_rank, relaunch, without_gpus
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
    if gpus is not None and launched_rank() is None:
        shared = rank_settings(out, {"train": table}).backend == "gloo"
        raise typer.Exit(relaunch(gpus, without_gpus(sys.argv[1:]), shared=shared))
    with contextlib.ExitStack() as stack:
        ranks = None
        if launched_rank() is not None:
            ranks = stack.enter_context(join(out, {"train": table}, device))
        status = _finetune(args, resume, device, tensorboard, ranks)
    if status:
        raise typer.Exit(status)


def _finetune(args: Any, resume: bool, device: str, tensorboard: bool, ranks: Ranks | None) -> int:
    from scratchlm.cli.task_setup import head_figures
    from scratchlm.cli.train import (
        carry_out,
        choose_device,
        look_at_machine,
        plan_for_all,
        say_progress,
    )
    from scratchlm.cli.training_checks import check_place, leaving_nothing, name_unused
    from scratchlm.cli.training_console import TensorBoard
    from scratchlm.training.checks import check_overrides

    if tensorboard:
        TensorBoard.require()
    where = choose_device(device) if ranks is None else ranks.device

    def make() -> tuple[Machine, Plan]:
        check_place(args.out, resume)
        check_overrides(args.overrides, where.type, ranks)
        machine = look_at_machine(where)
        plan = _plan(args, machine)
        name_unused(args.overrides, plan, ranks, say_progress)
        return machine, plan

    is_first = ranks is None or ranks.is_first
    with leaving_nothing(args.out) if is_first else contextlib.nullcontext():
        machine, plan = plan_for_all(args.out, make, ranks)
        has_head = plan.tuning is not None and plan.tuning.head is not None
        return carry_out(
            "finetune",
            args.out,
            plan,
            machine,
            resume=resume,
            device=where,
            ops="fast",
            sample=None if has_head else _sampler(plan),
            run_tasks=head_figures(plan) if has_head else None,
            bytes_per_id=None,
            tensorboard=tensorboard and is_first,
            ranks=ranks,
        )


def _plan(args: Any, machine: Machine) -> Plan:
    """Make the plan of a run, or read that of the one that was begun."""
    from scratchlm.cli.task_setup import make_task_plan
    from scratchlm.cli.train import say_progress
    from scratchlm.cli.training_setup import TrainArgs, continue_plan
    from scratchlm.cli.tuning_setup import check_same_tuning, make_tuning_plan
    from scratchlm.training import has_run, read_plan

    if has_run(args.out):
        check_same_tuning(args, read_plan(args.out))
        own = [path for path in (args.data, args.val) if path is not None]
        again = TrainArgs(
            data=own,
            out=args.out,
            val_fraction=args.val_fraction,
            overrides={"train": args.overrides},
        )
        return continue_plan(again, machine, say_progress)
    make = make_tuning_plan if args.task is None else make_task_plan
    return make(args, machine, say_progress)


def _sampler(plan: Plan, length: int = 60) -> Sampler:
    """Return what answers the first held-out prompt: the same for the same weights."""
    from scratchlm.data.examples import read_examples
    from scratchlm.inference import GREEDY, generate
    from scratchlm.tokenizer import load_tokenizer

    assert plan.data.tokenizer is not None
    tokenizer = load_tokenizer(plan.data.tokenizer)
    ids, learns = read_examples(plan.data.val or plan.data.train)[0]
    prompt = ids[: max(1, int(learns.argmax()))].tolist()
    prompt = prompt[-(plan.model.context_length // 2) :]

    def sample(model: Any, step: int) -> list[str]:
        found = generate(
            model,
            [prompt],
            tokenizer=tokenizer,
            max_new_tokens=min(length, plan.model.context_length - len(prompt)),
            sampling=GREEDY,
            seed=step,  # of several ranks the first one answers
            eos_ids=set(ids[learns.nonzero()[0][-1:]].tolist()),
        )
        return [tokenizer.decode(prompt) + found[0].text]

    return sample
