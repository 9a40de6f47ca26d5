"""An account in the terminal: a header, and one table per question."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scratchlm.accounting import (
    PRICES_AS_OF,
    Account,
    Fits,
    Item,
    Parameters,
    Roofline,
    Summary,
    Training,
)
from scratchlm.accounting.pool import PAGE_SIZE
from scratchlm.cli.terminal import does_fit, visible
from scratchlm.config import ModelConfig

if TYPE_CHECKING:
    from scratchlm.accounting.verify import Check

WIDE = 110  # columns from which the formula is also shown with the numbers in


def human(value: float, unit: str = "") -> str:
    """Format a number with a unit prefix: 4.51 T, 8.51 GB, 23.4 GiB, 3.2 ms."""
    if unit == "bytes":
        return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    if unit == "s":
        return seconds_text(value)
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P", "E", "Z", "Y"))


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    size, power = float(value), 0
    while abs(size) >= base and power < len(units) - 1:
        size, power = size / base, power + 1
    if abs(size) >= 100 or size == int(size):
        digits = f"{size:,.0f}"
    else:
        digits = f"{size:.3g}"
    return f"{digits} {units[power]}".rstrip()


def seconds_text(value: float) -> str:
    """Print a time with a unit that fits it."""
    for limit, scale, unit in (
        (1e-3, 1e6, "µs"),
        (1, 1e3, "ms"),
        (120, 1, "s"),
        (7200, 1 / 60, "min"),
        (2 * 86_400, 1 / 3600, "h"),
    ):
        if value < limit:
            return f"{value * scale:.3g} {unit}"
    return f"{value / 86_400:,.1f} days"


def exact(value: float) -> str:
    """Print whole numbers in full."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


# Columns that may wrap where the terminal is narrow; numbers never do.
_MAY_WRAP = ("formula", "with numbers", "meaning", "component", "largest model of this shape")


def make_table(title: str | None, *columns: tuple[str, str], header: bool = True) -> Table:
    """Make an empty table in the account's style; columns are (name, justify)."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 1),
        show_header=header,
    )
    styles = {"formula": "cyan", "with numbers": "cyan", "meaning": "dim"}
    for name, justify in columns:
        table.add_column(
            "" if name == "meaning" else name,
            justify=justify,  # type: ignore[arg-type]
            no_wrap=name not in _MAY_WRAP,
            overflow="fold",
            style=styles.get(name, ""),
            header_style="dim",
        )
    return table


def print_header(console: Console, name: str, config: ModelConfig) -> None:
    """Print the model's name and sizes."""
    kinds = (config.ffn, config.norm, config.positions)
    heads = f"{config.num_heads} heads of {config.d_head}"
    if config.num_kv_heads != config.num_heads:
        heads += f" ({config.num_kv_heads} for keys and values)"
    text = (
        f"{config.num_layers} layers, d_model {config.d_model:,}, {heads}, d_ff {config.d_ff:,}, "
        f"vocabulary {config.vocab_size:,}, context {config.context_length:,}; "
        f"{', '.join(type(kind).__name__ for kind in kinds)}"
        f"{', tied' if config.tie_embeddings else ''}"
    )
    console.print(Text(visible(name), style="bold"), Text(text), sep="  ")


def print_tree(
    console: Console, title: str, tree: Item, unit: str, note: bool = False, depth: int = 9
) -> None:
    """Print an item tree: formula, value, share of the whole."""
    wide = console.width >= WIDE
    columns = [("item", "left"), ("formula", "left")]
    columns += [("with numbers", "left")] if wide else []
    columns += [(unit if unit != "bytes" else "memory", "right"), ("share", "right")]
    table = make_table(title, *columns)

    def add(item: Item, level: int, whole: float) -> None:
        value = human(item.value, "bytes") if unit == "bytes" else exact(item.value)
        short = not item.children or len(item.symbols) <= 40  # else: the names just below
        name = item.name if item.times == 1 else f"{item.name} ({item.times} ×)"
        formula, numbers = (item.symbols, item.numbers) if short else ("", "")
        row = ["  " * level + name, formula, *([numbers] if wide else []), value]
        style = "bold" if level == 0 else ""
        table.add_row(*row, f"{whole:.1%}", style=style)
        if level >= depth:
            return
        if item.times > 1:
            one = item.value / item.times
            value = human(one, "bytes") if unit == "bytes" else exact(round(one))
            blank = [""] * (2 if wide else 1)
            level += 1
            table.add_row("  " * level + "one layer", *blank, value, f"{whole / item.times:.1%}")
        for child in item.children:
            add(child, level + 1, whole * child.share)

    add(tree, 0, 1.0)
    console.print(table)
    if any(item.times > 1 for _, item in tree.walk()):
        console.print(Text("  within one layer: values of one, shares of all", style="dim"))
    for text in dict.fromkeys(item.note for _, item in tree.walk() if item.note and note):
        console.print(Text(f"  {text}", style="dim"))
    console.print()


