"""`scratchlm train`: from text to a trained model and a report on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scratchlm.cli.device import Device

if TYPE_CHECKING:
    from scratchlm.cli.training_run import Figures
    from scratchlm.training import Plan
    from scratchlm.training.choosing import Machine

SECTIONS = ("model.", "train.", "data.")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("train")(train)


def train(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text files or folders, a folder made by `prepare`, or a token file; then "
            "changes to the config, such as model.d_model=256 or train.lr=1e-3.",
            metavar="DATA... [KEY=VALUE]...",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("run"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, or begin it.")
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Start from a run, a checkpoint or a Hugging Face folder, with its tokenizer.",
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A model by name; see `scratchlm presets`.")
    ] = None,
    params: Annotated[
        str | None, typer.Option(help="A model of about this many parameters, such as 10M.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with the tables model, train and data, or some of them."),
    ] = None,
    ablation: Annotated[
        str | None,
        typer.Option(
            help="Change one thing: no-rope, no-norm, post-norm, silu or tied-embeddings."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates to make.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bpe (learnt from the text), char, or a tokenizer's folder.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Of the tokenizer that is learnt.")] = None,
    val: Annotated[Path | None, typer.Option(help="A token file to validate on.")] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="How much of the text to hold out.", show_default="0.1")
    ] = None,
    separator: Annotated[
        str | None, typer.Option(help="Split text files into documents at this text.")
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(help="The text's field in JSON Lines or Parquet.", show_default="text"),
    ] = None,
    device: Device = "auto",
    gpus: Annotated[
        int | None,
        typer.Option(help="Train on this many GPUs of this machine, a process each.", min=1),
    ] = None,
    ops: Annotated[str, typer.Option(help="fast, or reference: the formulas as written.")] = "fast",
    accelerate: Annotated[
        bool | None,
        typer.Option(help="Use fused layers and kernels.", show_default="where available"),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="What samples begin with.", show_default="end of text")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A change to the config; may be repeated.")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard.")
    ] = False,
) -> None:
    """Train a model, from text or token files, and write a report.

    Ctrl-C saves and stops (exit status 130; SIGTERM 143); --resume goes on from there, bit for bit.
    A second Ctrl-C ends at once.
    """
    from scratchlm.cli.training_run import RunArgs, run, say_progress
    from scratchlm.cli.training_setup import TrainArgs, config_tables, continue_plan, make_plan
    from scratchlm.errors import ScratchLMError
    from scratchlm.ops import OPS
    from scratchlm.training import has_run
    from scratchlm.training.settings import parse_overrides

    words = data or []
    changes = [word for word in words if word.startswith(SECTIONS) and "=" in word]
    for word in words:
        is_change = "=" in word or word.startswith(SECTIONS)
        if is_change and word not in changes and not Path(word).exists():
            raise ValueError(
                f"{word}: no such file; a change to the config begins with "
                f"{', '.join(SECTIONS[:-1])} or {SECTIONS[-1]}, as in train.lr=1e-3"
            )
    overrides = parse_overrides(with_kinds([*changes, *(set_ or [])]))
    set_by_option(overrides.setdefault("train", {}), steps=steps, accelerate=accelerate)
    if ops not in OPS:
        raise ValueError(f"--ops must be one of {', '.join(OPS)}; got {ops!r}")
    args = TrainArgs(
        data=[word for word in words if word not in changes],
        out=out,
        preset=preset,
        params=params,
        config=config,
        ablation=ablation,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        val=val,
        val_fraction=val_fraction,
        separator=separator,
        text_field=field,
        start=start,
        overrides=overrides,
    )

    def plan_of(machine: Machine) -> Plan:
        plan = (continue_plan if has_run(out) else make_plan)(args, machine, say_progress)
        if plan.tuning is not None:
            raise ScratchLMError(
                f"{out} is a run of fine-tuning; `scratchlm finetune` goes on with it"
            )
        return plan

    typed, settings = overrides["train"], config_tables(args).get("train", {})
    asked = RunArgs("train", out, resume, device, gpus, tensorboard, typed, settings, ops)
    run(asked, plan_of, lambda plan: _figures(plan, prompt))


def with_kinds(changes: list[str]) -> list[str]:
    """Read model.ffn=moe as model.ffn.type=moe, so that the part's own keys go beside it."""
    kind = r"^\s*(model\.(?:positions|ffn|norm))\s*=(?!\s*\{)"
    return [re.sub(kind, r"\1.type=", change) for change in changes]


def set_by_option(table: dict[str, Any], **options: Any) -> None:
    """Put what options say into a table of settings, which must not say it too."""
    for name, value in options.items():
        if value is not None and name in table:
            raise ValueError(f"give --{name} or train.{name}, not both")
        if value is not None:
            table[name] = value


def _figures(plan: Plan, prompt: str | None) -> Figures:
    """Make what needs the tokenizer: samples, the bytes of each id, tasks."""
    from scratchlm.cli.training_figures import bytes_of_ids, make_sampler, make_task_runner
    from scratchlm.cli.training_run import Figures
    from scratchlm.tokenizer import load_tokenizer

    run_tasks = make_task_runner(plan)
    if plan.data.tokenizer is None:
        return Figures()
    tokenizer = load_tokenizer(plan.data.tokenizer)
    sizes = bytes_of_ids(tokenizer, plan.model.vocab_size)
    return Figures(make_sampler(plan, tokenizer, prompt), sizes, run_tasks)
