"""Progress of a training run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from scratchlm.cli.terminal import visible
from scratchlm.training.loop import Watcher
from scratchlm.training.report import duration

LINE_SECONDS = 10.0  # between plain lines, at least


class TrainingConsole(Watcher):
    """Shows a run on stderr; used as a context manager around it."""

    def __init__(self, steps: int, tokens_per_step: int, *, console: Console | None = None) -> None:
        self.steps, self.tokens_per_step = steps, tokens_per_step
        self.console = console or Console(stderr=True, highlight=False)
        self.live = self.console.is_terminal
        self.bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            transient=True,
            disable=not self.live,
            expand=True,
        )
        self.task: TaskID | None = None
        self.held_out: str = ""
        self.best_loss: float | None = None
        self._next_line = 0.0

    def __enter__(self) -> TrainingConsole:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def stop_notice(self, is_rank: bool = False) -> str:
        """Return what to print on a stop signal; the bar may have hidden the cursor."""
        show_cursor = "\x1b[?25h" if self.live else ""
        again = "" if is_rank else "; Ctrl-C again ends at once"
        return f"{show_cursor}\nstopping after this step{again}\n"

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        self.console.print(visible(text), markup=False, soft_wrap=not self.live)

    def stepped(self, record: dict[str, Any]) -> None:
        """Update the bar, or print a line every LINE_SECONDS."""
        if self.live:
            if self.task is None:
                self.bar.start()
                self.task = self.bar.add_task("", total=self.steps, figures="")
            figures = self._figures(record, self.console.width)
            self.bar.update(self.task, completed=record["step"], figures=figures)
        elif time.monotonic() >= self._next_line or record["step"] == self.steps:
            self._next_line = time.monotonic() + LINE_SECONDS
            self.say(f"step {record['step']:,}/{self.steps:,}  {self._figures(record, 400)}")

    def _figures(self, record: dict[str, Any], width: int) -> str:
        """Format as many figures as fit, the most important first."""
        clock = record["clock"]
        rate = clock["tokens_per_second"]
        left = (self.steps - record["step"]) * self.tokens_per_step / rate
        figures = [f"loss {record['loss']:.4f}", f"{duration(left)} left"]
        figures += [self.held_out] if self.held_out else []
        each = f" ({rate / clock['ranks']:,.0f} a rank)" if "ranks" in clock else ""
        figures += [f"lr {record['lr']:.2e}", f"{rate:,.0f} tok/s{each}"]
        if "mfu" in clock:
            figures.append(f"MFU {clock['mfu']:.1%} ({clock['mfu_convention']})")
        figures.append(f"{clock['memory_bytes'] / 2**30:.2f} GiB")
        room = max(30, width - 36)
        while len(figures) > 2 and len("  ".join(figures)) > room:
            figures.pop()
        return "  ".join(figures)

    def evaluated(self, record: dict[str, Any]) -> None:
        """Print the held-out figures."""
        loss = record["val_loss"]
        if loss is None:
            self.say(f"step {record['step']:,}: the held-out loss is not finite")
            return
        self.held_out = f"held-out {loss:.4f}"
        bits = record["bits_per_byte"]
        per_byte = "" if bits is None else f"  {bits:.4f} bits/byte"
        perplexity = record["val_perplexity"]
        shown = "" if perplexity is None else f"  perplexity {perplexity:,.2f}"
        best = "  best so far" if record["best"] else ""
        if record["best"] or self.best_loss is None:
            self.best_loss = loss
        elif loss > self.best_loss:
            best = f"  best {loss - self.best_loss:+.4f}"  # so much above it
        self.say(f"step {record['step']:,}: held-out {loss:.4f}{shown}{per_byte}{best}")

    def tasks_run(self, record: dict[str, Any]) -> None:
        """Print the first figure of each task."""
        for task, figures in record["tasks"].items():
            name, figure = next(iter(figures.items()))
            value = figure["value"]
            shown = "not finite" if value is None else f"{value:.4f}"
            if value is not None and figure["low"] is not None:
                shown += f" ({figure['low']:.4f}–{figure['high']:.4f})"
            self.say(f"step {record['step']:,}: {task}: {name.replace('_', ' ')} {shown}")

    def sampled(self, record: dict[str, Any]) -> None:
        """Print the first line of what the model wrote."""
        text = " ".join(record["samples"][0].split())
        room = max(20, self.console.width - 4) if self.live else 100
        cut = text[: room + 1].rpartition(" ")[0] if len(text) > room else text
        self.say(f"  | {cut or text[:room]}")

    def saved(self, path: Path) -> None:
        """Print nothing."""


class TensorBoard(Watcher):
    """Logs the same figures to TensorBoard."""

    @staticmethod
    def require() -> None:
        """Refuse early if the package is missing."""
        if find_spec("tensorboard") is None:
            raise ValueError(
                "--tensorboard needs the package tensorboard: pip install 'scratchlm[tensorboard]'"
            )

    def __init__(self, directory: Path) -> None:
        self.require()
        self.directory = directory
        self.writer: Any = None

    def begin(self, step: int) -> None:
        """Continue after `step`; later steps of an earlier session are purged."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.directory), purge_step=step + 1)

    def stepped(self, record: dict[str, Any]) -> None:
        """Log a step's numbers."""
        numbers = {**record, **record["clock"]}
        for name in ("loss", "lr", "grad_norm", "tokens_per_second", "mfu"):
            if name in numbers:
                self.writer.add_scalar(f"train/{name}", numbers[name], record["step"])

    def evaluated(self, record: dict[str, Any]) -> None:
        """Log an evaluation's numbers."""
        for name in ("val_loss", "val_perplexity", "bits_per_byte"):
            if record[name] is not None:
                self.writer.add_scalar(f"held-out/{name}", record[name], record["step"])

    def tasks_run(self, record: dict[str, Any]) -> None:
        """Log the figures of tasks."""
        for task, figures in record["tasks"].items():
            for name, figure in figures.items():
                if figure["value"] is not None:
                    self.writer.add_scalar(f"{task}/{name}", figure["value"], record["step"])

    def sampled(self, record: dict[str, Any]) -> None:
        """Log what the model wrote."""
        self.writer.add_text("samples", "\n\n".join(record["samples"]), record["step"])

    def saved(self, path: Path) -> None:
        """Flush the log with each checkpoint."""
        self.writer.flush()

    def close(self) -> None:
        """Close the log, if it was opened."""
        if self.writer is not None:
            self.writer.close()
