"""What a mixture of experts gives back, and the loss that keeps its experts evenly loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Routed:
    """The layer's output, and how its tokens were routed."""

    output: Float[Tensor, "*batch d_model"]
    probabilities: Float[Tensor, "tokens experts"]
    experts: Int[Tensor, "tokens chosen"]


def load_balancing_loss(
    probabilities: Float[Tensor, "tokens experts"], experts: Int[Tensor, "tokens chosen"]
) -> Float[Tensor, ""]:
    """E · Σ_e f_e · P_e: f_e the share of choices that fell on e, P_e its mean probability.

    It is 1 when the load is even, and E when one expert takes everything.
    """  # arXiv:2101.03961 eq. 4
    num_experts = probabilities.shape[-1]
    choices = torch.zeros(num_experts, dtype=probabilities.dtype, device=probabilities.device)
    ones = torch.ones_like(experts, dtype=probabilities.dtype).flatten()
    load = choices.index_add(0, experts.flatten(), ones) / experts.numel()
    return num_experts * (load * probabilities.mean(dim=0)).sum()
