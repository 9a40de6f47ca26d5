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
def load_pairs(  # type: ignore[no-untyped-def]
    start, inside, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load both channels of the pairs behind each pointer of `start` (rows, 1) as float32."""
    if INTERLEAVED:  # neighbours, read together and taken apart
        channel = tl.arange(0, 2 * PADDED)[None, :]
        within = inside & (channel < 2 * HALF)
        both = tl.load(start + channel, mask=within, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (both.shape[0], PADDED, 2)))
    else:
        pair = tl.arange(0, PADDED)[None, :]
        within = inside & (pair < HALF)
        a = tl.load(start + pair, mask=within, other=0.0).to(tl.float32)
        b = tl.load(start + HALF + pair, mask=within, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def store_pairs(  # type: ignore[no-untyped-def]
    start, a, b, inside, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Store what `load_pairs` would load."""
    kind = start.dtype.element_ty
    if INTERLEAVED:
        channel = tl.arange(0, 2 * PADDED)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * PADDED)).to(kind)
        tl.store(start + channel, both, mask=inside & (channel < 2 * HALF))
    else:
        pair = tl.arange(0, PADDED)[None, :]
        within = inside & (pair < HALF)
        tl.store(start + pair, a.to(kind), mask=within)
        tl.store(start + HALF + pair, b.to(kind), mask=within)


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
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    pair = tl.arange(0, PADDED)[None, :]
    inside = token < seq
    within = inside & (pair < HALF)
    place = batch * table_batch + token * HALF + pair
    c = tl.load(cos + place, mask=within, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=within, other=0.0).to(tl.float32) * back
    source = x + batch * x_batch + head * x_head + token * x_seq
    target = out + ((batch * seq + token) * heads + head) * 2 * HALF
    a, b = load_pairs(source, inside, HALF, PADDED, INTERLEAVED)
    a, b = a * c - b * s, a * s + b * c
    store_pairs(target, a, b, inside, HALF, PADDED, INTERLEAVED)


def table_step(table: Tensor) -> int:
    """Return how far apart the batch's tables lie: 0 where all rows share one."""
    return table.shape[-2] * table.shape[-1] if table.ndim > 2 and len(table) > 1 else 0


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
        table_step(cos),
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
