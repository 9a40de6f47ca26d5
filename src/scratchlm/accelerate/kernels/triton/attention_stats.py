"""Two numbers a query that attention's backward pass starts from (`attend_back.py`).

D = Σ ∂O ⊙ O, and −L log₂e, where L is the logarithm of the query's sum of exponentials.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH = 64  # of a head


@triton.jit
def _row_stats(  # type: ignore[no-untyped-def]
    out, d_out, log_sums, stats, heads, seq, total, ROWS: tl.constexpr
):
    """Write both for a block of a head's tokens."""
    head, unit = tl.program_id(1), tl.program_id(2) * heads + tl.program_id(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, 64)
    row = (tl.program_id(2) * seq + token).to(tl.int64) * heads * 64 + head * 64
    at = row[:, None] + channel[None, :]
    known = token < seq
    a = tl.load(out + at, mask=known[:, None], other=0.0).to(tl.float32)
    b = tl.load(d_out + at, mask=known[:, None], other=0.0).to(tl.float32)
    where = unit * seq + token
    log_sum = tl.load(log_sums + where, mask=known, other=0.0)
    tl.store(stats + where, log_sum * -1.4426950408889634, mask=known)
    tl.store(stats + total + where, tl.sum(a * b, axis=1), mask=known)


def row_stats(mixed: Tensor, d_mixed: Tensor, log_sums: Tensor) -> Tensor:
    """Return −L log₂e and D (2, batch, heads, seq) of mixed heads (batch, seq, heads · 64)."""
    batch, seq, width = mixed.shape
    heads = width // WIDTH
    stats = mixed.new_empty(2, batch, heads, seq, dtype=torch.float32)
    _row_stats[(triton.cdiv(seq, 64), heads, batch)](
        *(mixed.contiguous(), d_mixed.contiguous(), log_sums.contiguous(), stats),
        *(heads, seq, batch * heads * seq),
        ROWS=64,
        num_warps=4,
    )
    return stats
