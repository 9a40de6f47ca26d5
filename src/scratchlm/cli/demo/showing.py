"""The output of the demo: accounting, loss against the floor, stories, next words, verdict."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from scratchlm.cli.demo import LOSS_WITHIN, WORD_WITHIN
from scratchlm.cli.demo.corpus import World
from scratchlm.cli.demo.words import Comparison, GeneratedStory
from scratchlm.cli.training_console import TrainingConsole
from scratchlm.training import read_metrics
from scratchlm.training.plots import COLOURS, Curves, png, style_axes
from scratchlm.training.report import Section, duration, picture_html, table

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def accounting_lines(world: World) -> list[str]:
    """Describe the model and the predicted cost of training it."""
    forecast, model = world.forecast, world.plan.model
    assert forecast is not None
    return [
        f"model: {forecast.parameters:,} parameters ({model.num_layers} layers, d_model "
        f"{model.d_model}, {model.num_heads} heads, d_ff {model.d_ff}, context "
        f"{model.context_length}, vocabulary {model.vocab_size})",
        f"training: {forecast.steps:,} steps of {world.plan.train.batch_size} stories; "
        f"{forecast.flops_per_step:.3g} FLOPs and {forecast.memory_bytes / 2**20:.1f} MiB a step",
        f"this machine: {forecast.matmul_rate / 1e9:,.0f} GFLOP/s in large matmuls: "
        f"{duration(forecast.least_seconds)} if that were all",
        f"predicted training time: {duration(forecast.seconds)} "
        f"({forecast.step_seconds * 1e3:.0f} ms a step, in a trial that is thrown away)",
    ]


class FloorConsole(TrainingConsole):
    """A training console that also shows how far the held-out loss is above the floor."""

    def __init__(self, world: World) -> None:
        plan = world.plan
        super().__init__(plan.train.steps, plan.train.tokens_per_step(plan.model))
        self.floor = world.floor

    def evaluated(self, record: dict[str, Any]) -> None:
        """Print the held-out loss and its excess over the floor; the bar is logarithmic."""
        loss = record["val_loss"]
        if loss is None:
            super().evaluated(record)
            return
        excess = loss / self.floor - 1
        self.held_out = f"held-out {loss:.4f} ({excess:+.1%})"
        self.say(
            f"step {record['step']:>5,}: held-out loss {loss:.4f}, floor {self.floor:.4f} "
            f"{excess:>+9.2%} {bar(log_fraction(excess), 24)}"
        )


def log_fraction(excess: float) -> float:
    """Map a relative excess loss to a log scale: 0.3 % is 0, 3000 % is 1."""
    return math.log(max(excess, 0.003) / 0.003) / math.log(30 / 0.003)


def bar(share: float, width: int) -> str:
    """Draw a share of 1 as a bar of characters."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return (_EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip().ljust(width)


@dataclass(frozen=True)
class DemoResult:
    """The measured results, compared with what was promised."""

    val_loss: float
    excess: float  # val_loss / floor − 1
    worst: Comparison
    seconds: float  # in steps

    @property
    def loss_holds(self) -> bool:
        """Whether the held-out loss came near enough to the floor."""
        return abs(self.excess) <= LOSS_WITHIN

    @property
    def words_hold(self) -> bool:
        """Whether every probability shown is near enough to the truth."""
        return self.worst.worst <= WORD_WITHIN

    @property
    def holds(self) -> bool:
        """Whether both do."""
        return self.loss_holds and self.words_hold


def collect_result(world: World, comparisons: Sequence[Comparison]) -> DemoResult:
    """Collect the best held-out loss, that of the model shown, and the worst next-word error."""
    records = read_metrics(world.out)
    val_loss = min(r["val_loss"] for r in records if r.get("val_loss") is not None)
    seconds = [r["clock"]["seconds"] for r in records if "loss" in r][-1]
    worst = max(comparisons, key=lambda comparison: comparison.worst)
    return DemoResult(val_loss, val_loss / world.floor - 1, worst, seconds)


