"""Known mistakes in linear, embedding, softmax and SiLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scratchlm.check.mistakes.table import Table
from scratchlm.ops import reference

LAYERS = Table()

# Linear

LAYERS.add(
    "run_linear",
    "W is not transposed: x W instead of x Wᵀ",
    (
        "Which axis of the weights meets the last axis of x?",
        "weights are (d_out, d_in): the sum runs over their second axis.",
        "in_features @ weights.T",
    ),
    lambda d_in, d_out, w, x: x @ w,
)
LAYERS.add(
    "run_linear",
    "W is reshaped where it should be transposed",
    (
        "Print a small matrix before and after the change of its shape.",
        "reshape and view keep the order of the numbers; a transpose does not.",
        "weights.T, not weights.view(d_in, d_out)",
    ),
    lambda d_in, d_out, w, x: x @ w.reshape(d_in, d_out),
)
LAYERS.add(
    "run_linear",
    "the result is divided by √d_in",
    (
        "Set W to the identity: what should come out?",
        "A linear layer has no scale; 1/√d belongs to attention or to initialisation.",
        "in_features @ weights.T, and nothing after it",
    ),
    lambda d_in, d_out, w, x: x @ w.mT / d_in**0.5,
)
LAYERS.add(
    "run_linear",
    "a bias of ones is added",
    (
        "What does the layer give for x = 0?",
        "This layer has no bias.",
        "in_features @ weights.T, with no + after it",
    ),
    lambda d_in, d_out, w, x: x @ w.mT + 1,
)

# Embedding

LAYERS.add(
    "run_embedding",
    "ids are off by one",
    (
        "Which row does id 0 stand for?",
        "Ids count from 0, as rows do.",
        "weights[token_ids]",
    ),
    lambda v, d, w, ids: w[ids - 1],
    lambda v, d, w, ids: w[(ids + 1) % v],
    lambda v, d, w, ids: w[(ids + 1).clamp(max=v - 1)],
)
LAYERS.add(
    "run_embedding",
    "the vectors are scaled by √d_model",
    (
        "Compare one vector of yours with its row of the table.",
        "The original Transformer scales embeddings; this one does not.",
        "weights[token_ids], without * math.sqrt(d_model)",
    ),
    lambda v, d, w, ids: w[ids] * d**0.5,
)
LAYERS.add(
    "run_embedding",
    "no gradient reaches the table",
    (
        "Which of your operations does autograd not follow?",
        ".data, detach() and torch.no_grad() cut the gradient off.",
        "weights[token_ids], on the weights themselves",
    ),
    lambda v, d, w, ids: w.detach()[ids] if w.requires_grad else w[ids],
)

# Softmax


def _normalised(weights: Tensor, dim: int) -> Tensor:
    return weights / weights.sum(dim, keepdim=True)


def _over_all(weights: Tensor) -> Tensor:
    return weights / weights.sum()


LAYERS.add(
    "run_softmax",
    "the maximum is not subtracted: exp overflows",
    (
        "What is exp(1000)?",
        "Subtracting one number from a whole slice does not change its softmax.",
        "x = in_features - in_features.amax(dim, keepdim=True)",
    ),
    lambda x, dim: _normalised(x.exp(), dim),
)
LAYERS.add(
    "run_softmax",
    "softmax over the wrong axis: `dim` is ignored",
    (
        "Along which axis does your result sum to 1?",
        "`dim` must reach the maximum and the sum alike.",
        "torch.exp(x).sum(dim=dim, keepdim=True)",
    ),
    lambda x, dim: reference.softmax(x, -1),
    lambda x, dim: reference.softmax(x, 0),
    lambda x, dim: reference.softmax(x, 1 if x.ndim > 1 else 0),
)
LAYERS.add(
    "run_softmax",
    "normalised over all axes at once",
    (
        "What does the whole of your result sum to?",
        "The sum runs along `dim` alone, and keeps that axis with size 1.",
        ".sum(dim=dim, keepdim=True), not .sum()",
    ),
    lambda x, dim: (x - x.max()).exp() / (x - x.max()).exp().sum(),
    lambda x, dim: _over_all((x - x.amax(dim, keepdim=True)).exp()),
)
LAYERS.add(
    "run_softmax",
    "the maximum of all slices is subtracted: small ones underflow",
    (
        "Two rows, one of them 2000 below the other: what is left of it?",
        "Each slice has its own maximum.",
        "in_features.amax(dim=dim, keepdim=True), not in_features.max()",
    ),
    lambda x, dim: _normalised((x - x.max()).exp(), dim),
)
LAYERS.add(
    "run_softmax",
    "the minimum or mean is subtracted, not the maximum",
    (
        "Which number makes every exponent at most 0?",
        "exp must never see a large positive number.",
        "in_features.amax(dim=dim, keepdim=True)",
    ),
    lambda x, dim: _normalised((x - x.mean(dim, keepdim=True)).exp(), dim),
    lambda x, dim: _normalised((x - x.amin(dim, keepdim=True)).exp(), dim),
)
LAYERS.add(
    "run_softmax",
    "not normalised: the sum is missing",
    (
        "What should a slice of the result sum to?",
        "The exponentials are divided by their sum.",
        "weights / weights.sum(dim=dim, keepdim=True)",
    ),
    lambda x, dim: (x - x.amax(dim, keepdim=True)).exp(),
)
LAYERS.add(
    "run_softmax",
    "the logarithm of the softmax",
    (
        "Can a probability be negative?",
        "log-softmax is another function.",
        "weights / total, not x - total.log()",
    ),
    lambda x, dim: x - x.amax(dim, keepdim=True) - _shifted_lse(x, dim),
)


def _shifted_lse(x: Tensor, dim: int) -> Tensor:
    return (x - x.amax(dim, keepdim=True)).exp().sum(dim, keepdim=True).log()


# SiLU


def _silu(name: str, hints: tuple[str, str, str], *functions: Callable[..., Any]) -> None:
    LAYERS.add("run_silu", name, hints, *functions)


_silu(
    "σ(x) alone: the factor x is missing",
    (
        "What is SiLU of a large x?",
        "The sigmoid gates x: it is multiplied by it.",
        "in_features * torch.sigmoid(in_features)",
    ),
    lambda x: torch.sigmoid(x),
)
_silu(
    "exp(x) / (1 + exp(x)) overflows",
    (
        "What is your function at 1000?",
        "∞ / ∞ is not a number; exp(−x) goes to 0 there.",
        "in_features / (1 + torch.exp(-in_features))",
    ),
    lambda x: x * x.exp() / (1 + x.exp()),
)
_silu(
    "the sign in the exponent: x · σ(−x)",
    (
        "Should a large positive x be kept or closed off?",
        "σ(x) = 1 / (1 + exp(−x)).",
        "1 / (1 + torch.exp(-in_features))",
    ),
    lambda x: x * torch.sigmoid(-x),
)
_silu(
    "GELU instead of SiLU",
    (
        "Which function closes the gate?",
        "GELU has the normal distribution function, or 1.702 in its approximation; SiLU has σ.",
        "in_features * torch.sigmoid(in_features)",
    ),
    lambda x: reference.gelu(x),
    lambda x: reference.gelu_tanh(x),
    lambda x: x * torch.sigmoid(1.702 * x),
)
_silu(
    "ReLU instead of SiLU",
    (
        "Is SiLU ever negative?",
        "Nothing is cut off at 0.",
        "in_features * torch.sigmoid(in_features)",
    ),
    lambda x: reference.relu(x),
    lambda x: x.clamp(min=0),
    lambda x: torch.maximum(x, torch.zeros_like(x)),
)
_silu(
    "tanh instead of σ",
    (
        "Between which two numbers does the gate lie?",
        "σ lies between 0 and 1, tanh between −1 and 1.",
        "in_features * torch.sigmoid(in_features)",
    ),
    lambda x: x * torch.tanh(x),
)
