"""From a plan to a trained model in one call: open, check, restore, train, report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from scratchlm.config import ModelConfig
from scratchlm.data import Batches, TokenFile, ValidationBatches
from scratchlm.data.documents import DocumentBatches, DocumentValidationBatches
from scratchlm.errors import ScratchLMError
from scratchlm.ops import Ops
from scratchlm.training.learner import Learner, build_model
from scratchlm.training.loop import Data, Sampler, Watcher, train
from scratchlm.training.plan import Plan, has_run, write_plan
from scratchlm.training.run import Reached, Run, fingerprint, hold_run
from scratchlm.training.settings import TrainConfig
from scratchlm.training.throughput import Throughput, make_throughput


@dataclass(frozen=True)
class Outcome:
    """How a session ended."""

    ended: str  # finished, early stop, interrupted
    reached: Reached
    learner: Learner


Begin = Callable[[Learner, Run, Throughput], None]


def run_plan(
    directory: str | Path,
    plan: Plan,
    *,
    resume: bool = False,
    device: torch.device | str = "cpu",
    ops: str | Ops = "fast",
    bytes_per_id: Tensor | None = None,
    sample: Sampler | None = None,
    watchers: tuple[Watcher, ...] = (),
    on_begin: Begin | None = None,
    warn: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    matmul_rate: float | None = None,
) -> Outcome:
    """Train what `plan` says in `directory`, from its newest checkpoint where `resume` is set.

    `bytes_per_id` gives bits per byte; `sample` writes texts at every evaluation; `on_begin` is
    called once everything is checked and loaded; `matmul_rate` (FLOP/s) gives MFU.
    """
    directory, device = Path(directory), torch.device(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold_run(directory))
        if has_run(directory) and not resume:
            raise ScratchLMError(
                f"{directory} holds a run already: --resume goes on with it, "
                "another --out begins a new one"
            )
        settings = plan.train.resolved(device.type)
        spare_workspace(settings)
        stack.enter_context(deterministic_kernels(settings.deterministic))
        files = _open(plan, stack)
        data = _batches(plan, settings.batch_size, files, device, bytes_per_id)
        learner = Learner(build_model(plan.model, settings.seed, device, ops), settings)
        write_plan(directory, replace(plan, train=settings))
        run = stack.enter_context(
            Run(
                directory,
                {name: fingerprint(file) for name, file in files.items()},
                plan.data.tokenizer,
            )
        )
        run.restore(learner, warn)
        throughput = make_throughput(
            plan.model, settings.tokens_per_step(plan.model), device, matmul_rate
        )
        if on_begin is not None:
            on_begin(learner, run, throughput)
        ended = train(
            learner,
            data,
            run,
            throughput=throughput,
            watchers=watchers,
            sample=sample,
            should_stop=should_stop,
        )
        return Outcome(ended, run.reached, learner)


# Read when cuBLAS starts. With a workspace it clears a part of it before every product: in a
# recorded step of small kernels that costs about 1 %, and without one products are as fast.
WORKSPACE, NO_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":0:0"


def spare_workspace(settings: TrainConfig) -> None:
    """Let products of recorded steps do without a workspace, unless the user has said otherwise."""
    if settings.cuda_graph and not settings.deterministic:
        os.environ.setdefault(WORKSPACE, NO_WORKSPACE)


@contextlib.contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Let torch use only kernels that repeat to the last bit; on a GPU some are slower.

    Without it a GPU run resumes from the same state, but two runs may differ in the last bits.
    """
    if not wanted:
        yield
        return
    if os.environ.get(WORKSPACE) in (None, NO_WORKSPACE):
        os.environ[WORKSPACE] = ":4096:8"  # one of two that torch takes for repeatable
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _open(plan: Plan, stack: contextlib.ExitStack) -> dict[str, TokenFile]:
    """Open the token files and read them once: sizes, ids within the vocabulary, CRC-32."""
    paths = {"train": plan.data.train, "val": plan.data.val}
    files = {}
    for name, path in paths.items():
        if path is None:
            continue
        file = stack.enter_context(TokenFile(path, vocab_size=plan.model.vocab_size))
        least = plan.model.context_length + 1 if name == "train" else 2
        check_enough(file, least, plan.model)
        file.validate()
        files[name] = file
    return files


def check_enough(file: TokenFile, least: int, model: ModelConfig) -> None:
    """Refuse a file too small to learn from or to measure on."""
    if len(file) < least:
        raise ScratchLMError(
            f"{file.path} is too small: it holds {len(file):,} tokens, and at least {least:,} are "
            f"needed (model.context_length={model.context_length})"
        )


def _batches(
    plan: Plan,
    rows: int,
    files: dict[str, TokenFile],
    device: torch.device,
    bytes_per_id: Tensor | None,
) -> Data:
    pin, masked = device.type == "cuda", plan.train.document_mask
    context = plan.model.context_length
    validation: ValidationBatches | None = None
    at_once = min(rows, plan.train.micro_batch_size or rows)
    if plan.train.rows == "documents":
        if "val" in files:
            validation = DocumentValidationBatches(files["val"], context, at_once, pin_memory=pin)
        whole = DocumentBatches(files["train"], context, rows, plan.train.seed, pin_memory=pin)
        return Data(whole, validation, bytes_per_id)
    if "val" in files:
        validation = ValidationBatches(
            files["val"], context, at_once, document_ids=masked, pin_memory=pin
        )
    batches = Batches(
        files["train"], context, rows, plan.train.seed, document_ids=masked, pin_memory=pin
    )
    return Data(batches, validation, bytes_per_id)
