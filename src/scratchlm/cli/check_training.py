"""`scratchlm check --train`: a model trained with a learner's functions, beside the definitions."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scratchlm.cli.terminal import say
from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError

if TYPE_CHECKING:
    from scratchlm.check import Verdict
    from scratchlm.check.training import FirstDifference, Job, Step
    from scratchlm.model import TransformerLM
    from scratchlm.tokenizer import Tokenizer
    from scratchlm.training import Plan

SENTENCES = 4_000  # of the demo's stories
PROMPT = "The cat sat on the"
TOKENIZER_LIMIT = 6  # times a call's limit, to learn and apply merges


def train_both(
    path: Path, verdicts: list[Verdict], steps: int, out: Path, course: bool, limit: float
) -> int:
    """Train with the file's functions and with the definitions; return the exit status."""
    from scratchlm.check.training import ROUNDING, SideBySide, compare

    written = [v for v in verdicts if v.state != "missing"]
    if not written:
        raise ScratchLMError(f"{path}: nothing is written yet, so there is nothing to train with")
    world = _world(out, steps)
    job = _job(path, world, verdicts, course)
    _say_functions(verdicts, job)
    weights_file = out / "yours.safetensors"
    ours: list[Step] = []
    yours: list[Step] = []
    with tempfile.TemporaryFile() as printed:
        pair = SideBySide(job, limit * TOKENIZER_LIMIT, printed.fileno(), weights_file)
        with contextlib.closing(pair):
            _say_tokenizer(world, pair.tokens, job)
            say(f"{'step':>6}  {'definitions':>11}  {'yours':>11}")
            for mine, theirs in pair.steps():
                ours.append(mine)
                yours.append(theirs)
                if len(ours) in (1, 2, 5) or len(ours) % max(1, steps // 6) == 0:
                    say(f"{len(ours):>6}  {mine.loss:>11.6f}  {theirs.loss:>11.6f}")
    first = compare(ours, yours)
    right = all(v.state == "right" for v in written if not v.cut)
    if first is not None and not (right and _is_rounding(first)):
        first = compare(ours, yours, beyond=ROUNDING) or first
    say(_verdict(first, ours, yours, right))
    _keep(world, out, steps, weights_file, ours, yours, first)
    return 0 if first is None or (right and _is_rounding(first)) else 1


@dataclass(frozen=True)
class World:
    """The demo's stories, a few of them: how to train, and the loss no model can beat."""

    out: Path
    plan: Plan
    tokenizer: Tokenizer
    floor: float


def _world(out: Path, steps: int) -> World:
    from scratchlm.cli.demo.corpus import (
        SOURCE,
        DemoArgs,
        entropy_floor,
        new_plan,
        read_stories,
    )
    from scratchlm.tokenizer import Tokenizer, load_tokenizer
    from scratchlm.training import has_run

    if (out / "curves.json").is_file():  # of an earlier check
        for name in ("checkpoints", "data"):
            shutil.rmtree(out / name, ignore_errors=True)
    elif has_run(out) or (out / "checkpoints").exists():
        raise ScratchLMError(f"{out} holds another run; choose another --out")
    plan = new_plan(DemoArgs(out, 0, steps, SENTENCES), lambda _: None)
    assert plan.data.tokenizer is not None
    assert plan.data.val is not None
    tokenizer = load_tokenizer(plan.data.tokenizer)
    assert isinstance(tokenizer, Tokenizer)
    floor = entropy_floor(SOURCE, tokenizer, read_stories(plan.data.val, tokenizer))
    return World(out, plan, tokenizer, floor)


def _job(path: Path, world: World, verdicts: list[Verdict], course: bool) -> Job:
    from scratchlm.check.training import Job, plain
    from scratchlm.data import TokenFile
    from scratchlm.data.documents import DocumentBatches
    from scratchlm.data.stories import END

    settings = plain(world.plan.train)
    config = world.plan.model
    with TokenFile(world.plan.data.train) as file:
        rows = DocumentBatches(file, config.context_length, settings.batch_size, settings.seed)
        batches = [rows.batch(step) for step in range(settings.steps)]
    corpus = world.out / "data" / "corpus.txt"
    text = corpus.read_text(encoding="utf-8")[:4000]
    cut = frozenset(v.task.name for v in verdicts if v.cut)
    return Job(path, config, settings, batches, cut, course, corpus, END, text)


def _say_functions(verdicts: list[Verdict], job: Job) -> None:
    own = [v for v in verdicts if v.state != "missing" and v.task.name not in job.copying]
    lent = [v.task.short for v in verdicts if v not in own]
    say(f"training with {len(own)} functions of yours, {job.settings.steps} steps")
    if lent:
        say(f"borrowed: {', '.join(lent)}")


def _say_tokenizer(world: World, found: dict[str, Any], job: Job) -> None:
    """Compare the learner's merges and ids with those the model is trained on."""
    ours = world.tokenizer
    merges = [list(pair) for pair in ours.merges]
    if found["merges"] != merges:
        at = next(
            (i for i, (a, b) in enumerate(zip(found["merges"], merges, strict=False)) if a != b),
            min(len(found["merges"]), len(merges)),
        )
        say(f"your merges leave the definition's at merge {at}; the model takes those")
        return
    tokens = [ours.token_bytes(token) for token in ours.encode(job.text)]
    same = "the same tokens" if found["tokens"] == tokens else "other tokens for the same text"
    say(f"the tokenizer: the same {len(merges)} merges, {same}")


def _is_rounding(first: FirstDifference) -> bool:
    from scratchlm.check.training import ROUNDING

    return first.size <= ROUNDING


def _verdict(
    first: FirstDifference | None, ours: list[Step], yours: list[Step], right: bool
) -> str:
    if first is None:
        return f"the same to the bit, in all {len(ours)} steps"
    if right and _is_rounding(first):
        apart = max(abs(a.loss - b.loss) for a, b in zip(ours, yours, strict=True))
        return (
            f"the same but for rounding, from step {first.step} on: your sums run in another "
            f"order; the losses are never more than {apart:.1e} apart"
        )
    return f"the runs part at {first}"


def _keep(
    world: World,
    out: Path,
    steps: int,
    weights_file: Path,
    ours: list[Step],
    yours: list[Step],
    first: FirstDifference | None,
) -> None:
    """Write the curves, the picture, and the learner's model as a checkpoint; show what it says."""
    from safetensors.torch import load_file

    from scratchlm.checkpoint import checkpoint_path, write_checkpoint
    from scratchlm.data import TokenFile
    from scratchlm.data.documents import DocumentValidationBatches
    from scratchlm.model import TransformerLM
    from scratchlm.training import evaluate

    weights, plan = load_file(weights_file), world.plan
    weights_file.unlink()
    write_checkpoint(
        checkpoint_path(out, steps),
        model=weights,
        config=plan.model,
        tokenizer_file=plan.data.tokenizer,
    )
    model = TransformerLM(plan.model)
    model.load_state_dict(weights)
    assert plan.data.val is not None
    with TokenFile(plan.data.val) as file:
        rows = DocumentValidationBatches(file, plan.model.context_length, 32)
        found = evaluate(model, (rows.batch(i) for i in range(len(rows))))
    assert found is not None
    record = {
        "definitions": [s.loss for s in ours],
        "yours": [s.loss for s in yours],
        "first_difference": None if first is None else str(first),
        "floor": world.floor,
    }
    write_atomically(out / "curves.json", json.dumps(record, indent=1).encode())
    write_atomically(out / "curves.png", draw_curves(ours, yours, world.floor, first))
    say(f"held-out loss {found.loss:.4f}; no model can go below {world.floor:.4f}")
    text = world.tokenizer.decode(_continue(model, world.tokenizer.encode(PROMPT)))
    say(f"your model: {text}")
    say(f"curves: {out / 'curves.png'}; more of it: scratchlm generate {out} -p '{PROMPT}'")


def _continue(model: TransformerLM, ids: list[int]) -> list[int]:
    """Continue by the likeliest token, a sentence or two."""
    import torch

    for _ in range(20):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
    return ids


def draw_curves(
    ours: list[Step], yours: list[Step], floor: float, first: FirstDifference | None
) -> bytes:
    """Draw both losses, and their difference below; return a PNG."""
    from matplotlib.figure import Figure

    from scratchlm.training.plots import COLOURS, GREY, png, style_axes

    figure = Figure(figsize=(9, 5.6), dpi=110, layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    numbers = range(1, len(ours) + 1)
    top.plot(numbers, [s.loss for s in ours], color=GREY, lw=3.2, alpha=0.55, label="definitions")
    top.plot(numbers, [s.loss for s in yours], color=COLOURS[1], lw=1.3, label="yours")
    top.axhline(floor, color="#111827", ls="--", lw=1.1, label=f"entropy floor {floor:.3f}")
    top.legend(frameon=False)
    apart = [abs(a.loss - b.loss) for a, b in zip(ours, yours, strict=True)]
    if any(apart):
        below.plot(numbers, [a or float("nan") for a in apart], color=COLOURS[1], lw=1.2)
        below.set_yscale("log")
    else:
        below.text(0.5, 0.5, "the same to the bit", ha="center", transform=below.transAxes)
        below.set_yticks([])
    if first is not None:
        for axes in (top, below):
            axes.axvline(first.step, color=COLOURS[3], lw=1.0, ls=":")
    style_axes(top, "", "loss (nats per token)")
    style_axes(below, "step", "difference")
    below.xaxis.get_major_locator().set_params(integer=True)
    return png(figure)
