"""Accelerated models: the LM head and the loss in chunks, RoPE's tables once for all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scratchlm.accelerate.attention import rope_tables
from scratchlm.accelerate.lm_head_loss import chunked_lm_head_loss, supports_compiled
from scratchlm.accelerate.table import Fusion, accelerates, is_plain
from scratchlm.model import (
    ForwardContext,
    Linear,
    QuestionAnswering,
    SequenceClassifier,
    TiedHead,
    TransformerLM,
)
from scratchlm.model.transformer import Transformer
from scratchlm.ops.ranges import is_transformed


def _why_no_chunks(module: TransformerLM, hidden: Tensor, context: object) -> str | None:
    head = module.lm_head
    if not isinstance(head, (Linear, TiedHead)) or getattr(head, "bias", None) is not None:
        return "a head that is not a plain matrix"
    if is_transformed():
        return "functions are being transformed (torch.func)"
    if torch.compiler.is_compiling() and not supports_compiled(hidden, head.weight):
        return "a compiler fuses head and loss its own way"
    return None


CHUNKED_LOSS = Fusion(
    "chunked_lm_head_loss",
    "LM head and cross-entropy over chunks of tokens, both gradients ready going forward",
    takes=TransformerLM,
    absorbs=("lm_head",),
    ops=("linear", "cross_entropy", "log_sum_exp"),
    condition=_why_no_chunks,
    operators=("scratchlm::loss_and_gradients",),
    keeps="the gradients of the head and of its input; no logits",
    kernels=(
        "_lm_head_exp_kernel",
        "_cross_entropy_kernel",
        "_target_logits_kernel",
        "_lm_head_loss_kernel",
        "_scale_rows_kernel",
    ),
    gain="GPT-2 124M 54 %, Qwen3-0.6B 14 %, Llama-3.2-1B 8.7 %",
)


class _SharedTables(Transformer):
    """Looks RoPE's tables up once for all layers."""

    left_out: frozenset[str] = frozenset()

    def make_context(self, *shared: Any) -> ForwardContext:
        """Gather what the layers of one forward share."""
        context = super().make_context(*shared)
        first = getattr(self.layers[0], "attn", None)  # a replaced block need not have one
        rope = getattr(first, "rope", None)
        if rope is not None and is_plain(rope):
            context.derived["rope_tables"] = rope_tables(rope, context.positions)
        return context


@accelerates(TransformerLM, CHUNKED_LOSS)
class AcceleratedTransformerLM(_SharedTables, TransformerLM):
    """Embedding → blocks → final norm → head."""

    def head_loss(self, hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Return the mean cross-entropy of the logits of these hidden states."""
        if not CHUNKED_LOSS.runs(self, hidden):
            return super().head_loss(hidden, targets, **options)
        head: Any = self.lm_head
        return chunked_lm_head_loss(hidden, head.weight, targets, **options)


@accelerates(SequenceClassifier)
class AcceleratedSequenceClassifier(_SharedTables, SequenceClassifier):
    """Logits per label."""


@accelerates(QuestionAnswering)
class AcceleratedQuestionAnswering(_SharedTables, QuestionAnswering):
    """Start and end logits for every token."""
