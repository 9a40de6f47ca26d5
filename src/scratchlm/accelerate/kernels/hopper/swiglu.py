"""SwiGLU with its gate fused into the two GEMMs beside it, on Hopper's tensor cores.

    forward    a = x W1ᵀ,  b = x W3ᵀ,  s = σ(a),    Q = as,  h = Qb,  P = b(s + Q(1 − s))
    backward   dh = dy W2,    da = dh ⊙ P,    db = dh ⊙ Q

As kernels of their own, the gate and its backward pass read and write what the GEMM before them has
just written: 3 and 5 passes over (tokens, d_ff). Here the forward epilogue writes h, P and Q; a, b
and dh never lie in memory. The main loop: `pingpong_gemm.py`.

The GEMMs' rings take all the bandwidth of shared memory. So P and Q, which only the backward kernel
reads, do not pass through it: they lie in memory in the threads' register layout, tile by tile, 16
bytes of each thread in turn. The backward kernel issues the loads of a tile's first half before its
main loop.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and device values: Python has no types for them.

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
    BLOCK_K,
    SIZES,
    TILE,
    allocate,
    exp2,
    ith_tile,
    launch,
    load_operands,
    num_tiles,
    pingpong_multiply,
    split_columns,
    tma_descriptor,
)

FORWARD_STAGES = 6  # of the ring: only h needs output buffers


@gluon.jit
def _sigmoid(x):
    """Return 1 / (1 + exp(−x)) by two instructions."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [exp2(x * -1.4426950408889634) + 1.0],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


# The factors P and Q: tiles of 128 × 64, each 8,192 values in the threads' register layout

_FACTOR_TILE = gl.constexpr(128 * 64)


@gluon.jit
def _factor_pointers(factors, m, n, tiles_n, WHICH: gl.constexpr):
    """Return pointers to tile (m, n) of P (WHICH 0) or Q (1), 16 bytes per thread at a time."""
    by_thread: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    tile = (m * tiles_n + n) * 2 + WHICH
    return factors + tile.to(gl.int64) * _FACTOR_TILE + gl.arange(0, _FACTOR_TILE, by_thread)


@gluon.jit
def _store_factor(pointers, x):
    """Store a tile; no value moves to another thread.

    Row 64i + 16w + 8j + q and column 16g + 8h + 2p + e are in warp w, thread 4q + p.
    """
    by_thread: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    x = x.reshape(2, 4, 2, 8, 4, 2, 4, 2)  # i w j q g h p e
    x = x.permute(0, 4, 1, 3, 6, 5, 2, 7).reshape(_FACTOR_TILE)
    gl.store(pointers, gl.convert_layout(x, by_thread, assert_trivial=True))


