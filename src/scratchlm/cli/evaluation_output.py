"""What `scratchlm evaluate` gives out: tables, JSON, a picture, and what each case gave."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scratchlm.cli.terminal import does_fit, say, visible
from scratchlm.durable import write_atomically
from scratchlm.evaluation import Estimate, Result

WORDS_SHOWN = 20  # lines of a next-word table


@dataclass(frozen=True)
class OfModel:
    """A model and what it reached."""

    name: str
    source: Path
    results: list[Result]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(result: Result) -> dict[str, Any]:
    table = result.to_dict()
    for metric in table["metrics"].values():
        metric.update({end: _finite(metric[end]) for end in metric})
    return table


def print_json(found: Sequence[OfModel]) -> None:
    """Print everything; of one model on one held-out text, its figures alone."""
    if (figures := _single_text(found)) is not None:
        say(json.dumps({name: _finite_or_same(value) for name, value in figures.items()}))
        return
    models = [
        {
            "model": one.name,
            "checkpoint": str(one.source),
            "results": [_plain(result) for result in one.results],
        }
        for one in found
    ]
    say(json.dumps({"confidence": 0.95, "models": models}))


def _finite_or_same(value: Any) -> Any:
    return _finite(value) if isinstance(value, float) else value


def _single_text(found: Sequence[OfModel]) -> dict[str, Any] | None:
    """Return the figures of one model on one text, flat."""
    if len(found) != 1 or len(found[0].results) != 1:
        return None
    (result,) = found[0].results
    if result.kind not in ("held-out", "text"):
        return None
    values = {name: metric.value for name, metric in result.metrics.items()}
    return {
        "loss": values["loss"],
        "perplexity": values["perplexity"],
        "bits_per_byte": values.get("bits_per_byte"),
        "tokens": result.counts["tokens"],
        "bytes": result.counts["bytes"] or None,
        "checkpoint": str(found[0].source),
    }


def print_tables(found: Sequence[OfModel]) -> None:
    """Print figures with their intervals, a column for each model; then next-word tables."""
    figures = _single_text(found)
    if figures is not None:
        for name, value in figures.items():
            shown = f"{value:,.4f}" if isinstance(value, float) else value
            shown = f"{value:,}" if isinstance(value, int) else shown
            say(f"{name.replace('_', ' '):<14} {'unknown' if value is None else shown}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def side_by_side(models: Sequence[OfModel], names: Sequence[str]) -> Table:
        table = Table("task", "cases", "figure", box=None, pad_edge=False)
        for name in names:
            table.add_column(Text(visible(name)), justify="right")
        for rows in zip(*(one.results for one in models), strict=True):
            for i, name in enumerate(rows[0].metrics):
                counts = rows[0].counts
                cells = [format_estimate(row.metrics[name]) for row in rows]
                task = visible(rows[0].task) if i == 0 else ""
                unit = "" if "cases" in counts else " tokens"
                count = f"{counts.get('cases', counts.get('tokens', 0)):,}{unit}" if i == 0 else ""
                table.add_row(Text(task), count, Text(visible(name.replace("_", " "))), *cells)
        return table

    console = Console(width=None if Console().is_terminal else 160)
    short = short_names(found)
    table = side_by_side(found, short)
    if does_fit(console, table):
        console.print(table)
    else:  # one below the other
        for one, name in zip(found, short, strict=True):
            console.print(Text(visible(name)))
            console.print(side_by_side([one], [""]))
    say("in brackets: 95 % confidence intervals")
    for one in found:
        for result in one.results:
            if result.counts.get("cut"):
                say(f"{one.name}, {result.task}: {result.counts['cut']} contexts were cut to fit")
    for one, name in zip(found, short_names(found), strict=True):
        for result in one.results:
            if result.kind == "next":
                console.print(_next_words(name, result))


def _next_words(name: str, result: Result) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("context", "next", "probability", "likeliest", box=None, pad_edge=False)
    table.title, table.title_justify = Text(visible(f"{name}: {result.task}")), "left"
    for case in result.cases[:WORDS_SHOWN]:
        best = "  ".join(f"{text!r} {share:.3f}" for text, share in case["best"][:4])
        context = case["context"][-40:]
        table.add_row(
            Text(visible(f"{context!r}")),
            Text(visible(f"{case['next']!r}")),
            f"{case['probability']:.4f}",
            Text(visible(best)),
        )
    if len(result.cases) > WORDS_SHOWN:
        table.caption = f"the first {WORDS_SHOWN} of {len(result.cases):,}; --cases writes all"
    return table


def format_estimate(metric: Estimate) -> str:
    """Format a figure and its interval."""
    text = _number(metric.value)
    if metric.low is None or metric.high is None:
        return text
    return f"{text} ({_number(metric.low)}–{_number(metric.high)})"


def _number(value: float) -> str:
    return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.5g}"


def short_names(found: Sequence[OfModel]) -> list[str]:
    """Return the models' last names, or the whole ones where these are not enough."""
    names = [Path(one.name).absolute().name for one in found]
    return names if len(set(names)) == len(names) else [one.name for one in found]


