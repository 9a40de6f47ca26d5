"""Filters on logits: each a small pure function from (batch, vocab) to (batch, vocab).

A filter either shifts logits (bias, penalties, temperature) or masks tokens with −∞. None changes
its input. A setting is a number for all rows, or (batch, 1), one for each; a row's result does not
depend on the others. On ties the lower id comes first, so every filter is deterministic:
`top_k(logits, 1)` is always greedy.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Logits = Float[Tensor, "batch vocab"]
Counts = Int[Tensor, "batch vocab"]
Setting = float | Float[Tensor, "batch 1"]


def logit_bias(
    logits: Logits,
    rows: Int[Tensor, " biases"],
    tokens: Int[Tensor, " biases"],
    added: Float[Tensor, " biases"],
) -> Logits:
    """x_i + b_i for the tokens named; −∞ forbids a token."""
    return logits.index_put((rows, tokens), added, accumulate=True)


def repetition_penalty(
    logits: Logits, seen: Bool[Tensor, "batch vocab"], penalty: Setting
) -> Logits:
    """x_i / θ where the token was seen (x_i · θ below zero: the penalty always lowers)."""
    # arXiv:1909.05858, section 4.1
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, lowered, logits)


def presence_penalty(logits: Logits, counts: Counts, penalty: Setting) -> Logits:
    """x_i − α · [c_i > 0]."""  # as OpenAI's API defines it
    return logits - penalty * (counts > 0).to(logits.dtype)


def frequency_penalty(logits: Logits, counts: Counts, penalty: Setting) -> Logits:
    """x_i − α · c_i."""  # as OpenAI's API defines it
    return logits - penalty * counts.to(logits.dtype)


def temperature(logits: Logits, value: Setting) -> Logits:
    """x_i / T, for T > 0; the limit at T = 0 is the argmax."""
    return logits / value


def top_k(logits: Logits, k: int | Int[Tensor, "batch 1"], largest_k: int | None = None) -> Logits:
    """Keep the k largest logits; with a k for each row, `largest_k` is known without asking."""
    # arXiv:1805.04833, section 5.4
    vocab_size = logits.shape[-1]
    if isinstance(k, int):
        largest_k, k = k, torch.full_like(logits[:, :1], k, dtype=torch.long)
    largest = logits.topk(min(largest_k or vocab_size, vocab_size), dim=-1).values
    count = k.clamp(max=vocab_size).to(logits.dtype)
    return _keep(logits, _top_mask(logits, largest, count))


def top_p(logits: Logits, p: Setting) -> Logits:
    """Keep the nucleus: the smallest set of most probable tokens whose mass reaches p."""
    # arXiv:1904.09751, section 3.1
    probability = logits.softmax(dim=-1)
    ranked = probability.sort(dim=-1, descending=True).values
    return _keep(logits, _top_mask(probability, ranked, _nucleus_size(ranked, p)))


def min_p(logits: Logits, log_p: Setting) -> Logits:
    """Keep the tokens at least p times as probable as the most probable one."""  # arXiv:2407.01082
    return _keep(logits, logits >= logits.amax(dim=-1, keepdim=True) + log_p)


def typical(logits: Logits, mass: Setting) -> Logits:
    """Keep the tokens whose surprisal −log p_i is nearest the entropy H, up to `mass`."""
    # arXiv:2202.00666, eq. 10
    log_probability = logits.log_softmax(dim=-1)
    probability = log_probability.exp()
    surprisal = -log_probability
    terms = probability * surprisal.masked_fill(probability == 0, 0.0)
    # Row by row: torch splits a sum over threads in another way when there is only one.
    entropy = torch.cat([row.sum(-1, keepdim=True) for row in terms.split(1)])
    nearness = -(surprisal - entropy).abs()
    ranked, order = nearness.sort(dim=-1, descending=True, stable=True)
    return _keep(
        logits, _top_mask(nearness, ranked, _nucleus_size(probability.gather(-1, order), mass))
    )


def _nucleus_size(ranked: Float[Tensor, "batch vocab"], mass: Setting) -> Float[Tensor, "batch 1"]:
    """Count the first tokens whose probabilities sum to at least `mass`; at least one."""
    before = ranked.cumsum(dim=-1) - ranked  # mass of the tokens ranked higher
    return (before < mass).sum(dim=-1, keepdim=True).clamp(min=1).to(ranked.dtype)


def _top_mask(
    score: Float[Tensor, "batch vocab"],
    ranked: Float[Tensor, "batch ranks"],
    count: Float[Tensor, "batch 1"],
) -> Bool[Tensor, "batch vocab"]:
    """Mark the `count` highest scores; on ties the lower ids. `ranked` is `score`, sorted."""
    last = ranked.gather(1, count.long() - 1)  # the lowest score that is kept
    greater, equal = score > last, score == last
    ties_kept = count - greater.sum(dim=-1, keepdim=True)
    return greater | (equal & (equal.cumsum(dim=-1) <= ties_kept))


def _keep(logits: Logits, kept: Bool[Tensor, "batch vocab"]) -> Logits:
    return logits.masked_fill(~kept, -math.inf)
