"""`scratchlm account`: parameters, FLOPs, memory, time and cost of a model, with formulas."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scratchlm.cli.terminal import say, write_output

if TYPE_CHECKING:
    from rich.console import Console

    from scratchlm.accounting import Machine, Setup, Summary
    from scratchlm.config import ModelConfig

DEFAULT_GPU = "h100-sxm"


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("account")(account)


def account(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="A preset, a run, a checkpoint, a .toml or .json config, or a Hugging Face "
            "folder or config.json.",
            metavar="MODEL...",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences on each GPU.")] = 1,
    context: Annotated[
        int | None, typer.Option(help="Tokens in a sequence; default: the model's context.")
    ] = None,
    phase: Annotated[
        str,
        typer.Option(help="forward, training, prefill, decode, generation or generation-no-cache."),
    ] = "forward",
    prompt: Annotated[int | None, typer.Option(help="Tokens in the prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens to generate.")] = None,
    cache: Annotated[int | None, typer.Option(help="Tokens cached at a decode step.")] = None,
    documents: Annotated[
        str | None, typer.Option(help="Lengths of documents packed into a sequence: 512,512.")
    ] = None,
    convention: Annotated[str, typer.Option(help="full, causal, 6ND or hardware.")] = "full",
    dtype: Annotated[str, typer.Option(help="fp32, bf16-mixed or bf16.")] = "bf16-mixed",
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Serve weights in few bits: q8_0, q4_k, …; with --lora learn beside nf4 or int8. "
            "Memory only.",
            show_default="as a MODEL is stored",
        ),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd, sgd-momentum or muon.")] = "adamw",
    checkpointing: Annotated[
        str, typer.Option(help="What is recomputed: none, attention, ffn or block.")
    ] = "none",
    attention: Annotated[str, typer.Option(help="fused or unfused.")] = "fused",
    loss: Annotated[
        str, typer.Option(help="fused (slice by slice) or unfused (all logits at once).")
    ] = "fused",
    accumulate: Annotated[
        bool, typer.Option("--accumulate", help="Gradients live from step to step.")
    ] = False,
    lora: Annotated[
        int | None, typer.Option(help="Learn an adapter of this rank on a base that stands still.")
    ] = None,
    targets: Annotated[
        str | None, typer.Option(help="With --lora: the layers it adapts; default: all.")
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="A GPU by name, or `this` to measure this machine.")
    ] = DEFAULT_GPU,
    gpus: Annotated[int, typer.Option(help="Number of GPUs.")] = 1,
    parallel: Annotated[
        str, typer.Option(help="zero1, fsdp, hsdp, tp or ddp; none on several GPUs means zero1.")
    ] = "none",
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel ranks: GPUs that share a layer and a batch.")
    ] = None,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches in an update.")] = 1,
    link: Annotated[
        float | None,
        typer.Option(help="GB/s out of a GPU; unsaid: the GPU's own, and 50 to other nodes."),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens to train on: 300B; default: 20 per parameter.")
    ] = None,
    mfu: Annotated[float, typer.Option(help="Model FLOPs utilisation of the training run.")] = 0.4,
    price: Annotated[float | None, typer.Option(help="Dollars per GPU-hour.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Put several MODELs side by side.")
    ] = False,
    sweep: Annotated[
        str | None, typer.Option(help="Vary one size: context_length=1024..131072 doubles it.")
    ] = None,
    plans: Annotated[
        bool, typer.Option("--plans", help="What 8 to 1,024 GPUs come to, plan by plan.")
    ] = False,
    fits: Annotated[
        str | None, typer.Option(help="The largest batch, context and model in a memory: 24GiB.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the real model, built without memory.")
    ] = False,
    legend: Annotated[
        bool, typer.Option("--legend", help="Say what the symbols of the formulas stand for.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw to this file (.png, .svg).")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with sliders to this file (.html).")
    ] = None,
) -> None:
    """Account for a model before it is run: parameters, FLOPs, memory, time and money."""
    from scratchlm.accounting import CONVENTIONS, Execution, Setup
    from scratchlm.cli.account_models import (
        find_model,
        parse_count,
        parse_lengths,
        stored_format,
    )

    if legend:
        _print_legend()
        if not models:
            return
    if not models:
        raise ValueError("whose account? give a preset, a run, a checkpoint or a config")
    if json and csv:
        raise ValueError("--json and --csv exclude each other")
    if convention not in CONVENTIONS:
        raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}; got {convention!r}")
    if plans and (gpus > 1 or parallel != "none"):
        raise ValueError("--plans shows 8 to 1,024 GPUs; it excludes --gpus and --parallel")
    if len(models) > 1 and not compare:
        raise ValueError(f"several models need --compare; got {' '.join(models)}")
    if quantize is None and len(models) == 1:
        quantize = stored_format(models[0])
    setup = Setup(
        phase=phase,
        batch=batch,
        context=context,
        documents=parse_lengths(documents) if documents else (),
        prompt=prompt,
        cache=cache,
        new_tokens=new_tokens,
        precision=dtype,
        optimizer=optimizer,
        execution=Execution(attention=attention, loss=loss, checkpointing=checkpointing),
        accumulate=accumulate,
        micro_batches=micro_batches,
        parallel=_parallel(parallel, gpus),
        gpus=(tp or 1) if plans else gpus,
        tp=tp,
        quantize=quantize,
    )
    configs = {name: find_model(name) for name in models}
    if lora is not None:
        if verify or compare or sweep or fits or plans or csv or html or plot:
            raise ValueError("--lora shows one model, as a table or with --json")
        _lora(*next(iter(configs.items())), setup, lora, targets, json)
        return
    if targets is not None:
        raise ValueError("--targets needs --lora")
    money = {"tokens": parse_count(tokens) if tokens else None, "mfu": mfu, "price": price}
    money["link"] = None if link is None else link * 1e9
    output = "json" if json else "csv" if csv else "table"
    name, config = next(iter(configs.items()))
    if html is not None:
        if verify or compare or sweep or fits or plans or quantize:
            raise ValueError(
                "--html shows one model, not quantised; it excludes --compare, --sweep, --fits, "
                "--plans, --verify and --quantize"
            )
        _write_page(html, name, config, setup, convention, _machine(gpu), money)
        if output == "table" and plot is None:
            return
    if verify:
        _verify(config, setup)
    elif compare or sweep:
        first, rows = _rows(configs, setup, sweep, convention, _machine(gpu))
        _show_rows(first, rows, output, plot)
    elif fits:
        _fits(name, config, setup, fits, output)
    elif plans:
        _plans(name, config, setup, _machine(gpu), mfu, money["link"], output)
    else:
        _show(name, config, setup, convention, _machine(gpu), money, output, plot, parallel)


def _lora(
    name: str, config: ModelConfig, setup: Setup, rank: int, targets: str | None, as_json: bool
) -> None:
    """Print what learning an adapter takes."""
    import json

    from scratchlm.accounting.lora import lora_memory
    from scratchlm.cli import account_tables
    from scratchlm.config.lora import LoRA

    words = tuple(word.strip() for word in targets.split(",")) if targets else ()
    found = lora_memory(config, LoRA(rank=rank, targets=words), setup)
    if as_json:
        table = {"parameters": found.parameters.as_dict(), "training": found.training.as_dict()}
        say(json.dumps({**table, "moments": found.moments}, indent=2))
        return
    console = _console()
    account_tables.print_header(console, name, config)
    console.print()
    account_tables.print_tree(console, f"Adapter of rank {rank}", found.parameters, "parameters")
    size = f"batch {setup.batch}, {setup.context or config.context_length:,} tokens"
    title = f"Memory of one GPU that learns it, {found.training.name} ({size}; {setup.precision})"
    account_tables.print_tree(console, title, found.training, "bytes", depth=4)


def _print_legend() -> None:
    """Print every symbol and its meaning."""
    from scratchlm.accounting import SYMBOLS

    room = max(len(name) for name in SYMBOLS) + 2
    for name, meaning in SYMBOLS.items():
        lines = textwrap.wrap(meaning, 78 - room)
        typer.echo(f"{name:<{room}}" + f"\n{'':<{room}}".join(lines))
    typer.echo()


def _parallel(parallel: str, gpus: int) -> str:
    """Default to ZeRO-1 for several GPUs."""
    return "zero1" if parallel == "none" and gpus > 1 else parallel


def _machine(name: str) -> Machine:
    from scratchlm.accounting import machine

    if name != "this":
        return machine(name)
    from scratchlm.accounting.verify import measure_machine

    return measure_machine()


def _console() -> Console:
    """Return a console; if not a terminal, wide enough for every column."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=160, highlight=False)


