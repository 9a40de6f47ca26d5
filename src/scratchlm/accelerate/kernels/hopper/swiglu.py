"""SwiGLU's gate inside the two products beside it, for Hopper's tensor cores.

    forward    a = x W1ᵀ,  b = x W3ᵀ,  s = σ(a),    Q = as,  h = Qb,  P = b(s + Q(1 − s))
    backward   ∂h = ∂y W2,    ∂a = ∂h ⊙ P,    ∂b = ∂h ⊙ Q

As kernels of their own, the gate and its backward read and write what the product before them has
just written: 3 and 5 passes over (tokens, d_ff). Here h leaves with P and Q, a and b stay where
they were summed, and ∂h never lies in memory. How the products run, and what waits for what:
`turns.py`.

The products take all that shared memory can carry. So P and Q, which nobody else reads, do not pass
through it: they lie in memory as the threads hold them, tile by tile, 16 bytes of each thread's in
turn. The backward pass asks for a tile's first half before its products, and has it after.
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
    power_of_two,
    shared,
    taken_in_turn,
)

FORWARD_STAGES = 6  # of the ring: only h leaves through shared memory


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


# What forward keeps for backward: tiles of 128 × 64, each 8,192 numbers as the threads hold them

_KEPT = gl.constexpr(128 * 64)


@gluon.jit
def _kept_place(kept, m, n, across, KIND: gl.constexpr):
    """Return the addresses of tile (m, n) of P (kind 0) or Q (1), 16 bytes a thread at a time."""
    lines: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    tile = (m * across + n) * 2 + KIND
    return kept + tile.to(gl.int64) * _KEPT + gl.arange(0, _KEPT, lines)


@gluon.jit
def _write_kept(place, x):
    """Write a tile; no number moves to another thread.

    Row 64i + 16w + 8j + q and column 16g + 8h + 2p + e of it are in warp w, thread 4q + p.
    """
    lines: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    x = x.reshape(2, 4, 2, 8, 4, 2, 4, 2)  # i w j q g h p e
    x = x.permute(0, 4, 1, 3, 6, 5, 2, 7).reshape(_KEPT)
    gl.store(place, gl.convert_layout(x, lines, assert_trivial=True))


@gluon.jit
def _as_tile(x):
    """Return what was read as a tile again."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    x = x.reshape(2, 4, 4, 8, 4, 2, 2, 2)  # i g w q p h j e
    x = x.permute(0, 2, 6, 3, 1, 5, 4, 7).reshape(128, 64)
    return gl.convert_layout(x, half, assert_trivial=True).to(gl.float32)


# Backward: ∂y W2, times P and Q


@gluon.jit
def _consume_back(
    descs,
    kept,
    rings,
    out,
    bars,
    sizes,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    C: gl.constexpr,
):
    _, _, left_out, right_out = descs
    tiles_down, tiles_across, depth, across = sizes
    for i in range(C, count(tiles_down, tiles_across), 2):
        m, n = mine(i, tiles_down, tiles_across, GROUP)
        p = gl.load(_kept_place(kept, m, 2 * n, across, 0))  # on their way under the products
        q = gl.load(_kept_place(kept, m, 2 * n, across, 1))
        parts = halves(taken_in_turn(rings, bars, i, depth, STAGES, C, False))
        second = gl.minimum(2 * n + 1, across - 1)  # past the last column nothing is written
        for h in gl.static_range(2):
            da = (parts[h] * _as_tile(p)).to(gl.bfloat16)
            db = (parts[h] * _as_tile(q)).to(gl.bfloat16)
            tma.store_wait(0)  # what left these buffers before
            out.index(2 * C).store(da)
            out.index(2 * C + 1).store(db)
            fence_async_shared()
            if h == 0:
                p = gl.load(_kept_place(kept, m, second, across, 0))
                q = gl.load(_kept_place(kept, m, second, across, 1))
            row, column = m * 128, n * 128 + 64 * h
            tma.async_copy_shared_to_global(left_out, [row, column], out.index(2 * C))
            tma.async_copy_shared_to_global(right_out, [row, column], out.index(2 * C + 1))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*SIZES, "across"])
