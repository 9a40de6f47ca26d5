"""`scratchlm finetune --task`: records with labels or answers, and its figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scratchlm.config.heads import HEADS, TaskHead
from scratchlm.data.conversations import AnyTokenizer, Example
from scratchlm.data.examples import read_examples
from scratchlm.data.labelled import find_labels, read_answered, read_classified
from scratchlm.evaluation import wilson_interval
from scratchlm.training.heads import HeadValidation, count_right

if TYPE_CHECKING:
    from scratchlm.cli.tuning_setup import TuneArgs
    from scratchlm.training import Plan
    from scratchlm.training.loop import RunTasks


def check_task(args: TuneArgs) -> None:
    """Refuse options that have no effect with --task."""
    if args.task not in HEADS:
        raise ValueError(f"--task must be one of {', '.join(HEADS)}; got {args.task!r}")
    if args.lora:
        option = next(iter(args.lora)).replace("_", "-")
        raise ValueError(f"--{option} is for LoRA; with --task all weights learn")
    if args.quantize is not None:
        raise ValueError("--quantize is for LoRA; with --task all weights learn")
    if args.packed:
        raise ValueError("--pack has no effect beside --task: each example has its row")
    if args.preference is not None or args.beta is not None:
        raise ValueError("--preference learns from pairs of answers; it has no effect with --task")
    if args.overrides.get("tasks"):
        raise ValueError("train.tasks asks language models; it has no effect with --task")


def task_reader(
    task: str, data: Path, tokenizer: AnyTokenizer, longest: int
) -> tuple[TaskHead, Callable[[Path], list[list[Example]]]]:
    """Return a task's head, and what reads its records: each is one example."""
    head = TaskHead(task, find_labels(data) if task == "classification" else ())

    def read(path: Path) -> list[list[Example]]:
        if head.kind == "classification":
            return [[one] for one in read_classified(path, tokenizer, head.labels, longest)]
        return [[one] for one in read_answered(path, tokenizer, longest)]

    return head, read


def head_figures(plan: Plan) -> RunTasks | None:
    """Return what counts, at every evaluation, how many held-out examples are right."""
    tuning = plan.tuning
    if tuning is None or tuning.head is None or plan.data.val is None:
        return None
    head, examples = tuning.head, read_examples(plan.data.val)
    row_length = plan.train.row_tokens(plan.model)
    batches = HeadValidation(examples, row_length, plan.train.batch_size, head=head)
    name = "accuracy" if head.kind == "classification" else "exact_span"

    def run_tasks(model: Any) -> dict[str, dict[str, dict[str, float | None]]]:
        share = wilson_interval(*count_right(model, batches))
        return {"held-out": {name: {"value": share.value, "low": share.low, "high": share.high}}}

    return run_tasks
