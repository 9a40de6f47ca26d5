"""Train the demo's world twice, with the definitions and with a learner's functions, in step.

Ours is `training.Learner` with `ops="reference"`. The learner's is the loop below, in a process of
its own: every function of the file is used, the others are borrowed. What each step measures is
compared: loss, gradient norm, learning rate, weights after the update. Functions that compute what
the definition computes, in its order, give the same bits; the first difference names its step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from scratchlm.check.child import Reporter, one_line
from scratchlm.check.definitions import Functions
from scratchlm.check.loading import borrow, load_module, read_source
from scratchlm.check.outcomes import pack, unpack
from scratchlm.check.runner import ChildEnded, messages
from scratchlm.check.tasks import BY_NAME
from scratchlm.config import ModelConfig, Rotary
from scratchlm.data import IGNORE_INDEX, Batch
from scratchlm.errors import ScratchLMError
from scratchlm.training import Learner, TrainConfig, build_model, take_step
from scratchlm.training.optimizers import global_norm
from scratchlm.training.schedules import schedule_of

QUANTITIES = ("loss", "gradient norm", "learning rate", "sum of weights")
WHERE = {  # what to look at, where a quantity is the first to differ
    "loss": "forward or loss",
    "gradient norm": "the backward pass",
    "learning rate": "the schedule",
    "sum of weights": "clipping or AdamW",
}
BATCH_SIZE = 16  # two runs, as formulas, on one core each
ROUNDING = 1e-4  # a relative difference that another order of sums can make


@dataclass(frozen=True)
class Step:
    """What one update measured; `weights` is the sum of all of them afterwards."""

    loss: float
    gradient_norm: float
    learning_rate: float
    weights: float

    @property
    def values(self) -> tuple[float, float, float, float]:
        """The four numbers, in the order in which they are computed."""
        return self.loss, self.gradient_norm, self.learning_rate, self.weights


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs part."""

    step: int
    what: str
    ours: float
    yours: float

    @property
    def size(self) -> float:
        """The difference, relative to ours."""
        return abs(self.yours - self.ours) / max(abs(self.ours), 1e-12)  # NaN: of no size

    def __str__(self) -> str:
        return (
            f"step {self.step}: the {self.what} is {self.yours:.7g}, with the definitions "
            f"{self.ours:.7g}: look at {WHERE[self.what]}"
        )


@dataclass(frozen=True)
class Job:
    """What is trained: a file's functions on batches that are known beforehand."""

    path: Path
    config: ModelConfig
    settings: TrainConfig
    batches: list[Batch]
    copying: frozenset[str] = frozenset()  # functions through which no gradient reaches the weights
    course: bool = False
    corpus: Path | None = None  # for the learner's own BPE
    special: str = ""
    text: str = ""  # to encode with it


def compare(
    ours: Iterable[Step], yours: Iterable[Step], beyond: float = 0.0
) -> FirstDifference | None:
    """Return the first number that is not the same to the bit, or not `beyond` a relative size."""
    for number, (mine, theirs) in enumerate(zip(ours, yours, strict=False), 1):
        for what, a, b in zip(QUANTITIES, mine.values, theirs.values, strict=True):
            found = FirstDifference(number, what, a, b)
            if struct.pack("d", a) != struct.pack("d", b) and not found.size <= beyond:
                return found
    return None


def plain(settings: TrainConfig) -> TrainConfig:
    """Return settings under which everything is computed as it is defined."""
    exact = {"accelerate": False, "fast_optimizer": False, "ema": 0.0, "precision": "fp32"}
    return replace(settings, **exact, batch_size=BATCH_SIZE).resolved("cpu")  # type: ignore[arg-type]


def train_ours(
    config: ModelConfig, settings: TrainConfig, batches: Iterable[Batch]
) -> Iterator[tuple[Step, dict[str, Tensor]]]:
    """Train with the definitions; yield every step and the weights."""
    learner = Learner(build_model(config, settings.seed, "cpu", "reference"), settings)
    rate = schedule_of(settings)
    for number, batch in enumerate(batches, 1):
        result = take_step(learner, batch, number, rate(number))
        weights = learner.parameters
        yield _step(result.loss, result.grad_norm, rate(number), weights), dict(weights)


def _step(loss: float, norm: float, rate: float, weights: dict[str, Any]) -> Step:
    total = sum(float(w.detach().double().sum()) for w in weights.values())
    return Step(float(loss), float(norm), float(rate), total)


