"""`scratchlm inspect`: one prompt seen from inside, in the terminal or as a page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scratchlm.cli.checkpoints import CheckpointOption
from scratchlm.cli.device import Device
from scratchlm.cli.generate import (
    Accelerate,
    Dtype,
    ModelArgument,
    Prompt,
    draw_bar,
    load,
)
from scratchlm.cli.terminal import read_prompt, visible

if TYPE_CHECKING:
    from rich.console import Console

    from scratchlm.inference.prompts import AnyTokenizer
    from scratchlm.inspect.report import Ablation, Report

POINT = "POINT[:HEADS]"
SHOWN = 15  # parts of an attribution


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("inspect")(inspect)


def inspect(
    model: ModelArgument,
    prompt: Prompt,
    lens: Annotated[bool, typer.Option("--lens", help="The best guess after every layer.")] = False,
    attention: Annotated[
        str | None, typer.Option(metavar="LAYER.HEAD", help="Where a head looks.")
    ] = None,
    attribute: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Who wrote this next token's logit; #7 is id 7."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="… or its lead over this token's.")
    ] = None,
    ablate: Annotated[
        list[str] | None, typer.Option(metavar=POINT, help="Set to 0 first; repeatable.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write all of it as one page.")] = None,
    best: Annotated[int, typer.Option("--best", "-n", min=1, help="How many tokens to show.")] = 5,
    checkpoint: CheckpointOption = None,
    device: Device = "auto",
    dtype: Dtype = "stored",
    accelerate: Accelerate = True,
) -> None:
    """Look into a model as it reads a prompt: lens, attention, attribution, ablation.

    Points are named like the state dict: layers.1.attn.heads:3, layers.0.ffn.out.
    """
    from rich.console import Console

    from scratchlm.inference.next_tokens import token_text
    from scratchlm.inference.prompts import encode_prompt
    from scratchlm.inspect.report import report

    loaded = load(model, checkpoint, device, dtype, accelerate)
    tokenizer, text = loaded.need_tokenizer(), read_prompt(prompt)
    if against is not None and attribute is None:
        raise ValueError("--against needs --attribute")
    head = None if attention is None else _head(attention, loaded.model)
    found = report(
        loaded.model,
        encode_prompt(tokenizer, text),
        lambda token: token_text(tokenizer, token),
        token=None if attribute is None else _token(attribute, tokenizer, "--attribute"),
        against=None if against is None else _token(against, tokenizer, "--against"),
        ablate=[_ablation(given) for given in ablate or []],
        layers=None if html is not None else () if head is None else (head[0],),
        best=best,
    )
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    _print_next(console, found)
    if lens or (attention is None and attribute is None and html is None):
        _print_lens(console, found)
    if head is not None:
        _print_attention(console, found, *head)
    if attribute is not None:
        _print_shares(console, found)
    if html is not None:
        from scratchlm.durable import write_atomically
        from scratchlm.inspect.page import inspect_page

        if head is not None and head[0] not in found.weights:
            raise ValueError(f"--html: the patterns of {len(found.tokens)} tokens are too large")
        write_atomically(html, inspect_page(model, found, head).encode())
        console.print(f"written: {html}", style="dim")


# Arguments


def _head(given: str, model: Any) -> tuple[int, int]:
    layer, _, head = given.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise ValueError(f"--attention must be LAYER.HEAD, as in 1.0; got {given!r}")
    layers, heads = model.config.num_layers, model.config.num_heads
    if int(layer) >= layers or int(head) >= heads:
        raise ValueError(
            f"--attention: layers go from 0 to {layers - 1}, heads from 0 to {heads - 1}; "
            f"got {given!r}"
        )
    return int(layer), int(head)


def _token(given: str, tokenizer: AnyTokenizer, option: str) -> int:
    if given.startswith("#") and given[1:].isdecimal():
        return int(given[1:])
    ids = tokenizer.encode(given)
    if len(ids) != 1:
        pieces = ", ".join(repr(tokenizer.decode([i])) for i in ids[:8])
        more = ", …" if len(ids) > 8 else ""
        raise ValueError(
            f"{option} must be one token, or #ID; {given!r} is {len(ids)} tokens: {pieces}{more}"
        )
    return int(ids[0])


def _ablation(given: str) -> Ablation:
    point, _, heads = given.partition(":")
    if not heads:
        return point, None
    if not all(head.isdecimal() for head in heads.split(",")):
        raise ValueError(f"--ablate must be {POINT}, as in layers.1.attn.heads:0,3; got {given!r}")
    return point, [int(head) for head in heads.split(",")]


# Printing


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        numeric = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if numeric else "left")
    return table


def _text(text: str) -> Any:
    from rich.text import Text

    return Text(repr(visible(text)))


def _print_next(console: Console, found: Report) -> None:
    from rich.text import Text

    if found.ablated:
        console.print(f"without {', '.join(found.ablated)}", style="bold")
        table = _table("next token", ">before", ">after", "")
        for change in found.changes:
            table.add_row(
                *(_text(change.text), f"{change.before:.2%}", f"{change.after:.2%}"),
                Text(draw_bar(change.after, 30), style="cyan"),
            )
    else:
        table = _table("next token", ">probability", "")
        for guess in found.next:
            bar = Text(draw_bar(guess.probability, 30), style="cyan")
            table.add_row(_text(guess.text), f"{guess.probability:.2%}", bar)
    console.print(table)


def _print_lens(console: Console, found: Report) -> None:
    console.print("\nlens: the best guesses after every layer, at the last token", style="bold")
    table = _table("after", "best", ">", "next best", "")
    for name, positions in found.lens.items():
        first, *others = positions[-1][:3]
        rest = [_text(guess.text) for guess in others]
        rest += [""] * (2 - len(rest))
        table.add_row(name, _text(first.text), f"{first.probability:.1%}", *rest)
    console.print(table)


def _print_attention(console: Console, found: Report, layer: int, head: int) -> None:
    from rich.text import Text

    console.print(f"\nattention: where head {layer}.{head} looks", style="bold")
    table = _table(">", "token", "looks at", "", "")
    weights = found.weights[layer][head]
    for i, token in enumerate(found.tokens):
        best = weights[i, : i + 1].topk(min(3, i + 1))
        cells = [
            Text(f"{weight:.2f} {j} {visible(found.tokens[j])!r}")
            for weight, j in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        table.add_row(str(i), _text(token), *cells, *[""] * (3 - len(cells)))
    console.print(table)


def _print_shares(console: Console, found: Report) -> None:
    from rich.text import Text

    attribution, (token, against) = found.attribution, found.attributed
    assert attribution is not None
    lead = "" if against is None else f", against {visible(against)!r}"
    console.print(f"\nwho wrote the logit of {visible(token)!r}{lead}", style="bold")
    parts = attribution.top()
    scale = max(abs(share) for _, share in parts) or 1.0
    table = _table("part", ">share", "")
    for part, share in parts[:SHOWN]:
        bar = Text(draw_bar(abs(share) / scale, 30), style="cyan" if share >= 0 else "red")
        table.add_row(part, f"{share:+.4f}", bar)
    if len(parts) > SHOWN:
        rest = sum(share for _, share in parts[SHOWN:])
        table.add_row(f"{len(parts) - SHOWN} more", f"{rest:+.4f}", "")
    table.add_row("sum: the logit", f"{float(attribution.logit[0]):+.4f}", "")
    console.print(table)
    console.print(
        f"The final norm's scale is held fixed. Rounding: {attribution.error:.1e}.", style="dim"
    )
