"""`scratchlm demo`: train on stories with known probabilities, and compare the model to them.

`corpus.py` writes corpus and token files, `words.py` computes next-word probabilities, `showing.py`
prints and draws; this file runs them in order.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scratchlm.cli import terminal
from scratchlm.cli.device import Device, choose_device

if TYPE_CHECKING:
    import torch

    from scratchlm.cli.demo.corpus import DemoArgs, World

STEPS, SENTENCES = 1_200, 90_000
LOSS_WITHIN, WORD_WITHIN = 0.03, 0.03


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("demo")(demo)


def demo(
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the stories, the weights and the order.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Updates to make.")] = STEPS,
    sentences: Annotated[
        int, typer.Option(min=100, help="Sentences of the corpus, at least.")
    ] = SENTENCES,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove the demo that is in --out and start clean.")
    ] = False,
    device: Device = "cpu",
) -> None:
    """Train a small model on a world whose truth is known, and show how near it came.

    Stories are drawn from a grammar, so the exact probability of every next word is known, and so
    is the loss that no model can beat. The demo ends with the model's next words beside the truth.
    Exit status 0: the held-out loss is within 3 % of that floor and every probability shown within
    0.03 of the truth; 1: not. A demo that was interrupted goes on where it stopped.
    """
    from scratchlm.cli.demo.corpus import DemoArgs, remove_demo

    if seed < 0:
        raise ValueError(f"--seed must be >= 0; got {seed}")
    if fresh:
        remove_demo(out)
    status = _demo(DemoArgs(out, seed, steps, sentences), device)
    if status:
        raise typer.Exit(status)


def say(text: str = "") -> None:
    """Print a progress line to stderr; results go to standard output."""
    terminal.say(text, err=True)


def _demo(args: DemoArgs, device_name: str) -> int:
    from scratchlm.cli.demo.corpus import make_world
    from scratchlm.cli.demo.showing import accounting_lines
    from scratchlm.cli.demo.trial import trial
    from scratchlm.training import watch_signals

    device = choose_device(device_name)
    world = make_world(args, say)
    if not world.finished:
        world.forecast = trial(world, device)
        for line in accounting_lines(world):
            say(line)
    with watch_signals() as stop:
        if _train(world, device, stop) == "interrupted":
            say(f"stopped and saved; the same command goes on: {args.command()}")
            return stop.exit_status
    return _show(world)


def _train(world: World, device: torch.device, stop: Callable[[], bool]) -> str:
    from scratchlm.cli.demo.showing import FloorConsole
    from scratchlm.cli.training_figures import bytes_of_ids, make_sampler
    from scratchlm.training import run_plan

    plan, console = world.plan, FloorConsole(world)
    with console:
        return run_plan(
            world.out,
            plan,
            resume=True,
            device=device,
            bytes_per_id=bytes_of_ids(world.tokenizer, plan.model.vocab_size),
            sample=make_sampler(plan, world.tokenizer, None),
            watchers=(console,),
            on_begin=lambda learner, run, _: say(world.start_message(run.progress.step)),
            warn=terminal.warn,
            should_stop=stop,
            matmul_rate=world.forecast.matmul_rate if world.forecast else None,
        ).ended


def _show(world: World) -> int:
    """Print the model's next words beside the truth, write the report, return the exit status."""
    from rich.console import Console

    from scratchlm.cli.attention_picture import attention_section
    from scratchlm.cli.demo.showing import (
        collect_result,
        html_sections,
        print_samples,
        print_table,
        print_verdict,
    )
    from scratchlm.cli.demo.words import compare_next_words, write_stories
    from scratchlm.inference import load_model
    from scratchlm.training import write_report

    console = Console(highlight=False)
    model = load_model(world.out).model
    stories = write_stories(model, world)
    comparisons = compare_next_words(model, world)
    result = collect_result(world, comparisons)
    print_samples(console, stories)
    print_table(console, comparisons)
    report = write_report(
        world.out,
        title="scratchlm demo: a world whose truth is known",
        floor=world.floor,
        sections=[
            *html_sections(world, result, comparisons, stories),
            *filter(None, [attention_section(world.out)]),
        ],
        command="scratchlm demo",
    )
    print_verdict(console, world, result)
    whole_lines = not console.is_terminal
    console.print(f"report  {report}", markup=False, soft_wrap=True)
    console.print(
        f"page    scratchlm serve {shlex.quote(str(world.out))}, then open http://127.0.0.1:8000: "
        "write with it, and look inside",
        markup=False,
        soft_wrap=whole_lines,
    )
    return 0 if result.holds else 1
