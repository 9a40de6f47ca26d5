"""Write docs/accounting.md and its plots: `python docs/make_accounting.py`.

Every number on the page comes out of `scratchlm.accounting` when this runs.
"""

from __future__ import annotations

from pathlib import Path

from scratchlm.accounting import (
    MACHINES,
    SYMBOLS,
    Account,
    Item,
    Setup,
    Summary,
    account,
    plans,
    summarize,
    sweep,
)
from scratchlm.accounting.collectives import NOT_COUNTED
from scratchlm.accounting.machines import NETWORK, NODE
from scratchlm.accounting.money import DEFAULT_MFU
from scratchlm.accounting.projection import APART
from scratchlm.accounting.verify import CANNOT_SEE
from scratchlm.cli.account_output import plot_account, plot_summaries
from scratchlm.cli.account_tables import human
from scratchlm.config import preset

HERE = Path(__file__).parent
FAMILY = ("cs336-gpt2", "cs336-gpt2-medium", "cs336-gpt2-large", "cs336-gpt2-xl")
CONTEXTS = [1_024 * 2**n for n in range(8)]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Lay rows out as a Markdown table, numbers to the right."""
    words = ("item", "formula", "with numbers", "model", "convention", "GPU", "plan", "fits")
    rule = ["---" if name in words else "---:" for name in header]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def tree_table(tree: Item, unit: str) -> str:
    """Lay an item tree out: item, formula, with numbers, value, share of the whole."""
    rows = []

    def add(item: Item, level: int, share: float) -> None:
        name = item.name if item.times == 1 else f"{item.name} ({item.times} ×)"
        rows.append(["&emsp;" * level + name, f"`{item.symbols}`", item.numbers])
        rows[-1] += [f"{item.value:,}", f"{share:.1%}"]
        for child in item.children:
            add(child, level + 1, share * child.share)

    add(tree, 0, 1.0)
    return table(["item", "formula", "with numbers", unit, "share"], rows)


def shares_table(first: str, rows: list[Summary]) -> str:
    """Lay out the shares of models or contexts."""
    lines = [
        [row.name, f"{row.parameters:,}", f"{row.flops:.4g}"]
        + [f"{share:.1%}" for share in row.shares.values()]
        for row in rows
    ]
    return table([first, "parameters", "FLOP", *rows[0].shares], lines)


def page() -> str:
    """Write the page."""
    config = preset("cs336-gpt2-xl")
    xl = account(config, Setup())
    training = account(config, Setup(phase="training", batch=8))
    contexts = sweep(config, Setup(), "context_length", CONTEXTS)
    family = [summarize(name, preset(name), Setup()) for name in FAMILY]
    parts = {
        **worked(xl),
        **long_context(contexts),
        "parameters": tree_table(xl.parameters.tree, "parameters"),
        "flops": tree_table(xl.flops["full"], "FLOP"),
        "conventions": conventions(xl, account(config, Setup(phase="training"))),
        "family": shares_table("model", family),
        "contexts": shares_table("context", contexts),
        "memory": tree_table(training.memory.training, "bytes"),
        "symbols": "\n".join(f"- `{name}` {words}" for name, words in SYMBOLS.items()),
        "unseen": "\n".join(f"- **{what}**: {why}." for what, why in CANNOT_SEE.items()),
        "machines": machines(),
        **several_gpus(),
    }
    return (HERE / "accounting.md.in").read_text(encoding="utf-8").format(**parts)


def conventions(forward: Account, training: Account) -> str:
    """Lay out the conventions side by side."""
    rows = [
        [name, f"{item.value:,}", f"{training.flops[name].value:,}"]
        for name, item in forward.flops.items()
    ]
    return table(["convention", "forward", "training step"], rows)


def machines() -> str:
    """Lay out the machines."""
    rows = []
    for m in MACHINES.values():
        rates = [f"{rate / 1e12:,.4g}" for rate in (m.peak("bf16"), m.fp32)]
        sizes = [human(m.memory, "bytes"), f"{m.bandwidth / 1e9:,.0f} GB/s"]
        link = "" if m.link is None else f"{m.link / 1e9:,.0f} GB/s"
        rows.append([m.name, *sizes, link, *rates, f"{m.price:.2f}"])
    return table(["GPU", "memory", "bandwidth", "link", "bf16 (or fp16)", "fp32", "$/h"], rows)


def several_gpus() -> dict[str, str]:
    """Return the formulas of a projected step, and plans side by side."""
    config, gpu = preset("llama3-8b"), MACHINES["h100-sxm"]
    found = plans(config, Setup("training"), gpu, DEFAULT_MFU, counts=(8, 64, 1_024))
    rows = []
    for plan in found:
        made, gpus = plan.projection, plan.setup.gpus
        sizes = [human(plan.memory, "bytes"), "yes" if plan.fits else "no"]
        sizes += [human(made.sent.value, "bytes"), f"{made.share:.0%}"]
        rates = [f"{item.value / gpus:,.0f}" for item in (made.tokens, made.tokens_overlapped)]
        rows.append([plan.name, f"{gpus:,}", *sizes, *rates])
    header = ["plan", "GPUs", "memory", "fits", "sent a step", "communication"]
    header += ["tokens/s a GPU, nothing overlaps", "all that can"]
    step = found[0].projection
    return {
        "plans": table(header, rows),
        "arithmetic": step.step.children[0].symbols,
        "apart": APART.symbols(),
        "overlapped": step.overlapped.symbols,
        "not_counted": "\n".join(f"- **{what}**: {why}." for what, why in NOT_COUNTED.items()),
        "node": f"{NODE}",
        "network": f"{NETWORK / 1e9:.0f}",
    }


def worked(xl: Account) -> dict[str, str]:
    """Return the numbers of the worked answer."""
    tree, total = xl.flops["full"], xl.parameters.total
    layers = tree["layers"]
    values = {
        "total": total,
        "projections": tree["projections"].value,
        "attention": tree["attention"].value,
        "ffn": tree["feed-forward"].value,
        "layer": layers.value // layers.times,
        "layers": layers.value,
        "head": tree["LM head"].value,
        "forward": tree.value,
    }
    return {name: f"{value:,}" for name, value in values.items()} | {
        "gigabytes": f"{total * 4 / 1e9:.2f}"
    }


def long_context(contexts: list[Summary]) -> dict[str, str]:
    """Return the numbers at 16,384 tokens."""
    short = contexts[0]
    long = next(row for row in contexts if row.name == "16,384")
    return {
        "long_flops": f"{long.flops:.3e}".replace("e+", " × 10^"),
        "long_times": f"{long.flops / short.flops:.1f}",
        "long_share": f"{long.shares['attention']:.1%}",
    }


def plots(folder: Path) -> None:
    """Draw the page's plots."""
    family = [summarize(name, preset(name), Setup()) for name in FAMILY]
    plot_summaries("model", family, folder / "family.png")
    contexts = sweep(preset("cs336-gpt2-xl"), Setup(), "context_length", CONTEXTS)
    plot_summaries("context_length", contexts, folder / "contexts.png")
    training = account(preset("cs336-gpt2-xl"), Setup(phase="training", batch=8), machine="h200")
    plot_account("cs336-gpt2-xl", training, "full", folder / "gpt2-xl.png")


if __name__ == "__main__":
    (HERE / "accounting.md").write_text(page(), encoding="utf-8")
    plots(HERE / "accounting")
    print(f"wrote {HERE / 'accounting.md'} and {HERE / 'accounting'}/*.png")
