"""Filters on logits: each a small pure function from (batch, vocab) to (batch, vocab).

A filter either shifts logits (bias, penalties, temperature) or sets those of refused tokens to −∞.
None changes its input. Where tokens tie, the lower id comes first, so that every filter keeps a
definite set: `top_k(logits, 1)` is greedy, always.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Logits = Float[Tensor, "batch vocab"]
Counts = Int[Tensor, "batch vocab"]


def logit_bias(logits: Logits, bias: Mapping[int, float]) -> Logits:
    """x_i + b_i for the tokens named; −∞ forbids a token."""
    if not bias:
        return logits
    ids = torch.tensor(list(bias), device=logits.device)
    added = torch.tensor(list(bias.values()), device=logits.device, dtype=logits.dtype)
    return logits.index_add(1, ids, added.expand(len(logits), -1))


def repetition_penalty(logits: Logits, seen: Bool[Tensor, "batch vocab"], penalty: float) -> Logits:
    """x_i / θ where the token was seen (x_i · θ below zero: the penalty always lowers)."""
    # arXiv:1909.05858, section 4.1
    lowered = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, lowered, logits)


def presence_penalty(logits: Logits, counts: Counts, penalty: float) -> Logits:
    """x_i − α · [c_i > 0]."""  # as OpenAI's API defines it
    return logits - penalty * (counts > 0).to(logits.dtype)


def frequency_penalty(logits: Logits, counts: Counts, penalty: float) -> Logits:
    """x_i − α · c_i."""  # as OpenAI's API defines it
    return logits - penalty * counts.to(logits.dtype)


def temperature(logits: Logits, value: float) -> Logits:
    """x_i / T; at T = 0, its limit: only the greatest logit remains."""
    if value == 0:
        return greedy(logits)
    return logits / value


def greedy(logits: Logits) -> Logits:
    """Keep the greatest logit, the first of equals."""
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.full_like(logits, -math.inf).scatter(1, best, logits.gather(1, best))


def top_k(logits: Logits, k: int) -> Logits:
    """Keep the k greatest logits."""  # arXiv:1805.04833, section 5.4
    if k >= logits.shape[-1]:
        return logits
    greatest = logits.topk(k, dim=-1).values
    return _keep(logits, _best(logits, greatest, torch.full_like(greatest[:, :1], k)))


def top_p(logits: Logits, p: float) -> Logits:
    """Keep the smallest set of the most probable tokens whose mass reaches p."""
    # arXiv:1904.09751, section 3.1
    probability = logits.softmax(dim=-1)
    ranked = probability.sort(dim=-1, descending=True).values
    return _keep(logits, _best(probability, ranked, _needed(ranked, p)))


def min_p(logits: Logits, p: float) -> Logits:
    """Keep the tokens at least p times as probable as the most probable one."""  # arXiv:2407.01082
    if p == 0:
        return logits
    return _keep(logits, logits >= logits.amax(dim=-1, keepdim=True) + math.log(p))


def typical(logits: Logits, mass: float) -> Logits:
    """Keep the tokens whose surprise −log p_i is nearest the entropy H, until `mass` is reached."""
    # arXiv:2202.00666, eq. 10
    log_probability = logits.log_softmax(dim=-1)
    probability = log_probability.exp()
    surprise = -log_probability
    entropy = (probability * surprise.masked_fill(probability == 0, 0.0)).sum(-1, keepdim=True)
    nearness = -(surprise - entropy).abs()
    ranked, order = nearness.sort(dim=-1, descending=True, stable=True)
    return _keep(logits, _best(nearness, ranked, _needed(probability.gather(-1, order), mass)))


def _needed(ranked: Float[Tensor, "batch vocab"], mass: float) -> Float[Tensor, "batch 1"]:
    """Count the first tokens it takes until their probabilities sum to `mass`; at least one."""
    before = ranked.cumsum(dim=-1) - ranked  # what the tokens ahead hold already
    return (before < mass).sum(dim=-1, keepdim=True).clamp(min=1).to(ranked.dtype)


def _best(
    score: Float[Tensor, "batch vocab"],
    ranked: Float[Tensor, "batch ranks"],
    how_many: Float[Tensor, "batch 1"],
) -> Bool[Tensor, "batch vocab"]:
    """Mark the `how_many` best scores, given in descending order too; of equals the lower ids."""
    last = ranked.gather(1, how_many.long() - 1)  # the worst score that is still in
    above, equal = score > last, score == last
    room = how_many - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))


def _keep(logits: Logits, kept: Bool[Tensor, "batch vocab"]) -> Logits:
    return logits.masked_fill(~kept, -math.inf)
