"""Plots of runs: loss, learning rate and throughput of one run; losses of several runs together.

Drawn with matplotlib's figure objects alone: no window, no global state.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
GREY = "#6b7280"


@dataclass(frozen=True)
class Curves:
    """A run's log as columns."""

    steps: list[int]
    loss: list[float]
    lr: list[float]
    tokens_per_second: list[float]
    val_steps: list[int]
    val_loss: list[float]

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Curves:
        """Extract the columns from the lines of `metrics.jsonl`."""
        train = [record for record in records if "loss" in record]
        val = [record for record in records if record.get("val_loss") is not None]
        return cls(
            [record["step"] for record in train],
            [record["loss"] for record in train],
            [record["lr"] for record in train],
            [record["clock"]["tokens_per_second"] for record in train],
            [record["step"] for record in val],
            [record["val_loss"] for record in val],
        )

    def smooth_loss(self) -> list[float]:
        """Fit a line to the steps around each, about a fiftieth of the run, and read it there.

        A line, and a window to both sides: no lag where the loss falls, no noise at the ends.
        """
        count, half = len(self.loss), len(self.loss) // 100
        sums, moments = [0.0], [0.0]  # of y and of x·y, before each step
        for i, value in enumerate(self.loss):
            sums.append(sums[-1] + value)
            moments.append(moments[-1] + i * value)
        out = []
        for i in range(count):
            first, last = max(0, i - half), min(count - 1, i + half)
            n, centre = last - first + 1, (first + last) / 2
            mean = (sums[last + 1] - sums[first]) / n
            spread = n * (n * n - 1) / 12  # Σ (x − centre)²
            moment = moments[last + 1] - moments[first] - centre * n * mean
            out.append(mean + (i - centre) * moment / spread if spread else mean)
        return out


def task_curves(
    records: Sequence[Mapping[str, Any]],
) -> dict[str, tuple[str, list[tuple[int, Mapping[str, Any]]]]]:
    """Extract the main figure of every task: its name, and its values by step."""
    curves: dict[str, tuple[str, list[tuple[int, Mapping[str, Any]]]]] = {}
    for record in records:
        for task, figures in record.get("tasks", {}).items():
            name = "bits_per_byte" if "bits_per_byte" in figures else next(iter(figures), "")
            if name and figures[name]["value"] is not None:
                curves.setdefault(task, (name, []))[1].append((record["step"], figures[name]))
    return curves


