"""`report.html`: a run's config, curves, samples and accounting in one self-contained file."""

from __future__ import annotations

import base64
import contextlib
import html
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scratchlm.accounting import (
    CHECKPOINTING,
    PRECISIONS,
    Execution,
    Setup,
    count_parameters,
    memory,
)
from scratchlm.accounting.lora import LoRAMemory, lora_memory
from scratchlm.checkpoint import best_step, find_checkpoints, read_manifest, step_of, tensor_shapes
from scratchlm.config.lora import LoRA
from scratchlm.data.examples import read_examples
from scratchlm.data.token_file import read_sidecar
from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError
from scratchlm.training.metrics import read_metrics
from scratchlm.training.plan import NAME as CONFIG_NAME
from scratchlm.training.plan import Plan, epochs, read_plan
from scratchlm.training.plots import draw_run, draw_tasks, task_curves
from scratchlm.training.throughput import CONVENTION, make_throughput
from scratchlm.untrusted import MAX_CONFIG_BYTES, read_text


@dataclass(frozen=True)
class Section:
    """A caller-provided section of the report; `body` is HTML."""

    title: str
    body: str


def write_report(
    run: str | Path,
    *,
    title: str | None = None,
    floor: float | None = None,
    sections: Sequence[Section] = (),
    command: str | None = None,
) -> Path:
    """Write RUN/report.html and RUN/loss.png from what the run has on disk; return the page.

    `floor`: a loss no model can beat, drawn as a line. `sections` follow the curves. `command`:
    what a person typed to make the run.
    """
    run = Path(run)
    plan, records = read_plan(run), read_metrics(run)
    if not any("loss" in record for record in records):
        raise ScratchLMError(f"{run}: no step has been made yet; there is nothing to report")
    steps = [record["step"] for record in records if "loss" in record][-1]
    picture, narrow = draw_run(records, floor), draw_run(records, floor, narrow=True)
    all_sections = [
        Section("In short", _summary(records, floor)),
        Section(
            "Loss, learning rate, throughput",
            picture_html("loss curves", picture, narrow),
        ),
        Section("Tasks", _tasks(records)),
        *sections,
        Section("What it wrote, as training went on", _samples(records)),
        Section("The accounting beside what was measured", _accounting(run, plan, records)),
        Section("How it was made", table(("", ""), _origin(run, plan, steps, command))),
        Section(
            "Config", f"<pre>{html.escape(read_text(run / CONFIG_NAME, MAX_CONFIG_BYTES))}</pre>"
        ),
    ]
    page = _PAGE.format(
        title=html.escape(title or f"Training run {run.absolute().name}"),
        body="\n".join(
            f"<section><h2>{html.escape(part.title)}</h2>\n{part.body}</section>"
            for part in all_sections
            if part.body
        ),
    )
    write_atomically(run / "loss.png", picture)
    out = run / "report.html"
    write_atomically(out, page.encode())
    return out


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as an HTML table; every cell is plain text."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    lines = [
        "<tr>" + "".join(f"<td>{escape_command(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def escape_command(text: str) -> str:
    """Escape a text, and keep the browser from breaking its lines inside an `--option`."""
    return re.sub(r"(?<!\S)--[\w-]+", r'<span class="whole">\g<0></span>', html.escape(text))


def _summary(records: Sequence[Mapping[str, Any]], floor: float | None) -> str:
    last = [record for record in records if "loss" in record][-1]
    clock = last["clock"]
    cards = [
        ("steps", f"{last['step']:,}"),
        ("tokens seen", f"{last['tokens']:,}"),
        ("training loss", f"{last['loss']:.4f}"),
    ]
    held_out = [record for record in records if record.get("val_loss") is not None]
    if held_out:
        best = min(held_out, key=lambda record: record["val_loss"])
        cards += [
            ("best held-out loss", f"{best['val_loss']:.4f}"),
            ("at step", f"{best['step']:,}"),
        ]
        if best.get("val_perplexity") is not None:
            cards.append(("perplexity", f"{best['val_perplexity']:,.2f}"))
        if best.get("bits_per_byte") is not None:
            cards.append(("bits per byte", f"{best['bits_per_byte']:.4f}"))
        if floor:
            cards.append(("above the entropy floor", f"{best['val_loss'] / floor - 1:+.2%}"))
    cards += [
        ("time in steps", duration(clock["seconds"])),
        ("tokens per second", f"{mean_rate(last):,.0f}"),
    ]
    if "mfu" in clock:
        mfu = clock["mfu"] * mean_rate(last) / clock["tokens_per_second"]
        cards.append((f"MFU ({clock['mfu_convention']})", f"{mfu:.1%}"))
    return (
        '<div class="cards">'
        + "".join(
            f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
            for name, value in cards
        )
        + "</div>"
    )


def _origin(run: Path, plan: Plan, steps: int, command: str | None) -> list[tuple[str, str]]:
    """Return the command, the data in epochs, the best step, the machine and the versions."""
    rows = [("command", command)] if command else []
    if plan.start is not None:
        rows.append(("started from", str(plan.start)))
    with contextlib.suppress(ScratchLMError, OSError):
        read = f"{epochs(plan, steps):.3g} epochs"
        if plan.tuning is None:
            rows.append(("data", f"{read_sidecar(plan.data.train).count:,} tokens; {read}"))
        else:
            rows.append(("data", f"{len(read_examples(plan.data.train)):,} examples; {read}"))
    found = find_checkpoints(run)
    if found:
        best, last = best_step(found[-1]), step_of(found[-1])
        which = f"step {last:,}, the last" if best is None else f"step {best:,}, the best"
        rows.append(("checkpoint that commands take", which))
        versions = read_manifest(found[-1])["versions"]
        rows.append(("versions", ", ".join(f"{name} {text}" for name, text in versions.items())))
    return [*rows, ("machine", describe_machine())]


def describe_machine() -> str:
    """Name this machine: its processor, cores and threads, its GPU if it has one."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line for line in lines if line.startswith("model name")).partition(": ")[2]
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    gpu = f"; {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{platform.system()}, {name}, {cores}{gpu}"


def mean_rate(last: Mapping[str, Any]) -> float:
    """Return the tokens per second of all steps up to one; its own are those of the last few."""
    return last["tokens"] / max(last["clock"]["seconds"], 1e-9)


def _tasks(records: Sequence[Mapping[str, Any]]) -> str:
    """Show the tasks of `train.tasks`: their main figures by step, and all of them at the end."""
    if not task_curves(records):
        return ""
    runs = {"": records}
    picture = picture_html("tasks by step", draw_tasks(runs), draw_tasks(runs, narrow=True))
    last = [record for record in records if record.get("tasks")][-1]
    rows = [
        (task, name.replace("_", " "), *(_format_end(figure[end]) for end in ENDS))
        for task, figures in last["tasks"].items()
        for name, figure in figures.items()
    ]
    header = ("task", "figure", f"at step {last['step']:,}", "95 % from", "to")
    return picture + table(header, rows)


ENDS = ("value", "low", "high")


def _format_end(value: float | None) -> str:
    return "" if value is None else f"{value:,.4f}"


def _samples(records: Sequence[Mapping[str, Any]]) -> str:
    rows = [record for record in records if record.get("samples")]
    if len(rows) > 8:  # more of them from the beginning, where the text changes most
        wanted = {round((len(rows) - 1) * (i / 7) ** 1.5) for i in range(8)}
        rows = [row for i, row in enumerate(rows) if i in wanted]
    return "".join(
        f"<h3>step {row['step']:,}</h3>"
        + "".join(f"<blockquote>{html.escape(text)}</blockquote>" for text in row["samples"])
        for row in rows
    )


def _accounting(run: Path, plan: Plan, records: Sequence[Mapping[str, Any]]) -> str:
    """Compare the predicted figures with the measured ones."""
    last = [record for record in records if "loss" in record][-1]
    clock, model, settings = last["clock"], plan.model, plan.train
    rows: list[Sequence[object]] = [
        ("parameters", _learnt_parameters(plan), _stored_parameters(run)),
        ("tokens per step", f"{settings.tokens_per_step(model):,}", ""),
    ]
    throughput = make_throughput(
        model,
        settings.tokens_per_step(model),
        torch.device("cpu"),
        row_length=settings.row_tokens(model),
    )
    flops = throughput.flops_per_token * throughput.tokens_per_step
    rows.append((f"FLOPs per step ({CONVENTION})", f"{flops:.4g}", ""))
    if clock.get("mfu"):
        rate = clock["tokens_per_second"] * throughput.flops_per_token / clock["mfu"]
        ideal_seconds = last["step"] * flops / rate
        rows.append(("matmul rate of the machine", "", f"{rate / 1e9:,.0f} GFLOP/s"))
        rows.append(
            (
                "time in steps",
                f"{duration(ideal_seconds)} at 100 % MFU",
                f"{duration(clock['seconds'])}, {ideal_seconds / clock['seconds']:.0%} overall",
            )
        )
    rows.append(("peak memory", _predicted_peak(plan), _format_bytes(clock["memory_bytes"])))
    note = (
        "<p>Measured memory is that of torch's allocator on a GPU; on a CPU it is the whole "
        "process, Python and libraries included.</p>"
    )
    return table(("", "computed beforehand", "measured"), rows) + note


def _learnt_parameters(plan: Plan) -> str:
    """Count what a checkpoint of the run holds: the model, or its adapter alone."""
    if plan.tuning is None or plan.tuning.lora is None:
        return f"{count_parameters(plan.model).unique:,}"
    adapter = _adapter_account(plan, plan.tuning.lora, Setup())
    return "not modelled" if adapter is None else f"{adapter.parameters.value:,}"


def _adapter_account(plan: Plan, lora: LoRA, setup: Setup) -> LoRAMemory | None:
    """Account for an adapter; None where the account does not know such a one."""
    if lora.dora or any("layers." in target for target in lora.targets):
        return None
    return lora_memory(plan.model, lora, setup)


def _predicted_peak(plan: Plan) -> str:
    settings = plan.train
    batch = settings.micro_batch_size or settings.batch_size
    precision = settings.precision or "fp32"
    tuning = plan.tuning
    known = settings.checkpointing in CHECKPOINTING and settings.checkpointed_layers is None
    known &= tuning is None or tuning.head is None
    if not known or precision not in PRECISIONS or settings.moment != "fp32":
        return "not modelled"
    setup = Setup(
        phase="training",
        batch=batch,
        context=settings.row_tokens(plan.model),
        precision=precision,
        optimizer=settings.optimizer,
        execution=Execution(
            # a compiler that sees the whole model forms all logits
            loss="unfused" if settings.compile == "model" else "fused",
            checkpointing=settings.checkpointing,
        ),
        accumulate=batch < settings.batch_size,
        quantize=None if tuning is None else tuning.quantize,
    )
    if tuning is not None and tuning.lora is not None:
        adapter = _adapter_account(plan, tuning.lora, setup)
        return "not modelled" if adapter is None else _format_bytes(float(adapter.training.value))
    return _format_bytes(float(memory(plan.model, setup).training.value))


def _stored_parameters(run: Path) -> str:
    """Count the parameters in the newest checkpoint from the size of its tensors."""
    found = find_checkpoints(run)
    if not found:
        return "no checkpoint"
    shapes = tensor_shapes(found[-1])
    return f"{sum(math.prod(shape) for shape in shapes.values()):,}"


def duration(seconds: float) -> str:
    """Format a time: 12.3 s, 4:05 min, 3:02:10 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} h"


