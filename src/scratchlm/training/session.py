"""From a plan to a trained model in one call: open, check, restore, train."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scratchlm.checkpoint import find_checkpoints
from scratchlm.config import ModelConfig
from scratchlm.data import Batches, TokenFile, ValidationBatches, tokenizer_fingerprint
from scratchlm.data.documents import DocumentBatches, DocumentValidationBatches
from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.ops import Ops
from scratchlm.training.apply import NO_WORKSPACE, WORKSPACE
from scratchlm.training.learner import Learner, build_model
from scratchlm.training.loop import Data, RunTasks, Sampler, Watcher, train
from scratchlm.training.parts import fill, first_weights
from scratchlm.training.plan import Plan, has_run, write_plan
from scratchlm.training.run import Progress, Run, fingerprint, hold_run
from scratchlm.training.settings import TrainConfig
from scratchlm.training.throughput import Throughput, make_throughput
from scratchlm.training.tuning import (
    adapter_record,
    build_tuned,
    make_data,
    make_learner,
    open_examples,
)
from scratchlm.untrusted import MAX_TOKENIZER_BYTES, read_bytes

if TYPE_CHECKING:
    from scratchlm.parallel.ranks import Ranks


@dataclass(frozen=True)
class Outcome:
    """The result of a session."""

    ended: str  # finished, early stop, interrupted
    progress: Progress
    learner: Learner


@dataclass(frozen=True)
class Start:
    """The weights a run begins with, and the tokens that end a text of theirs."""

    tensors: Mapping[str, Tensor]
    eos_token_ids: tuple[int, ...] = ()
    source: Path | None = None  # the folder they came from
    fingerprint: str = ""  # of what it holds


OnBegin = Callable[[Learner, Run, Throughput], None]


def run_plan(
    directory: str | Path,
    plan: Plan,
    *,
    resume: bool = False,
    device: torch.device | str = "cpu",
    ops: str | Ops = "fast",
    bytes_per_id: Tensor | None = None,
    sample: Sampler | None = None,
    run_tasks: RunTasks | None = None,
    watchers: tuple[Watcher, ...] = (),
    on_begin: OnBegin | None = None,
    warn: Callable[[str], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    matmul_rate: float | None = None,
    start: Callable[[], Start] | None = None,
    chat_template: bytes | None = None,
    ranks: Ranks | None = None,
) -> Outcome:
    """Train `plan` in `directory`; with `resume`, from its newest checkpoint.

    `ranks`: the processes that call this together, on one directory; the first one logs.

    `start` loads what a run with `plan.start` begins with; that becomes its checkpoint of step 0.
    Fine-tuning loads it in every session where the base does not learn.
    `bytes_per_id` gives bits per byte; `sample` generates texts and `run_tasks` runs the tasks of
    `train.tasks` at every evaluation; `on_begin` is called once everything is checked and loaded;
    `matmul_rate` (FLOP/s) gives MFU.
    """
    directory, device = Path(directory), torch.device(device)
    is_first = ranks is None or ranks.is_first
    with contextlib.ExitStack() as stack:
        if is_first:
            stack.enter_context(hold_run(directory))
        if has_run(directory) and not resume and is_first:
            raise ScratchLMError(
                f"{directory} holds a run already: --resume goes on with it, "
                "another --out begins a new one"
            )
        settings = plan.train.resolved(device.type)
        stack.enter_context(deterministic_kernels(settings.deterministic))
        tokenizer, known = _read_tokenizer(plan.data.tokenizer)
        is_new = not find_checkpoints(directory)
        first = _first_weights(directory, plan, start, is_new)
        tell = warnings.warn if warn is None else warn
        if plan.tuning is None:
            files = _open_token_files(plan, known, stack)
            prints = {name: fingerprint(file) for name, file in files.items()}
            data = _make_batches(plan, settings.batch_size, files, device, bytes_per_id, ranks)
            learner = _text_learner(plan, settings, first, device, ops, tell, ranks)
        else:
            examples = open_examples(plan, known)
            prints = {name: found.fingerprint for name, found in examples.items()}
            model = build_tuned(plan, first, settings, device, ops)
            learner = make_learner(model, settings, plan.tuning, tell, ranks)
            data = make_data(plan, settings, examples, learner)
        if first is not None:  # the learner has its own
            first = replace(first, tensors={})
        is_cut = ranks is not None and (settings.has_collectives or settings.precision != "fp32")
        if is_cut and (sample or run_tasks):
            left = ["no samples are drawn"] * bool(sample)
            left += ["train.tasks are not run"] * bool(run_tasks)
            tell(f"{' and '.join(left)}: no rank has all weights, in one type")
        if is_cut or not is_first:
            sample = run_tasks = None
        run = stack.enter_context(Run(directory, prints, tokenizer, plan.changed, ranks=ranks))
        run.chat_template, run.adapter = chat_template, adapter_record(plan, first)
        if plan.tuning is not None and plan.tuning.head is not None:
            run.head = plan.tuning.head.to_dict()
        run.restore(learner, warn)
        if is_first:
            write_plan(directory, replace(plan, train=settings))
        if first is not None and is_new:
            run.eos_token_ids = first.eos_token_ids
            run.save(learner)
        throughput = make_throughput(
            plan.model,
            settings.tokens_per_step(plan.model),
            device,
            matmul_rate,
            1 if ranks is None else ranks.size,
            row_length=settings.row_tokens(plan.model),
        )
        if on_begin is not None:
            on_begin(learner, run, throughput)
        with contextlib.nullcontext() if ranks is None else ranks.naming_the_missing():
            ended = train(
                learner,
                data,
                run,
                throughput=throughput,
                watchers=watchers,
                sample=sample,
                run_tasks=run_tasks,
                should_stop=should_stop,
            )
        return Outcome(ended, run.progress, learner)


def _text_learner(
    plan: Plan,
    settings: TrainConfig,
    first: Start | None,
    device: torch.device,
    ops: str | Ops,
    warn: Callable[[str], None],
    ranks: Ranks | None,
) -> Learner:
    """Make the model of a run that learns from text, with all its weights."""
    if ranks is not None and settings.has_collectives:  # no rank has all of it, ever
        learner = Learner(
            TransformerLM(plan.model, ops, device="meta"), settings, warn=warn, ranks=ranks
        )
        drawn = first_weights(plan.model, settings.seed)
        fill(learner, drawn if first is None else first.tensors.items())
        return learner
    if first is None:
        model = build_model(plan.model, settings.seed, device, ops)
    else:
        model = TransformerLM(plan.model, ops, device="meta").to_empty(device=device)
        model.load_state_dict(first.tensors)
    return Learner(model, settings, warn=warn, ranks=ranks)


def _first_weights(
    directory: Path, plan: Plan, start: Callable[[], Start] | None, is_new: bool
) -> Start | None:
    """Load what a run begins with: once, or in every session where it is an adapter's base."""
    has_adapter = plan.tuning is not None and plan.tuning.lora is not None
    if plan.start is None or not (is_new or has_adapter):
        return None
    if start is None:
        raise ScratchLMError(f"{directory} starts from {plan.start}, which was not given")
    return start()


