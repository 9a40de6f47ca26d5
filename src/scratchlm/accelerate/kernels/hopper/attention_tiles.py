"""Tiles of 64 tokens of a head, as a consumer's threads hold them in attention's kernels.

Row 16w + 8j + q and column 8g + 2p + e are with warp w, thread 4q + p. So they can lie in memory,
16 bytes of each thread's in turn, be added to what lies there, and be turned back by tables laid
out in the same way: no number moves to another thread.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and numbers of the device: Python has no types for them.

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SCALE = gl.constexpr(0.125)  # 1/√64
TO_POWERS = gl.constexpr(0.125 / math.log(2))  # exp(s/8) = 2 to the power of s · this
SIZE = gl.constexpr(64 * 64)
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))  # of a product, from registers
LINES = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))  # 16 bytes of each thread's in turn


@gluon.jit
def in_lines(x):
    """Lay a tile's numbers in a line."""
    x = x.reshape(4, 2, 8, 8, 4, 2).permute(3, 0, 2, 4, 1, 5).reshape(SIZE)  # w j q g p e
    return gl.convert_layout(x, LINES, assert_trivial=True)


@gluon.jit
def as_tile(x):
    """Return the tile whose numbers lie in a line."""
    x = x.reshape(8, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(64, 64)  # g w q p j e
    return gl.convert_layout(x, SUMS, assert_trivial=True)


@gluon.jit
def add(place, x):
    """Add a tile to what lies there, and do not wait."""
    gl.inline_asm_elementwise(
        "red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8}; mov.u32 $0, 0;",
        "=r,l,l,l,l,f,f,f,f",
        [place.to(gl.int64, bitcast=True), in_lines(x)],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _angles(lines, place, INTERLEAVED: gl.constexpr):
    """Read a table's 64 × 32 numbers, laid out by `project_heads.in_lines`; at once: volatile."""
    at = lines + place * 2048 + gl.arange(0, 2048, LINES)
    x = gl.load(at, volatile=True).reshape(4, 4, 8, 4, 2, 2)
    if INTERLEAVED:
        x = x.permute(1, 5, 2, 0, 4, 3)  # g w q p h j
    else:
        x = x.permute(1, 4, 2, 0, 3, 5)  # g w q p j e
    return x.reshape(64, 32)


@gluon.jit
def tables_of(turn, unit, tile, heads, INTERLEAVED: gl.constexpr):
    """Return cos and sin of a tile's tokens."""
    lines, places, step = turn
    place = unit // heads * step + tile
    c = _angles(lines, place, INTERLEAVED)
    return c, _angles(lines, places + place, INTERLEAVED)


@gluon.jit
def turned_back(x, tables, INTERLEAVED: gl.constexpr):
    """Scale 64 tokens of a head and turn them back; no number moves to another thread."""
    x *= SCALE
    if INTERLEAVED:
        a, b = x.reshape(64, 32, 2).split()
    else:
        a, b = x.reshape(64, 2, 32).permute(0, 2, 1).split()
    c = gl.convert_layout(tables[0], a.type.layout, assert_trivial=True)
    s = gl.convert_layout(tables[1], a.type.layout, assert_trivial=True)
    y = gl.join(a * c + b * s, b * c - a * s)
    if not INTERLEAVED:
        y = y.permute(0, 2, 1)
    y = gl.convert_layout(y.reshape(64, 64), SUMS, assert_trivial=True)
    return y.to(gl.bfloat16)
