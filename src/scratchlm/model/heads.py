"""Other tasks on the same trunk: classify a sequence, find an answer's span.

The trunk keeps its parameter names, so a language model's weights load into either
(`load_state_dict(lm.state_dict(), strict=False)` leaves only the new head untouched).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scratchlm.config import ModelConfig
from scratchlm.model.layers import Linear
from scratchlm.model.transformer import Transformer, last_token
from scratchlm.ops import Ops


class SequenceClassifier(Transformer):
    """Logits per label, read off the last real token: the only one that has seen the whole row."""

    def __init__(
        self, config: ModelConfig, num_labels: int, ops: str | Ops = "fast", **where: Any
    ) -> None:
        super().__init__(config, ops, **where)
        if num_labels < 2:
            raise ValueError(f"num_labels must be at least 2; got num_labels={num_labels}")
        self.score = Linear(config.d_model, num_labels, ops=ops, **where)

    def forward(
        self,
        token_ids: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch labels"]:
        """Return one logit per label for each row."""
        hidden = self.hidden(token_ids, attention_mask=attention_mask)
        row = torch.arange(len(token_ids), device=token_ids.device)
        return self.score(hidden[row, last_token(token_ids, attention_mask)])

    def loss(
        self,
        token_ids: Int[Tensor, "batch seq"],
        labels: Int[Tensor, " batch"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of the rows' labels."""
        return self.ops.cross_entropy(self(token_ids, attention_mask=attention_mask), labels)


@dataclass(frozen=True)
class SpanLogits:
    """How likely an answer starts, and ends, at each token; −∞ at padding."""

    start: Float[Tensor, "batch seq"]
    end: Float[Tensor, "batch seq"]


class QuestionAnswering(Transformer):
    """Start and end logits for every token: the answer is a span of the input."""

    def __init__(self, config: ModelConfig, ops: str | Ops = "fast", **where: Any) -> None:
        super().__init__(config, ops, **where)
        self.span = Linear(config.d_model, 2, bias=True, ops=ops, **where)

    def forward(
        self,
        token_ids: Int[Tensor, "batch seq"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> SpanLogits:
        """Return the logits of the answer's two ends."""
        logits = self.span(self.hidden(token_ids, attention_mask=attention_mask))
        if attention_mask is not None:
            logits = logits.masked_fill(~attention_mask[..., None], -math.inf)
        start, end = logits.unbind(-1)
        return SpanLogits(start, end)

    def loss(
        self,
        token_ids: Int[Tensor, "batch seq"],
        start: Int[Tensor, " batch"],
        end: Int[Tensor, " batch"],
        *,
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the mean of the two cross-entropies; −100 marks a row without an answer."""
        logits, loss = self(token_ids, attention_mask=attention_mask), self.ops.cross_entropy
        return (loss(logits.start, start) + loss(logits.end, end)) / 2
