"""The joined Q, K, V projection with a fused RoPE epilogue, on Hopper's tensor cores.

    [q; k; v] = [W_Q; W_K; W_V] x,    q and k rotated: (a, b) → (a cos − b sin, a sin + b cos)

A RoPE kernel of its own (`triton/qkv_norm_rope.py`) reads what the GEMM has just written and writes
it once more. Here an output tile is two heads of 64 channels, and both channels of a pair are in
one thread: it rotates them before they are rounded, and q, k and v are views of the GEMM's output.
The main loop: `pingpong_gemm.py`.

`qkv_rope_attention` is the projection, RoPE and causal attention as one differentiable function:
cuDNN's forward pass reads the views, and our backward pass (`attention_backward.py`) rotates back
as it writes.
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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from scratchlm.accelerate.kernels.hopper.attention_backward import attention_backward
from scratchlm.accelerate.kernels.hopper.pingpong_gemm import (
    BLOCK_K,
    SIZES,
    TILE,
    allocate,
    ith_tile,
    launch,
    load_operands,
    num_tiles,
    pingpong_multiply,
    split_columns,
    tma_descriptor,
)

HEAD_DIM = 64


@gluon.jit
def _split_pairs(x, INTERLEAVED: gl.constexpr):
    """Split 64 channels into the first and the second of each pair."""
    if INTERLEAVED:
        x = x.reshape(128, 32, 2)
    else:
        x = x.reshape(128, 2, 32).permute(0, 2, 1)
    return x.split()


@gluon.jit
def _rotate(x, c, s, INTERLEAVED: gl.constexpr):
    """Rotate a head of 128 tokens; no value moves to another thread."""
    a, b = _split_pairs(x, INTERLEAVED)
    c = gl.convert_layout(c, a.type.layout, assert_trivial=True)
    s = gl.convert_layout(s, a.type.layout, assert_trivial=True)
    y = gl.join(a * c - b * s, a * s + b * c)
    if not INTERLEAVED:
        y = y.permute(0, 2, 1)
    return gl.convert_layout(y.reshape(128, 64), x.type.layout, assert_trivial=True)


@gluon.jit
def _load_table(tables, block, INTERLEAVED: gl.constexpr):
    """Load a table's 128 × 32 values for a tile's tokens (`rope_tables`)."""
    by_thread: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    x = gl.load(tables + block * 4096 + gl.arange(0, 4096, by_thread))
    if INTERLEAVED:
        x = x.reshape(2, 4, 4, 8, 4, 2, 2).permute(0, 2, 6, 3, 1, 5, 4)  # i g w q p h j
    else:
        x = x.reshape(2, 4, 4, 8, 4, 2, 2).permute(0, 2, 5, 3, 1, 4, 6)  # i g w q p j e
    return x.reshape(128, 32)


@gluon.jit
def _consume(
    y,
    rope,
    rings,
    out,
    bars,
    sizes,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    C: gl.constexpr,
):
    """Consumer C: the GEMM's tiles, and RoPE as their epilogue."""
    tables, table_blocks, rotated = rope
    tiles_m, tiles_n, k_blocks = sizes
    for i in range(C, num_tiles(tiles_m, tiles_n), 2):
        m, n = ith_tile(i, tiles_m, tiles_n, GROUP)
        c = _load_table(tables, m % table_blocks, INTERLEAVED)  # in flight during the main loop
        s = _load_table(tables, table_blocks + m % table_blocks, INTERLEAVED)
        heads = split_columns(pingpong_multiply(rings, bars, i, k_blocks, STAGES, C, True))
        tma.store_wait(0)  # the previous tile has left the buffers long ago
        for h in gl.static_range(2):
            head = heads[h]
            if n * 128 + 64 * h < rotated:
                head = _rotate(head, c, s, INTERLEAVED)
            out.index(2 * C + h).store(head.to(gl.bfloat16))
        fence_async_shared()
        for h in gl.static_range(2):
            corner = [m * 128, n * 128 + 64 * h]
            tma.async_copy_shared_to_global(y, corner, out.index(2 * C + h))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*SIZES, "table_blocks", "rotated"])