def check_places(picture: Path | None, option: str, *others: Path | None) -> None:
    """Refuse, before anything is computed, files that could not be written at the end."""
    if picture is not None and picture.suffix.lower() != ".png":
        raise ValueError(f"{option} must be a name that ends in .png; got {picture.name!r}")
    for path in (picture, *others):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise ValueError(f"{path}: a folder is there already")
    if picture is not None and picture in others:
        raise ValueError(f"{option} {picture}: something else is to be written there")


def write_cases(path: Path, found: Sequence[OfModel]) -> None:
    """Write a line for every case: its model, its task, and what it gave."""
    lines = [
        json.dumps({"model": one.name, "task": result.task, "case": i, **case})
        for one in found
        for result in one.results
        for i, case in enumerate(result.cases)
    ]
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())


# The figure of each kind that is drawn
_DRAWN = {
    "text": "bits_per_byte",
    "held-out": "bits_per_byte",
    "choice": "accuracy",
    "answer": "exact_match",
    "next": "accuracy",
}
_LOSSES = ("bits_per_byte", "loss")


def write_plot(path: Path, found: Sequence[OfModel]) -> None:
    """Draw the main figure of every task, with its interval, models side by side."""
    from matplotlib.figure import Figure

    from scratchlm.training.plots import png

    groups: dict[bool, list[tuple[int, str]]] = {False: [], True: []}
    for place, result in enumerate(found[0].results):
        name = _DRAWN.get(result.kind, next(iter(result.metrics)))
        name = name if name in result.metrics else "loss"
        groups[name in _LOSSES or "perplexity" in name].append((place, name))
    panels = [(is_loss, tasks) for is_loss, tasks in groups.items() if tasks]
    rows = max(len(tasks) for _, tasks in panels)
    height = 1.3 + 0.3 * rows * (len(found) + 1)
    figure = Figure(figsize=(4.8 * len(panels) + 1.5, height), dpi=110, layout="constrained")
    for at, (is_loss, tasks) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), at + 1)
        _draw(axes, tasks, found, is_loss)
        axes.set_ylim(rows - 0.5, -0.5)  # bars are as thick in both
    figure.axes[0].legend(
        frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=8
    )
    write_atomically(path, png(figure))


def _draw(
    axes: Any, tasks: Sequence[tuple[int, str]], found: Sequence[OfModel], is_loss: bool
) -> None:
    """Draw bars of tasks, each by its place among the results and the figure's name."""
    from scratchlm.training.plots import COLOURS, GREY

    height, top = 0.8 / len(found), 0.0
    for index, (one, model) in enumerate(zip(found, short_names(found), strict=True)):
        metrics = [one.results[place].metrics[name] for place, name in tasks]
        top = max(top, *(m.value for m in metrics))
        places = [row + (index - (len(found) - 1) / 2) * height for row in range(len(tasks))]
        errors = [
            [m.value - (m.value if m.low is None else m.low) for m in metrics],
            [(m.value if m.high is None else m.high) - m.value for m in metrics],
        ]
        axes.barh(
            places,
            [m.value for m in metrics],
            height * 0.9,
            xerr=errors,
            color=COLOURS[index % len(COLOURS)],
            error_kw={"lw": 1, "capsize": 2, "ecolor": "#374151"},
            label=visible(model).replace("$", r"\$"),
        )
    labels = [f"{found[0].results[at].task}\n{name.replace('_', ' ')}" for at, name in tasks]
    axes.set_yticks(range(len(tasks)), [visible(label).replace("$", r"\$") for label in labels])
    axes.set_xlim(left=0)
    if not is_loss and top <= 1:
        axes.set_xlim(0, 1)
    axes.set_xlabel("lower is better" if is_loss else "share, higher is better", color=GREY)
    axes.grid(axis="x", alpha=0.25, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#d1d5db")
    axes.tick_params(colors=GREY, labelsize=9)