def print_samples(console: Console, stories: Sequence[GeneratedStory]) -> None:
    """Print a few of the stories the model wrote."""
    possible = sum(story.possible for story in stories)
    console.print("\n[bold]What it writes[/]")
    for story in stories[:3]:
        console.print(Padding(Text(printable(story.text)), (0, 0, 0, 2)))
    console.print(
        f"{possible} of {len(stories)} stories it wrote could have come from the source itself"
    )
    wrong = [story for story in stories if not story.possible]
    if wrong:
        before, word, after = map(printable, wrong[0].cut())
        console.print("this one could not, for the word that stands out:")
        space = "" if not before or not word[:1].isalnum() else " "
        told = Text.assemble(before, space, (f"»{word}«", "bold red"), after)
        console.print(Padding(told, (0, 0, 0, 2)))


def printable(text: str) -> str:
    """Replace control characters: a model that has learnt little may write some."""
    return "".join(c if c.isprintable() else "�" for c in text)


def last_words(text: str, room: int) -> str:
    """Return the end of a text that fits, cut between words."""
    if len(text) <= room:
        return text
    kept = text[-(room - 2) :]
    return "… " + (kept if text[-(room - 1)] == " " else kept.partition(" ")[2])


def print_table(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print the next words, the model's bars beside the truth's, to fit in 80 columns."""
    console.print("\n[bold]The next word[/]: [cyan]truth[/] and [magenta]model[/]")
    for comparison in comparisons:
        console.print(f"\n[dim]{comparison.title}[/]")
        console.print(Padding(Text(f"{comparison.prompt} …"), (0, 0, 0, 2)))
        for word, truth, model in comparison.rows:
            console.print(
                f"  {word:<10} {truth:.3f} [cyan]{bar(truth, 20)}[/]  "
                f"{model:.3f} [magenta]{bar(model, 20)}[/] {model - truth:+.3f}",
                soft_wrap=True,
            )


def verdicts(world: World, result: DemoResult) -> list[tuple[bool, str]]:
    """Return for each promise whether it holds, and the measurement."""
    return [
        (
            result.loss_holds,
            f"held-out loss {result.val_loss:.4f}, floor {world.floor:.4f}: {result.excess:+.2%} "
            f"(promised: within {LOSS_WITHIN:.0%})",
        ),
        (
            result.words_hold,
            f"next words: at most {result.worst.worst:.4f} from the truth, after "
            f"“{last_words(result.worst.prompt, 26)}” (promised: within {WORD_WITHIN})",
        ),
    ]


def print_verdict(console: Console, world: World, result: DemoResult) -> None:
    """Print the verdict, and the time beside the forecast."""
    console.print("\n[bold]What was promised[/]")
    for holds, text in verdicts(world, result):
        mark = "[green]yes[/]" if holds else "[bold red]no [/]"
        console.print(f"{mark}  {text}", soft_wrap=not console.is_terminal)
    if world.forecast is not None and not world.begun:
        steps = world.forecast.steps * world.forecast.step_seconds
        console.print(
            f"time in steps {duration(result.seconds)}; predicted {duration(steps)}", soft_wrap=True
        )


def html_sections(
    world: World,
    result: DemoResult,
    comparisons: Sequence[Comparison],
    stories: Sequence[GeneratedStory],
) -> list[Section]:
    """Make the demo's part of the report."""
    judged = "".join(
        f"<li><b>{'yes' if holds else 'no'}</b> {html.escape(text)}</li>"
        for holds, text in verdicts(world, result)
    )
    entropy = world.entropy
    source = table(
        ("the source", "", ""),
        [
            ("expected over all stories", f"{entropy.nats:.4f} nats", f"{entropy.words:.2f} words"),
            ("entropy", f"{entropy.per_word:.4f} nats a word", f"{entropy.per_token:.4f} a token"),
            (
                "the floor: the truth's own score on the held-out stories",
                f"{world.floor:.4f} nats a token",
                f"{len(world.held_out):,} stories",
            ),
        ],
    )
    possible = sum(story.possible for story in stories)
    written = "".join(
        f"<blockquote>{html.escape(story.text)}</blockquote>" for story in stories[:5]
    )
    wrong = [story for story in stories if not story.possible]
    betrayed = ""
    if wrong:
        before, word, after = map(html.escape, wrong[0].cut())
        betrayed = (
            "<p>This one could not, for the word that stands out:</p>"
            f"<blockquote>{before} <mark>{word}</mark>{after}</blockquote>"
        )
    records = read_metrics(world.out)
    wide, narrow = (draw_excess_loss(records, world.floor, narrow=kind) for kind in (False, True))
    picture = picture_html("distance from the floor", wide, narrow)
    return [
        Section("What was promised", f"<ul>{judged}</ul>{picture}{source}"),
        Section("The next word: truth and model", _STYLE + "".join(map(_html_words, comparisons))),
        Section(
            "What it writes now",
            f"{written}<p>{possible} of {len(stories)} stories it wrote could have come from the "
            f"source itself.</p>{betrayed}",
        ),
    ]


def draw_excess_loss(
    records: Sequence[Mapping[str, Any]], floor: float, *, narrow: bool = False
) -> bytes:
    """Draw the excess of the losses over the floor: on a log scale, linear around the floor."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    curves = Curves.of(records)
    figure = Figure(figsize=(4, 3.4) if narrow else (9, 3.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    lowest = -1.0
    for steps, losses, colour, name in (
        (curves.steps, curves.smooth_loss(), COLOURS[0], "training, smoothed"),
        (curves.val_steps, curves.val_loss, COLOURS[1], "held-out"),
    ):
        excess = [100 * (loss / floor - 1) for loss in losses]
        axes.plot(steps, excess, color=colour, lw=1.4, label=name)
        lowest = min([lowest, *excess])
    axes.axhline(100 * LOSS_WITHIN, color="#6b7280", ls=":", lw=1.2, label="promised")
    axes.axhline(0, color="#111827", lw=1.0, label="the floor")
    # A few batches may have a loss below the floor by chance: linear around it, log beyond.
    axes.set_yscale("symlog", linthresh=1.0, linscale=0.6)
    axes.set_yticks([-1, 0, 1, 3, 10, 30, 100, 300])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=1.2 * lowest)
    style_axes(axes, "step", "loss above the floor")
    axes.legend(frameon=False)
    return png(figure)


_STYLE = """<style>
.words { display: grid; grid-template-columns: 6rem 1fr 4rem; gap: .15rem .8rem;
  align-items: center; margin: .3rem 0 1.2rem; font-variant-numeric: tabular-nums; }
.words i { display: block; height: .55rem; border-radius: 3px; min-width: 1px; }
.words .t { background: #0891b2; } .words .m { background: #be185d; margin-top: 2px; }
.words small { color: var(--grey); line-height: 1.15; }
.key { display: inline-block; width: .8rem; height: .55rem; border-radius: 3px; }
</style>
<p><span class="key" style="background:#0891b2"></span> truth &nbsp;
<span class="key" style="background:#be185d"></span> model</p>
"""


def _html_words(comparison: Comparison) -> str:
    rows = "".join(
        f"<span>{html.escape(word)}</span>"
        f'<div><i class="t" style="width:{truth:.2%}"></i>'
        f'<i class="m" style="width:{model:.2%}"></i></div>'
        f"<small>{truth:.3f}<br>{model:.3f}</small>"
        for word, truth, model in comparison.rows
    )
    return (
        f"<h3>{html.escape(comparison.title)}</h3><div>{html.escape(comparison.prompt)} …</div>"
        f'<div class="words">{rows}</div>'
    )
