"""Filters on logits with one setting for all rows: the oracle of `inference/filters.py`.

A filter either shifts logits (bias, penalties, temperature) or masks tokens with −∞. None changes
its input. On ties the lower id comes first, so every filter is deterministic: `top_k(logits, 1)` is
always greedy.
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
    """x_i / T; at T = 0 its limit, greedy: only the argmax remains."""
    if value == 0:
        return greedy(logits)
    return logits / value


def greedy(logits: Logits) -> Logits:
    """Keep the argmax, the lowest id on ties."""
    best = logits.argmax(dim=-1, keepdim=True)
    return torch.full_like(logits, -math.inf).scatter(1, best, logits.gather(1, best))


def top_k(logits: Logits, k: int) -> Logits:
    """Keep the k largest logits."""  # arXiv:1805.04833, section 5.4
    if k >= logits.shape[-1]:
        return logits
    largest = logits.topk(k, dim=-1).values
    return _keep(logits, _top_mask(logits, largest, torch.full_like(largest[:, :1], k)))


def top_p(logits: Logits, p: float) -> Logits:
    """Keep the nucleus: the smallest set of most probable tokens whose mass reaches p."""
    # arXiv:1904.09751, section 3.1
    probability = logits.softmax(dim=-1)
    ranked = probability.sort(dim=-1, descending=True).values
    return _keep(logits, _top_mask(probability, ranked, _nucleus_size(ranked, p)))


def min_p(logits: Logits, p: float) -> Logits:
    """Keep the tokens at least p times as probable as the most probable one."""  # arXiv:2407.01082
    if p == 0:
        return logits
    return _keep(logits, logits >= logits.amax(dim=-1, keepdim=True) + math.log(p))


def typical(logits: Logits, mass: float) -> Logits:
    """Keep the tokens whose surprisal −log p_i is nearest the entropy H, up to `mass`."""
    # arXiv:2202.00666, eq. 10
    log_probability = logits.log_softmax(dim=-1)
    probability = log_probability.exp()
    surprisal = -log_probability
    entropy = (probability * surprisal.masked_fill(probability == 0, 0.0)).sum(-1, keepdim=True)
    nearness = -(surprisal - entropy).abs()
    ranked, order = nearness.sort(dim=-1, descending=True, stable=True)
    return _keep(
        logits, _top_mask(nearness, ranked, _nucleus_size(probability.gather(-1, order), mass))
    )


def _nucleus_size(ranked: Float[Tensor, "batch vocab"], mass: float) -> Float[Tensor, "batch 1"]:
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
