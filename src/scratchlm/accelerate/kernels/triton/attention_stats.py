"""Two numbers per query that attention's backward pass starts from (`attention_backward.py`).

D = Σ dO ⊙ O, and −L log₂e, where L is the log-sum-exp of the query's scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEAD_DIM = 64


@triton.jit
def _attention_stats_kernel(  # type: ignore[no-untyped-def]
    out, grad_out, log_sum_exp, stats, heads, seq, total, ROWS: tl.constexpr
):
    """Write both for a block of a head's tokens. Grid: (blocks, heads, batch)."""
    head, unit = tl.program_id(1), tl.program_id(2) * heads + tl.program_id(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, 64)
    row = (tl.program_id(2) * seq + token).to(tl.int64) * heads * 64 + head * 64
    at = row[:, None] + channel[None, :]
    inside = token < seq
    a = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    b = tl.load(grad_out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    query = unit * seq + token
    lse = tl.load(log_sum_exp + query, mask=inside, other=0.0)
    tl.store(stats + query, lse * -1.4426950408889634, mask=inside)
    tl.store(stats + total + query, tl.sum(a * b, axis=1), mask=inside)


def attention_stats(attn_out: Tensor, grad_attn_out: Tensor, log_sum_exp: Tensor) -> Tensor:
    """Return −L log₂e and D (2, batch, heads, seq); outputs are (batch, seq, heads · 64)."""
    batch, seq, width = attn_out.shape
    heads = width // HEAD_DIM
    stats = attn_out.new_empty(2, batch, heads, seq, dtype=torch.float32)
    _attention_stats_kernel[(triton.cdiv(seq, 64), heads, batch)](
        *(attn_out.contiguous(), grad_attn_out.contiguous(), log_sum_exp.contiguous(), stats),
        *(heads, seq, batch * heads * seq),
        ROWS=64,
        num_warps=4,
    )
    return stats
