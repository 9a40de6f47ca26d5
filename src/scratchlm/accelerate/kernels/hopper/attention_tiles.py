"""Tiles of 64 tokens of one head, as a consumer's threads hold them in attention's backward pass.

wgmma's accumulator layout puts row 16w + 8j + q and column 8g + 2p + e into warp w, thread 4q + p.
A tile in memory keeps that order: 16 bytes of each thread in turn ("thread order"). So a tile is
stored, added to what is stored, and rotated by RoPE tables in the same order, and no value moves to
another thread.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and device values: Python has no types for them.

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SCALE = gl.constexpr(0.125)  # 1/√64
SCALE_LOG2E = gl.constexpr(0.125 / math.log(2))  # exp(s/8) = 2^(s · SCALE_LOG2E)
TILE_SIZE = gl.constexpr(64 * 64)
ACCUMULATOR = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OPERAND_A = gl.constexpr(gl.DotOperandLayout(0, ACCUMULATOR.value, 2))  # in registers
THREAD_ORDER = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # 16 bytes per thread in turn


@gluon.jit
def to_thread_order(x):
    """Return a tile as a vector in thread order."""
    x = x.reshape(4, 2, 8, 8, 4, 2).permute(3, 0, 2, 4, 1, 5).reshape(TILE_SIZE)  # w j q g p e
    return gl.convert_layout(x, THREAD_ORDER, assert_trivial=True)


@gluon.jit
def from_thread_order(x):
    """Return a vector in thread order as a tile."""
    x = x.reshape(8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, 64)  # g w q p j e
    return gl.convert_layout(x, ACCUMULATOR, assert_trivial=True)


@gluon.jit
def atomic_add_tile(pointers, x):
    """Add a tile to global memory, without waiting for the result."""
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8}; mov.u32 $0, 0;",
        "=r,l,l,l,l,f,f,f,f",
        [pointers.to(gl.int64, bitcast=True), to_thread_order(x)],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _load_table(tables, tile, INTERLEAVED: gl.constexpr):
    """Load 64 × 32 values of a table packed by `qkv_rope.rope_tables`; volatile: at once."""
    pointers = tables + tile * 2048 + gl.arange(0, 2048, THREAD_ORDER)
    x = gl.load(pointers, volatile=True).reshape(4, 4, 8, 4, 2, 2)
    if INTERLEAVED:
        x = x.permute(1, 5, 2, 0, 4, 3)  # g w q p h j
    else:
        x = x.permute(1, 4, 2, 0, 3, 5)  # g w q p j e
    return x.reshape(64, 32)


@gluon.jit
def load_cos_sin(rope, unit, tile, heads, INTERLEAVED: gl.constexpr):
    """Return cos and sin of a tile's tokens."""
    tables, table_tiles, batch_step = rope
    at = unit // heads * batch_step + tile
    c = _load_table(tables, at, INTERLEAVED)
    return c, _load_table(tables, table_tiles + at, INTERLEAVED)


@gluon.jit
def scale_and_rotate_back(x, cos_sin, INTERLEAVED: gl.constexpr):
    """Multiply a tile by 1/8 and by RoPE's transpose; no value moves to another thread."""
    x *= SCALE
    if INTERLEAVED:
        a, b = x.reshape(64, 32, 2).split()
    else:
        a, b = x.reshape(64, 2, 32).permute(0, 2, 1).split()
    c = gl.convert_layout(cos_sin[0], a.type.layout, assert_trivial=True)
    s = gl.convert_layout(cos_sin[1], a.type.layout, assert_trivial=True)
    y = gl.join(a * c + b * s, b * c - a * s)
    if not INTERLEAVED:
        y = y.permute(0, 2, 1)
    y = gl.convert_layout(y.reshape(64, 64), ACCUMULATOR, assert_trivial=True)
    return y.to(gl.bfloat16)
