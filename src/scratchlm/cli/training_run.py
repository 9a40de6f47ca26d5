"""Carry out the plan of a run before the user's eyes, on one device or several ranks."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from scratchlm.cli.device import choose_device
from scratchlm.cli.terminal import say, warn

if TYPE_CHECKING:
    import torch

    from scratchlm.parallel.ranks import Ranks
    from scratchlm.training import Plan, Progress, TrainConfig
    from scratchlm.training.choosing import Machine
    from scratchlm.training.loop import RunTasks, Sampler


@dataclass(frozen=True)
class RunArgs:
    """What the command line asks for, of training and of fine-tuning alike."""

    command: str
    out: Path
    resume: bool
    device: str
    gpus: int | None
    tensorboard: bool
    typed: dict[str, Any]  # settings given on the command line
    settings: dict[str, Any]  # these, over those of a file
    ops: str = "fast"


@dataclass(frozen=True)
class Figures:
    """What is computed at every evaluation besides the loss."""

    sample: Sampler | None = None
    bytes_per_id: torch.Tensor | None = None
    run_tasks: RunTasks | None = None


MakePlan = Callable[["Machine"], "Plan"]
MakeFigures = Callable[["Plan"], Figures]


def run(args: RunArgs, make_plan: MakePlan, make_figures: MakeFigures) -> None:
    """Make a plan and carry it out, on several ranks where they are asked for."""
    from scratchlm.parallel.launch import check_devices, launched_ranks, relaunch, without_gpus

    check_devices(args.device, args.gpus)
    if args.gpus is not None:
        shared = rank_settings(args.out, args.settings).backend == "gloo"
        raise typer.Exit(relaunch(args.gpus, without_gpus(sys.argv[1:]), shared=shared))
    with contextlib.ExitStack() as stack:
        ranks = None
        if launched_ranks() > 1:
            from scratchlm.parallel.ranks import join_ranks

            where, asked = choose_device(args.device).type, rank_settings(args.out, args.settings)
            ranks = stack.enter_context(
                join_ranks(where, asked.tp, asked.rank_timeout, asked.backend, asked.cp)
            )
        status = _run(args, make_plan, make_figures, ranks)
    if status:
        raise typer.Exit(status)


def rank_settings(out: Path, asked: dict[str, Any]) -> TrainConfig:
    """Return what must be known of a run's settings before there are ranks."""
    from scratchlm.training import TrainConfig, has_run, read_plan

    begun = read_plan(out).train.to_dict() if has_run(out) else {}
    names = ("tp", "cp", "backend", "rank_timeout")
    chosen = {name: {**begun, **asked}.get(name) for name in names}
    return TrainConfig.from_dict({k: value for k, value in chosen.items() if value is not None})


def _run(args: RunArgs, make_plan: MakePlan, make_figures: MakeFigures, ranks: Ranks | None) -> int:
    """Check what costs nothing to check, plan, train; return the exit status."""
    from scratchlm.cli import device
    from scratchlm.cli.errors import named_as_keys
    from scratchlm.cli.training_checks import check_place, leaving_nothing, name_unused
    from scratchlm.cli.training_console import TensorBoard
    from scratchlm.config import ModelConfig
    from scratchlm.training import TrainConfig, has_run
    from scratchlm.training.checks import check_overrides

    if args.tensorboard:
        TensorBoard.require()
    where = choose_device(args.device) if ranks is None else ranks.device

    def make() -> tuple[Machine, Plan]:
        check_place(args.out, args.resume)
        given = args.typed if has_run(args.out) else args.settings
        check_overrides(given, where.type, ranks)
        machine = device.look_at_machine(where)
        with named_as_keys(
            train=TrainConfig.__dataclass_fields__, model=ModelConfig.__dataclass_fields__
        ):
            plan = make_plan(machine)
        name_unused(args.typed, plan, ranks, args.ops, say_progress)
        return machine, plan

    is_first = ranks is None or ranks.is_first
    with leaving_nothing(args.out) if is_first else contextlib.nullcontext():
        machine, plan = _plan_for_all(args.out, make, ranks)
        figures = make_figures(plan)
        return _carry_out(args, plan, figures, machine, where, ranks)


def _plan_for_all(
    out: Path, make: Callable[[], tuple[Machine, Plan]], ranks: Ranks | None
) -> tuple[Machine, Plan]:
    """Look at the machine and the data once, on the first rank, and tell the others."""
    from scratchlm.training.choosing import Machine
    from scratchlm.training.plan import plan_of, plan_tables

    if ranks is None:
        return make()
    told = None
    if ranks.is_first:
        machine, plan = make()
        told = [asdict(machine), plan_tables(out, plan)]
    told = ranks.from_first(told)
    return Machine(**told[0]), plan_of(out, told[1])


