"""RMSNorm over a head, then the rotation: one read and one write, forward and backward.

    n = x / rms(x) · g,    y = R n                          R turns each pair by its angle
    ∂n = Rᵀ ∂y,    ∂x = (∂n·g − x·mean(∂n·g·x)/rms²)/rms,    ∂g = Σ ∂n · x/rms

Queries and keys of models with a norm on them (Qwen3) pass here in every layer. A pair's halves
are called a and b; where they lie is the layout's matter (`ops/kernels/rotary.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 16  # at a time
TILES = 8  # times a program of the backward pass does that: fewer parts of the gain's gradient


@triton.jit
def _halves(  # type: ignore[no-untyped-def]
    start, inside, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Load both halves of the pairs behind each of `start`'s rows as float32."""
    pair = tl.arange(0, PADDED)
    a_at, b_at = pair, HALF + pair
    if INTERLEAVED:
        a_at, b_at = 2 * pair, 2 * pair + 1
    a = tl.load(start + a_at[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(start + b_at[None, :], mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_halves(  # type: ignore[no-untyped-def]
    start, a, b, inside, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr
):
    pair = tl.arange(0, PADDED)
    a_at, b_at = pair, HALF + pair
    if INTERLEAVED:
        a_at, b_at = 2 * pair, 2 * pair + 1
    tl.store(start + a_at[None, :], a.to(start.dtype.element_ty), mask=inside)
    tl.store(start + b_at[None, :], b.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x,
    gain,
    cos,
    sin,
    out,
    heads,
    seq,
    x_batch,
    x_head,
    x_seq,
    table_batch,
    eps,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1) % heads
    batch = (tl.program_id(1) // heads).to(tl.int64)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    pair = tl.arange(0, PADDED)[None, :]
    inside = (token < seq) & (pair < HALF)
    place = batch * table_batch + token * HALF + pair
    c = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)
    source = x + batch * x_batch + head * x_head + token * x_seq
    a, b = _halves(source, inside, HALF, PADDED, INTERLEAVED)
    ga, gb = _halves(gain + 0 * token, inside, HALF, PADDED, INTERLEAVED)
    square = tl.sum(a * a + b * b, axis=1) / (2 * HALF)
    inverse = (1 / tl.sqrt(square + eps))[:, None]
    a, b = a * inverse * ga, b * inverse * gb
    target = out + ((batch * seq + token) * heads + head) * 2 * HALF
    _store_halves(target, a * c - b * s, a * s + b * c, inside, HALF, PADDED, INTERLEAVED)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    x,
    gain,
    cos,
    sin,
    slope,
    out,
    gain_parts,
    heads,
    seq,
    x_batch,
    x_head,
    x_seq,
    slope_batch,
    slope_head,
    slope_seq,
    table_batch,
    eps,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    head = tl.program_id(1) % heads
    batch = (tl.program_id(1) // heads).to(tl.int64)
    pair = tl.arange(0, PADDED)[None, :]
    sum_a, sum_b = tl.zeros((PADDED,), tl.float32), tl.zeros((PADDED,), tl.float32)
    for tile in range(TILES):
        first = (tl.program_id(0) * TILES + tile) * TOKENS
        token = (first + tl.arange(0, TOKENS))[:, None]
        inside = (token < seq) & (pair < HALF)
        place = batch * table_batch + token * HALF + pair
        c = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)
        source = x + batch * x_batch + head * x_head + token * x_seq
        a, b = _halves(source, inside, HALF, PADDED, INTERLEAVED)
        above = slope + batch * slope_batch + head * slope_head + token * slope_seq
        ya, yb = _halves(above, inside, HALF, PADDED, INTERLEAVED)
        ga, gb = _halves(gain + 0 * token, inside, HALF, PADDED, INTERLEAVED)
        na, nb = ya * c + yb * s, yb * c - ya * s  # turned back
        square = tl.sum(a * a + b * b, axis=1) / (2 * HALF)
        inverse = (1 / tl.sqrt(square + eps))[:, None]
        along = tl.sum(na * ga * a + nb * gb * b, axis=1) / (2 * HALF)
        along = along[:, None] * inverse * inverse
        target = out + ((batch * seq + token) * heads + head) * 2 * HALF
        da, db = (na * ga - a * along) * inverse, (nb * gb - b * along) * inverse
        _store_halves(target, da, db, inside, HALF, PADDED, INTERLEAVED)
        sum_a += tl.sum(na * a * inverse, axis=0)
        sum_b += tl.sum(nb * b * inverse, axis=0)
    program = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    part = gain_parts + program * 2 * HALF
    ours = tl.arange(0, PADDED)
    first_at, second_at = ours, HALF + ours
    if INTERLEAVED:
        first_at, second_at = 2 * ours, 2 * ours + 1
    tl.store(part + first_at, sum_a, mask=ours < HALF)
    tl.store(part + second_at, sum_b, mask=ours < HALF)


def _grid(x: Tensor) -> tuple[int, int]:
    batch, heads, seq, _ = x.shape
    return triton.cdiv(seq, TOKENS), batch * heads


def _sizes(x: Tensor, interleaved: bool) -> dict[str, Any]:
    half = x.shape[-1] // 2
    padded = triton.next_power_of_2(half)
    return {"HALF": half, "PADDED": padded, "INTERLEAVED": interleaved, "TOKENS": TOKENS}


def _result(x: Tensor) -> Tensor:
    batch, heads, seq, width = x.shape
    return x.new_empty(batch, seq, heads, width).transpose(1, 2)


def norm_turn_forward(
    x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool
) -> Tensor:
    """Normalise (batch, heads, seq, d) over d, times the gain, and turn it by the tables."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin, out = cos.contiguous(), sin.contiguous(), _result(x)
    heads, seq, half = x.shape[1], x.shape[2], x.shape[3] // 2
    table = seq * half if cos.ndim > 2 else 0
    sizes = _sizes(x, interleaved)
    _forward[_grid(x)](x, gain, cos, sin, out, heads, seq, *x.stride()[:3], table, eps, **sizes)
    return out


def norm_turn_backward(
    x: Tensor,
    gain: Tensor,
    cos: Tensor,
    sin: Tensor,
    slope: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the gain."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    slope = slope if slope.stride(-1) == 1 else slope.contiguous()
    cos, sin, out = cos.contiguous(), sin.contiguous(), _result(x)
    heads, seq, width = x.shape[1:]
    programs, rows = triton.cdiv(seq, TOKENS * TILES), x.shape[0] * heads
    parts = torch.empty(programs * rows, width, dtype=torch.float32, device=x.device)
    table = seq * (width // 2) if cos.ndim > 2 else 0
    places = (*x.stride()[:3], *slope.stride()[:3], table)
    sizes = {**_sizes(x, interleaved), "TILES": TILES}
    _backward[(programs, rows)](
        x, gain, cos, sin, slope, out, parts, heads, seq, *places, eps, **sizes
    )
    return out, parts.sum(dim=0).to(gain.dtype)


# As torch sees them: whole operations, which a compiler does not open

norm_turn = torch.library.custom_op(
    "scratchlm::norm_turn", norm_turn_forward, mutates_args=(), device_types="cuda"
)
_norm_turn_backward = torch.library.custom_op(
    "scratchlm::norm_turn_backward", norm_turn_backward, mutates_args=(), device_types="cuda"
)


@norm_turn.register_fake
def _(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool) -> Tensor:
    return _result(x)


@_norm_turn_backward.register_fake
def _(
    x: Tensor,
    gain: Tensor,
    cos: Tensor,
    sin: Tensor,
    slope: Tensor,
    eps: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    return _result(x), torch.empty_like(gain)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps, ctx.interleaved = inputs
    ctx.save_for_backward(*tensors)


def _back(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    x, gain, cos, sin = ctx.saved_tensors
    of_x, of_gain = _norm_turn_backward(x, gain, cos, sin, slope, ctx.eps, ctx.interleaved)
    return of_x, of_gain, None, None, None, None


norm_turn.register_autograd(_back, setup_context=_keep)
