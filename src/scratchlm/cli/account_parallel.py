"""Several GPUs in the terminal: what they send each other, a projected step, plans side by side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from scratchlm.accounting import Account, Machine, Plan, Projection, Setup
from scratchlm.accounting.collectives import NOT_COUNTED
from scratchlm.accounting.items import Item
from scratchlm.accounting.projection import APART, plan_name
from scratchlm.cli.account_tables import WIDE, human, make_table, print_notes

_PROJECTED = "a projection, not a measurement"


def print_projection(console: Console, result: Account, asked: str) -> None:
    """Print every collective, then the step's projected time; `asked` is the word for the plan."""
    found = result.projection
    if found is None:
        text = f"no link speed is known of this machine: --link projects {result.setup.gpus} GPUs"
        console.print(Text(f"  {text}\n", style="dim"))
        return
    _print_collectives(console, found, result.setup)
    _print_step(console, found)
    notes = [f"{_PROJECTED}: each GPU is assumed to reach an MFU of {found.mfu:.2f} alone (--mfu)"]
    for group in found.sent.children:
        notes.append(f"{_rate(group, found) / 1e9:,.4g} GB/s {group.name} (--link)")
    if asked == "none" and result.setup.parallel == "zero1":
        notes.append("zero1 is what several GPUs do unless --parallel says otherwise")
    print_notes(console, [*notes, f"not counted: {', '.join(NOT_COUNTED)}"])


def _rate(group: Item, found: Projection) -> float:
    """Return the bytes/s a GPU sends to a group of others."""
    if "nodes" in group.name:
        return found.node_rate
    return found.tensor_rate if "tensor" in group.name else found.data_rate


def _print_collectives(console: Console, found: Projection, setup: Setup) -> None:
    wide = console.width >= WIDE
    title = f"What one GPU sends in a step ({plan_name(setup)} on {found.gpus} × {found.machine})"
    table = make_table(
        title,
        ("collective", "left"),
        ("formula", "left"),
        *([("with numbers", "left")] if wide else []),
        ("payload", "right"),
        ("sent", "right"),
        ("time", "right"),
    )
    for group in found.sent.children:
        rate = _rate(group, found)
        table.add_row(*_line(group.name, "", "", wide), *_figures("", group, rate))
        for item in group.children:
            made = next(c for c in found.collectives if c.name == item.name)
            name = f"  {item.name}\n    {made.kind}, {made.count:,} ×"
            line = _line(name, item.symbols if wide else made.formula, item.numbers, wide)
            table.add_row(*line, *_figures(human(made.bytes, "bytes"), item, rate))
    console.print(table)
    ring = "sent: (R − 1) / R of the payload, of an all-reduce twice that"
    print_notes(console, [f"{ring}; R: the ranks of the ring"])


def _line(name: str, symbols: str, numbers: str, wide: bool) -> list[str]:
    return [name, symbols, *([numbers] if wide else [])]


def _figures(payload: str, item: Item, rate: float) -> list[str]:
    return [payload, human(item.value, "bytes"), human(item.value / rate, "s")]


def _print_step(console: Console, found: Projection) -> None:
    wide = console.width >= WIDE
    table = make_table(
        "A step, projected",
        ("item", "left"),
        ("formula", "left"),
        *([("with numbers", "left")] if wide else []),
        ("", "right"),
    )
    parts = [part for part in found.step.children if part.value]
    together = dataclasses.replace(found.step, symbols=APART.symbols())
    for item in (*parts, together, found.overlapped):
        row = _line(item.name, item.symbols, item.numbers, wide)
        table.add_row(*row, human(item.value, "s"), style="" if item in parts else "bold")
    for item in (found.tokens, found.tokens_overlapped):
        row = _line(f"tokens/s, {item.name}", item.symbols, item.numbers, wide)
        table.add_row(*row, f"{item.value:,.0f}", style="bold")
    console.print(table)
    print_notes(console, [f"{found.share:.1%} of it communication where nothing overlaps"])


def print_plans(console: Console, found: Sequence[Plan], machine: Machine) -> None:
    """Print the plans, those of one number of GPUs together."""
    setup, first = found[0].setup, found[0].projection
    table = make_table(
        f"Plans on {machine.name} ({human(machine.memory, 'bytes')}), projected",
        ("GPUs", "right"),
        ("plan", "left"),
        ("memory", "right"),
        ("", "left"),
        ("sent", "right"),
        ("comm.", "right"),
        ("tokens/s a GPU", "right"),
        ("tokens/s", "right"),
    )
    before = 0
    for plan in found:
        gpus, known = plan.setup.gpus, plan.projection
        slow, fast = float(known.tokens.value), float(known.tokens_overlapped.value)
        table.add_row(
            f"{gpus:,}" if gpus != before else "",
            plan.name,
            human(plan.memory, "bytes"),
            Text("fits", "green") if plan.fits else Text("too large", "red"),
            human(known.sent.value, "bytes"),
            f"{known.share:.0%}",
            f"{slow / gpus:,.0f}–{fast / gpus:,.0f}",
            human(fast),
        )
        before = gpus
    console.print(table)
    kept = setup.execution.checkpointing
    many = f"{setup.micro_batches} micro-batches" if setup.micro_batches > 1 else "a batch"
    size = f"each data-parallel rank has {many} of {setup.batch} a step"
    notes = [
        f"{size}; {setup.precision}, {setup.optimizer}, checkpointing {kept}",
        "comm.: communication's share of a step in which nothing overlaps",
        "tokens/s a GPU: from nothing overlaps to all that can; tokens/s: the latter, of all GPUs",
        f"{_PROJECTED}: each GPU is assumed to reach an MFU of {first.mfu:.2f} alone (--mfu)",
    ]
    print_notes(console, notes)


def projection_dict(found: Projection) -> dict[str, Any]:
    """Write a projection as plain values, for JSON."""
    trees = ("sent", "step", "overlapped", "tokens", "tokens_overlapped")
    plain = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    return {
        **plain,
        "is_measured": False,
        "collectives": [dataclasses.asdict(c) for c in found.collectives],
        **{name: plain[name].as_dict() for name in trees},
        "communication_share": found.share,
    }


def plan_row(plan: Plan) -> dict[str, Any]:
    """Write a plan as plain values: a row of JSON or CSV."""
    found = plan.projection
    return {
        "gpus": plan.setup.gpus,
        "plan": plan.name,
        "memory_bytes": plan.memory,
        "fits": plan.fits,
        "sent_bytes": found.sent.value,
        "communication_share": found.share,
        "projected_tokens_per_second": found.tokens.value,
        "projected_tokens_per_second_overlapped": found.tokens_overlapped.value,
    }


def plans_text(found: Sequence[Plan], as_json: bool) -> str:
    """Write the plans as JSON, or as CSV with a line for each."""
    rows = [plan_row(plan) for plan in found]
    if as_json:
        return json.dumps(rows, indent=2, ensure_ascii=False)
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    return "\n".join(lines)
