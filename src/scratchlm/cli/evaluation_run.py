"""What `scratchlm evaluate` runs: tasks, held-out text and the harness, on one model at a time."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scratchlm.cli.device import choose_device
from scratchlm.cli.terminal import warn
from scratchlm.cli.training_figures import bytes_of_ids
from scratchlm.cli.training_setup import is_prepared, is_token_file
from scratchlm.errors import ScratchLMError
from scratchlm.evaluation import Estimate, Evaluator, Result, Task, ratio_interval, read_task
from scratchlm.inference import Loaded, load_model

if TYPE_CHECKING:
    from scratchlm.training import Evaluation

TASK_ENDINGS = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Harness:
    """What lm-evaluation-harness is asked for."""

    tasks: Sequence[str]
    include_path: Path | None
    num_fewshot: int | None
    limit: int | None
    chat_template: bool


@dataclass(frozen=True)
class Wanted:
    """What every model is measured on."""

    tasks: list[Task | str]  # a name is that of held-out text
    context_length: int | None
    batch_size: int
    harness: Harness | None


def split_arguments(first: str, rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell models, which come first, from tasks: a folder is a model unless it is prepared data."""
    models, tasks = [first], list(rest)
    while tasks and Path(tasks[0]).is_dir() and not is_prepared(Path(tasks[0])):
        if not _is_model(Path(tasks[0])):
            break
        models.append(tasks.pop(0))
    late = [task for task in tasks if not is_prepared(Path(task)) and _is_model(Path(task))]
    if late:
        raise ScratchLMError(f"models come before tasks; got the model {late[0]} after {tasks[0]}")
    return models, tasks


def _is_model(path: Path) -> bool:
    from scratchlm.checkpoint import find_checkpoints, is_checkpoint
    from scratchlm.interop import is_hf_directory

    return path.is_dir() and (
        is_checkpoint(path) or bool(find_checkpoints(path)) or is_hf_directory(path)
    )


def open_task(name: str) -> Task | str:
    """Read a task's file; other names stand for held-out text."""
    if name.lower().endswith(TASK_ENDINGS) and not Path(name).is_dir():
        return read_task(name)
    return name


def harness_tasks(
    names: Sequence[str] | None,
    include_path: Path | None,
    num_fewshot: int | None,
    limit: int | None,
    chat_template: bool,
    has_tasks: bool,
) -> Harness | None:
    """Gather the options of --lm-eval; refuse those that would not apply."""
    if names:
        if include_path is not None and not include_path.is_dir():
            raise ScratchLMError(f"--include-path {include_path}: no such folder")
        for option, value, least in (("--num-fewshot", num_fewshot, 0), ("--limit", limit, 1)):
            if value is not None and value < least:
                raise ValueError(f"{option} must be at least {least}; got {value}")
        return Harness(names, include_path, num_fewshot, limit, chat_template)
    given = {
        "--include-path": include_path is not None,
        "--num-fewshot": num_fewshot is not None,
        "--limit": limit is not None,
        "--chat-template": chat_template,
    }
    for option, is_given in given.items():
        if is_given:
            raise ScratchLMError(f"{option} is for --lm-eval, which was not given")
    if not has_tasks:
        raise ScratchLMError("nothing to evaluate on: give a task, held-out text or --lm-eval TASK")
    return None


def load(name: str, device: str, accelerate: bool, checkpoint: str | None) -> Loaded:
    """Load one of the models."""
    return load_model(
        name,
        device=choose_device(device),
        accelerate=accelerate,
        checkpoint=checkpoint,
        warn=warn,
    )


def run(loaded: Loaded, wanted: Wanted) -> list[Result]:
    """Measure a model on everything."""
    evaluator: Evaluator | None = None
    found = []
    for task in wanted.tasks:
        if isinstance(task, str):
            found.append(_held_out(loaded, task, wanted))
            continue
        evaluator = evaluator or Evaluator(loaded)
        found.append(evaluator.run(task))
    if wanted.harness is not None:
        if find_spec("lm_eval") is None:
            raise ScratchLMError(
                "--lm-eval needs the package lm-eval: pip install 'scratchlm[eval]'"
            )
        from scratchlm.evaluation.lm_eval_adapter import run_harness

        options: Any = dict(vars(wanted.harness))
        found += run_harness(evaluator or Evaluator(loaded), options.pop("tasks"), **options)
    return found


def _held_out(loaded: Loaded, data: str, wanted: Wanted) -> Result:
    """Measure the loss on text in sequences of the context's length, as in training."""
    from scratchlm.data import TokenFile, ValidationBatches, prepare
    from scratchlm.data.token_file import read_sidecar
    from scratchlm.training import evaluate as measure

    context = wanted.context_length or min(loaded.config.context_length, 1024)
    if context > loaded.config.context_length:
        raise ValueError(
            f"--context-length must not exceed the model's {loaded.config.context_length}; "
            f"got {context}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(data)
        if is_prepared(path):
            file = path / ("val" if (path / "val.bin").exists() else "train")
        elif is_token_file(path):
            file = path
        else:
            prepare([path], loaded.need_tokenizer(), folder, val_fraction=0.0)
            file = Path(folder) / "train"
            if read_sidecar(file).count < 2:
                raise ScratchLMError(f"{data} is too short to evaluate on: less than 2 tokens")
        tokenizer = loaded.tokenizer
        known = None if tokenizer is None else tokenizer.fingerprint()
        with TokenFile(
            file, expect_fingerprint=known, vocab_size=loaded.config.vocab_size
        ) as tokens:
            tokens.validate()
            vocab_size = loaded.config.vocab_size
            sizes = None if tokenizer is None else bytes_of_ids(tokenizer, vocab_size)
            batches = ValidationBatches(tokens, context, wanted.batch_size)
            found = measure(loaded.model, batches, bytes_per_id=sizes)
    assert found is not None
    return _result_of(found, path)


def _result_of(found: Evaluation, path: Path) -> Result:
    """Give an evaluation's figures intervals: the batches are what varies."""
    losses, targets, sizes = zip(*found.batches, strict=True)
    nats = [loss * count for loss, count in zip(losses, targets, strict=True)]
    spread = ratio_interval(nats, targets)
    loss = Estimate(found.loss, spread.low, spread.high)
    metrics = {"loss": loss, "perplexity": loss.map(lambda x: math.exp(min(x, 700.0)))}
    if found.num_bytes:
        spread = ratio_interval([nat / math.log(2) for nat in nats], sizes)
        assert found.bits_per_byte is not None
        metrics["bits_per_byte"] = Estimate(found.bits_per_byte, spread.low, spread.high)
    counts = {"tokens": found.targets, "bytes": found.num_bytes or 0}
    return Result(path.name or str(path), "held-out", metrics, counts)