def _show(
    name: str,
    config: ModelConfig,
    setup: Setup,
    convention: str,
    machine: Machine,
    money: dict[str, Any],
    output: str,
    plot: Path | None,
    parallel: str,
) -> None:
    from scratchlm import accounting
    from scratchlm.cli import account_output, account_parallel, account_tables

    result = accounting.account(config, setup, machine=machine, convention=convention, **money)
    if plot is not None:
        account_output.plot_account(name, result, convention, plot)
    if output == "json":
        say(account_output.account_json(result))
    elif output == "csv":
        write_output(account_output.account_csv(result))
    else:
        console = _console()
        account_tables.print_header(console, name, config)
        console.print()
        account_tables.print_parameters(console, result.parameters)
        account_tables.print_flops(console, result, convention)
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
    if plot is not None:
        say(f"wrote {plot}", err=True)


def _plans(
    name: str,
    config: ModelConfig,
    setup: Setup,
    machine: Machine,
    mfu: float,
    link: float | None,
    output: str,
) -> None:
    """Print what each number of GPUs comes to, plan by plan."""
    from scratchlm import accounting
    from scratchlm.cli import account_parallel, account_tables

    found = accounting.plans(config, setup, machine, mfu, link)
    if output != "table":
        say(account_parallel.plans_text(found, as_json=output == "json"))
        return
    console = _console()
    account_tables.print_header(console, name, config)
    console.print()
    account_parallel.print_plans(console, found, machine)


