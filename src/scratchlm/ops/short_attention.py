"""Causal attention over short sequences, for training on a CPU: two products over all heads.

    P = softmax(Q Kᵀ / √d_head + future),   O = P V           future: −∞ above the diagonal

For what our kernel (`cpu_attention.py`) does not support: float64, very short sequences, very wide
heads, and everything where there is no C++ compiler. Torch's kernel takes one head after the other.
Where sequences are short these are products too small for two cores to gain by: all heads at once,
with P kept for the backward pass, take less time. Longer sequences it serves better: it never
multiplies most of the future.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SHORT = 96  # tokens; P is then at most a few times as large as Q


def is_short(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this way is for these: on a CPU, with gradients, in one full precision."""
    return (
        q.is_cpu
        and q.ndim == 4
        and 0 < q.shape[-2] <= SHORT
        and torch.is_grad_enabled()
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
    )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return O; as many key heads as query heads, each (batch, heads, seq, d_head)."""
    seq, d_head = q.shape[-2:]
    future = q.new_full((seq, seq), -math.inf).triu(1)
    q, k, v, heads = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), q.shape[:2]
    table = torch.baddbmm(future, q, k.mT, alpha=1 / math.sqrt(d_head))  # (head, query, key)
    return torch.bmm(table.softmax(dim=-1), v).unflatten(0, heads)
