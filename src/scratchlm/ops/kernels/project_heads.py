"""Queries, keys and values of tokens, turned by their positions, on Hopper's tensor cores.

    [q; k; v] = [W_Q; W_K; W_V] x,    q and k turned: (a, b) → (a cos − b sin, a sin + b cos)

As a kernel of its own (`heads.py`), turning reads what the product has just written and writes it
once more. Here a tile is two heads of 64 channels, and both channels of a pair are one thread's:
they are turned before they are rounded, and q, k and v are views of what the product writes. How
the products run, and what waits for what: `turns.py`.
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

from scratchlm.ops.kernels.heads import turn_heads_back
from scratchlm.ops.kernels.turns import (
    DEEP,
    SIZES,
    TILE,
    barriers,
    count,
    described,
    halves,
    launch,
    load,
    mine,
    taken_in_turn,
)

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
def _joined(a, b, INTERLEAVED: gl.constexpr):
    """Put the channels back; no number moves to another thread."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    x = gl.join(a, b)
    if not INTERLEAVED:
        x = x.permute(0, 2, 1)
    return gl.convert_layout(x.reshape(128, 64), half, assert_trivial=True)


@gluon.jit
def _places(m, places, INTERLEAVED: gl.constexpr):
    """Return where in the tables the angle of each token and pair stands."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row = (m * 128 + gl.arange(0, 128, gl.SliceLayout(1, half))) % places
    channel = gl.arange(0, 64, gl.SliceLayout(0, half))
    if INTERLEAVED:
        pair = channel // 2
    else:
        pair = channel % 32
    first, _ = _pairs(gl.expand_dims(row, 1) * 32 + gl.expand_dims(pair, 0), INTERLEAVED)
    return first


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
    cos, sin, places, turned = tables
    tiles_down, tiles_across, depth = sizes
    for i in range(C, count(tiles_down, tiles_across), 2):
        m, n = mine(i, tiles_down, tiles_across, GROUP)
        at = _places(m, places, INTERLEAVED)
        c = gl.load(cos + at)  # on their way under the products
        s = gl.load(sin + at)
        parts = halves(taken_in_turn(rings, bars, i, depth, STAGES, C, True))
        tma.store_wait(0)  # of the tile before: long since read out
        for h in gl.static_range(2):
            part = parts[h]
            if n * 128 + 64 * h < turned:
                a, b = _pairs(part, INTERLEAVED)
                part = _joined(a * c - b * s, a * s + b * c, INTERLEAVED)
            out.index(2 * C + h).store(part.to(gl.bfloat16))
        fence_async_shared()
        for h in gl.static_range(2):
            place = [m * 128, n * 128 + 64 * h]
            tma.async_copy_shared_to_global(y, place, out.index(2 * C + h))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*SIZES, "places", "turned"])
def _project(
    x,
    w,
    y,
    cos,
    sin,
    places,
    turned,
    tiles_down,
    tiles_across,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], x.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], w.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [4, 128, 64], y.layout)
    bars = (barriers(STAGES), barriers(STAGES), barriers(2))
    fence_async_shared()
    tables = (cos, sin, places, turned)
    sizes = (tiles_down, tiles_across, depth)
    rings = (a_ring, b_ring)
    gl.warp_specialize(
        [
            (_consume, (y, tables, rings, out, bars, sizes, STAGES, GROUP, INTERLEAVED, 0)),
            (_consume, (y, tables, rings, out, bars, sizes, STAGES, GROUP, INTERLEAVED, 1)),
            (load, (x, w, rings, bars, sizes, STAGES, GROUP, True)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


def turned_product(
    x: Tensor,
    w: Tensor,
    cos: Tensor,
    sin: Tensor,
    turned: int,
    interleaved: bool,
    programs: int = 0,
) -> Tensor:
    """Return x Wᵀ (tokens, all heads · 64), the first `turned` columns of it turned.

    The tables (places, 32) serve tokens in turn: they are as long as a sequence, or as all.
    """
    (rows, d), columns = x.shape, len(w)
    x, w = x.contiguous(), w.contiguous()
    cos, sin = cos.reshape(-1, WIDTH // 2).contiguous(), sin.reshape(-1, WIDTH // 2).contiguous()
    y = x.new_empty(rows, columns)
    tensors = [described(x, TILE, DEEP), described(w, TILE, DEEP), described(y, TILE, 64)]
    given = [*tensors, cos, sin, len(cos), turned]
    sizes = (rows // TILE, triton.cdiv(columns, TILE), d // DEEP)
    launch(_project, given, sizes, programs, INTERLEAVED=interleaved)
    return y


# As torch sees it: a whole operation, which a compiler does not open


@torch.library.custom_op("scratchlm::turned_product", mutates_args=(), device_types="cuda")
def _turned_product(
    x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, turned: int, interleaved: bool
) -> Tensor:
    return turned_product(x, w, cos, sin, turned, interleaved)


@_turned_product.register_fake
def _(
    x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, turned: int, interleaved: bool
) -> Tensor:
    return x.new_empty(len(x), len(w))


class _Projected(torch.autograd.Function):
    """Queries, keys and values: views of one product, hence no plain op."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        kv_heads: int,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, d = x.shape
        turned = (heads + kv_heads) * WIDTH
        joined = _turned_product(x.reshape(-1, d), w, cos, sin, turned, interleaved)
        q, k, v = (
            joined.view(batch, seq, -1, WIDTH)
            .transpose(1, 2)
            .split((heads, kv_heads, kv_heads), dim=1)
        )
        ctx.save_for_backward(x, w, cos, sin)
        ctx.interleaved = interleaved
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        x, w, cos, sin = ctx.saved_tensors
        of_joined, _ = turn_heads_back(
            dq, dk, dv, None, cos, sin, None, None, 0.0, ctx.interleaved
        )
        of_joined = of_joined.view(-1, len(w))
        of_x = (of_joined @ w).view(x.shape)
        return of_x, of_joined.t() @ x.reshape(-1, x.shape[-1]), *[None] * 5


def projected(
    x: Tensor, w: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (batch, heads, seq, 64), all in bfloat16."""
    q, k, v = _Projected.apply(x, w, cos, sin, *heads, interleaved)
    return q, k, v
