"""The training loop.

After every update, what is due at that step is done in a fixed order: evaluate, save, stop; then
comes the next update. A resumed run enters the loop at the same point: whatever the previous
session had not finished at that step is done now. Batches and learning rates are functions of the
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
from scratchlm.data.examples import ExampleBatches, ExampleValidation
from scratchlm.model import TransformerLM
from scratchlm.training.evaluation import Evaluation, evaluate
from scratchlm.training.learner import Learner
from scratchlm.training.metrics import finite
from scratchlm.training.run import Run
from scratchlm.training.schedules import schedule_of
from scratchlm.training.step import take_step
from scratchlm.training.throughput import Throughput


class Watcher:
    """Callbacks of a run; the command line draws it, TensorBoard logs it."""

    def stepped(self, record: dict[str, Any]) -> None:
        """Called after each step with its log line."""

    def evaluated(self, record: dict[str, Any]) -> None:
        """Called after each evaluation with its log line."""

    def tasks_run(self, record: dict[str, Any]) -> None:
        """Called with the figures of the run's tasks."""

    def sampled(self, record: dict[str, Any]) -> None:
        """Called with the texts the model generated."""

    def saved(self, path: Path) -> None:
        """Called with the path of a new checkpoint."""


@dataclass(frozen=True)
class Data:
    """Training and validation batches of a run."""

    train: Batches | ExampleBatches
    validation: ValidationBatches | ExampleValidation | None = None
    bytes_per_id: Tensor | None = None  # for bits per byte
    measure: Callable[..., Evaluation | None] = evaluate  # what the held-out loss is


Sampler = Callable[[TransformerLM, int], list[str]]
# task → figure → value, low, high
RunTasks = Callable[[TransformerLM], dict[str, dict[str, dict[str, float | None]]]]


def train(
    learner: Learner,
    data: Data,
    run: Run,
    *,
    throughput: Throughput,
    watchers: tuple[Watcher, ...] = (),
    sample: Sampler | None = None,
    run_tasks: RunTasks | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """Train from the current step; return why it stopped: finished, early stop, interrupted."""
    settings, progress, ranks = learner.settings, run.progress, learner.ranks
    if ranks is not None:
        own_stop, should_stop = should_stop, lambda: ranks.any(own_stop())
    lr_at = schedule_of(settings)
    prefetched = cast(Generator[Batch], data.train.iterate(progress.step, settings.steps))
    with contextlib.closing(prefetched) as batches:
        while True:
            improved = _evaluate_if_due(
                learner, data, run, watchers, sample, run_tasks, should_stop
            )
            reason = _stop_reason(learner, run, should_stop)
            if progress.step and (reason or _save_is_due(learner, run, improved)):
                for path in run.save(learner):
                    for watcher in watchers:
                        watcher.saved(path)
            if reason:
                return reason
            began = time.perf_counter()
            step = progress.step + 1
            if ranks is not None:
                ranks.beat(step)
            step_result = take_step(learner, next(batches), step, lr_at(step))
            seconds = time.perf_counter() - began
            progress.step, progress.seconds = step, progress.seconds + seconds
            record = {
                "step": step,
                "loss": step_result.loss,
                "lr": lr_at(step),
                "grad_norm": step_result.grad_norm,
                "tokens": step * settings.tokens_per_step(learner.config),
                "clock": throughput.record(seconds, progress.seconds),
            }
            run.metrics.write(record)
            for watcher in watchers:
                watcher.stepped(record)


def _save_is_due(learner: Learner, run: Run, improved: bool) -> bool:
    """Whether to save now; the best step so far is copied where it is written later."""
    every, progress, ranks = learner.settings.save_every, run.progress, learner.ranks

    def agreed(flag: bool) -> bool:
        return flag if ranks is None else ranks.first_says(flag)  # whose clock decides

    if every and progress.step % every == 0:
        return True
    just_evaluated = progress.evaluated == progress.step
    if improved or (not every and just_evaluated):
        if agreed(run.may_save):
            return True
        return improved and not run.keep_best(learner)
    return not every and agreed(run.is_overdue)


def _stop_reason(learner: Learner, run: Run, should_stop: Callable[[], bool]) -> str:
    patience, progress = learner.settings.patience, run.progress
    if _evaluation_is_due(learner, run) and should_stop():  # it was broken off, at the end too
        return "interrupted"
    if progress.step >= learner.settings.steps:
        return "finished"
    if patience and progress.evaluations_since_best >= patience:
        return "early stop"
    return "interrupted" if should_stop() else ""


def _evaluation_is_due(learner: Learner, run: Run) -> bool:
    every, progress = learner.settings.eval_every, run.progress
    if not every or progress.evaluated == progress.step:
        return False
    return progress.step % every == 0 or progress.step >= learner.settings.steps


def _evaluate_if_due(
    learner: Learner,
    data: Data,
    run: Run,
    watchers: tuple[Watcher, ...],
    sample: Sampler | None,
    run_tasks: RunTasks | None,
    should_stop: Callable[[], bool],
) -> bool:
    """Evaluate if due at this step and not done yet; return whether the loss is the best so far."""
    settings, progress = learner.settings, run.progress
    if not _evaluation_is_due(learner, run):
        return False
    best = False
    with learner.best_weights() as model, learner.without_compile(), learner.evaluating():
        if data.validation is not None:
            rows = data.validation
            result = data.measure(
                model,
                rows if learner.ranks is None else map(learner.own_part, rows),
                max_batches=settings.eval_batches,
                bytes_per_id=data.bytes_per_id,
                autocast=learner.autocast(),
                should_stop=should_stop,
                **({} if learner.ranks is None else {"add_up": learner.ranks.sum}),
            )
            if result is None:  # interrupted: the resumed run evaluates at this step
                return False
            best = result.loss < (math.inf if progress.best_loss is None else progress.best_loss)
            progress.evaluations_since_best += 1
            if best:
                progress.best_loss, progress.best_step = result.loss, progress.step
                progress.evaluations_since_best = 0
            record: dict[str, Any] = {
                "step": progress.step,
                "val_loss": finite(result.loss),
                "val_perplexity": finite(result.perplexity),
                "bits_per_byte": finite(result.bits_per_byte),
                "best": best,
                "clock": {"seconds": progress.seconds},
            }
            run.metrics.write(record)
            for watcher in watchers:
                watcher.evaluated(record)
        if run_tasks is not None:
            record = {"step": progress.step, "tasks": run_tasks(model)}
            run.metrics.write(record)
            for watcher in watchers:
                watcher.tasks_run(record)
        if sample is not None:
            record = {"step": progress.step, "samples": sample(model, progress.step)}
            run.metrics.write(record)
            for watcher in watchers:
                watcher.sampled(record)
        if learner.ranks is not None:  # the first one may write and run tasks for long
            learner.ranks.from_first(None)
    progress.evaluated = progress.step
    return best and progress.step > 0