def _back(
    dy,
    w2,
    left_out,
    right_out,
    kept,
    across,
    tiles_down,
    tiles_across,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    rings, out, bars = shared(dy, w2, left_out, STAGES, 4, False)
    descs = (dy, w2, left_out, right_out)
    sizes = (tiles_down, tiles_across, depth)
    wide = (tiles_down, tiles_across, depth, across)
    gl.warp_specialize(
        [
            (_consume_back, (descs, kept, rings, out, bars, wide, STAGES, GROUP, 0)),
            (_consume_back, (descs, kept, rings, out, bars, wide, STAGES, GROUP, 1)),
            (load, (dy, w2, rings, bars, sizes, STAGES, GROUP, False)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Forward: x [W1; W3]ᵀ and the gate; a tile is 64 columns of a and the same 64 of b


@gluon.jit
def _load_forward(descs, rings, bars, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr):
    x, w1, w3, _ = descs
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
    descs, kept, rings, out, bars, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr, C: gl.constexpr
):
    hidden = descs[3]
    tiles_down, tiles_across, depth = sizes
    for i in range(C, count(tiles_down, tiles_across), 2):
        a, b = halves(taken_in_turn(rings, bars, i, depth, STAGES, C, True))
        m, n = mine(i, tiles_down, tiles_across, GROUP)
        s = _sigmoid(a)
        q = a * s
        h = (q * b).to(gl.bfloat16)
        tma.store_wait(0)  # of the tile before: long since read out
        out.index(C).store(h)
        fence_async_shared()
        tma.async_copy_shared_to_global(hidden, [m * 128, n * 64], out.index(C))
        _write_kept(_kept_place(kept, m, n, tiles_across, 1), q.to(gl.bfloat16))
        p = b * (s + q * (1.0 - s))
        _write_kept(_kept_place(kept, m, n, tiles_across, 0), p.to(gl.bfloat16))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def _forward(
    x,
    w1,
    w3,
    hidden,
    kept,
    tiles_down,
    tiles_across,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    rings, out, bars = shared(x, w1, hidden, STAGES, 2, True)
    descs = (x, w1, w3, hidden)
    sizes = (tiles_down, tiles_across, depth)
    gl.warp_specialize(
        [
            (_consume_forward, (descs, kept, rings, out, bars, sizes, STAGES, GROUP, 0)),
            (_consume_forward, (descs, kept, rings, out, bars, sizes, STAGES, GROUP, 1)),
            (_load_forward, (descs, rings, bars, sizes, STAGES, GROUP)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Calls


def gated_product(x: Tensor, w13: Tensor, programs: int = 0) -> tuple[Tensor, Tensor]:
    """Return P and Q, as `gated_product_back` reads them, and h, in bfloat16 as all is."""
    (rows, d), d_ff = x.shape, len(w13) // 2
    x, w13 = x.contiguous(), w13.contiguous()
    kept, hidden = x.new_empty(kept_size(rows, d_ff)), x.new_empty(rows, d_ff)
    tensors = [
        described(x, 128, 64),
        *(described(half, 64, 64) for half in w13.split(d_ff)),
        described(hidden, 128, 64),
    ]
    sizes = (rows // TILE, triton.cdiv(d_ff, 64), d // DEEP)
    launch(_forward, [*tensors, kept], sizes, programs, stages=FORWARD_STAGES)
    return kept, hidden


def kept_size(rows: int, d_ff: int) -> int:
    """Return how many numbers P and Q are: whole tiles."""
    return 2 * rows * 64 * triton.cdiv(d_ff, 64)


def gated_product_back(dy: Tensor, w2: Tensor, kept: Tensor, programs: int = 0) -> Tensor:
    """Return the gradient of [a | b], where that of W2 h is `dy`."""
    (rows, d), d_ff = dy.shape, w2.shape[1]
    dy, w2 = dy.contiguous(), w2.contiguous()
    out = dy.new_empty(rows, 2 * d_ff)
    tensors = [
        described(dy, 128, 64),
        described(w2, 64, 128),
        *(described(half, 128, 64) for half in out.split(d_ff, dim=1)),
    ]
    sizes = (rows // TILE, triton.cdiv(d_ff, TILE), d // DEEP)
    launch(_back, [*tensors, kept, triton.cdiv(d_ff, 64)], sizes, programs)
    return out


# As torch sees them: whole operations, which a compiler does not open. The first is all of SwiGLU,
# and has its gradient from torch.library: so a compiler, too, computes it again where it is told to
# keep nothing (of an autograd.Function torch 2.11 keeps everything).


@torch.library.custom_op("scratchlm::swiglu", mutates_args=(), device_types="cuda")
def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return W2 h of rows x, and what is kept for the backward pass: P and Q, and h."""
    kept, hidden = gated_product(x, w13)
    return hidden @ w2.t(), kept, hidden


@torch.library.custom_op("scratchlm::gated_product_back", mutates_args=(), device_types="cuda")
def through_gate(dy: Tensor, w2: Tensor, kept: Tensor) -> Tensor:
    """Return the gradient of [a | b]."""
    return gated_product_back(dy, w2, kept)


@swiglu.register_fake
def _(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, d_ff = len(x), len(w13) // 2
    kept, hidden = x.new_empty(kept_size(rows, d_ff)), x.new_empty(rows, d_ff)
    return x.new_empty(rows, len(w2)), kept, hidden


@through_gate.register_fake
def _(dy: Tensor, w2: Tensor, kept: Tensor) -> Tensor:
    return dy.new_empty(len(dy), 2 * w2.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _slopes(ctx: Any, slope: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    x, w13, w2, kept, hidden = ctx.saved_tensors
    for_x, for_13, for_2 = ctx.needs_input_grad
    of_x: Tensor | None = None
    of_13: Tensor | None = None
    if for_x or for_13:
        of_joined = through_gate(slope, w2, kept)
        of_x = of_joined @ w13 if for_x else None
        of_13 = of_joined.t() @ x if for_13 else None
    return of_x, of_13, slope.t() @ hidden if for_2 else None


swiglu.register_autograd(_slopes, setup_context=_keep)