def print_parameters(console: Console, counts: Parameters) -> None:
    """Print every matrix, then the usual totals."""
    print_tree(console, "Parameters", counts.tree, "parameters", note=True)
    rows = (
        ("total", counts.total, "a tied LM head counted as its own matrix"),
        ("unique", counts.unique, "tied weights once: what an optimizer sees"),
        ("embedding", counts.embedding, "vectors looked up"),
        ("non-embedding", counts.non_embedding, "unique without those"),
        ("active per token", counts.active, "with experts, the chosen ones"),
        ("in matmuls", counts.matmul, "N_matmul of the MFU convention"),
    )
    columns = (("count", "left"), ("", "right"), ("", "right"), ("meaning", "left"))
    table = make_table(None, *columns, header=False)
    for name, value, says in rows:
        table.add_row(name, f"{value:,}", f"{_decimal_bytes(value * 4)} fp32", says)
    console.print(table)
    console.print()


def print_flops(console: Console, result: Account, convention: str) -> None:
    """Print one convention's tree, then all conventions side by side."""
    where = _where(result)
    title = f"FLOPs of {result.setup.phase} ({where}), convention {convention}"
    print_tree(console, title, result.flops[convention], "FLOP", note=True)
    columns = (("convention", "left"), ("FLOP", "right"), ("of full", "right"), ("meaning", "left"))
    table = make_table("Conventions", *columns)
    words = {
        "full": "every matmul as written, attention S×S",
        "causal": "only what must be done",
        "6ND": "2N forward, 4N backward per token",
        "hardware": "what is executed, recomputation included",
    }
    base = float(result.flops["full"].value)
    for name, item in result.flops.items():
        table.add_row(name, exact(item.value), f"{item.value / base:.3f}", words[name])
    console.print(table)
    console.print()


def _where(result: Account) -> str:
    setup = result.setup
    if setup.phase in ("forward", "training"):
        return f"batch {setup.batch}, {result.seq:,} tokens"
    return f"batch {setup.batch}"


def print_training_memory(console: Console, result: Account) -> None:
    """Print the training peak, and the other moments that were compared."""
    setup = result.setup
    how = f"{setup.precision}, {setup.optimizer}, checkpointing {setup.execution.checkpointing}"
    how += f", {setup.parallel} on {setup.gpus}" if setup.parallel != "none" else ""
    peak = result.memory.training
    size = f"batch {setup.batch}, {result.seq:,} tokens"
    title = f"Training memory of one GPU, {peak.name} ({size}; {how})"
    print_tree(console, title, peak, "bytes", depth=4 if console.width >= WIDE else 3)
    moments = result.memory.moments
    listed = ", ".join(f"{name} {human(value, 'bytes')}" for name, value in moments.items())
    print_notes(console, [f"moments: {listed}"])


def print_serving_memory(console: Console, result: Account) -> None:
    """Print what serving holds."""
    batch = result.setup.batch
    title = f"Serving memory of one GPU (batch {batch})"
    print_tree(console, title, result.memory.serving, "bytes")
    per_token = human(result.memory.kv_cache_per_token, "bytes")
    per_page = human(result.memory.kv_cache_per_token * PAGE_SIZE, "bytes")
    sizes = f"{per_token} per token of a sequence, {per_page} per page of {PAGE_SIZE} tokens"
    print_notes(console, [f"KV cache: {sizes}"])


def print_roofline(console: Console, line: Roofline) -> None:
    """Print every component's time at the machine's limits."""
    wide = console.width >= WIDE
    table = make_table(
        f"Time of {line.phase} at the limits of {line.machine}",
        ("component", "left"),
        ("FLOP", "right"),
        ("moved", "right"),
        *([("FLOP/byte", "right")] if wide else []),
        ("time", "right"),
        ("share", "right"),
        ("bound by", "left"),
    )
    for part in line.parts:
        table.add_row(
            part.name,
            human(part.flops),
            human(part.bytes, "bytes"),
            *([f"{part.intensity:,.1f}"] if wide else []),
            seconds_text(part.seconds),
            f"{part.seconds / line.seconds:.1%}",
            Text(part.bound, style="green" if part.bound == "compute" else "yellow"),
        )
    whole = seconds_text(line.seconds)
    blank = [""] * (3 if wide else 2)
    table.add_row("together", *blank, whole, "100.0%", "", style="bold")
    console.print(table)
    rate = f"{line.tokens / line.seconds:,.0f} tokens/s"
    print_notes(console, [f"{rate}, MFU {line.mfu}: nothing real is faster"])


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """Print notes beneath a table, each with what follows its first line indented."""
    for note in notes:
        for line in textwrap.wrap(note, console.width - 2, subsequent_indent="  "):
            console.print(Text(f"  {line}", style="dim"))
    console.print()