def train_theirs(
    functions: Functions,
    config: ModelConfig,
    settings: TrainConfig,
    batches: Iterable[Batch],
    course: bool = False,
) -> Iterator[tuple[Step, dict[str, Tensor]]]:
    """Train with a set of functions: forward, loss, backward, clip, rate, update."""
    model = build_model(config, settings.seed, "cpu", "reference")
    weights = dict(model.named_parameters())
    optimizer = functions.get_adamw_cls()(
        [
            {"params": [p for p in weights.values() if p.ndim >= 2]},
            {"params": [p for p in weights.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    assert isinstance(config.positions, Rotary)
    sizes = config.vocab_size, config.context_length, config.d_model, config.num_layers
    more = config.num_heads, config.d_ff, config.rope_theta
    warmup = settings.warmup_steps or 0
    for number, batch in enumerate(batches, 1):
        logits = functions.run_transformer_lm(*sizes, *more, weights, batch.inputs)
        loss = _loss(functions, logits, batch.targets, course)
        for p in weights.values():
            p.grad = None
        loss.backward()
        norm = global_norm([p.grad for p in weights.values() if p.grad is not None])
        functions.run_gradient_clipping(weights.values(), settings.clip)
        rate = functions.run_get_lr_cosine_schedule(
            number, settings.lr, settings.min_lr or 0.0, warmup, settings.steps
        )
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        optimizer.step()
        yield _step(loss.item(), norm.item(), rate, weights), dict(weights)


def _loss(functions: Functions, logits: Tensor, targets: Tensor, course: bool) -> Tensor:
    if not course:
        return functions.run_cross_entropy(logits, targets)
    keep = targets != IGNORE_INDEX  # the course's loss takes rows, all of which count
    return functions.run_cross_entropy(logits[keep], targets[keep])


# The learner's side, in its own process


def usable(module: ModuleType, missing: set[str], copying: set[str]) -> dict[str, Any]:
    """Return the file's own functions, but those through which no gradient passes."""
    return {n: getattr(module, n) for n in BY_NAME if n not in missing and n not in copying}


def run_learner(report: Reporter, job: Job, weights_file: Path) -> None:
    """Train with the file's functions, report every step, and write the weights at the end."""
    torch.set_num_threads(1)
    try:
        module = load_module(job.path)
        source = read_source(job.path)
        missing = source.unwritten | source.absent
        borrow(module, missing)
        functions = Functions(**usable(module, missing, set(job.copying)))
        report.send(tokens=_own_tokens(functions, job))
        weights: dict[str, Tensor] = {}
        run = train_theirs(functions, job.config, job.settings, job.batches, job.course)
        for step, now in run:
            weights = now
            report.send(step=list(step.values))
    except BaseException as error:
        report.send(failed=one_line(error, job.path))
        return
    save_file({name: w.detach().contiguous() for name, w in weights.items()}, weights_file)


def _own_tokens(functions: Functions, job: Job) -> Any:
    """Learn merges from the corpus and encode a text, with the learner's BPE or the definition."""
    if job.corpus is None:
        return None
    size = job.config.vocab_size
    vocab, merges = functions.run_train_bpe(str(job.corpus), size, [job.special])
    tokenizer = functions.get_tokenizer(vocab, merges, [job.special])
    tokens = [vocab[i] for i in tokenizer.encode(job.text)]
    return pack({"merges": [list(pair) for pair in merges], "tokens": tokens})


class SideBySide:
    """Both runs, step by step; the learner's process may take `limit` seconds for each."""

    def __init__(self, job: Job, limit: float, printed: int, weights_file: Path) -> None:
        self.job, self.limit = job, limit

        def work(report: Reporter) -> None:
            run_learner(report, job, weights_file)

        self._theirs = messages(work, limit, printed)
        self.number = 0
        self.tokens: Any = unpack(self._next()["tokens"])

    def steps(self) -> Iterator[tuple[Step, Step]]:
        """Yield every step, ours and the learner's."""
        for step, _ in train_ours(self.job.config, self.job.settings, self.job.batches):
            self.number += 1
            yield step, Step(*self._next()["step"])
        for _ in self._theirs:  # until its weights are written
            pass

    def close(self) -> None:
        """End the learner's process."""
        self._theirs.close()

    def _next(self) -> dict[str, Any]:
        where = f"{self.job.path}: step {self.number}" if self.number else f"{self.job.path}:"
        try:
            message = next(self._theirs, {"failed": "the process ends"})
        except ChildEnded as how:
            raise ScratchLMError(f"{where} {how}") from None
        if "failed" in message:
            raise ScratchLMError(f"{where} {message['failed']}")
        return message
