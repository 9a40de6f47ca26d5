"""From logits to one token, row by row: the oracle of `inference/device_sampling.py`.

Settings are numbers, and a filter that is off is not called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from inference import oracle_filters as filters
from scratchlm.inference import Sampling


@dataclass(frozen=True)
class Seen:
    """Token counts of each row's prompt and of its answer."""

    prompt: filters.Counts
    answer: filters.Counts

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Seen:
        """Count the prompts' tokens; all answers are empty."""
        prompt = torch.zeros(len(prompts), vocab_size, dtype=torch.long, device=device)
        for row, ids in zip(prompt, prompts, strict=True):
            row += torch.tensor(ids, device=device).bincount(minlength=vocab_size)
        return cls(prompt, torch.zeros_like(prompt))

    def add(self, tokens: Sequence[int]) -> None:
        """Count one more token of every answer."""
        column = torch.tensor(tokens, device=self.answer.device)[:, None]
        self.answer.scatter_add_(1, column, torch.ones_like(column))

    def rows(self, rows: Sequence[int]) -> Seen:
        """Keep these rows."""
        index = torch.tensor(rows, device=self.prompt.device)
        return Seen(self.prompt[index], self.answer[index])


def filtered(
    logits: Float[Tensor, "batch vocab"], sampling: Sampling, seen: Seen | None = None
) -> Float[Tensor, "batch vocab"]:
    """Apply every filter that is on, in the order above; masked tokens come out as −∞."""
    x = filters.logit_bias(logits.double(), sampling.logit_bias)
    if sampling.penalizes:
        if seen is None:
            raise ValueError("penalties need the tokens seen so far; got none")
        if sampling.repetition_penalty != 1:
            seen_mask = (seen.prompt + seen.answer) > 0
            x = filters.repetition_penalty(x, seen_mask, sampling.repetition_penalty)
        if sampling.presence_penalty != 0:
            x = filters.presence_penalty(x, seen.answer, sampling.presence_penalty)
        if sampling.frequency_penalty != 0:
            x = filters.frequency_penalty(x, seen.answer, sampling.frequency_penalty)
    x = filters.temperature(x, sampling.temperature)
    if sampling.top_k is not None:
        x = filters.top_k(x, sampling.top_k)
    if sampling.top_p < 1:
        x = filters.top_p(x, sampling.top_p)
    if sampling.min_p > 0:
        x = filters.min_p(x, sampling.min_p)
    if sampling.typical < 1:
        x = filters.typical(x, sampling.typical)
    return x


def draw(probability: Float[Tensor, "batch vocab"], numbers: Sequence[float]) -> list[int]:
    """Invert each row's CDF at its number in [0, 1)."""
    cdf = probability.double().cumsum(dim=-1)
    total = cdf[:, -1:]
    target = torch.tensor(numbers, dtype=torch.float64, device=total.device)[:, None] * total
    # Rounding must not carry the target to the total: there is no token beyond it.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    chosen: list[int] = torch.searchsorted(cdf, target, right=True)[:, 0].tolist()
    return chosen


def sample(
    logits: Float[Tensor, "batch vocab"],
    sampling: Sampling,
    numbers: Sequence[float],
    seen: Seen | None = None,
) -> list[int]:
    """Choose one token for every row; `numbers` are the rows' draws from `uniform`."""
    if sampling.is_plain_greedy:
        return _argmax(logits)
    x = filtered(logits, sampling, seen)
    if sampling.temperature == 0:
        return _argmax(x)
    probability = x.softmax(dim=-1)
    if not bool(probability.isfinite().all()):
        raise ValueError(_NO_VALID_TOKEN)
    return draw(probability, numbers)


_NO_VALID_TOKEN = (
    "the logits leave nothing to choose from: one is NaN or +∞, or every token is forbidden"
)


def _argmax(logits: Float[Tensor, "batch vocab"]) -> list[int]:
    values, ids = logits.max(dim=-1)  # the lowest id on ties; NaN if there is one
    if not all(map(math.isfinite, values.tolist())):
        raise ValueError(_NO_VALID_TOKEN)
    chosen: list[int] = ids.tolist()
    return chosen