@contextlib.contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Restrict torch to deterministic kernels; on a GPU some are slower.

    Without it a GPU run resumes from the same state, but two runs may differ in the last bits.
    """
    if not enabled:
        yield
        return
    if os.environ.get(WORKSPACE) in (None, NO_WORKSPACE):
        os.environ[WORKSPACE] = ":4096:8"  # one of the two values torch accepts as deterministic
    from torch._inductor import config as inductor  # it takes a second to import

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        # The compiler, too, must not choose among kernels by timing them.
        with inductor.patch(deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def _read_tokenizer(path: Path | None) -> tuple[bytes | None, str | None]:
    """Return what a tokenizer.json holds, for the checkpoints, and its fingerprint."""
    if path is None:
        return None, None
    return read_bytes(path, MAX_TOKENIZER_BYTES), tokenizer_fingerprint(path)


def _open_token_files(
    plan: Plan, tokenizer: str | None, stack: contextlib.ExitStack
) -> dict[str, TokenFile]:
    """Open the token files and read them once: tokenizer, sizes, ids, CRC-32."""
    paths = {"train": plan.data.train, "val": plan.data.val}
    files = {}
    for name, path in paths.items():
        if path is None:
            continue
        file = stack.enter_context(TokenFile(path, vocab_size=plan.model.vocab_size))
        if tokenizer is not None and file.info.tokenizer != tokenizer:
            raise ScratchLMError(
                f"{file.path} was made with another tokenizer than {plan.data.tokenizer}: "
                f"fingerprint {file.info.tokenizer[:16]}, not {tokenizer[:16]}"
            )
        minimum = plan.train.row_tokens(plan.model) + 1 if name == "train" else 2
        check_num_tokens(file, minimum, plan.model)
        file.validate()
        files[name] = file
    return files


def check_num_tokens(file: TokenFile, minimum: int, model: ModelConfig) -> None:
    """Refuse a file too small to train or evaluate on."""
    if len(file) < minimum:
        raise ScratchLMError(
            f"{file.path} is too small: it holds {len(file):,} tokens, at least {minimum:,} are "
            f"needed (model.context_length={model.context_length})"
        )


def _make_batches(
    plan: Plan,
    rows: int,
    files: dict[str, TokenFile],
    device: torch.device,
    bytes_per_id: Tensor | None,
    ranks: Ranks | None,
) -> Data:
    world = 1 if ranks is None else ranks.row_size
    options: dict[str, Any] = {"pin_memory": device.type == "cuda"}
    if ranks is not None:
        options |= {"rank": ranks.row_rank, "world_size": world}
    train_rows, val_rows = Batches, ValidationBatches
    if plan.train.rows == "documents":
        train_rows, val_rows = DocumentBatches, DocumentValidationBatches
    else:
        options["document_ids"] = plan.train.document_mask
    context = plan.train.row_tokens(plan.model)
    validation = None
    if "val" in files:
        per_rank = min(-(-rows // world), plan.train.micro_batch_size or rows)
        validation = val_rows(files["val"], context, per_rank * world, **options)
        if plan.train.eval_batches:
            validation.keep_first(plan.train.held_out_rows())
    batches = train_rows(files["train"], context, rows, plan.train.seed, **options)
    return Data(batches, validation, bytes_per_id)