def print_training(console: Console, run: Training) -> None:
    """Print days and dollars."""
    columns = (("", "left"), ("", "right"), ("meaning", "left"))
    table = make_table("A training run", *columns, header=False)
    times = f"{run.tokens / run.suggested_tokens:.2g} × the suggested"
    source = f"{human(run.suggested_tokens)}: 20 per parameter, arXiv:2203.15556"
    table.add_row("tokens", human(run.tokens), f"{times} {source}")
    table.add_row("FLOP per token", human(run.flops_per_token), run.mfu.convention)
    table.add_row("assumed MFU", f"{run.mfu.value:.2f}", f"of {run.mfu.peak}")
    time = seconds_text(float(run.seconds.value))
    table.add_row("time", time, f"on {run.gpus} × {run.machine}")
    table.add_row("GPU hours", _amount(run.gpu_hours, ""), "")
    if run.dollars is not None:
        price = f"at ${run.price:.2f} per GPU-hour (prices: {PRICES_AS_OF}, rough; --price)"
        table.add_row("cost", _amount(run.dollars, "$"), price)
    console.print(table)
    console.print()


def _decimal_bytes(count: int) -> str:
    """Format bytes in GB, as sizes of models are given; a small model's in MB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def _amount(value: float, unit: str) -> str:
    """Format hours or dollars: whole where there are many, and never 0 where there are some."""
    if value >= 100 or value == 0:
        return f"{unit}{value:,.0f}"
    return f"{unit}{value:.2f}" if value >= 0.01 else f"< {unit}0.01"


def print_fits(console: Console, answers: dict[str, Fits]) -> None:
    """Print the inverse questions' answers."""
    memory = human(next(iter(answers.values())).memory, "bytes")
    table = make_table(
        f"What fits {memory}",
        ("", "left"),
        ("needed now", "right"),
        ("largest batch", "right"),
        ("largest context", "right"),
        ("largest model of this shape", "left"),
    )
    for name, found in answers.items():
        model = "none"
        if found.model is not None:
            sizes = f"L{found.model.num_layers} d{found.model.d_model}"
            model = f"{human(found.parameters)} parameters ({sizes})"
        needed = human(found.needed, "bytes")
        table.add_row(name, needed, f"{found.batch:,}", f"{found.context:,}", model)
    console.print(table)
    console.print()


def print_summaries(console: Console, title: str, first: str, rows: list[Summary]) -> None:
    """Print models, or points of a sweep, one per row."""
    wide = console.width >= WIDE
    names = [visible(row.name) for row in rows]
    table = _summary_table(names, title, first, rows, wide)
    if not does_fit(console, table):  # the names below
        names = [f"{i}" for i in range(1, len(rows) + 1)]
        table = _summary_table(names, title, first, rows, wide)
    console.print(table)
    parts = list(rows[0].shares)
    if not wide and parts:
        shares_table = make_table(
            "Shares of the FLOPs", (first, "left"), *((name, "right") for name in parts)
        )
        for name, row in zip(names, rows, strict=True):
            shares_table.add_row(Text(name), *(f"{row.shares[part]:.1%}" for part in parts))
        console.print(shares_table)
    for name, row in zip(names, rows, strict=True):
        if name != visible(row.name):
            console.print(Text(f"{name}: {visible(row.name)}"))
    console.print()


def _summary_table(
    names: Sequence[str], title: str, first: str, rows: list[Summary], wide: bool
) -> Table:
    parts = list(rows[0].shares)
    table = make_table(
        title,
        (first, "right" if first != "model" else "left"),
        ("parameters", "right"),
        ("FLOP", "right"),
        *((name, "right") for name in (parts if wide else [])),
        ("training", "right"),
        ("serving", "right"),
        ("KV/token", "right"),
        ("time", "right"),
    )
    for name, row in zip(names, rows, strict=True):
        shares = [f"{row.shares[part]:.1%}" for part in parts] if wide else []
        table.add_row(
            Text(name),
            human(row.parameters),
            human(row.flops),
            *shares,
            human(row.training_bytes, "bytes"),
            human(row.serving_bytes, "bytes"),
            human(row.kv_bytes_per_token, "bytes"),
            "" if row.seconds is None else seconds_text(row.seconds),
        )
    return table


def print_checks(
    console: Console, checks: Sequence[Check], unseen: dict[str, str], on_gpu: bool
) -> None:
    """Print what was compared, and what a counter cannot see."""
    table = make_table(
        "The account against the real model",
        ("what", "left"),
        ("predicted", "right"),
        ("measured", "right"),
        ("", "left"),
        ("", "left"),
    )
    for check in checks:
        verdict = "equal" if check.error == 0 else f"{check.error:.2%} apart"
        style = "green" if check.holds else "red bold"
        predicted, measured = f"{check.predicted:,.0f}", f"{check.measured:,.0f}"
        table.add_row(check.what, predicted, measured, check.unit, Text(verdict, style=style))
    console.print(table)
    if not on_gpu:
        console.print(Text("  memory: no GPU here to measure a step on", style="dim"))
    console.print()
    console.print(Text("What the FLOP counter cannot see", style="bold"))
    for what, why in unseen.items():
        console.print(Text.assemble(f"  {what}: ", (why, "dim")))
