"""Models with a task head, ready to be used: classify texts, find answers in a context.

loaded = load_head("runs/mine")                    a run, a checkpoint, a Hugging Face folder
classify(loaded, ["I liked it"])                   [{"good": 0.93, "bad": 0.07}]
answer(loaded, [("Who?", "It was Ann.")])          [Answer("Ann", 7, 10, 0.88)]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scratchlm import acceleration, checkpoint
from scratchlm.config import ModelConfig
from scratchlm.config.heads import TaskHead
from scratchlm.errors import ScratchLMError
from scratchlm.inference.prompts import AnyTokenizer
from scratchlm.interop import check_stored, is_hf_directory, read_hf
from scratchlm.model import QuestionAnswering, SequenceClassifier
from scratchlm.model.transformer import Transformer
from scratchlm.tokenizer import load_tokenizer
from scratchlm.tokenizer.task_inputs import QuestionInput, question_ids, text_ids
from scratchlm.untrusted import brief

LONGEST_ANSWER = 32  # tokens
BATCH_SIZE = 16


@dataclass(frozen=True)
class LoadedHead:
    """A trunk with its head, and what came with it."""

    model: Any  # SequenceClassifier or QuestionAnswering
    head: TaskHead
    tokenizer: AnyTokenizer | None
    config: ModelConfig
    source: Path

    def need(self, kind: str) -> AnyTokenizer:
        """Return the tokenizer of a head of this kind; refuse any other head."""
        if self.head.kind != kind:
            raise ScratchLMError(f"{self.source}: a head for {self.head.kind}, not for {kind}")
        if self.tokenizer is None:
            raise ScratchLMError(f"{self.source}: text needs a tokenizer; the model has none")
        return self.tokenizer


def make_head(config: ModelConfig, head: TaskHead, ops: Any = "fast", **where: Any) -> Transformer:
    """Build a trunk with its head."""
    if head.kind == "classification":
        return SequenceClassifier(config, len(head.labels), ops, **where)
    return QuestionAnswering(config, ops, **where)


def head_in(path: Path) -> TaskHead | None:
    """Return the head of a checkpoint of ours; None: a language model's."""
    stored = checkpoint.read_manifest(path)["metadata"].get("head")
    if stored is None:
        return None
    try:
        return TaskHead.from_dict(stored)
    except (TypeError, ValueError) as error:
        raise ScratchLMError(f"{path}: {brief(error)}") from None


def load_head(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    ops: Any = "fast",
    accelerate: bool = True,
    checkpoint: str | int | None = None,
    warn: Callable[[str], None] | None = None,
) -> LoadedHead:
    """Load a model with a task head; arguments as of `load_model`."""
    path, build = Path(path), partial(_build, device=device, ops=ops, accelerate=accelerate)
    from scratchlm.checkpoint import is_checkpoint, read_chosen, verify_checkpoint

    if not path.exists():
        raise ScratchLMError(f"{path}: no such run, checkpoint or Hugging Face directory")
    if is_checkpoint(path):
        verify_checkpoint(path)
        return _load_ours(path, dtype, build)
    if is_hf_directory(path):
        return _load_hf(path, dtype, build)
    which = "best" if checkpoint is None else checkpoint
    found = read_chosen(path, lambda one: _load_ours(one, dtype, build), which, warn)
    if found is None:
        raise ScratchLMError(
            f"{path}: must be a run with a checkpoint, a checkpoint, or a Hugging Face directory"
        )
    return found


def _load_ours(path: Path, dtype: torch.dtype | None, build: Callable[..., Any]) -> LoadedHead:
    head = head_in(path)
    if head is None:
        raise ScratchLMError(f"{path}: a language model, without a task head")
    config = checkpoint.read_config(path)
    check_stored(config, checkpoint.stored_tensors(path), path, head=head)
    tensors = checkpoint.read_tensors(path)
    model = build(config, head, dtype or next(iter(tensors.values())).dtype)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(tensors[name])
    return LoadedHead(model, head, _tokenizer_in(path), config, path)


def _load_hf(path: Path, dtype: torch.dtype | None, build: Callable[..., Any]) -> LoadedHead:
    source = read_hf(path, with_head=True)
    if source.head is None:
        raise ScratchLMError(f"{path}: a language model, without a task head")
    model = build(source.config, source.head, dtype or source.dtype)
    source.load_into(model.state_dict())
    return LoadedHead(model, source.head, _tokenizer_in(path), source.config, path)


