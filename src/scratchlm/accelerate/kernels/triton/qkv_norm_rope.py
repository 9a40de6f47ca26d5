"""From the fused projection [W_Q x; W_K x; W_V x] to attention's q, k, v; forward and backward.

    q, k        n = x / rms(x) · w  with QK-norm, else n = x;    y = RoPE(n) = R n
    v           a view of the projection
    backward    ∂n = Rᵀ ∂y,  ∂x = (∂n·w − x·mean(∂n·w·x)/rms²)/rms,  ∂w = Σ ∂n · x/rms

R rotates each pair (a, b) of channels: (a cos − b sin, a sin + b cos). A program takes a block of
tokens and loops over all heads of q or of k: it loads cos and sin once, and sums the gradient of
the norm's weight over the heads. The backward kernel writes ∂q, ∂k and ∂v into one contiguous
tensor, as the next two GEMMs need it; a compiler would rotate first and concatenate afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # of one head, per program and iteration
WARPS = 4


@triton.jit
def _load_rope_pairs(  # type: ignore[no-untyped-def]
    start, row_mask, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load both channels of every RoPE pair of the heads at `start` (rows, 1), as float32."""
    if INTERLEAVED:  # coalesced: load neighbours together, then split
        channel = tl.arange(0, 2 * PADDED)[None, :]
        mask = row_mask & (channel < 2 * HALF)
        both = tl.load(start + channel, mask=mask, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (both.shape[0], PADDED, 2)))
    else:
        pair = tl.arange(0, PADDED)[None, :]
        mask = row_mask & (pair < HALF)
        a = tl.load(start + pair, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(start + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_rope_pairs(  # type: ignore[no-untyped-def]
    start, a, b, row_mask, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Store both channels of every RoPE pair: the inverse of `_load_rope_pairs`."""
    dtype = start.dtype.element_ty
    if INTERLEAVED:
        channel = tl.arange(0, 2 * PADDED)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * PADDED)).to(dtype)
        tl.store(start + channel, both, mask=row_mask & (channel < 2 * HALF))
    else:
        pair = tl.arange(0, PADDED)[None, :]
        mask = row_mask & (pair < HALF)
        tl.store(start + pair, a.to(dtype), mask=mask)
        tl.store(start + HALF + pair, b.to(dtype), mask=mask)


@triton.jit
def _load_cos_sin(  # type: ignore[no-untyped-def]
    cos, sin, token, row_mask, seq, batch_stride, HALF: tl.constexpr, PADDED: tl.constexpr
):
    pair = tl.arange(0, PADDED)[None, :]
    offsets = (token // seq) * batch_stride + (token % seq) * HALF + pair
    mask = row_mask & (pair < HALF)
    c = tl.load(cos + offsets, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + offsets, mask=mask, other=0.0).to(tl.float32)
    return c, s


@triton.jit
def _load_norm_weight(  # type: ignore[no-untyped-def]
    q_weight, k_weight, kind, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    weight = q_weight
    if kind == 1:
        weight = k_weight
    zero = tl.zeros((1, 1), tl.int32)
    return _load_rope_pairs(weight + zero, zero == 0, HALF, PADDED, INTERLEAVED)


@triton.jit
def _qkv_norm_rope_kernel(  # type: ignore[no-untyped-def]
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    q,
    k,
    tokens,
    seq,
    table_batch_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid: (q or k, blocks of tokens)."""
    token = (tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    row_mask = token < tokens
    c, s = _load_cos_sin(cos, sin, token, row_mask, seq, table_batch_stride, HALF, PADDED)
    kind = tl.program_id(0)
    first, heads, out = 0, HEADS, q
    if kind == 1:
        first, heads, out = HEADS, KV_HEADS, k
    if NORM:
        wa, wb = _load_norm_weight(q_weight, k_weight, kind, HALF, PADDED, INTERLEAVED)
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + first) * 2 * HALF
    target = out + token * heads * 2 * HALF
    for head in range(heads):
        a, b = _load_rope_pairs(source + head * 2 * HALF, row_mask, HALF, PADDED, INTERLEAVED)
        if NORM:
            mean_square = tl.sum(a * a + b * b, axis=1) / (2 * HALF)
            inv_rms = (1 / tl.sqrt(mean_square + eps))[:, None]
            a, b = a * inv_rms * wa, b * inv_rms * wb
        a, b = a * c - b * s, a * s + b * c
        _store_rope_pairs(target + head * 2 * HALF, a, b, row_mask, HALF, PADDED, INTERLEAVED)


@triton.jit
def _qkv_norm_rope_backward_kernel(  # type: ignore[no-untyped-def]
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    dq,
    dk,
    dv,
    dqkv,
    dweight_partial,
    tokens,
    seq,
    table_batch_stride,
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
    """Grid: (q, k or v, blocks of tokens). `q_batch`, … are strides."""
    kind = tl.program_id(0)
    token = (tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS))[:, None]
    row_mask = token < tokens
    batch, position = token // seq, token % seq
    row = token * (HEADS + 2 * KV_HEADS) * 2 * HALF
    if kind == 2:
        source = dv + batch * v_batch + position * v_seq
        channel = tl.arange(0, 2 * PADDED)[None, :]
        mask = row_mask & (channel < 2 * HALF)
        target = dqkv + row + (HEADS + KV_HEADS) * 2 * HALF + channel
        for head in range(KV_HEADS):
            value = tl.load(source + head * v_head + channel, mask=mask, other=0.0)
            tl.store(target + head * 2 * HALF, value, mask=mask)
    else:
        c, s = _load_cos_sin(cos, sin, token, row_mask, seq, table_batch_stride, HALF, PADDED)
        source, stride, first, heads = dq + batch * q_batch + position * q_seq, q_head, 0, HEADS
        if kind == 1:
            source, stride, first, heads = (
                dk + batch * k_batch + position * k_seq,
                k_head,
                HEADS,
                KV_HEADS,
            )
        # Summed over heads here, over tokens at the end: that reduces across threads.
        dwa = tl.zeros((TOKENS, PADDED), tl.float32)
        dwb = tl.zeros((TOKENS, PADDED), tl.float32)
        if NORM:
            wa, wb = _load_norm_weight(q_weight, k_weight, kind, HALF, PADDED, INTERLEAVED)
        start = row + first * 2 * HALF
        for head in range(heads):
            ya, yb = _load_rope_pairs(source + head * stride, row_mask, HALF, PADDED, INTERLEAVED)
            da, db = ya * c + yb * s, yb * c - ya * s  # Rᵀ ∂y
            offsets = start + head * 2 * HALF
            if NORM:
                a, b = _load_rope_pairs(qkv + offsets, row_mask, HALF, PADDED, INTERLEAVED)
                mean_square = tl.sum(a * a + b * b, axis=1) / (2 * HALF)
                inv_rms = (1 / tl.sqrt(mean_square + eps))[:, None]
                dwa += da * a * inv_rms
                dwb += db * b * inv_rms
                mean_dot = tl.sum(da * wa * a + db * wb * b, axis=1) / (2 * HALF)
                mean_dot = mean_dot[:, None] * inv_rms * inv_rms
                da, db = (da * wa - a * mean_dot) * inv_rms, (db * wb - b * mean_dot) * inv_rms
            _store_rope_pairs(dqkv + offsets, da, db, row_mask, HALF, PADDED, INTERLEAVED)
        if NORM:
            pair = tl.arange(0, PADDED)
            partial = dweight_partial + (kind * tl.num_programs(1) + tl.program_id(1)) * 2 * HALF
            a_channel, b_channel = pair, HALF + pair
            if INTERLEAVED:
                a_channel, b_channel = 2 * pair, 2 * pair + 1
            tl.store(partial + a_channel, tl.sum(dwa, axis=0), mask=pair < HALF)
            tl.store(partial + b_channel, tl.sum(dwb, axis=0), mask=pair < HALF)


def _table_batch_stride(table: Tensor) -> int:
    """Return the stride between the batch's tables: 0 where all rows share one."""
    return table.shape[-2] * table.shape[-1] if table.ndim > 2 and len(table) > 1 else 0


def _sizes(qkv: Tensor, heads: int, kv_heads: int) -> tuple[int, dict[str, Any]]:
    """Return the number of token blocks, and the kernels' compile-time sizes."""
    batch, seq, width = qkv.shape
    d_head = width // (heads + 2 * kv_heads)
    padded = triton.next_power_of_2(d_head // 2)
    tokens = max(1, ELEMENTS // (2 * padded))
    sizes = {"HALF": d_head // 2, "PADDED": padded, "TOKENS": tokens}
    return triton.cdiv(batch * seq, tokens), {"HEADS": heads, "KV_HEADS": kv_heads, **sizes}


def launch_qk_norm_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    heads: int,
    kv_heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return q and k (batch, heads, seq, d_head) of `qkv` (batch, seq, all heads · d_head)."""
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    batch, seq, _ = qkv.shape
    blocks, sizes = _sizes(qkv, heads, kv_heads)
    q, k = _empty_qk(qkv, heads, kv_heads)
    _qkv_norm_rope_kernel[(2, blocks)](
        *(qkv, q_weight, k_weight, cos, sin, q, k),
        *(batch * seq, seq, _table_batch_stride(cos), eps),
        INTERLEAVED=interleaved,
        NORM=q_weight is not None,
        num_warps=WARPS,
        **sizes,
    )
    return q, k


def _empty_qk(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    batch, seq, width = qkv.shape
    d_head = width // (heads + 2 * kv_heads)
    q = qkv.new_empty(batch, seq, heads, d_head).transpose(1, 2)
    return q, qkv.new_empty(batch, seq, kv_heads, d_head).transpose(1, 2)


def launch_qkv_norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `qkv` and, with QK-norm, of both norm weights (2, d_head)."""
    dq, dk, dv = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk, dv))
    cos, sin = cos.contiguous(), sin.contiguous()
    qkv = None if qkv is None else qkv.contiguous()
    (batch, heads, seq, d_head), kv_heads = dq.shape, dk.shape[1]
    dqkv = dq.new_empty(batch, seq, (heads + 2 * kv_heads) * d_head)
    blocks, sizes = _sizes(dqkv, heads, kv_heads)
    norm = qkv is not None
    partial = torch.empty(2, blocks if norm else 0, d_head, dtype=torch.float32, device=dq.device)
    _qkv_norm_rope_backward_kernel[(3, blocks)](
        *(qkv, q_weight, k_weight, cos, sin, dq, dk, dv, dqkv, partial),
        *(batch * seq, seq, _table_batch_stride(cos), eps),
        *(*dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3]),
        INTERLEAVED=interleaved,
        NORM=norm,
        num_warps=WARPS,
        **sizes,
    )
    return dqkv, partial.sum(dim=1) if norm else partial.new_empty(2, d_head)


# Custom ops: opaque to torch.compile

qk_norm_rope = torch.library.custom_op(
    "scratchlm::qk_norm_rope", launch_qk_norm_rope, mutates_args=(), device_types="cuda"
)
qkv_norm_rope_backward = torch.library.custom_op(
    "scratchlm::qkv_norm_rope_backward",
    launch_qkv_norm_rope_backward,
    mutates_args=(),
    device_types="cuda",
)


@qk_norm_rope.register_fake
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    heads: int,
    kv_heads: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    return _empty_qk(qkv, heads, kv_heads)


@qkv_norm_rope_backward.register_fake
def _(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    (batch, heads, seq, d_head), kv_heads = dq.shape, dk.shape[1]
    dqkv = dq.new_empty(batch, seq, (heads + 2 * kv_heads) * d_head)
    return dqkv, dq.new_empty(2, d_head, dtype=torch.float32)


class _QKVNormRope(torch.autograd.Function):
    """Not a custom op, because those cannot return views: v is a view of qkv."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        heads: int,
        kv_heads: int,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k = qk_norm_rope(qkv, cos, sin, q_weight, k_weight, eps, heads, kv_heads, interleaved)
        d_head = q.shape[-1]
        v = qkv[..., (heads + kv_heads) * d_head :].unflatten(-1, (kv_heads, d_head))
        ctx.save_for_backward(None if q_weight is None else qkv, cos, sin, q_weight, k_weight)
        ctx.eps, ctx.interleaved = eps, interleaved
        return q, k, v.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, cos, sin, q_weight, k_weight = ctx.saved_tensors
        dqkv, dweights = qkv_norm_rope_backward(
            dq, dk, dv, qkv, cos, sin, q_weight, k_weight, ctx.eps, ctx.interleaved
        )
        dq_weight = dk_weight = None
        if q_weight is not None:
            dq_weight, dk_weight = dweights.to(q_weight.dtype).unbind()
        return dqkv, None, None, dq_weight, dk_weight, None, None, None, None


def qkv_norm_rope(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm: tuple[Tensor, Tensor, float] | None,
    num_heads: tuple[int, int],
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split `qkv` into q, k and v (batch, heads, seq, d_head), with QK-norm and RoPE.

    `norm` is (q_weight, k_weight, eps) or None; `num_heads` is (heads, kv_heads); tables are
    (seq, d_head/2) or (batch, 1, seq, d_head/2).
    """
    weights = (None, None, 0.0) if norm is None else norm
    q, k, v = _QKVNormRope.apply(qkv, cos, sin, *weights, *num_heads, interleaved)
    return q, k, v
