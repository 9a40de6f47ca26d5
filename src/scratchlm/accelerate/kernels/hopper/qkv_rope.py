"""Queries, keys and values of tokens, turned by their positions, on Hopper's tensor cores.

    [q; k; v] = [W_Q; W_K; W_V] x,    q and k turned: (a, b) → (a cos − b sin, a sin + b cos)

As a kernel of its own (`heads.py`), turning reads what the product has just written and writes it
once more. Here a tile is two heads of 64 channels, and both channels of a pair are one thread's:
they are turned before they are rounded, and q, k and v are views of what the product writes. How
the products run, and what waits for what: `turns.py`. Where attention is plainly causal, it is part
of the same operation (`attended`): cuDNN attends to the views, and the backward pass of ours
(`attention_backward.py`) turns back as it writes.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and numbers of the device: Python has no types for them.

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from scratchlm.accelerate.kernels.hopper.attention_backward import through_attention
from scratchlm.accelerate.kernels.hopper.pingpong_gemm import (
    DEEP,
    SIZES,
    TILE,
    count,
    described,
    halves,
    launch,
    load,
    mine,
    shared,
    taken_in_turn,
)
from scratchlm.accelerate.kernels.triton.qkv_norm_rope import turn_heads_back

WIDTH = 64  # of a head


@gluon.jit
def _pairs(x, INTERLEAVED: gl.constexpr):
    """Take 64 channels apart into the first and the second of each pair."""
    if INTERLEAVED:
        x = x.reshape(128, 32, 2)
    else:
        x = x.reshape(128, 2, 32).permute(0, 2, 1)
    return x.split()


@gluon.jit
def _turn(x, c, s, INTERLEAVED: gl.constexpr):
    """Turn a head of 128 tokens; no number moves to another thread."""
    a, b = _pairs(x, INTERLEAVED)
    c = gl.convert_layout(c, a.type.layout, assert_trivial=True)
    s = gl.convert_layout(s, a.type.layout, assert_trivial=True)
    y = gl.join(a * c - b * s, a * s + b * c)
    if not INTERLEAVED:
        y = y.permute(0, 2, 1)
    return gl.convert_layout(y.reshape(128, 64), x.type.layout, assert_trivial=True)


@gluon.jit
def _angles(lines, block, INTERLEAVED: gl.constexpr):
    """Read a table's 128 × 32 numbers for a tile's tokens, which lie as the threads hold them."""
    by_thread: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    x = gl.load(lines + block * 4096 + gl.arange(0, 4096, by_thread))
    if INTERLEAVED:
        x = x.reshape(2, 4, 4, 8, 4, 2, 2).permute(0, 2, 6, 3, 1, 5, 4)  # i g w q p h j
    else:
        x = x.reshape(2, 4, 4, 8, 4, 2, 2).permute(0, 2, 5, 3, 1, 4, 6)  # i g w q p j e
    return x.reshape(128, 32)


@gluon.jit
def _consume(
    y,
    tables,
    rings,
    out,
    bars,
    sizes,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    C: gl.constexpr,
):
    lines, blocks, turned = tables
    tiles_down, tiles_across, depth = sizes
    for i in range(C, count(tiles_down, tiles_across), 2):
        m, n = mine(i, tiles_down, tiles_across, GROUP)
        c = _angles(lines, m % blocks, INTERLEAVED)  # on their way under the products
        s = _angles(lines, blocks + m % blocks, INTERLEAVED)
        parts = halves(taken_in_turn(rings, bars, i, depth, STAGES, C, True))
        tma.store_wait(0)  # of the tile before: long since read out
        for h in gl.static_range(2):
            part = parts[h]
            if n * 128 + 64 * h < turned:
                part = _turn(part, c, s, INTERLEAVED)
            out.index(2 * C + h).store(part.to(gl.bfloat16))
        fence_async_shared()
        for h in gl.static_range(2):
            place = [m * 128, n * 128 + 64 * h]
            tma.async_copy_shared_to_global(y, place, out.index(2 * C + h))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*SIZES, "blocks", "turned"])
def _project(
    x,
    w,
    y,
    lines,
    blocks,
    turned,
    tiles_down,
    tiles_across,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):
    rings, out, bars = shared(x, w, y, STAGES, 4, True)
    tables = (lines, blocks, turned)
    sizes = (tiles_down, tiles_across, depth)
    gl.warp_specialize(
        [
            (_consume, (y, tables, rings, out, bars, sizes, STAGES, GROUP, INTERLEAVED, 0)),
            (_consume, (y, tables, rings, out, bars, sizes, STAGES, GROUP, INTERLEAVED, 1)),
            (load, (x, w, rings, bars, sizes, STAGES, GROUP, True)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Calls


def in_lines(cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Lay both tables (…, places, 32) out as the threads hold them, 128 places at a time.

    Place 64i + 16w + 8j + q and pair 8g + 4h + p (where pairs are halves apart, 8g + 2p + e) are
    with warp w, thread 4q + p, 16 bytes of each thread's in turn.
    """
    both = torch.stack((cos, sin))
    if interleaved:  # i w j q g h p
        return both.reshape(2, -1, 4, 2, 8, 4, 2, 4).permute(0, 1, 5, 2, 4, 7, 6, 3).contiguous()
    return both.reshape(2, -1, 4, 2, 8, 4, 4, 2).permute(0, 1, 5, 2, 4, 6, 3, 7).contiguous()


