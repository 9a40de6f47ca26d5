"""SwiGLU's gate inside the two products beside it, for Hopper's tensor cores.

    forward    [a | b] = x [W1; W3]ᵀ,    h = SiLU(a) ⊙ b
    backward   ∂h = ∂y W2,    ∂a = ∂h ⊙ b ⊙ σ(a)(1 + a(1 − σ(a))),    ∂b = ∂h ⊙ SiLU(a)

As kernels of their own, the gate and its backward read and write what the product before them has
just written: 3 and 5 passes over (tokens, d_ff). Here h leaves with a and b, and ∂h never lies in
memory. How the products run, and what waits for what: `turns.py`. In the backward pass also

    given[2h + c]  half h (64 columns) of a and b for consumer c's tile

a and b have one set of buffers, and ∂a lies over a, ∂b over b: the consumer of tile i, once its
results have been read out, itself starts the copies for tile i + 1.
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
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

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
    power_of_two,
    taken_in_turn,
)


@gluon.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(−x)) by the two instructions there are for it."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [power_of_two(x * -1.4426950408889634) + 1.0],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


# Backward: (∂y W2) through the gate


@gluon.jit
def _ask_for_half(left, right, given, gate, m, n, c, h: gl.constexpr, pred):
    """Start the copies of 64 columns of a and b for consumer c's next tile."""
    bar, row, column = given.index(2 * h + c), m * 128, n * 128 + 64 * h
    mbarrier.expect(bar, 2 * 128 * 64 * 2, pred=pred)
    tma.async_copy_global_to_shared(left, [row, column], bar, gate.index(2 * h), pred=pred)
    tma.async_copy_global_to_shared(right, [row, column], bar, gate.index(2 * h + 1), pred=pred)


@gluon.jit
def _load_back(descs, rings, gate, bars, given, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr):
    dy, w2, left, right, _, _ = descs
    m, n = mine(0, sizes[0], sizes[1], GROUP)
    for h in gl.static_range(2):
        _ask_for_half(left, right, given, gate, m, n, 0, h, True)
    load(dy, w2, rings, bars, sizes, STAGES, GROUP, False)


