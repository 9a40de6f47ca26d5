"""Attention of one row's new token and the output projection, in one kernel.

The projection is a sum over heads, W_O a = Σ_h W_O[:, h] a_h, so a program that has its head's
output can multiply it at once, and a layer takes four kernels instead of five:

    q, k, v = W_qkv · norm(x)                norm_project, which also sets total = 0
    total  += W_O[:, h] attention_h(q, k, v) attend_project
    u       = act(W1 h) ⊙ W3 h               norm_gate      h = norm(x + total)
    x       = x + total + W2 u               project_add

A program takes one head and a block of W_O's rows. All programs of a head do the same attention
again, from keys and values that the L2 holds: what is saved is a wait and a trip to memory, so it
pays while the cache is short (`tiles.choose_attention`). The block of W_O comes before the wait.
`total` adds up in any order to the same bits (`exact_sum.py`); the output bias is part of head 0.

One total serves all layers. It is cleared after `norm_project` has waited for the `project_add` of
the layer before, its last reader; nobody adds to it before `norm_project` has ended.
"""

# mypy: disallow_untyped_defs=False
# Arguments of a kernel are pointers and numbers of the device: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

from scratchlm.ops.kernels.decode_attention import gather
from scratchlm.ops.kernels.early_start import packed
from scratchlm.ops.kernels.exact_sum import add_part


@triton.jit
def attend_project(
    q,
    k,
    v,
    q_gain,
    k_gain,
    cos,
    sin,
    keys,
    values,
    lengths,
    w,
    bias,
    total,
    CAPACITY: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EPS: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """total += W_O[:, head] · the head's attention; the new key and value go into the cache.

    Grid: (HEADS, blocks of BLOCK_N rows of W_O), for one row.
    """
    head, block, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n, d = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    place = w + head * D + n[:, None] * (HEADS * D) + d[None, :]
    inside = (n < N)[:, None] & (d < D)[None, :]
    weights = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
    part = tl.zeros((BLOCK_N,), tl.float32)
    if bias is not None:
        part += tl.load(bias + n, mask=(n < N) & (head == 0), other=0.0).to(tl.float32)
    _, weight_sum, acc = gather(
        q,
        k,
        v,
        q_gain,
        k_gain,
        cos,
        sin,
        keys,
        values,
        lengths,
        head,
        0,
        row,
        block == 0,
        CAPACITY,
        HEADS,
        KV_HEADS,
        D,
        BLOCK_D,
        BLOCK_T,
        1,
        EPS,
        QK_NORM,
        ROPE,
        WINDOW,
        SCALE,
        PDL,
    )
    weights = packed(weights, PDL)
    mixed = acc / weight_sum
    part += tl.sum(weights.to(tl.float32) * mixed[None, :], 1)
    add_part(total + n, part, n < N, HEADS)
