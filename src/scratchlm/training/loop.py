"""The training loop.

After every update the run stands at a step. What is due there is done in a fixed order: evaluate,
save, stop; then comes the next update. A run that is resumed enters at the same place: whatever
its last life did not get to do there is done now. Batches and learning rates are functions of the
step, so there is nothing else to restore.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from scratchlm.data import Batch, Batches, ValidationBatches
from scratchlm.model import TransformerLM
from scratchlm.training.evaluation import evaluate
from scratchlm.training.learner import Learner
from scratchlm.training.metrics import finite
from scratchlm.training.run import Run
from scratchlm.training.schedules import schedule_of
from scratchlm.training.step import take_step
from scratchlm.training.throughput import Throughput


class Watcher:
    """Told what happens in a run; the command line draws it, TensorBoard logs it."""

    def stepped(self, record: dict[str, Any]) -> None:
        """Take the line of one step."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """Take the line of one evaluation."""

    def sampled(self, record: dict[str, Any]) -> None:
        """Take what the model wrote."""

    def saved(self, path: Path) -> None:
        """Take the place of a new checkpoint."""


@dataclass(frozen=True)
class Data:
    """What a run learns from and is measured on."""

    train: Batches
    validation: ValidationBatches | None = None
    bytes_per_id: Tensor | None = None  # for bits per byte


Sampler = Callable[[TransformerLM, int], list[str]]


def train(
    learner: Learner,
    data: Data,
    run: Run,
    *,
    throughput: Throughput,
    watchers: tuple[Watcher, ...] = (),
    sample: Sampler | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """Train from where the run stands; say why it ended: finished, early stop, interrupted."""
    settings, reached = learner.settings, run.reached
    lr_at = schedule_of(settings)
    ahead = cast(Generator[Batch], data.train.iterate(reached.step, settings.steps))
    with contextlib.closing(ahead) as batches:
        while True:
            improved = _evaluate_if_due(learner, data, run, watchers, sample, should_stop)
            ended = _why_ended(learner, run, should_stop)
            due = reached.step and reached.step % (settings.save_every or 1) == 0
            if (due or improved or (ended and reached.step)) and not run.is_saved:
                path = run.save(learner)
                for watcher in watchers:
                    watcher.saved(path)
            if ended:
                return ended
            began = time.perf_counter()
            step = reached.step + 1
            result = take_step(learner, next(batches), step, lr_at(step))
            seconds = time.perf_counter() - began
            reached.step, reached.seconds = step, reached.seconds + seconds
            record = {
                "step": step,
                "loss": result.loss,
                "lr": lr_at(step),
                "grad_norm": result.grad_norm,
                "tokens": step * settings.tokens_per_step(learner.model.config),
                "clock": throughput.record(seconds, reached.seconds),
            }
            run.metrics.write(record)
            for watcher in watchers:
                watcher.stepped(record)


def _why_ended(learner: Learner, run: Run, should_stop: Callable[[], bool]) -> str:
    patience, reached = learner.settings.patience, run.reached
    if reached.step >= learner.settings.steps:
        return "finished"
    if patience and reached.evaluations_since_best >= patience:
        return "early stop"
    return "interrupted" if should_stop() else ""


def _evaluate_if_due(
    learner: Learner,
    data: Data,
    run: Run,
    watchers: tuple[Watcher, ...],
    sample: Sampler | None,
    should_stop: Callable[[], bool],
) -> bool:
    """Evaluate where the run stands unless that has been done; say whether it is the best."""
    settings, reached = learner.settings, run.reached
    every, last = settings.eval_every, reached.step >= settings.steps
    if not every or (reached.step % every and not last) or reached.evaluated == reached.step:
        return False
    best = False
    with learner.best_weights() as model:
        if data.validation is not None:
            found = evaluate(
                model,
                data.validation,
                max_batches=settings.eval_batches,
                bytes_per_id=data.bytes_per_id,
                autocast=learner.autocast(),
                should_stop=should_stop,
            )
            if found is None:  # asked to stop in the middle: the next life evaluates here
                return False
            best = found.loss < (math.inf if reached.best_loss is None else reached.best_loss)
            reached.evaluations_since_best += 1
            if best:
                reached.best_loss, reached.best_step = found.loss, reached.step
                reached.evaluations_since_best = 0
            record: dict[str, Any] = {
                "step": reached.step,
                "val_loss": finite(found.loss),
                "val_perplexity": finite(found.perplexity),
                "bits_per_byte": finite(found.bits_per_byte),
                "best": best,
                "clock": {"seconds": reached.seconds},
            }
            run.metrics.write(record)
            for watcher in watchers:
                watcher.evaluated(record)
        if sample is not None:
            record = {"step": reached.step, "samples": sample(model, reached.step)}
            run.metrics.write(record)
            for watcher in watchers:
                watcher.sampled(record)
    reached.evaluated = reached.step
    return best and reached.step > 0
