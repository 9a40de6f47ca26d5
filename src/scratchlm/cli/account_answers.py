"""What `scratchlm account` prints for each question: a model, plans, a sweep, what fits."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from scratchlm import accounting
from scratchlm.accounting import Machine, Setup
from scratchlm.cli import account_output, account_parallel, account_tables
from scratchlm.cli.terminal import say, write_output
from scratchlm.config import ModelConfig, to_dict


@dataclass(frozen=True)
class Question:
    """Whose account, under which assumptions, and how it is to be shown."""

    name: str
    config: ModelConfig
    setup: Setup
    convention: str
    gpu: str
    money: dict[str, Any]  # tokens, mfu, price, link
    output: str  # table, json or csv
    plot: Path | None

    @property
    def machine(self) -> Machine:
        """The GPU that is named, or this machine, measured."""
        if self.gpu != "this":
            return accounting.machine(self.gpu)
        from scratchlm.accounting.verify import measure_machine

        return measure_machine()

    def open_table(self) -> Console:
        """Print the model's name and sizes; return the console to go on with."""
        console = make_console()
        account_tables.print_header(console, self.name, self.config)
        console.print()
        return console

    def say_plotted(self) -> None:
        """Say that the plot was written, if one was."""
        if self.plot is not None:
            say(f"wrote {self.plot}", err=True)


def make_console() -> Console:
    """Return a console; if not a terminal, wide enough for every column."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=160, highlight=False)


def print_legend() -> None:
    """Print every symbol and its meaning."""
    room = max(len(name) for name in accounting.SYMBOLS) + 2
    for name, meaning in accounting.SYMBOLS.items():
        lines = textwrap.wrap(meaning, 78 - room)
        typer.echo(f"{name:<{room}}" + f"\n{'':<{room}}".join(lines))
    typer.echo()


def show(asked: Question, parallel: str) -> None:
    """Print the whole account; `parallel` is the word for the plan as it was typed."""
    setup = asked.setup
    result = accounting.account(
        asked.config, setup, machine=asked.machine, convention=asked.convention, **asked.money
    )
    if asked.plot is not None:
        account_output.plot_account(asked.name, result, asked.convention, asked.plot)
    if asked.output == "json":
        say(account_output.account_json(result))
    elif asked.output == "csv":
        write_output(account_output.account_csv(result))
    else:
        console = asked.open_table()
        account_tables.print_parameters(console, result.parameters)
        account_tables.print_flops(console, result, asked.convention)
        learns = setup.phase in ("forward", "training")
        if learns:
            account_tables.print_training_memory(console, result)
        account_tables.print_serving_memory(console, result)
        if result.roofline is not None:
            account_tables.print_roofline(console, result.roofline)
        if learns and setup.gpus > 1:
            account_parallel.print_projection(console, result, parallel)
        if result.training is not None and learns:
            account_tables.print_training(console, result.training)
    asked.say_plotted()


def show_lora(asked: Question, rank: int, targets: str | None) -> None:
    """Print what learning an adapter takes."""
    from scratchlm.accounting.lora import lora_memory
    from scratchlm.config.lora import LoRA

    setup = asked.setup
    words = tuple(word.strip() for word in targets.split(",")) if targets else ()
    found = lora_memory(asked.config, LoRA(rank=rank, targets=words), setup)
    if asked.output == "json":
        table = {"parameters": found.parameters.as_dict(), "training": found.training.as_dict()}
        say(json.dumps({**table, "moments": found.moments}, indent=2))
        return
    console = asked.open_table()
    account_tables.print_tree(console, f"Adapter of rank {rank}", found.parameters, "parameters")
    size = f"batch {setup.batch}, {setup.context or asked.config.context_length:,} tokens"
    title = f"Memory of one GPU that learns it, {found.training.name} ({size}; {setup.precision})"
    account_tables.print_tree(console, title, found.training, "bytes", depth=4)


def show_plans(asked: Question) -> None:
    """Print what each number of GPUs comes to, plan by plan."""
    machine, money = asked.machine, asked.money
    found = accounting.plans(asked.config, asked.setup, machine, money["mfu"], money["link"])
    if asked.output != "table":
        say(account_parallel.plans_text(found, as_json=asked.output == "json"))
        return
    account_parallel.print_plans(asked.open_table(), found, machine)


def write_page(asked: Question, path: Path) -> None:
    """Write the page with sliders."""
    from scratchlm.accounting.page import account_page
    from scratchlm.durable import write_atomically

    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"a page must end in .html; got {path}")
    options: dict[str, Any] = {"machine": asked.machine, "convention": asked.convention}
    options |= asked.money
    # validate: the page must not open with settings that the tables refuse
    accounting.account(asked.config, asked.setup, **options)
    page = account_page(asked.name, asked.config, asked.setup, **options)
    write_atomically(path, page.encode())
    say(f"wrote {path}", err=True)


def show_rows(asked: Question, configs: dict[str, ModelConfig], sweep: str | None) -> None:
    """Print models side by side, or one over a range of sizes."""
    setup, convention, machine = asked.setup, asked.convention, asked.machine
    if sweep is None:
        first = "model"
        rows = [
            accounting.summarize(name, config, setup, convention, machine)
            for name, config in configs.items()
        ]
    elif len(configs) > 1:
        raise ValueError("--sweep takes one model; got several")
    else:
        first, values = accounting.parse_sweep(sweep)
        rows = accounting.sweep(asked.config, setup, first, values, convention, machine)
    if asked.plot is not None:
        account_output.plot_summaries(first, rows, asked.plot)
    if asked.output == "json":
        say(account_output.summaries_json(rows))
    elif asked.output == "csv":
        write_output(account_output.summaries_csv(first, rows))
    else:
        title = "Models side by side" if sweep is None else f"Sweep of {first}"
        account_tables.print_summaries(make_console(), title, first, rows)
    asked.say_plotted()


def show_fits(asked: Question, memory: str) -> None:
    """Print the largest batch, context and model that fit a memory."""
    from scratchlm.cli.account_models import parse_bytes

    budget = parse_bytes(memory)
    answers = {
        "training": accounting.fits(asked.config, asked.setup, budget),
        "serving": accounting.fits(asked.config, asked.setup, budget, serving=True),
    }
    if asked.output == "json":
        table = {
            kind: {
                **{f.name: getattr(found, f.name) for f in dataclasses.fields(found)},
                "model": None if found.model is None else to_dict(found.model),
            }
            for kind, found in answers.items()
        }
        say(json.dumps(table, indent=2))
        return
    if asked.output == "csv":
        say("kind,memory,needed,batch,context,parameters")
        for kind, f in answers.items():
            say(f"{kind},{f.memory},{f.needed},{f.batch},{f.context},{f.parameters}")
        return
    account_tables.print_fits(asked.open_table(), answers)


def show_verified(asked: Question) -> None:
    """Print every comparison; exit 1 where one does not hold."""
    import torch

    from scratchlm import acceleration
    from scratchlm.errors import ScratchLMError

    if not acceleration.is_available():
        raise ScratchLMError("--verify needs scratchlm.accelerate, which is not there")
    from scratchlm.accounting.verify import CANNOT_SEE, verify

    checks = verify(asked.config, asked.setup)
    account_tables.print_checks(make_console(), checks, CANNOT_SEE, torch.cuda.is_available())
    if not all(check.holds for check in checks):
        raise typer.Exit(1)