def draw_tasks(runs: Mapping[str, Sequence[Mapping[str, Any]]], *, narrow: bool = False) -> bytes:
    """Draw the tasks of runs as they went on, a panel each, with 95 % intervals."""
    from matplotlib.figure import Figure

    columns = 1 if narrow else 3
    rows = -(-len(all_tasks(runs)) // columns)
    size = (4.2, 2.8 * rows) if narrow else (9.5, 2.8 * rows)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    _add_tasks(figure, figure.add_gridspec(rows, columns), 0, columns, runs)
    return png(figure)


def all_tasks(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Name the tasks of any of the runs."""
    return list(dict.fromkeys(task for records in runs.values() for task in task_curves(records)))


def _add_tasks(
    figure: Any,
    grid: Any,
    row: int,
    columns: int,
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """Add a panel for each task, from a row of the grid on."""
    for at, task in enumerate(all_tasks(runs)):
        axes = figure.add_subplot(grid[row + at // columns, at % columns])
        for index, records in enumerate(runs.values()):
            name, points = task_curves(records).get(task, ("", []))
            if not points:
                continue
            colour, steps = COLOURS[index % len(COLOURS)], [step for step, _ in points]
            values = [figure["value"] for _, figure in points]
            axes.plot(steps, values, color=colour, lw=1.6, marker="o", ms=3)
            if all(
                figure["low"] is not None and figure["high"] is not None for _, figure in points
            ):
                ends = ([figure[end] for _, figure in points] for end in ("low", "high"))
                axes.fill_between(steps, *ends, color=colour, alpha=0.12, lw=0)
            style_axes(axes, "step", name.replace("_", " "))
        axes.set_title(task.replace("$", r"\$"), fontsize=9, color=GREY, loc="left")


def draw_run(
    records: Sequence[Mapping[str, Any]], floor: float | None = None, *, narrow: bool = False
) -> bytes:
    """Draw one run as a PNG; `floor` is the entropy of the data, if known: no model can beat it.

    `narrow` is for a phone: everything below each other.
    """
    from matplotlib.figure import Figure

    curves = Curves.of(records)
    figure = Figure(figsize=(4, 7) if narrow else (9, 6.4), dpi=110, layout="constrained")
    grid = figure.add_gridspec(3 if narrow else 2, 1 if narrow else 2)
    grid.set_height_ratios((2, 1, 1) if narrow else (2.4, 1))
    top = figure.add_subplot(grid[0, :])
    top.plot(curves.steps, curves.loss, color=COLOURS[0], alpha=0.25, lw=0.8)
    top.plot(curves.steps, curves.smooth_loss(), color=COLOURS[0], lw=1.6, label="training")
    if curves.val_loss:
        top.plot(
            curves.val_steps,
            curves.val_loss,
            color=COLOURS[1],
            lw=1.4,
            marker="o",
            ms=3.5,
            label="held-out",
        )
    if floor is not None:
        top.axhline(floor, color="#111827", ls="--", lw=1.2, label=f"entropy floor {floor:.4f}")
    style_axes(top, "step", "loss (nats per token)")
    _set_loss_limits(top, curves, floor)
    top.legend(frameon=False)
    rate = figure.add_subplot(grid[1, 0])
    rate.plot(curves.steps, curves.lr, color=COLOURS[4], lw=1.4)
    style_axes(rate, "step", "learning rate")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    speed = figure.add_subplot(grid[-1, -1])
    speed.plot(curves.steps, curves.tokens_per_second, color=COLOURS[2], lw=1.2)
    speed.set_ylim(bottom=0)
    style_axes(speed, "step", "tokens per second")
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return png(figure)


def draw_comparison(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """Draw the losses of several runs together: training faint, held-out bold; tasks below."""
    from matplotlib.figure import Figure

    rows = -(-len(all_tasks(runs)) // 3)
    figure = Figure(figsize=(9, 5 + 2.6 * rows), dpi=110, layout="constrained")
    grid = figure.add_gridspec(1 + rows, 3, height_ratios=[5, *[2.6] * rows])
    axes = figure.add_subplot(grid[0, :])
    lows, highs = [], []
    for index, (name, records) in enumerate(runs.items()):
        curves, colour = Curves.of(records), COLOURS[index % len(COLOURS)]
        style = "-" if index < len(COLOURS) else "--"
        held_out = bool(curves.val_loss)
        smooth = curves.smooth_loss()
        axes.plot(
            curves.steps,
            smooth,
            style,
            color=colour,
            lw=1.0 if held_out else 1.6,
            alpha=0.4 if held_out else 1.0,
            label=None if held_out else name,
        )
        if held_out:
            axes.plot(
                curves.val_steps, curves.val_loss, style, color=colour, lw=1.8, ms=3, label=name
            )
        values = [*smooth, *curves.val_loss]
        if values:
            lows.append(min(values))
            highs.append(sorted(values)[len(values) * 9 // 10])
    if lows:
        span = max(0.05, max(highs) - min(lows))
        axes.set_ylim(min(lows) - 0.05 * span, max(highs) + 0.4 * span)
    style_axes(axes, "step", "loss (nats per token)")
    axes.set_title("held-out loss (training loss faint)", fontsize=10, color=GREY, loc="left")
    axes.legend(frameon=False)
    _add_tasks(figure, grid, 1, 3, runs)
    return png(figure)


def _set_loss_limits(axes: Any, curves: Curves, floor: float | None) -> None:
    """Exclude the steep initial drop from the y-range, where it would flatten the rest."""
    values = curves.loss[len(curves.loss) // 50 :] + curves.val_loss[1:]
    if not values:
        return
    low = min(values) if floor is None else min([*values, floor])
    high = max(values)
    axes.set_ylim(low - 0.06 * (high - low or 1), high + 0.06 * (high - low or 1))


def style_axes(axes: Any, x: str, y: str) -> None:
    """Name the axes, and let them stand back."""
    axes.set_xlabel(x, color=GREY)
    axes.set_ylabel(y, color=GREY)
    axes.grid(alpha=0.25, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#d1d5db")
    axes.tick_params(colors=GREY, labelsize=9)


def png(figure: Any) -> bytes:
    """Return a figure as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