def _carry_out(
    args: RunArgs,
    plan: Plan,
    figures: Figures,
    machine: Machine,
    device: torch.device,
    ranks: Ranks | None,
) -> int:
    """Train, show how it goes, write the report; of several ranks the first one speaks."""
    from scratchlm.cli.starting import load_start, template_of
    from scratchlm.cli.training_console import TensorBoard, TrainingConsole
    from scratchlm.training import Watcher, run_plan, watch_signals

    settings = plan.train.resolved(device.type)
    console = TrainingConsole(settings.steps, settings.tokens_per_step(plan.model))
    speaks = ranks is None or ranks.is_first
    is_rank = ranks is not None
    notice = console.stop_notice(is_rank) if speaks else ""
    watchers: list[Watcher] = [console] if speaks else []
    board = TensorBoard(args.out / "tensorboard") if args.tensorboard and speaks else None

    def begin(learner: Any, run: Any, _: object) -> None:
        if speaks:
            _announce(plan, learner, run.progress.step)
        console.best_loss = run.progress.best_loss
        if board is not None:
            board.begin(run.progress.step)

    with (
        watch_signals(notice, is_rank=is_rank) as stop,
        console,
        contextlib.ExitStack() as at_the_end,
    ):
        if board is not None:
            watchers.append(at_the_end.enter_context(contextlib.closing(board)))
        outcome = run_plan(
            args.out,
            plan,
            resume=args.resume,
            device=device,
            ops=args.ops,
            bytes_per_id=figures.bytes_per_id,
            sample=figures.sample,
            run_tasks=figures.run_tasks,
            watchers=tuple(watchers),
            on_begin=begin,
            warn=warn if speaks else lambda message: None,
            should_stop=stop,
            matmul_rate=machine.matmul_rate,
            start=None if plan.start is None else lambda: load_start(plan),
            chat_template=template_of(plan),
            ranks=ranks,
        )
    ended, progress = outcome.ended, outcome.progress
    del outcome  # the report loads the model again: not beside gradients and moments
    if speaks:
        _conclude(args, plan, ended, progress)
    return stop.exit_status if ended == "interrupted" else 0


def _conclude(args: RunArgs, plan: Plan, ended: str, progress: Progress) -> None:
    """Say how a run ended, and write the report of one that was not interrupted."""
    from scratchlm.cli.attention_picture import attention_section
    from scratchlm.errors import ScratchLMError
    from scratchlm.training import write_report

    step, best_step = progress.step, progress.best_step
    if ended == "interrupted":
        where = f"at step {step:,} and saved" if step else "before the first step"
        again = f"`scratchlm {args.command} --resume --out {args.out}`"
        say_progress(f"stopped {where}; {again} goes on")
        return
    best = progress.best_loss
    held_out = "" if best is None else f"; best held-out loss {best:.4f}"
    say_progress(f"{ended} at step {step:,}{held_out}")
    has_head = plan.tuning is not None and plan.tuning.head is not None
    users = "predict and export" if has_head else "evaluate, generate and export"
    if best_step not in (None, step):
        warn(
            f"the held-out loss has risen since step {best_step:,}, the checkpoint that "
            f"{users} take; fewer steps, a smaller model or train.patience would save the rest"
        )
    heads = None if has_head else attention_section(args.out)
    typed = shlex.join(["scratchlm", *sys.argv[1:]])
    try:
        say(write_report(args.out, sections=[heads] if heads else [], command=typed))
    except ScratchLMError as error:  # the model is trained and saved all the same
        warn(f"no report was written: {error}")


def say_progress(text: str) -> None:
    """Tell the user how it goes, on stderr."""
    say(text, err=True)


def _announce(plan: Plan, learner: Any, step: int) -> None:
    from scratchlm.accounting import count_parameters
    from scratchlm.cli.starting import start_folder
    from scratchlm.ops import native
    from scratchlm.ops.attention import TOKENS_FROM
    from scratchlm.ops.fast import has_fast_attention
    from scratchlm.training.plan import epochs

    model, settings = plan.model, learner.settings
    say_progress(
        f"model: {count_parameters(model).unique:,} parameters, {model.num_layers} layers, "
        f"d_model {model.d_model}, {model.num_heads} heads, context {model.context_length}, "
        f"vocabulary {model.vocab_size:,}"
    )
    say_progress(
        f"training: {settings.steps:,} steps of {settings.tokens_per_step(model):,} tokens, "
        f"{epochs(plan):.3g} epochs, on {_where(learner)}, {settings.precision}"
        + (f"; starting from {start_folder(plan.start)}" if plan.start and not step else "")
        + (f"; going on from step {step:,}" if step else "")
    )
    on_cpu = learner.device.type == "cpu" and settings.precision == "fp32"
    fast = has_fast_attention(learner.model.ops)
    if on_cpu and fast and model.context_length >= TOKENS_FROM:
        reason = native.why_not()
        if reason is not None:
            say_progress(f"attention: torch's, which is slower; ours is not available: {reason}")


def _where(learner: Any) -> str:
    """Say on what a model learns: a device, or ranks and how it lies over them."""
    ranks, settings = learner.ranks, learner.settings
    if ranks is None:
        return str(learner.device)
    tp = f" × tp {ranks.tensor_size}" if ranks.tensor_size > 1 else ""
    tp += f" × cp {ranks.context_size}" if ranks.context_size > 1 else ""
    return f"{ranks.size} ranks ({settings.parallel or 'zero1'}{tp}, {ranks.device.type})"
