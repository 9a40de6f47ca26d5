"""From the joined product [W_Q x; W_K x; W_V x] to attention's inputs, and their gradients back.

    queries and keys    n = x / rms(x) · g  where the model norms them,    y = R n
    values              a view of the product
    back                ∂n = Rᵀ ∂y,  ∂x = (∂n·g − x·mean(∂n·g·x)/rms²)/rms,  ∂g = Σ ∂n · x/rms

R turns each pair (a, b) of channels by its angle. A program takes a few tokens and all heads of one
kind, one after the other: the tables are read once, and a gain's gradient is summed over the heads
before it leaves the program. The backward pass writes all three gradients side by side, where the
next two products want them; left to a compiler they are turned first and joined afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scratchlm.accelerate.kernels.triton.rope import load_pairs, store_pairs, table_step

ELEMENTS = 1024  # of one head, in a program at a time
WARPS = 4


@triton.jit
def _tables(  # type: ignore[no-untyped-def]
    cos, sin, token, inside, seq, table_batch, HALF: tl.constexpr, PADDED: tl.constexpr
):
    pair = tl.arange(0, PADDED)[None, :]
    place = (token // seq) * table_batch + (token % seq) * HALF + pair
    within = inside & (pair < HALF)
    c = tl.load(cos + place, mask=within, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=within, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def _gains(  # type: ignore[no-untyped-def]
    q_gain, k_gain, kind, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    gain = q_gain
    if kind == 1:
        gain = k_gain
    one = tl.zeros((1, 1), tl.int32)
    return load_pairs(gain + one, one == 0, HALF, PADDED, INTERLEAVED)


@triton.jit
def _cut_heads(  # type: ignore[no-untyped-def]
    joined,
    q_gain,
    k_gain,
    cos,
    sin,
    q,
    k,
    tokens,
    seq,
    table_batch,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid: (queries or keys, blocks of tokens)."""
    token = (tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    inside = token < tokens
    c, s = _tables(cos, sin, token, inside, seq, table_batch, HALF, PADDED)
    kind = tl.program_id(0)
    first, heads, out = 0, HEADS, q
    if kind == 1:
        first, heads, out = HEADS, KV_HEADS, k
    if NORM:
        ga, gb = _gains(q_gain, k_gain, kind, HALF, PADDED, INTERLEAVED)
    source = joined + (token * (HEADS + 2 * KV_HEADS) + first) * 2 * HALF
    target = out + token * heads * 2 * HALF
    for head in range(heads):
        a, b = load_pairs(source + head * 2 * HALF, inside, HALF, PADDED, INTERLEAVED)
        if NORM:
            square = tl.sum(a * a + b * b, axis=1) / (2 * HALF)
            inverse = (1 / tl.sqrt(square + eps))[:, None]
            a, b = a * inverse * ga, b * inverse * gb
        a, b = a * c - b * s, a * s + b * c
        store_pairs(target + head * 2 * HALF, a, b, inside, HALF, PADDED, INTERLEAVED)


@triton.jit
def _join_heads(  # type: ignore[no-untyped-def]
    joined,
    q_gain,
    k_gain,
    cos,
    sin,
    dq,
    dk,
    dv,
    out,
    gain_parts,
    tokens,
    seq,
    table_batch,
    eps,
    q_batch,
    q_head,
    q_seq,
    k_batch,
    k_head,
    k_seq,
    v_batch,
    v_head,
    v_seq,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid: (queries, keys or values, blocks of tokens)."""
    kind = tl.program_id(0)
    token = (tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    inside = token < tokens
    batch, place = token // seq, token % seq
    row = token * (HEADS + 2 * KV_HEADS) * 2 * HALF
    if kind == 2:
        above = dv + batch * v_batch + place * v_seq
        channel = tl.arange(0, 2 * PADDED)[None, :]
        within = inside & (channel < 2 * HALF)
        target = out + row + (HEADS + KV_HEADS) * 2 * HALF + channel
        for head in range(KV_HEADS):
            value = tl.load(above + head * v_head + channel, mask=within, other=0.0)
            tl.store(target + head * 2 * HALF, value, mask=within)
    else:
        c, s = _tables(cos, sin, token, inside, seq, table_batch, HALF, PADDED)
        above, step, first, heads = dq + batch * q_batch + place * q_seq, q_head, 0, HEADS
        if kind == 1:
            above, step, first, heads = (
                dk + batch * k_batch + place * k_seq,
                k_head,
                HEADS,
                KV_HEADS,
            )
        # Summed over the heads here, over the tokens at the end: that crosses threads.
        sum_a = tl.zeros((TOKENS, PADDED), tl.float32)
        sum_b = tl.zeros((TOKENS, PADDED), tl.float32)
        if NORM:
            ga, gb = _gains(q_gain, k_gain, kind, HALF, PADDED, INTERLEAVED)
        start = row + first * 2 * HALF
        for head in range(heads):
            ya, yb = load_pairs(above + head * step, inside, HALF, PADDED, INTERLEAVED)
            da, db = ya * c + yb * s, yb * c - ya * s  # turned back
            here = start + head * 2 * HALF
            if NORM:
                a, b = load_pairs(joined + here, inside, HALF, PADDED, INTERLEAVED)
                square = tl.sum(a * a + b * b, axis=1) / (2 * HALF)
                inverse = (1 / tl.sqrt(square + eps))[:, None]
                sum_a += da * a * inverse
                sum_b += db * b * inverse
                along = tl.sum(da * ga * a + db * gb * b, axis=1) / (2 * HALF)
                along = along[:, None] * inverse * inverse
                da, db = (da * ga - a * along) * inverse, (db * gb - b * along) * inverse
            store_pairs(out + here, da, db, inside, HALF, PADDED, INTERLEAVED)
        if NORM:
            pair = tl.arange(0, PADDED)
            part = gain_parts + (kind * tl.num_programs(1) + tl.program_id(1)) * 2 * HALF
            a_at, b_at = pair, HALF + pair
            if INTERLEAVED:
                a_at, b_at = 2 * pair, 2 * pair + 1
            tl.store(part + a_at, tl.sum(sum_a, axis=0), mask=pair < HALF)
            tl.store(part + b_at, tl.sum(sum_b, axis=0), mask=pair < HALF)


def _sizes(joined: Tensor, heads: int, kv_heads: int) -> tuple[int, dict[str, Any]]:
    """Return the blocks of tokens, and what the kernels know beforehand."""
    batch, seq, row = joined.shape
    width = row // (heads + 2 * kv_heads)
    padded = triton.next_power_of_2(width // 2)
    tokens = max(1, ELEMENTS // (2 * padded))
    sizes = {"HALF": width // 2, "PADDED": padded, "TOKENS": tokens}
    return triton.cdiv(batch * seq, tokens), {"HEADS": heads, "KV_HEADS": kv_heads, **sizes}


def heads_forward(
    joined: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    heads: int,
    kv_heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys (batch, heads, seq, d) of the product (batch, seq, all heads · d)."""
    joined, cos, sin = joined.contiguous(), cos.contiguous(), sin.contiguous()
    batch, seq, _ = joined.shape
    blocks, sizes = _sizes(joined, heads, kv_heads)
    q, k = _results(joined, heads, kv_heads)
    _cut_heads[(2, blocks)](
        *(joined, q_gain, k_gain, cos, sin, q, k),
        *(batch * seq, seq, table_step(cos), eps),
        INTERLEAVED=interleaved,
        NORM=q_gain is not None,
        num_warps=WARPS,
        **sizes,
    )
    return q, k


def _results(joined: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    batch, seq, row = joined.shape
    width = row // (heads + 2 * kv_heads)
    q = joined.new_empty(batch, seq, heads, width).transpose(1, 2)
    return q, joined.new_empty(batch, seq, kv_heads, width).transpose(1, 2)


def heads_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    joined: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the joined product and, with norms, of both gains (2, d)."""
    dq, dk, dv = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk, dv))
    cos, sin = cos.contiguous(), sin.contiguous()
    joined = None if joined is None else joined.contiguous()
    (batch, heads, seq, width), kv_heads = dq.shape, dk.shape[1]
    out = dq.new_empty(batch, seq, (heads + 2 * kv_heads) * width)
    blocks, sizes = _sizes(out, heads, kv_heads)
    norm = joined is not None
    parts = torch.empty(2, blocks if norm else 0, width, dtype=torch.float32, device=dq.device)
    _join_heads[(3, blocks)](
        *(joined, q_gain, k_gain, cos, sin, dq, dk, dv, out, parts),
        *(batch * seq, seq, table_step(cos), eps),
        *(*dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3]),
        INTERLEAVED=interleaved,
        NORM=norm,
        num_warps=WARPS,
        **sizes,
    )
    return out, parts.sum(dim=1) if norm else parts.new_empty(2, width)


# As torch sees them: whole operations, which a compiler does not open

_turn_heads = torch.library.custom_op(
    "scratchlm::turn_heads", heads_forward, mutates_args=(), device_types="cuda"
)
turn_heads_back = torch.library.custom_op(
    "scratchlm::turn_heads_back", heads_backward, mutates_args=(), device_types="cuda"
)


@_turn_heads.register_fake
def _(
    joined: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    heads: int,
    kv_heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    return _results(joined, heads, kv_heads)


@turn_heads_back.register_fake
def _(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    joined: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    (batch, heads, seq, width), kv_heads = dq.shape, dk.shape[1]
    out = dq.new_empty(batch, seq, (heads + 2 * kv_heads) * width)
    return out, dq.new_empty(2, width, dtype=torch.float32)


class _Heads(torch.autograd.Function):
    """Queries, keys and values of a joined product; the last a view of it, hence no plain op."""

    @staticmethod
    def forward(
        ctx: Any,
        joined: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_gain: Tensor | None,
        k_gain: Tensor | None,
        eps: float,
        heads: int,
        kv_heads: int,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        how = (eps, heads, kv_heads, interleaved)
        q, k = _turn_heads(joined, cos, sin, q_gain, k_gain, *how)
        width = q.shape[-1]
        v = joined[..., (heads + kv_heads) * width :].unflatten(-1, (kv_heads, width))
        ctx.save_for_backward(None if q_gain is None else joined, cos, sin, q_gain, k_gain)
        ctx.eps, ctx.interleaved = eps, interleaved
        return q, k, v.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        joined, cos, sin, q_gain, k_gain = ctx.saved_tensors
        how = (cos, sin, q_gain, k_gain, ctx.eps, ctx.interleaved)
        out, of_gains = turn_heads_back(dq, dk, dv, joined, *how)
        of_q = of_k = None
        if q_gain is not None:
            of_q, of_k = of_gains.to(q_gain.dtype).unbind()
        return out, None, None, of_q, of_k, None, None, None, None


def cut_and_turn(
    joined: Tensor,
    cos: Tensor,
    sin: Tensor,
    gains: tuple[Tensor, Tensor, float] | None,
    heads: tuple[int, int],
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (batch, heads, seq, d); `gains`: of both norms, and ε."""
    norm = (None, None, 0.0) if gains is None else gains
    q, k, v = _Heads.apply(joined, cos, sin, *norm, *heads, interleaved)
    return q, k, v