def _qkv_rope_kernel(
    x,
    w,
    y,
    tables,
    table_blocks,
    rotated,
    tiles_m,
    tiles_n,
    k_blocks,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):
    rings, out, bars = allocate(x, w, y, STAGES, 4, True)
    rope = (tables, table_blocks, rotated)
    sizes = (tiles_m, tiles_n, k_blocks)
    gl.warp_specialize(
        [
            (_consume, (y, rope, rings, out, bars, sizes, STAGES, GROUP, INTERLEAVED, 0)),
            (_consume, (y, rope, rings, out, bars, sizes, STAGES, GROUP, INTERLEAVED, 1)),
            (load_operands, (x, w, rings, bars, sizes, STAGES, GROUP, True)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Host side


def rope_tables(cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pack both tables (…, positions, 32) in the kernel's register layout, 128 positions at a time.

    Position 64i + 16w + 8j + q and pair 8g + 4h + p (in the half layout, 8g + 2p + e) belong to
    warp w, thread 4q + p, 16 bytes of each thread in turn.
    """
    both = torch.stack((cos, sin))
    if interleaved:  # i w j q g h p
        return both.reshape(2, -1, 4, 2, 8, 4, 2, 4).permute(0, 1, 5, 2, 4, 7, 6, 3).contiguous()
    return both.reshape(2, -1, 4, 2, 8, 4, 4, 2).permute(0, 1, 5, 2, 4, 6, 3, 7).contiguous()


def qkv_rope_gemm(
    x: Tensor, w: Tensor, tables: Tensor, rotated: int, interleaved: bool, programs: int = 0
) -> Tensor:
    """Return x Wᵀ (tokens, all heads · 64) with RoPE applied to its first `rotated` columns.

    The packed tables serve the tokens in turn: they are as long as a sequence, or as all of them.
    """
    (rows, d), columns = x.shape, len(w)
    x, w = x.contiguous(), w.contiguous()
    y = x.new_empty(rows, columns)
    descriptors = [
        tma_descriptor(x, TILE, BLOCK_K),
        tma_descriptor(w, TILE, BLOCK_K),
        tma_descriptor(y, TILE, 64),
    ]
    arguments = [*descriptors, tables, tables.numel() // (2 * TILE * HEAD_DIM // 2), rotated]
    sizes = (rows // TILE, triton.cdiv(columns, TILE), d // BLOCK_K)
    launch(_qkv_rope_kernel, arguments, sizes, programs, INTERLEAVED=interleaved)
    return y


# As torch sees it: one opaque op, which a compiler does not trace into


@torch.library.custom_op("scratchlm::qkv_rope_product", mutates_args=(), device_types="cuda")
def qkv_rope_product(
    x: Tensor, w: Tensor, tables: Tensor, rotated: int, interleaved: bool
) -> Tensor:
    """Return x Wᵀ (tokens, all heads · 64) with RoPE applied to its first `rotated` columns."""
    return qkv_rope_gemm(x, w, tables, rotated, interleaved)


@qkv_rope_product.register_fake
def _(x: Tensor, w: Tensor, tables: Tensor, rotated: int, interleaved: bool) -> Tensor:
    return x.new_empty(len(x), len(w))


def _project(
    x: Tensor, w: Tensor, tables: Tensor, num_heads: tuple[int, int], interleaved: bool
) -> Tensor:
    """Return [Q | K | V] (batch, seq, all heads · 64) with RoPE applied."""
    batch, seq, d = x.shape
    rotated = sum(num_heads) * HEAD_DIM
    qkv = qkv_rope_product(x.reshape(-1, d), w, tables, rotated, interleaved)
    return qkv.view(batch, seq, -1)


def _split_heads(qkv: Tensor, num_heads: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v (batch, heads, seq, 64) as views of (batch, seq, all heads · 64)."""
    heads, kv_heads = num_heads
    by_head = qkv.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
    q, k, v = by_head.split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v


def _gemm_gradients(
    ctx: Any, grad_qkv: Tensor, x: Tensor, w: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and w that are needed."""
    grad_qkv = grad_qkv.view(-1, len(w))
    needs_x, needs_w, *_ = ctx.needs_input_grad
    grad_x = (grad_qkv @ w).view(x.shape) if needs_x else None
    grad_w = grad_qkv.t() @ x.reshape(-1, x.shape[-1]) if needs_w else None
    return grad_x, grad_w


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return causal attention's output, laid out as q, and the log-sum-exp of the scores.

    cuDNN itself maps groups of query heads to fewer heads of k and v.
    """
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    attn_out, log_sum_exp, *_ = attention(q, k, v, None, True, 0.0, True)
    return attn_out, log_sum_exp


class _QkvRopeAttention(torch.autograd.Function):
    """From the layer's input to attention's output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        tables: Tensor,
        heads: int,
        kv_heads: int,
        interleaved: bool,
    ) -> Tensor:
        qkv = _project(x, w, tables, (heads, kv_heads), interleaved)
        by_head, log_sum_exp = cudnn_attention(*_split_heads(qkv, (heads, kv_heads)))
        attn_out = by_head.transpose(1, 2).flatten(2)  # a view: cuDNN follows q's layout
        ctx.save_for_backward(x, w, qkv, attn_out, log_sum_exp, tables)
        ctx.interleaved = interleaved
        return attn_out

    @staticmethod
    def backward(ctx: Any, grad_attn_out: Tensor) -> tuple[Tensor | None, ...]:
        x, w, qkv, attn_out, log_sum_exp, tables = ctx.saved_tensors
        grad_qkv = attention_backward(
            qkv, attn_out, grad_attn_out, log_sum_exp, tables, ctx.interleaved
        )
        return *_gemm_gradients(ctx, grad_qkv, x, w), *[None] * 4


def qkv_rope_attention(
    x: Tensor, w: Tensor, tables: Tensor, num_heads: tuple[int, int], interleaved: bool
) -> Tensor:
    """Return causal attention's output (batch, seq, heads · 64) for x (batch, seq, d).

    x and w ((heads + 2 kv_heads) · 64, d) are in bfloat16, seq is a multiple of 128, d of 64;
    `tables` are packed by `rope_tables`; `num_heads`: of queries, of keys and values.
    """
    attn_out: Tensor = _QkvRopeAttention.apply(x, w, tables, *num_heads, interleaved)
    return attn_out