@gluon.jit
def _consume_back(
    descs,
    rings,
    gate,
    bars,
    given,
    sizes,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    C: gl.constexpr,
):
    _, _, left, right, left_out, right_out = descs
    tiles_down, tiles_across, depth = sizes
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tiles = count(tiles_down, tiles_across)
    for i in range(C, tiles, 2):
        parts = halves(taken_in_turn(rings, bars, i, depth, STAGES, C, False))
        m, n = mine(i, tiles_down, tiles_across, GROUP)
        for h in gl.static_range(2):
            mbarrier.wait(given.index(2 * h + C), i // 2 & 1)
            a = gate.index(2 * h).load(half).to(gl.float32)
            b = gate.index(2 * h + 1).load(half).to(gl.float32)
            s = _sigmoid(a)
            g = parts[h] * s
            da = (g * b) * (1.0 + a * (1.0 - s))
            db = g * a
            gate.index(2 * h).store(da.to(gl.bfloat16))
            gate.index(2 * h + 1).store(db.to(gl.bfloat16))
            fence_async_shared()
            row, column = m * 128, n * 128 + 64 * h
            tma.async_copy_shared_to_global(left_out, [row, column], gate.index(2 * h))
            tma.async_copy_shared_to_global(right_out, [row, column], gate.index(2 * h + 1))
        more = i + 1 < tiles
        m, n = mine(i + 1, tiles_down, tiles_across, GROUP)
        tma.store_wait(2)  # the first half's buffers have been read out
        _ask_for_half(left, right, given, gate, m, n, 1 - C, 0, more)
        tma.store_wait(0)
        _ask_for_half(left, right, given, gate, m, n, 1 - C, 1, more)


@gluon.jit(do_not_specialize=SIZES)
def _back(
    dy,
    w2,
    left,
    right,
    left_out,
    right_out,
    tiles_down,
    tiles_across,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], dy.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], w2.layout)
    gate = gl.allocate_shared_memory(gl.bfloat16, [4, 128, 64], left.layout)
    bars = (barriers(STAGES), barriers(STAGES), barriers(2))
    given = barriers(4)
    fence_async_shared()
    descs = (dy, w2, left, right, left_out, right_out)
    sizes = (tiles_down, tiles_across, depth)
    rings = (a_ring, b_ring)
    gl.warp_specialize(
        [
            (_consume_back, (descs, rings, gate, bars, given, sizes, STAGES, GROUP, 0)),
            (_consume_back, (descs, rings, gate, bars, given, sizes, STAGES, GROUP, 1)),
            (_load_back, (descs, rings, gate, bars, given, sizes, STAGES, GROUP)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Forward: x [W1; W3]ᵀ and the gate; a tile is 64 columns of a and the same 64 of b


@gluon.jit
def _load_forward(descs, rings, bars, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr):
    x, w1, w3, _, _, _ = descs
    full, empty, _ = bars
    tiles_down, tiles_across, depth = sizes
    s = 0
    phase = 1
    for i in range(count(tiles_down, tiles_across)):
        m, n = mine(i, tiles_down, tiles_across, GROUP)
        for k in range(depth):
            mbarrier.wait(empty.index(s), phase)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * 128 * 64 * 2)
            pair = rings[1].index(s)._reinterpret(gl.bfloat16, [2, 64, 64], w1.layout)
            tma.async_copy_global_to_shared(x, [m * 128, k * 64], bar, rings[0].index(s))
            tma.async_copy_global_to_shared(w1, [n * 64, k * 64], bar, pair.index(0))
            tma.async_copy_global_to_shared(w3, [n * 64, k * 64], bar, pair.index(1))
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1


@gluon.jit
def _consume_forward(
    descs, rings, out, bars, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr
):
    _, _, _, left, right, hidden = descs
    tiles_down, tiles_across, depth = sizes
    for i in range(C, count(tiles_down, tiles_across), 2):
        a, b = halves(taken_in_turn(rings, bars, i, depth, STAGES, C, True))
        m, n = mine(i, tiles_down, tiles_across, GROUP)
        a = a.to(gl.bfloat16)
        b = b.to(gl.bfloat16)
        tma.store_wait(0)  # of the tile before: long since read out
        out.index(2 * C).store(a)
        out.index(2 * C + 1).store(b)
        fence_async_shared()
        tma.async_copy_shared_to_global(left, [m * 128, n * 64], out.index(2 * C))
        tma.async_copy_shared_to_global(right, [m * 128, n * 64], out.index(2 * C + 1))
        a = a.to(gl.float32)
        h = (a * _sigmoid(a) * b.to(gl.float32)).to(gl.bfloat16)
        tma.store_wait(1)  # a's buffer has been read out
        out.index(2 * C).store(h)
        fence_async_shared()
        tma.async_copy_shared_to_global(hidden, [m * 128, n * 64], out.index(2 * C))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def _forward(
    x,
    w1,
    w3,
    left,
    right,
    hidden,
    tiles_down,
    tiles_across,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], x.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], w1.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [4, 128, 64], left.layout)
    bars = (barriers(STAGES), barriers(STAGES), barriers(2))
    fence_async_shared()
    descs = (x, w1, w3, left, right, hidden)
    sizes = (tiles_down, tiles_across, depth)
    rings = (a_ring, b_ring)
    gl.warp_specialize(
        [
            (_consume_forward, (descs, rings, out, bars, sizes, STAGES, GROUP, 0)),
            (_consume_forward, (descs, rings, out, bars, sizes, STAGES, GROUP, 1)),
            (_load_forward, (descs, rings, bars, sizes, STAGES, GROUP)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Calls


def gated_product(x: Tensor, w13: Tensor, programs: int = 0) -> tuple[Tensor, Tensor]:
    """Return [a | b] = x [W1; W3]ᵀ and SiLU(a) ⊙ b, in bfloat16 as all is."""
    (rows, d), d_ff = x.shape, len(w13) // 2
    x, w13 = x.contiguous(), w13.contiguous()
    joined, hidden = x.new_empty(rows, 2 * d_ff), x.new_empty(rows, d_ff)
    tensors = [
        described(x, 128, 64),
        *(described(half, 64, 64) for half in w13.split(d_ff)),
        *(described(half, 128, 64) for half in joined.split(d_ff, dim=1)),
        described(hidden, 128, 64),
    ]
    sizes = (rows // TILE, triton.cdiv(d_ff, 64), d // DEEP)
    launch(_forward, tensors, sizes, programs)
    return joined, hidden


def gated_product_back(dy: Tensor, w2: Tensor, joined: Tensor, programs: int = 0) -> Tensor:
    """Return the gradient of [a | b], where that of W2 h is `dy`."""
    (rows, d), d_ff = dy.shape, w2.shape[1]
    dy, w2, joined = dy.contiguous(), w2.contiguous(), joined.contiguous()
    out = torch.empty_like(joined)
    tensors = [
        described(dy, 128, 64),
        described(w2, 64, 128),
        *(described(half, 128, 64) for half in joined.split(d_ff, dim=1)),
        *(described(half, 128, 64) for half in out.split(d_ff, dim=1)),
    ]
    sizes = (rows // TILE, triton.cdiv(d_ff, TILE), d // DEEP)
    launch(_back, tensors, sizes, programs)
    return out


# As torch sees them: whole operations, which a compiler does not open. The first is all of SwiGLU,
# and has its gradient from torch.library: so a compiler, too, computes it again where it is told to
# keep nothing (of an autograd.Function torch 2.11 keeps everything).


@torch.library.custom_op("scratchlm::swiglu", mutates_args=(), device_types="cuda")
def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return W2 h of rows x, and what is kept for the backward pass: [a | b] and h."""
    joined, hidden = gated_product(x, w13)
    return hidden @ w2.t(), joined, hidden


@torch.library.custom_op("scratchlm::gated_product_back", mutates_args=(), device_types="cuda")
def through_gate(dy: Tensor, w2: Tensor, joined: Tensor) -> Tensor:
    """Return the gradient of [a | b]."""
    return gated_product_back(dy, w2, joined)


@swiglu.register_fake
def _(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    joined, hidden = x.new_empty(len(x), len(w13)), x.new_empty(len(x), len(w13) // 2)
    return x.new_empty(len(x), len(w2)), joined, hidden


@through_gate.register_fake
def _(dy: Tensor, w2: Tensor, joined: Tensor) -> Tensor:
    return joined.new_empty(joined.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _slopes(ctx: Any, slope: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    x, w13, w2, joined, hidden = ctx.saved_tensors
    for_x, for_13, for_2 = ctx.needs_input_grad
    of_x: Tensor | None = None
    of_13: Tensor | None = None
    if for_x or for_13:
        of_joined = through_gate(slope, w2, joined)
        of_x = of_joined @ w13 if for_x else None
        of_13 = of_joined.t() @ x if for_13 else None
    return of_x, of_13, slope.t() @ hidden if for_2 else None


swiglu.register_autograd(_slopes, setup_context=_keep)
