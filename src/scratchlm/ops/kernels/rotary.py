"""Turning pairs of channels by their angles, forward and backward, in one read and one write.

    (a, b) → (a cos − b sin, a sin + b cos)

The backward pass turns the other way. The input may be any view of (batch, heads, seq, d), such as
a part of the joined product of Q, K and V; the result lies in memory as (batch, seq, heads, d),
which is how attention's kernels like it. Left to a compiler, the pairs of the `interleaved` layout
are taken apart and joined again element by element.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 32  # per program


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    out,
    heads,
    seq,
    x_batch,
    x_head,
    x_seq,
    table_batch,
    back,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1) % heads
    batch = (tl.program_id(1) // heads).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, PADDED)
    inside = (token < seq)[:, None] & (pair < HALF)[None, :]
    place = batch * table_batch + token[:, None] * HALF + pair[None, :]
    c = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32) * back
    source = x + batch * x_batch + head * x_head + token[:, None] * x_seq
    target = out + ((batch * seq + token[:, None]) * heads + head) * 2 * HALF
    if INTERLEAVED:
        channel = tl.arange(0, 2 * PADDED)
        within = (token < seq)[:, None] & (channel < 2 * HALF)[None, :]
        both = tl.load(source + channel[None, :], mask=within, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (TOKENS, PADDED, 2)))
        turned = tl.join(a * c - b * s, a * s + b * c)
        turned = tl.reshape(turned, (TOKENS, 2 * PADDED)).to(out.dtype.element_ty)
        tl.store(target + channel[None, :], turned, mask=within)
    else:
        a = tl.load(source + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + HALF + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(target + pair[None, :], (a * c - b * s).to(out.dtype.element_ty), mask=inside)
        b = (a * s + b * c).to(out.dtype.element_ty)
        tl.store(target + HALF + pair[None, :], b, mask=inside)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Turn (batch, heads, seq, d) by tables (seq, d/2) or (batch, 1, seq, d/2); `back`: undo it."""
    batch, heads, seq, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = _result(x)
    half = width // 2
    _turn[(triton.cdiv(seq, TOKENS), batch * heads)](
        x,
        cos,
        sin,
        out,
        heads,
        seq,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        seq * half if cos.ndim > 2 else 0,
        -1.0 if back else 1.0,
        HALF=half,
        PADDED=triton.next_power_of_2(half),
        INTERLEAVED=interleaved,
        TOKENS=TOKENS,
    )
    return out


def _result(x: Tensor) -> Tensor:
    batch, heads, seq, width = x.shape
    return x.new_empty(batch, seq, heads, width).transpose(1, 2)


# As torch sees it: a whole operation, which a compiler does not open

turn = torch.library.custom_op("scratchlm::turn", turn_pairs, mutates_args=(), device_types="cuda")


@turn.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    return _result(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _back(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None, None]:
    cos, sin = ctx.saved_tensors
    return turn(slope, cos, sin, ctx.interleaved, not ctx.back), None, None, None, None


turn.register_autograd(_back, setup_context=_keep)