def _write_page(
    path: Path,
    name: str,
    config: ModelConfig,
    setup: Setup,
    convention: str,
    machine: Machine,
    money: dict[str, Any],
) -> None:
    from scratchlm import accounting
    from scratchlm.accounting.page import account_page
    from scratchlm.durable import write_atomically

    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"a page must end in .html; got {path}")
    # validate: the page must not open with settings that the tables refuse
    accounting.account(config, setup, machine=machine, convention=convention, **money)
    page = account_page(name, config, setup, machine=machine, convention=convention, **money)
    write_atomically(path, page.encode())
    say(f"wrote {path}", err=True)


def _rows(
    configs: dict[str, ModelConfig],
    setup: Setup,
    sweep: str | None,
    convention: str,
    machine: Machine,
) -> tuple[str, list[Summary]]:
    from scratchlm import accounting

    if sweep is None:
        rows = [
            accounting.summarize(name, config, setup, convention, machine)
            for name, config in configs.items()
        ]
        return "model", rows
    if len(configs) > 1:
        raise ValueError("--sweep takes one model; got several")
    field, values = accounting.parse_sweep(sweep)
    config = next(iter(configs.values()))
    return field, accounting.sweep(config, setup, field, values, convention, machine)


def _show_rows(first: str, rows: list[Summary], output: str, plot: Path | None) -> None:
    from scratchlm.cli import account_output, account_tables

    if plot is not None:
        account_output.plot_summaries(first, rows, plot)
    if output == "json":
        say(account_output.summaries_json(rows))
    elif output == "csv":
        write_output(account_output.summaries_csv(first, rows))
    else:
        title = "Models side by side" if first == "model" else f"Sweep of {first}"
        account_tables.print_summaries(_console(), title, first, rows)
    if plot is not None:
        say(f"wrote {plot}", err=True)


def _fits(name: str, config: ModelConfig, setup: Setup, memory: str, output: str) -> None:
    import json

    from scratchlm import accounting
    from scratchlm.cli import account_tables
    from scratchlm.cli.account_models import parse_bytes
    from scratchlm.config import to_dict

    budget = parse_bytes(memory)
    answers = {
        "training": accounting.fits(config, setup, budget),
        "serving": accounting.fits(config, setup, budget, serving=True),
    }
    if output == "json":
        table = {
            kind: {
                **{f.name: getattr(found, f.name) for f in dataclasses.fields(found)},
                "model": None if found.model is None else to_dict(found.model),
            }
            for kind, found in answers.items()
        }
        say(json.dumps(table, indent=2))
        return
    if output == "csv":
        say("kind,memory,needed,batch,context,parameters")
        for kind, f in answers.items():
            say(f"{kind},{f.memory},{f.needed},{f.batch},{f.context},{f.parameters}")
        return
    console = _console()
    account_tables.print_header(console, name, config)
    console.print()
    account_tables.print_fits(console, answers)


def _verify(config: ModelConfig, setup: Setup) -> None:
    """Print every comparison; exit 1 where one does not hold."""
    import torch

    from scratchlm import acceleration
    from scratchlm.errors import ScratchLMError

    if not acceleration.is_available():
        raise ScratchLMError("--verify needs scratchlm.accelerate, which is not there")
    from scratchlm.accounting.verify import CANNOT_SEE, verify
    from scratchlm.cli import account_tables

    console = _console()
    checks = verify(config, setup)
    account_tables.print_checks(console, checks, CANNOT_SEE, torch.cuda.is_available())
    if not all(check.holds for check in checks):
        raise typer.Exit(1)
