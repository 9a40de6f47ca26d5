"""`scratchlm account`: parameters, FLOPs, memory, time and cost of a model, with formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scratchlm.cli.errors import named_as_options

# Arguments of the library that an error may name first.
NAMES = "phase batch context prompt cache new_tokens documents convention optimizer checkpointing"
NAMES += " attention loss gpus parallel tp micro_batches link mfu price quantize targets"


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("account")(account)


@named_as_options(*NAMES.split(), precision="dtype", rank="lora")
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
    ] = "h100-sxm",
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
    from scratchlm.cli import account_answers as answers
    from scratchlm.cli.account_models import (
        check_lengths,
        check_views,
        find_model,
        parse_count,
        parse_lengths,
        stored_format,
        unused_options,
    )
    from scratchlm.cli.terminal import warn

    if legend:
        answers.print_legend()
        if not models:
            return
    if not models:
        raise ValueError("whose account? give a preset, a run, a checkpoint or a config")
    if json and csv:
        raise ValueError("--json and --csv exclude each other")
    views: dict[str, object] = {"verify": verify, "compare": compare, "sweep": sweep, "fits": fits}
    views |= {"plans": plans, "lora": lora}
    check_views(
        views,
        {"json": json, "csv": csv, "plot": plot, "html": html},
    )
    check_lengths(phase, {"prompt": prompt, "new-tokens": new_tokens, "documents": documents})
    if link is not None and gpus == 1 and not plans and html is None:
        raise ValueError("--link is for several GPUs: --gpus, or --plans")
    given = {"convention": convention != "full", "gpu": gpu != "h100-sxm", "mfu": mfu != 0.4}
    given |= {"tokens": tokens is not None, "price": price is not None, "accumulate": accumulate}
    given |= {"optimizer": optimizer != "adamw", "checkpointing": checkpointing != "none"}
    given |= {"loss": loss != "fused", "micro-batches": micro_batches > 1}
    view = next((name for name, value in views.items() if value), None)
    if html is None and (view is not None or not (json or csv)):
        for option, beside in unused_options(view, phase, given):
            warn(f"--{option} has no effect beside {beside}")
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
        parallel="zero1" if parallel == "none" and gpus > 1 else parallel,
        gpus=(tp or 1) if plans else gpus,
        tp=tp,
        quantize=quantize,
    )
    configs = {name: find_model(name) for name in models}
    name, config = next(iter(configs.items()))
    money = {
        "tokens": parse_count(tokens) if tokens else None,
        "mfu": mfu,
        "price": price,
        "link": None if link is None else link * 1e9,
    }
    output = "json" if json else "csv" if csv else "table"
    asked = answers.Question(name, config, setup, convention, gpu, money, output, plot)
    if lora is not None:
        answers.show_lora(asked, lora, targets)
        return
    if targets is not None:
        raise ValueError("--targets needs --lora")
    if html is not None:
        if quantize:
            raise ValueError("--html shows a model that is not quantised; leave --quantize out")
        answers.write_page(asked, html)
        if output == "table" and plot is None:
            return
    if verify:
        answers.show_verified(asked)
    elif compare or sweep:
        answers.show_rows(asked, configs, sweep)
    elif fits:
        answers.show_fits(asked, fits)
    elif plans:
        answers.show_plans(asked)
    else:
        answers.show(asked, parallel)