def turned_product(
    x: Tensor, w: Tensor, lines: Tensor, turned: int, interleaved: bool, programs: int = 0
) -> Tensor:
    """Return x Wᵀ (tokens, all heads · 64), the first `turned` columns of it turned.

    The tables in `lines` serve tokens in turn: they are as long as a sequence, or as all.
    """
    (rows, d), columns = x.shape, len(w)
    x, w = x.contiguous(), w.contiguous()
    y = x.new_empty(rows, columns)
    tensors = [described(x, TILE, DEEP), described(w, TILE, DEEP), described(y, TILE, 64)]
    blocks = lines.numel() // (2 * TILE * WIDTH // 2)
    sizes = (rows // TILE, triton.cdiv(columns, TILE), d // DEEP)
    launch(_project, [*tensors, lines, blocks, turned], sizes, programs, INTERLEAVED=interleaved)
    return y


# As torch sees it: a whole operation, which a compiler does not open


@torch.library.custom_op("scratchlm::turned_product", mutates_args=(), device_types="cuda")
def _turned_product(x: Tensor, w: Tensor, lines: Tensor, turned: int, interleaved: bool) -> Tensor:
    return turned_product(x, w, lines, turned, interleaved)


@_turned_product.register_fake
def _(x: Tensor, w: Tensor, lines: Tensor, turned: int, interleaved: bool) -> Tensor:
    return x.new_empty(len(x), len(w))


def _cut(joined: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (batch, heads, seq, 64) as views of (batch, seq, all)."""
    by_head = joined.unflatten(-1, (-1, WIDTH)).transpose(1, 2)
    q, k, v = by_head.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def _gradients(
    ctx: Any, of_joined: Tensor, x: Tensor, w: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a product's operands that are asked for."""
    of_joined = of_joined.view(-1, len(w))
    for_x, for_w, *_ = ctx.needs_input_grad
    of_x = (of_joined @ w).view(x.shape) if for_x else None
    return of_x, of_joined.t() @ x.reshape(-1, x.shape[-1]) if for_w else None


class _Projected(torch.autograd.Function):
    """Queries, keys and values: views of one product, hence no plain op."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        cos: Tensor,
        sin: Tensor,
        lines: Tensor,
        heads: int,
        kv_heads: int,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, d = x.shape
        turned = (heads + kv_heads) * WIDTH
        joined = _turned_product(x.reshape(-1, d), w, lines, turned, interleaved)
        ctx.save_for_backward(x, w, cos, sin)
        ctx.interleaved = interleaved
        return _cut(joined.view(batch, seq, -1), heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        x, w, cos, sin = ctx.saved_tensors
        how = (cos, sin, None, None, 0.0, ctx.interleaved)
        of_joined = turn_heads_back(dq, dk, dv, None, *how)[0]
        return *_gradients(ctx, of_joined, x, w), *[None] * 6


def projected(
    x: Tensor,
    w: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    heads: tuple[int, int],
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (batch, heads, seq, 64); `tables`: cos, sin, both in lines.

    x and w are in bfloat16.
    """
    q, k, v = _Projected.apply(x, w, *tables, *heads, interleaved)
    return q, k, v


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal attention's output, laid out as q, and the log-sum-exp of the scores.

    cuDNN takes fewer heads of k and v than of q as they are.
    """
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    attn_out, log_sum_exp, *_ = attention(q, k, v, None, True, 0.0, True)
    return attn_out, log_sum_exp


class _Attended(torch.autograd.Function):
    """Heads from their projection to what attention mixes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        lines: Tensor,
        heads: int,
        kv_heads: int,
        interleaved: bool,
    ) -> Tensor:
        batch, seq, d = x.shape
        turned = (heads + kv_heads) * WIDTH
        joined = _turned_product(x.reshape(-1, d), w, lines, turned, interleaved)
        joined = joined.view(batch, seq, -1)
        by_head, log_sums = cudnn_attention(*_cut(joined, heads, kv_heads))
        mixed = by_head.transpose(1, 2).reshape(batch, seq, -1)  # a view: cuDNN follows q's layout
        ctx.save_for_backward(x, w, joined, mixed, log_sums, lines)
        ctx.interleaved = interleaved
        return mixed

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, w, joined, mixed, log_sums, lines = ctx.saved_tensors
        of_joined = through_attention(joined, mixed, slope, log_sums, lines, ctx.interleaved)
        return *_gradients(ctx, of_joined, x, w), *[None] * 4


def attended(
    x: Tensor, w: Tensor, lines: Tensor, heads: tuple[int, int], interleaved: bool
) -> Tensor:
    """Return what causal attention mixes (batch, seq, heads · 64) of x; x and w in bfloat16."""
    mixed: Tensor = _Attended.apply(x, w, lines, *heads, interleaved)
    return mixed
