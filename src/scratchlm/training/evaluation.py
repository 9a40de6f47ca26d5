"""Evaluation on held-out text: loss, perplexity, bits per byte.

    loss            Σ −ln p(target) / number of targets        nats per token
    perplexity      e^loss
    bits per byte   Σ −ln p(target) / (ln 2 · bytes of the targets' text)

Bits per byte does not depend on the tokenizer. Special tokens such as end-of-text are coded too,
so their loss counts, but they stand for no byte of text.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from scratchlm.data import IGNORE_INDEX, Batch
from scratchlm.model import TransformerLM


@dataclass(frozen=True)
class Evaluation:
    """The results of one evaluation; `bits_per_byte` is None if the bytes are unknown."""

    loss: float
    targets: int
    num_bytes: int | None = None
    batches: tuple[tuple[float, int, int], ...] = ()  # loss, targets and bytes of each
    of_tokens: bool = True  # not of pairs of answers, or of labels

    @property
    def perplexity(self) -> float | None:
        """e^loss; infinite on overflow; None where the loss is not that of tokens."""
        if not self.of_tokens:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The total loss in bits, divided by the bytes of the text."""
        if not self.num_bytes:
            return None
        return self.loss * self.targets / math.log(2) / self.num_bytes


# A GPU is filled by about this many tokens at a time, if their logits take no more than so much.
GPU_TOKENS, LOGIT_BYTES = 65_536, 2 << 30


def merge_batches(batches: Iterable[Batch], tokens: int) -> Iterator[Batch]:
    """Lay consecutive batches together, up to this many tokens."""
    waiting: list[Batch] = []
    for batch in batches:
        held = sum(b.inputs.numel() for b in waiting)
        other_shape = waiting and waiting[0].inputs.shape[1:] != batch.inputs.shape[1:]
        if waiting and (other_shape or held + batch.inputs.numel() > tokens):
            yield _merge(waiting)
            waiting = []
        waiting.append(batch)
    if waiting:
        yield _merge(waiting)


def _merge(batches: list[Batch]) -> Batch:
    documents = [b.document_ids for b in batches if b.document_ids is not None]
    return Batch(
        torch.cat([b.inputs for b in batches]),
        torch.cat([b.targets for b in batches]),
        torch.cat(documents) if documents else None,
    )


def without_padding(batch: Batch) -> Batch:
    """Leave out rows without a target, and what follows the last target of all rows."""
    counts = batch.targets != IGNORE_INDEX
    rows, columns = counts.any(dim=1), counts.any(dim=0).nonzero()
    length = int(columns[-1]) + 1 if len(columns) else 0
    parts = (batch.inputs, batch.targets, batch.document_ids)
    return Batch(*(None if part is None else part[rows, :length] for part in parts))  # type: ignore[arg-type]


@torch.no_grad()
def evaluate(
    model: TransformerLM,
    batches: Iterable[Batch],
    *,
    max_batches: int = 0,
    bytes_per_id: Tensor | None = None,
    autocast: contextlib.AbstractContextManager[Any] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    add_up: Callable[[Sequence[float]], list[float]] | None = None,
) -> Evaluation | None:
    """Measure the loss over `batches` (0: all of them); None if `should_stop` interrupted it.

    `add_up` adds numbers up over the ranks that have measured other rows.
    """
    device = next(model.parameters()).device
    means: list[Tensor] = []
    counts: list[int] = []
    sizes: list[int] = []
    autocast = contextlib.nullcontext() if autocast is None else autocast
    chosen: Iterable[Batch] = islice(batches, max_batches or None)
    if device.type == "cuda":
        logits = 6 * model.config.vocab_size  # bytes for a token's, in bfloat16 and in float32
        chosen = merge_batches(chosen, min(GPU_TOKENS, LOGIT_BYTES // logits))
    for batch in chosen:
        if should_stop():
            return None
        count = batch.num_targets()
        if device.type == "cpu" and add_up is None and count:  # ranks need equal shapes
            batch = without_padding(batch)
        valid_targets = batch.targets[batch.targets != IGNORE_INDEX]
        on_device = batch.to(device, non_blocking=True)
        with autocast:
            hidden = model.hidden(on_device.inputs, document_ids=on_device.document_ids)
            mean = model.head_loss(hidden, on_device.targets, ignore_index=IGNORE_INDEX)
        if not count:  # all padding; but other ranks may have waited for this one's weights
            continue
        sizes.append(0 if bytes_per_id is None else int(bytes_per_id[valid_targets].sum()))
        means.append(mean)
        counts.append(count)
    per_batch = torch.stack(means).tolist() if means else []  # the only wait for the device
    own = math.fsum(mean * count for mean, count in zip(per_batch, counts, strict=True))
    total, targets, num_bytes = (add_up or list)([own, sum(counts), sum(sizes)])
    if not targets:
        raise ValueError("there is nothing to evaluate on: no targets")
    batches_found = tuple(zip(per_batch, counts, sizes, strict=True))
    return Evaluation(total / targets, round(targets), round(num_bytes) or None, batches_found)


@torch.no_grad()
def evaluate_mean(
    loss: Callable[[Any, Batch], Tensor],
    model: Any,
    batches: Iterable[Batch],
    *,
    max_batches: int = 0,
    bytes_per_id: Tensor | None = None,
    autocast: contextlib.AbstractContextManager[Any] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Measure a loss that is the mean over a batch's targets; arguments as of `evaluate`."""
    device = next(model.parameters()).device
    sums, counts = [], []
    for batch in islice(batches, max_batches or None):
        if should_stop():
            return None
        with contextlib.nullcontext() if autocast is None else autocast:
            sums.append(batch.num_targets() * float(loss(model, batch.to(device))))
        counts.append(batch.num_targets())
    if not counts:
        raise ValueError("there is nothing to evaluate on: no examples")
    return Evaluation(math.fsum(sums) / sum(counts), sum(counts), of_tokens=False)