@gluon.jit
def _factor_tile(x):
    """Return a loaded factor as a tile, in float32."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    x = x.reshape(2, 4, 4, 8, 4, 2, 2, 2)  # i g w q p h j e
    x = x.permute(0, 2, 6, 3, 1, 5, 4, 7).reshape(128, 64)
    return gl.convert_layout(x, half, assert_trivial=True).to(gl.float32)


# Backward: dy W2, times P and Q


@gluon.jit
def _consume_backward(
    descs,
    factors,
    rings,
    out,
    bars,
    sizes,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    C: gl.constexpr,
):
    _, _, da_out, db_out = descs
    tiles_m, tiles_n, k_blocks, factor_tiles = sizes
    for i in range(C, num_tiles(tiles_m, tiles_n), 2):
        m, n = ith_tile(i, tiles_m, tiles_n, GROUP)
        # In flight during the main loop
        p = gl.load(_factor_pointers(factors, m, 2 * n, factor_tiles, 0))
        q = gl.load(_factor_pointers(factors, m, 2 * n, factor_tiles, 1))
        dh = split_columns(pingpong_multiply(rings, bars, i, k_blocks, STAGES, C, False))
        second = gl.minimum(2 * n + 1, factor_tiles - 1)  # past the last column nothing is written
        for h in gl.static_range(2):
            da = (dh[h] * _factor_tile(p)).to(gl.bfloat16)
            db = (dh[h] * _factor_tile(q)).to(gl.bfloat16)
            tma.store_wait(0)  # the buffers are free again
            out.index(2 * C).store(da)
            out.index(2 * C + 1).store(db)
            fence_async_shared()
            if h == 0:
                p = gl.load(_factor_pointers(factors, m, second, factor_tiles, 0))
                q = gl.load(_factor_pointers(factors, m, second, factor_tiles, 1))
            row, column = m * 128, n * 128 + 64 * h
            tma.async_copy_shared_to_global(da_out, [row, column], out.index(2 * C))
            tma.async_copy_shared_to_global(db_out, [row, column], out.index(2 * C + 1))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*SIZES, "factor_tiles"])
def _swiglu_gemm_backward_kernel(
    dy,
    w2,
    da_out,
    db_out,
    factors,
    factor_tiles,
    tiles_m,
    tiles_n,
    k_blocks,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    rings, out, bars = allocate(dy, w2, da_out, STAGES, 4, False)
    descs = (dy, w2, da_out, db_out)
    sizes = (tiles_m, tiles_n, k_blocks)
    consumer_sizes = (tiles_m, tiles_n, k_blocks, factor_tiles)
    gl.warp_specialize(
        [
            (
                _consume_backward,
                (descs, factors, rings, out, bars, consumer_sizes, STAGES, GROUP, 0),
            ),
            (
                _consume_backward,
                (descs, factors, rings, out, bars, consumer_sizes, STAGES, GROUP, 1),
            ),
            (load_operands, (dy, w2, rings, bars, sizes, STAGES, GROUP, False)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Forward: x [W1; W3]ᵀ and the gate; a tile is 64 columns of a and the same 64 of b


@gluon.jit
def _load_forward(descs, rings, bars, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr):
    x, w1, w3, _ = descs
    full, empty, _ = bars
    tiles_m, tiles_n, k_blocks = sizes
    s = 0
    phase = 1
    for i in range(num_tiles(tiles_m, tiles_n)):
        m, n = ith_tile(i, tiles_m, tiles_n, GROUP)
        for k in range(k_blocks):
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
    descs,
    factors,
    rings,
    out,
    bars,
    sizes,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    C: gl.constexpr,
):
    hidden = descs[3]
    tiles_m, tiles_n, k_blocks = sizes
    for i in range(C, num_tiles(tiles_m, tiles_n), 2):
        a, b = split_columns(pingpong_multiply(rings, bars, i, k_blocks, STAGES, C, True))
        m, n = ith_tile(i, tiles_m, tiles_n, GROUP)
        s = _sigmoid(a)
        q = a * s
        h = (q * b).to(gl.bfloat16)
        tma.store_wait(0)  # the previous tile has left the buffer long ago
        out.index(C).store(h)
        fence_async_shared()
        tma.async_copy_shared_to_global(hidden, [m * 128, n * 64], out.index(C))
        _store_factor(_factor_pointers(factors, m, n, tiles_n, 1), q.to(gl.bfloat16))
        p = b * (s + q * (1.0 - s))
        _store_factor(_factor_pointers(factors, m, n, tiles_n, 0), p.to(gl.bfloat16))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def _swiglu_gemm_kernel(
    x,
    w1,
    w3,
    hidden,
    factors,
    tiles_m,
    tiles_n,
    k_blocks,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    rings, out, bars = allocate(x, w1, hidden, STAGES, 2, True)
    descs = (x, w1, w3, hidden)
    sizes = (tiles_m, tiles_n, k_blocks)
    gl.warp_specialize(
        [
            (_consume_forward, (descs, factors, rings, out, bars, sizes, STAGES, GROUP, 0)),
            (_consume_forward, (descs, factors, rings, out, bars, sizes, STAGES, GROUP, 1)),
            (_load_forward, (descs, rings, bars, sizes, STAGES, GROUP)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Host side


def swiglu_gemm(x: Tensor, w13: Tensor, programs: int = 0) -> tuple[Tensor, Tensor]:
    """Return the factors P and Q, as `swiglu_gemm_backward` reads them, and h; all in bfloat16."""
    (rows, d), d_ff = x.shape, len(w13) // 2
    x, w13 = x.contiguous(), w13.contiguous()
    factors, hidden = x.new_empty(factors_size(rows, d_ff)), x.new_empty(rows, d_ff)
    descriptors = [
        tma_descriptor(x, 128, 64),
        *(tma_descriptor(half, 64, 64) for half in w13.split(d_ff)),
        tma_descriptor(hidden, 128, 64),
    ]
    sizes = (rows // TILE, triton.cdiv(d_ff, 64), d // BLOCK_K)
    arguments = [*descriptors, factors]
    launch(_swiglu_gemm_kernel, arguments, sizes, programs, stages=FORWARD_STAGES)
    return factors, hidden


def factors_size(rows: int, d_ff: int) -> int:
    """Return how many values P and Q have together: whole tiles."""
    return 2 * rows * 64 * triton.cdiv(d_ff, 64)


def swiglu_gemm_backward(dy: Tensor, w2: Tensor, factors: Tensor, programs: int = 0) -> Tensor:
    """Return [da | db] (rows, 2 d_ff), given the gradient of y."""
    (rows, d), d_ff = dy.shape, w2.shape[1]
    dy, w2 = dy.contiguous(), w2.contiguous()
    out = dy.new_empty(rows, 2 * d_ff)
    descriptors = [
        tma_descriptor(dy, 128, 64),
        tma_descriptor(w2, 64, 128),
        *(tma_descriptor(half, 128, 64) for half in out.split(d_ff, dim=1)),
    ]
    sizes = (rows // TILE, triton.cdiv(d_ff, TILE), d // BLOCK_K)
    arguments = [*descriptors, factors, triton.cdiv(d_ff, 64)]
    launch(_swiglu_gemm_backward_kernel, arguments, sizes, programs)
    return out


# As torch sees them: opaque ops, which a compiler does not trace into. The first is all of SwiGLU
# and has its gradient from torch.library: so a compiler, too, recomputes it where checkpointing
# says so (of an autograd.Function torch 2.11 saves everything).


@torch.library.custom_op("scratchlm::swiglu", mutates_args=(), device_types="cuda")
def swiglu_op(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y of rows x, and what the backward pass needs: P and Q, and h."""
    factors, hidden = swiglu_gemm(x, w13)
    return hidden @ w2.t(), factors, hidden


