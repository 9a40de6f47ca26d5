"""The last step of grouped-query attention's backward pass: dK and dV summed over each group.

`attention_backward.py` writes dK and dV of every query head. A key/value head's gradient is the sum
over the query heads that read it: in float32, in the order of the heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEAD_DIM = 64
TOKENS = 64  # per program


@triton.jit
def _dkv_group_sum_kernel(  # type: ignore[no-untyped-def]
    per_head, grad, tokens, group, per_head_stride, grad_stride, first_column, TOKENS: tl.constexpr
):
    """Grid: (blocks of tokens, heads of K and then of V)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, 64)[None, :]
    kv_head = tl.program_id(1)
    inside = token < tokens
    source = per_head + token.to(tl.int64) * per_head_stride + kv_head * group * 64 + channel
    total = tl.zeros((TOKENS, 64), tl.float32)
    for i in range(group):
        total += tl.load(source + i * 64, mask=inside, other=0.0).to(tl.float32)
    target = grad + token.to(tl.int64) * grad_stride + first_column + kv_head * 64 + channel
    tl.store(target, total.to(grad.dtype.element_ty), mask=inside)


def sum_dkv_groups(per_head: Tensor, grad: Tensor) -> None:
    """Write K's and V's columns of `grad` (tokens, (heads + 2 kv_heads) · 64).

    per_head (tokens, 2 · heads · 64) has dK of all query heads, then dV.
    """
    (tokens, width), heads = per_head.shape, per_head.shape[1] // (2 * HEAD_DIM)
    kv_columns = grad.shape[1] - heads * HEAD_DIM
    _dkv_group_sum_kernel[(triton.cdiv(tokens, TOKENS), kv_columns // HEAD_DIM)](
        *(per_head, grad, tokens, width // kv_columns),
        *(per_head.stride(0), grad.stride(0), heads * HEAD_DIM),
        TOKENS=TOKENS,
        num_warps=4,
    )
