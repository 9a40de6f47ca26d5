"""Low-rank adapters beside a joined product: what several layers add, in two thin products.

    [W₁; W₂] x + [s₁B₁ 0; 0 s₂B₂] · [A₁; A₂] x

Layers that multiply one input (Q, K and V; W1 and W3) keep their one product where they have
adapters: A's lie one below the other, B's on a diagonal, and the second product adds to the first
as it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scratchlm.accelerate.conditions import compute_dtype


def add_adapters(y: Tensor, x: Tensor, linears: Sequence[Any]) -> Tensor:
    """Add what the adapters of these layers add to their joined product y of x."""
    terms = [linear.terms() if hasattr(linear, "terms") else [] for linear in linears]
    every = [term for each in terms for term in each]
    if not every:
        return y
    low, total = compute_dtype(x), sum(len(term.a) for term in every)
    down = torch.cat([term.a.to(low) for term in every])  # (ranks, d_in)
    rows, before = [], 0
    for linear, own in zip(linears, terms, strict=True):
        width = sum(len(term.a) for term in own)
        if own:
            up = torch.cat([(term.b * term.scale).to(low) for term in own], dim=1)
            rows.append(F.pad(up, (before, total - before - width)))
        else:
            rows.append(down.new_zeros(len(linear.weight), total))
        before += width
    thin = F.linear(x, down).flatten(0, -2)  # (tokens, ranks)
    return torch.addmm(y.flatten(0, -2), thin, torch.cat(rows).T).view(y.shape)
