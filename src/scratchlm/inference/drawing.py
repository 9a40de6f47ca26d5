"""From probabilities to a token; and, on a CPU, without looking at most of the vocabulary.

A row that takes the k likeliest tokens, or a nucleus, draws from a few of many thousands. Which
those can be is found from the largest logit of every 32: the k-th largest of these is at most the
k-th largest of all, so the tokens from it up hold the k likeliest. They are filtered as the whole
vocabulary would be; only sums of probabilities round in another way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.inference import filters
from scratchlm.inference.sampling import Sampling

NOTHING = -1  # in place of a token
BLOCK = 32
NUCLEUS = 256  # tokens among which a nucleus is looked for first
Logits = Float[Tensor, "rows vocab"]
Tokens = Int[Tensor, " rows"]


def argmax(logits: Logits) -> Tokens:
    """Take every row's likeliest token: the lowest id on ties, NOTHING if it is not finite."""
    if logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        table = logits.numpy()  # a tenth of torch's time
        likeliest = table.argmax(-1)
        likeliest[~np.isfinite(table[np.arange(len(table)), likeliest])] = NOTHING
        return torch.from_numpy(likeliest)
    values, ids = logits.max(dim=-1)
    return ids.masked_fill(~values.isfinite(), NOTHING)


def draw(probability: Logits, numbers: Float[Tensor, " rows"]) -> Tokens:
    """Invert each row's CDF, up to a factor, at its number in [0, 1)."""
    cdf = probability.cumsum(dim=-1)
    total = cdf[:, -1:]
    # Rounding must not carry the target to the total: there is no token beyond it.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(numbers[:, None] * total, below)
    tokens = torch.searchsorted(cdf, target, right=True)[:, 0]
    return tokens.masked_fill(~probability.isfinite().all(dim=-1), NOTHING)


def draw_rows(
    x: Logits, samplings: Sequence[Sampling], numbers: Float[Tensor, " rows"] | None
) -> Tokens:
    """Choose on a CPU, row by row, from logits that biases and penalties have shifted."""
    tokens = argmax(x)
    if numbers is not None:
        for i, sampling in enumerate(samplings):
            if sampling.temperature > 0 and tokens[i] != NOTHING:
                tokens[i] = _draw_row(x[i], sampling, numbers[i : i + 1])
    return tokens


def _draw_row(
    x: Float[Tensor, " vocab"], sampling: Sampling, number: Float[Tensor, " 1"]
) -> Tensor | int:
    x = filters.temperature(x, sampling.temperature)
    k, p = sampling.top_k or len(x), sampling.top_p
    ids, some = None, x
    if k < len(x):
        ids = _likeliest(x, k)
    elif p < 1:
        ids = _likeliest(x, NUCLEUS)
    if ids is not None:
        some = x[ids]
        if k >= len(x):  # p is a share of the whole distribution, not of these
            mass = float((some.logsumexp(0) - x.logsumexp(0)).exp())
            ids, some, p = (ids, some, p / mass) if mass >= p else (None, x, p)
    table = some[None]
    if k < len(x):
        table = filters.top_k(table, k)
    if p < 1:
        table = filters.top_p(table, p)
    if sampling.min_p > 0:
        table = filters.min_p(table, math.log(sampling.min_p))
    if sampling.typical < 1:
        table = filters.typical(table, sampling.typical)
    drawn = draw(table.softmax(dim=-1), number)[0]
    return drawn if ids is None or drawn == NOTHING else ids[drawn]


def _likeliest(x: Float[Tensor, " vocab"], count: int) -> Int[Tensor, " some"] | None:
    """Return all tokens from some logit up, at least `count`; None: not worth the search."""
    blocks = len(x) // BLOCK
    if count > blocks:
        return None
    largest = x[: blocks * BLOCK].view(blocks, BLOCK).amax(dim=1)
    least = largest.topk(count).values[-1]
    return torch.from_numpy(np.flatnonzero((x >= least).numpy()))
