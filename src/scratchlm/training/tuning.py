"""Fine-tuning: what a run learns besides, and how its model, data and learner are made.

With LoRA the base model stands still and is not written again: a checkpoint holds the adapter, and
says which base it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from scratchlm import acceleration
from scratchlm.config import ModelConfig
from scratchlm.config.heads import TaskHead
from scratchlm.config.lora import LoRA
from scratchlm.data.batches import Batch
from scratchlm.data.examples import ExampleBatches, Examples, ExampleValidation, read_examples
from scratchlm.errors import ScratchLMError, check_keys
from scratchlm.model import TransformerLM
from scratchlm.ops import Ops
from scratchlm.quantization.convert import fill, make_room, recompute_matrices
from scratchlm.quantization.rule import BASES, choose_base
from scratchlm.training.checks import check_loss
from scratchlm.training.evaluation import evaluate_mean
from scratchlm.training.heads import HeadBatches, HeadValidation, build_head, head_loss
from scratchlm.training.learner import Learner
from scratchlm.training.loop import Data
from scratchlm.training.lora import apply_lora, find_targets
from scratchlm.training.preference import (
    NAME,
    PreferenceBatches,
    PreferenceValidation,
    pair_loss,
    reference_logps,
)
from scratchlm.training.settings import TrainConfig

if TYPE_CHECKING:
    from scratchlm.parallel.ranks import Ranks
    from scratchlm.training.plan import Plan
    from scratchlm.training.session import Start

PREFERENCES = ("dpo",)


@dataclass(frozen=True)
class Tuning:
    """What makes a run one of fine-tuning."""

    lora: LoRA | None = None  # None: all weights learn
    quantize: str | None = None  # what the base is stored as while an adapter learns beside it
    packed: bool = True  # several examples to a row
    preference: str | None = None  # dpo: learn from pairs
    beta: float = 0.1  # of dpo: how far from the start the model may go; smaller is farther
    head: TaskHead | None = None  # trained with all weights, in place of the LM head

    def __post_init__(self) -> None:
        if self.quantize is not None and (self.quantize not in BASES or self.lora is None):
            raise ValueError(
                f"quantize stores the base of an adapter as {' or '.join(BASES)}; "
                f"got quantize={self.quantize!r}" + ("" if self.lora else " without lora")
            )
        if self.preference is not None and self.preference not in PREFERENCES:
            raise ValueError(
                f"preference must be one of {', '.join(PREFERENCES)}; got {self.preference!r}"
            )
        if not (isinstance(self.beta, int | float) and 0 < self.beta < 1e6):
            raise ValueError(f"beta must be above 0 and below a million; got beta={self.beta!r}")
        if self.head is not None and (self.lora or self.preference or self.packed):
            raise ValueError("a task head learns with all weights, from rows of one example each")

    def to_dict(self) -> dict[str, Any]:
        """Write as plain values."""
        table: dict[str, Any] = {"packed": self.packed}
        if self.quantize is not None:
            table["quantize"] = self.quantize
        if self.preference is not None:
            table |= {"preference": self.preference, "beta": self.beta}
        if self.head is not None:
            table["head"] = self.head.to_dict()
        return table if self.lora is None else {**table, "lora": self.lora.to_dict()}

    @classmethod
    def from_dict(cls, values: Any) -> Tuning:
        """Read plain values; unknown keys are refused by name."""
        if not isinstance(values, dict):
            raise TypeError(f"tuning must be a table; got {type(values).__name__}")
        check_keys(values, [field.name for field in fields(cls)], "tuning.")
        lora, head = values.get("lora"), values.get("head")
        parts = {
            "lora": None if lora is None else LoRA.from_dict(lora),
            "head": None if head is None else TaskHead.from_dict(head),
        }
        return cls(**{**values, **parts})


def build_tuned(
    plan: Plan, start: Start | None, settings: TrainConfig, device: torch.device, ops: str | Ops
) -> TransformerLM:
    """Make the model a run learns with: its base filled in, its adapter fresh.

    A base that does not learn is kept as products read it, in bfloat16 where they run so, or in
    few bits.
    """
    tuning = plan.tuning
    assert tuning is not None
    if tuning.head is not None:
        tensors = None if start is None else start.tensors
        made: TransformerLM = build_head(
            plan.model, tuning.head, tensors, settings.seed, device, ops
        )
        return made
    frozen = tuning.lora is not None
    low = frozen and device.type == "cuda" and settings.precision != "fp32"
    model = TransformerLM(plan.model, ops, device="meta", dtype=torch.float32)
    choices = [] if tuning.quantize is None else choose_base(plan.model, tuning.quantize)
    make_room(model, choices)
    model = model.to(torch.bfloat16 if low else torch.float32).to_empty(device=device)
    if start is not None and choices:
        fill(model, choices, start.tensors.items())
        recompute_matrices(model)
    elif start is not None:
        model.load_state_dict(start.tensors)
    if tuning.lora is not None:
        if device.type == "cuda" and settings.accelerate and not choices:
            acceleration.join_weights(model)
        apply_lora(model, tuning.lora, seed=settings.seed)
    return model


def check_tuning(tuning: Tuning, settings: TrainConfig, model: ModelConfig) -> None:
    """Refuse settings that do not go with what is learnt, and layers that are not there."""
    if tuning.lora is not None:
        if settings.precision == "fp8":
            raise ScratchLMError("train.precision=fp8 is for weights that learn; a base's do not")
        if tuning.lora.dropout and settings.shares > 1:
            raise ScratchLMError("train.shares does not go with dropout: threads draw in any order")
        list(find_targets(TransformerLM(model, device="meta"), tuning.lora))
    if tuning.quantize is not None:
        choose_base(model, tuning.quantize)
    check_loss(settings, tuning.head is None and tuning.preference is None)
    if tuning.head is not None and (settings.cuda_graph or settings.shares > 1):
        raise ScratchLMError("train.cuda_graph and train.shares do not serve task heads")
    if tuning.preference is not None:
        if settings.cuda_graph or settings.shares > 1:
            raise ScratchLMError(
                "train.cuda_graph and train.shares do not serve pairs (--preference)"
            )
        for name in ("batch_size", "micro_batch_size"):
            size = getattr(settings, name) or 0
            if size % 2:
                raise ScratchLMError(f"pairs need an even train.{name}; got {size}")


def make_learner(
    model: TransformerLM,
    settings: TrainConfig,
    tuning: Tuning,
    warn: Callable[[str], None],
    ranks: Ranks | None = None,
) -> Learner:
    """Make what learns: from texts, from pairs, or a task head."""
    check_tuning(tuning, settings, model.config)
    if ranks is not None and (tuning.head or tuning.preference or settings.has_collectives):
        raise ScratchLMError(
            "several ranks fine-tune on texts, with train.parallel=zero1; pairs, task heads, fsdp, "
            "hsdp, train.tp and train.cp are not for them"
        )
    return Learner(model, settings, warn=warn, ranks=ranks, loss=_loss_of(tuning))


def _loss_of(tuning: Tuning) -> Callable[[Any, Batch], Tensor] | None:
    """Return the loss of a batch of labels, answers or pairs; None: that of next tokens."""
    if tuning.head is not None:
        return head_loss
    return None if tuning.preference is None else partial(pair_loss, beta=tuning.beta)


def open_examples(plan: Plan, tokenizer: str | None) -> dict[str, Examples]:
    """Read the examples of a run; they must be of its tokenizer."""
    found = {}
    for name, path in (("train", plan.data.train), ("val", plan.data.val)):
        if path is None:
            continue
        examples = read_examples(path)
        if tokenizer is not None and examples.fingerprint["tokenizer"] != tokenizer:
            raise ScratchLMError(f"{path} was made with another tokenizer than the run's")
        ids = examples.ids
        if plan.tuning is not None and plan.tuning.head and plan.tuning.head.labels:
            ids = np.delete(ids, examples.ends - 1)  # a label's number is no token
        if len(ids) and int(ids.max()) >= plan.model.vocab_size:
            raise ScratchLMError(
                f"{path}: ids must lie below vocab_size={plan.model.vocab_size}; got {ids.max()}"
            )
        found[name] = examples
    return found


def make_data(
    plan: Plan, settings: TrainConfig, files: dict[str, Examples], learner: Learner
) -> Data:
    """Make the batches of a run."""
    tuning = plan.tuning
    assert tuning is not None
    row_length = settings.row_tokens(plan.model)
    ranks = learner.ranks
    world = 1 if ranks is None else ranks.data_size
    rows = world * min(learner.rows, settings.micro_batch_size or settings.batch_size)
    train, val = files["train"], files.get("val")
    if tuning.head is not None:
        batches_of = HeadBatches(
            train, row_length, settings.batch_size, settings.seed, head=tuning.head
        )
        held = None if val is None else HeadValidation(val, row_length, rows, head=tuning.head)
        return Data(batches_of, held, measure=partial(evaluate_mean, head_loss))
    if tuning.preference is None:
        options: dict[str, Any] = {
            "packed": tuning.packed,
            "pin_memory": learner.device.type == "cuda",
            "rank": 0 if ranks is None else ranks.data_rank,
            "world_size": world,
        }
        validation = None if val is None else ExampleValidation(val, row_length, rows, **options)
        if validation is not None and settings.eval_batches:
            validation.keep_first(settings.held_out_rows())
        batches = ExampleBatches(train, row_length, settings.batch_size, settings.seed, **options)
        return Data(batches, validation)
    logps = {
        name: reference_logps(
            plan.data.train.with_name(f"{name}-{NAME}"), learner, examples, row_length, rows
        )
        for name, examples in files.items()
    }
    pairs = PreferenceBatches(
        train, row_length, settings.batch_size, settings.seed, reference=logps["train"]
    )
    held_out = None
    if val is not None:
        held_out = PreferenceValidation(val, row_length, rows, reference=logps["val"])
    loss = partial(pair_loss, beta=tuning.beta)
    return Data(pairs, held_out, measure=partial(evaluate_mean, loss))


def adapter_record(plan: Plan, start: Start | None) -> dict[str, Any] | None:
    """Return what a checkpoint that holds an adapter alone says of it, and of its base."""
    if plan.tuning is None or plan.tuning.lora is None:
        return None
    assert plan.start is not None
    assert start is not None
    quantize = plan.tuning.quantize
    return {
        "lora": plan.tuning.lora.to_dict(),
        **({} if quantize is None else {"quantize": quantize}),
        "base": str((start.source or plan.start).absolute()),
        "base_fingerprint": start.fingerprint,
    }
