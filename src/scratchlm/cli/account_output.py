"""An account as JSON, CSV or a plot."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scratchlm.accounting import Account, Item, Summary, component_shares
from scratchlm.cli.account_parallel import projection_dict
from scratchlm.config import to_dict
from scratchlm.durable import write_atomically

_COLUMNS = ("section", "item", "symbols", "numbers", "value", "unit", "share", "times")


def account_json(result: Account) -> str:
    """Write everything as JSON."""
    counts = dataclasses.asdict(dataclasses.replace(result.parameters, tree=None))  # type: ignore[arg-type]
    del counts["tree"]
    table: dict[str, Any] = {
        "config": to_dict(result.config),
        "setup": {**dataclasses.asdict(result.setup), "context": result.seq},
        "parameters": {**counts, "tree": result.parameters.tree.as_dict()},
        "flops": {name: item.as_dict() for name, item in result.flops.items()},
        "memory": {
            "training": result.memory.training.as_dict(),
            "moments": result.memory.moments,
            "serving": result.memory.serving.as_dict(),
            "kv_cache_bytes": result.memory.kv_cache,
            "kv_cache_bytes_per_token": result.memory.kv_cache_per_token,
        },
    }
    if result.roofline is not None:
        table["roofline"] = dataclasses.asdict(result.roofline)
    if result.training is not None:
        run = result.training
        table["training_run"] = {
            **{f.name: getattr(run, f.name) for f in dataclasses.fields(run)},
            "mfu": dataclasses.asdict(run.mfu),
            "seconds": run.seconds.as_dict(),
            "days": run.days,
            "gpu_hours": run.gpu_hours,
        }
    if result.projection is not None:
        table["projection"] = projection_dict(result.projection)
    return json.dumps(table, indent=2, ensure_ascii=False)


def account_csv(result: Account) -> str:
    """Write every item as a row; `item` is its path."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    sections = [("parameters", result.parameters.tree)]
    sections += [(f"flops {name}", item) for name, item in result.flops.items()]
    sections += [("training memory", result.memory.training)]
    sections += [("serving memory", result.memory.serving)]
    if result.projection is not None:
        found = result.projection
        sections += [("sent", found.sent), ("projected step", found.step)]
        sections += [("projected step", found.overlapped)]
        sections += [("projected", found.tokens), ("projected", found.tokens_overlapped)]
    for section, tree in sections:
        _write_items(writer, section, tree, "")
    for part in result.roofline.parts if result.roofline else ():
        share = part.seconds / result.roofline.seconds if result.roofline else 0
        row = ("roofline", part.name, part.symbols, part.numbers, part.seconds, "s", share, 1)
        writer.writerow(row)
    return out.getvalue()


def _write_items(writer: Any, section: str, item: Item, parent: str) -> None:
    path = f"{parent}/{item.name}" if parent else item.name
    row = (section, path, item.symbols, item.numbers, item.value, item.unit, item.share, item.times)
    writer.writerow(row)
    for child in item.children:
        _write_items(writer, section, child, path)


def summaries_json(rows: list[Summary]) -> str:
    """Write the rows of a comparison or sweep as JSON."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=2)


def summaries_csv(first: str, rows: list[Summary]) -> str:
    """Write the rows of a comparison or sweep as CSV, numbers in full."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fields = ["parameters", "active", "flops", "training_bytes", "serving_bytes"]
    fields += ["kv_bytes_per_token", "seconds"]
    parts = list(rows[0].shares)
    writer.writerow([first, *fields, *(f"share {name}" for name in parts)])
    for row in rows:
        shares = [row.shares[name] for name in parts]
        writer.writerow([row.name.replace(",", ""), *(getattr(row, f) for f in fields), *shares])
    return out.getvalue()


# Plots

_COLOURS = ["#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB"]
_COLOURS += ["#222255", "#EE8866", "#44BB99", "#FFAABB", "#99DDFF", "#AAAA00", "#77AADD"]