def _build(
    config: ModelConfig,
    head: TaskHead,
    dtype: torch.dtype,
    *,
    device: Any,
    ops: Any,
    accelerate: bool,
) -> Transformer:
    model = make_head(config, head, ops, device="meta", dtype=dtype)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    if accelerate:
        acceleration.accelerate(model)
    return model


def _tokenizer_in(path: Path) -> AnyTokenizer | None:
    there = any((path / name).exists() for name in ("tokenizer.json", "vocab.json"))
    return load_tokenizer(path) if there else None


# Use


def padded(
    rows: Sequence[Sequence[int]], device: Any = None
) -> tuple[Int[Tensor, "rows seq"], Bool[Tensor, "rows seq"]]:
    """Lay rows of ids beside each other, padded on the right; return them and what is real."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]


def encode_text(loaded: LoadedHead, text: str) -> list[int]:
    """Encode a text to be classified; it must fit the model's context."""
    return _fitting(text_ids(loaded.need("classification"), text), loaded)


def encode_question(loaded: LoadedHead, question: str, context: str) -> QuestionInput:
    """Encode a question and the text that holds its answer; both must fit the model's context."""
    found = question_ids(loaded.need("qa"), question, context)
    _fitting(found.ids, loaded)
    return found


@torch.inference_mode()
def classify(loaded: LoadedHead, texts: Sequence[str]) -> list[dict[str, float]]:
    """Return for every text the probability of each label, the likeliest first."""
    rows = [encode_text(loaded, text) for text in texts]
    found: list[dict[str, float]] = []
    for ids, mask in _batches(rows, loaded):
        logits = loaded.model(ids, attention_mask=mask)
        for line in logits.double().softmax(dim=-1).tolist():
            pairs = sorted(zip(loaded.head.labels, line, strict=True), key=lambda pair: -pair[1])
            found.append(dict(pairs))
    return found


@dataclass(frozen=True)
class Answer:
    """An answer's text, where in the context it lies (in characters), and its probability."""

    text: str
    start: int
    end: int
    probability: float


@torch.inference_mode()
def answer(loaded: LoadedHead, asked: Sequence[tuple[str, str]]) -> list[Answer]:
    """Return for every (question, context) the likeliest span of the context."""
    inputs = [encode_question(loaded, question, context) for question, context in asked]
    found: list[Answer] = []
    for ids, mask in _batches([one.ids for one in inputs], loaded):
        logits = loaded.model(ids, attention_mask=mask)
        for start, end in zip(logits.start.double(), logits.end.double(), strict=True):
            one = inputs[len(found)]
            found.append(_best(one, start[one.first : len(one.ids)], end[one.first : len(one.ids)]))
    return found


def best_span(
    start: Float[Tensor, " seq"], end: Float[Tensor, " seq"], longest: int = LONGEST_ANSWER
) -> tuple[int, int]:
    """Return the likeliest first and last token with first ≤ last < first + longest."""
    scores = start[:, None] + end[None, :]
    near = torch.ones_like(scores, dtype=torch.bool).triu().tril(longest - 1)
    at = int(scores.masked_fill(~near, -torch.inf).argmax())
    return divmod(at, len(end))


def _best(one: QuestionInput, start: Tensor, end: Tensor) -> Answer:
    first, last = best_span(start, end)
    share = (start.log_softmax(-1)[first] + end.log_softmax(-1)[last]).exp().item()
    raw = one.context[one.spans[first][0] : one.spans[last][1]]
    at = one.spans[first][0] + len(raw) - len(raw.lstrip())
    text = raw.strip()
    return Answer(text, at, at + len(text), share)


def _fitting(ids: list[int], loaded: LoadedHead) -> list[int]:
    if len(ids) > loaded.config.context_length:
        raise ScratchLMError(
            f"{len(ids):,} tokens do not fit the context of {loaded.config.context_length:,}"
        )
    return ids


def _batches(rows: Sequence[list[int]], loaded: LoadedHead) -> Iterator[tuple[Tensor, Tensor]]:
    device = loaded.model.token_embeddings.weight.device
    for first in range(0, len(rows), BATCH_SIZE):
        yield padded(rows[first : first + BATCH_SIZE], device)