@torch.library.custom_op("scratchlm::swiglu_backward", mutates_args=(), device_types="cuda")
def swiglu_backward_op(dy: Tensor, w2: Tensor, factors: Tensor) -> Tensor:
    """Return [da | db]."""
    return swiglu_gemm_backward(dy, w2, factors)


@swiglu_op.register_fake
def _(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, d_ff = len(x), len(w13) // 2
    factors, hidden = x.new_empty(factors_size(rows, d_ff)), x.new_empty(rows, d_ff)
    return x.new_empty(rows, len(w2)), factors, hidden


@swiglu_backward_op.register_fake
def _(dy: Tensor, w2: Tensor, factors: Tensor) -> Tensor:
    return dy.new_empty(len(dy), 2 * w2.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad_output: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    x, w13, w2, factors, hidden = ctx.saved_tensors
    needs_x, needs_w13, needs_w2 = ctx.needs_input_grad
    grad_x: Tensor | None = None
    grad_w13: Tensor | None = None
    if needs_x or needs_w13:
        grad_ab = swiglu_backward_op(grad_output, w2, factors)
        grad_x = grad_ab @ w13 if needs_x else None
        grad_w13 = grad_ab.t() @ x if needs_w13 else None
    return grad_x, grad_w13, grad_output.t() @ hidden if needs_w2 else None


swiglu_op.register_autograd(_backward, setup_context=_setup_context)


def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Return W2(SiLU(W1 x) ⊙ W3 x) for x of any shape, all in bfloat16; w13 is [W1; W3]."""
    y: Tensor = swiglu_op(x.reshape(-1, x.shape[-1]), w13, w2)[0]
    return y.view(*x.shape[:-1], len(w2))