def plot_account(name: str, result: Account, convention: str, path: Path) -> None:
    """Draw where parameters, FLOPs, memory and time go, as bars."""
    flops = result.flops[convention]
    shares = component_shares(flops) or {c.name: c.share for c in flops.children}
    bars = {
        "parameters": {c.name: c.share for c in _with_layers_expanded(result.parameters.tree)},
        f"FLOPs of {result.setup.phase} ({convention})": shares,
        "training memory": {c.name: c.share for c in result.memory.training.children},
    }
    if result.roofline is not None:
        whole = result.roofline.seconds
        bars[f"time, {result.roofline.machine}"] = {
            part.name: part.seconds / whole for part in result.roofline.parts
        }
    figure, axes = _figure(9, 1.1 + 1.15 * len(bars), len(bars))
    setup = f"batch {result.setup.batch}, {result.seq:,} tokens, {result.setup.precision}"
    figure.suptitle(f"{name}: {setup}", x=0.01, ha="left", fontsize=11)
    for axis, (name, shares) in zip(axes, bars.items(), strict=True):
        _stacked_bar(axis, name, shares)
    _save(figure, path)


def _with_layers_expanded(tree: Item) -> list[Item]:
    """Replace the layers by their parts, so that a bar shows what is in them."""
    expanded = []
    for child in tree.children:
        if child.name != "layers":
            expanded.append(child)
            continue
        expanded += [dataclasses.replace(c, share=c.share * child.share) for c in child.children]
    return expanded


def _stacked_bar(axis: Any, name: str, shares: dict[str, float]) -> None:
    left = 0.0
    shown = {part: share for part, share in shares.items() if share > 0.0005}
    for i, (part, share) in enumerate(shown.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        axis.barh(0, share, left=left, color=colour, label=f"{part} {share:.1%}", height=0.8)
        left += share
    axis.set_xlim(0, 1)
    axis.set_yticks([])
    axis.set_xticks([])
    axis.set_title(name, loc="left", fontsize=10, pad=3)
    axis.legend(loc="upper left", bbox_to_anchor=(0, 0.02), ncols=4, fontsize=7, frameon=False)
    for spine in axis.spines.values():
        spine.set_visible(False)


def plot_summaries(first: str, rows: list[Summary], path: Path) -> None:
    """Draw the shares of the FLOPs, and FLOPs and memory, over models or a swept size."""
    swept = first != "model"
    figure, (shares, sizes) = _figure(9, 3.6, 1, columns=2)
    names = [row.name for row in rows]
    at = [int(name.replace(",", "")) for name in names] if swept else list(range(len(rows)))
    parts = list(rows[0].shares)
    for part, colour in zip(parts, _COLOURS, strict=False):
        shares.plot(at, [row.shares[part] for row in rows], "o-", color=colour, label=part)
    shares.set_ylim(0, 1)
    shares.set_title("share of the FLOPs", loc="left", fontsize=10)
    if parts:
        shares.legend(fontsize=8, frameon=False)
    sizes.plot(at, [row.flops / 1e12 for row in rows], "o-", color=_COLOURS[0], label="TFLOP")
    memory = [row.training_bytes / 2**30 for row in rows]
    sizes.plot(at, memory, "o-", color=_COLOURS[1], label="training memory, GiB")
    cache = [row.serving_bytes / 2**30 for row in rows]
    sizes.plot(at, cache, "o-", color=_COLOURS[2], label="serving memory, GiB")
    sizes.set_yscale("log")
    sizes.set_title("work and memory", loc="left", fontsize=10)
    sizes.legend(fontsize=8, frameon=False)
    for axis in (shares, sizes):
        if swept and max(at) >= 8 * min(at):
            axis.set_xscale("log", base=2)
        every = -(-len(at) // 12)  # more labels than this would overlap
        axis.set_xticks(at[::every], names[::every], rotation=30, ha="right", fontsize=8)
        axis.minorticks_off()
        axis.set_xlabel(first if swept else "", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _figure(width: float, height: float, rows: int, columns: int = 1) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flatten())


def _save(figure: Any, path: Path) -> None:
    kind = path.suffix.lstrip(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        words = ", ".join(f".{word}" for word in ("png", "svg", "pdf"))
        raise ValueError(f"a plot must end in {words}; got {path}")
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format=kind)
    write_atomically(path, content.getvalue())
