"""`scratchlm finetune --task`: from records with labels or answers to a plan, and its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scratchlm.cli.starting import start_model
from scratchlm.cli.tuning_setup import TuneArgs, row_tokens, split, tuning_settings, write_data
from scratchlm.config.heads import HEADS, TaskHead
from scratchlm.data.conversations import Example
from scratchlm.data.examples import gather_examples, read_examples
from scratchlm.data.labelled import find_labels, read_answered, read_classified
from scratchlm.evaluation import wilson_interval
from scratchlm.training.choosing import Machine
from scratchlm.training.heads import HeadValidation, count_right
from scratchlm.training.plan import Plan
from scratchlm.training.settings import TrainConfig
from scratchlm.training.tuning import Tuning, check_tuning

if TYPE_CHECKING:
    from pathlib import Path

    from scratchlm.cli.tuning_setup import Say
    from scratchlm.training.loop import RunTasks


def make_task_plan(args: TuneArgs, machine: Machine, say: Say) -> Plan:
    """Make the plan of a new run that trains a head; the records are encoded on the way."""
    from scratchlm.tokenizer import load_tokenizer

    if args.model is None or args.data is None:
        raise ValueError("what to fine-tune, and on what? give MODEL and DATA")
    _check_options(args)
    TrainConfig.check(args.overrides)
    started = start_model(args.model, {})
    longest = row_tokens(args, started.config)
    tokenizer = load_tokenizer(started.source)
    labels = find_labels(args.data) if args.task == "classification" else ()
    head = TaskHead(str(args.task), labels)

    def read(path: Path) -> list[list[Example]]:
        if head.kind == "classification":
            return [[one] for one in read_classified(path, tokenizer, head.labels, longest)]
        return [[one] for one in read_answered(path, tokenizer, longest)]

    train, val = split(args, read)
    tuning = Tuning(packed=False, head=head)
    examples = gather_examples(train, started.fingerprint)
    settings = tuning_settings(args, tuning, started.config, examples, machine)
    check_tuning(tuning, settings, started.config)
    files = write_data(args.out, started, tokenizer, None, examples, val)
    of = f", labels {', '.join(head.labels[:8])}" if head.labels else ""
    say(f"data: {len(train):,} examples{of}; {len(val):,} held out")
    return Plan(started.config, settings, files, start=started.source, tuning=tuning)


def _check_options(args: TuneArgs) -> None:
    if args.task not in HEADS:
        raise ValueError(f"--task must be one of {', '.join(HEADS)}; got {args.task!r}")
    if args.lora:
        option = next(iter(args.lora)).replace("_", "-")
        raise ValueError(f"--{option} is for LoRA; with --task all weights learn")
    if args.quantize is not None:
        raise ValueError("--quantize is for LoRA; with --task all weights learn")
    if args.preference is not None or args.beta is not None:
        raise ValueError("--preference learns from pairs of answers; it has no effect with --task")
    if args.val is not None and args.val_fraction is not None:
        raise ValueError("--val names the held-out records: --val-fraction has no effect beside it")
    if args.epochs is not None and "steps" in args.overrides:
        raise ValueError("--epochs and the number of steps say the same: give one of them")
    if args.overrides.get("tasks"):
        raise ValueError("train.tasks asks language models; it has no effect with --task")


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