def _format_bytes(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"


def picture_html(alt: str, wide: bytes, narrow: bytes) -> str:
    """Embed a picture in two widths: for a screen and for a phone."""
    return (
        f'<picture><source media="(max-width: 600px)" srcset="{_data_uri(narrow)}">'
        f'<img alt="{html.escape(alt)}" src="{_data_uri(wide)}"></picture>'
    )


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<meta name="color-scheme" content="light dark">
<style>
:root {{ --text: #111827; --page: #f9fafb; --card: #fff; --line: #e5e7eb; --faint: #f3f4f6;
  --grey: #6b7280; --mark: #fde68a; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e5e7eb; --page: #0b0f19; --card: #151b28; --line: #2b3444; --faint: #1f2737;
    --grey: #9ca3af; --mark: #92400e; }}
  img {{ filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  margin: 0 auto; max-width: 60rem; padding: 2rem 1rem; overflow-wrap: anywhere; }}
mark {{ background: var(--mark); color: inherit; padding: 0 .2em; border-radius: 3px; }}
@media (max-width: 600px) {{ body {{ padding: 1rem .5rem; }} section {{ padding: .9rem; }} }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.15rem; margin: 0 0 .8rem; }}
h3 {{ font-size: .9rem; color: var(--grey); margin: 1rem 0 .2rem; }}
section {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.2rem 1.4rem; margin: 1rem 0; overflow-x: auto; }}
img {{ max-width: 100%; display: block; margin: auto; }}
.cards {{ display: flex; flex-wrap: wrap; gap: 1rem 2rem; }}
.cards div {{ display: flex; flex-direction: column; }}
.cards b {{ font-size: 1.3rem; font-weight: 600; }}
.cards span {{ color: var(--grey); font-size: .85rem; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }}
th {{ color: var(--grey); font-weight: 500; }} .whole {{ white-space: nowrap; }}
th, td {{ overflow-wrap: break-word; }}
td:nth-child(2):last-child {{ overflow-wrap: anywhere; }} /* a path may be longer than a line */
blockquote {{ margin: .2rem 0; padding: .4rem .8rem; background: var(--faint); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace;
  font-size: .85rem; }}
pre {{ font-size: .8rem; margin: 0; overflow-x: auto; overflow-wrap: normal; }}
p {{ color: var(--grey); font-size: .85rem; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""
