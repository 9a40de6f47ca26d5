"""The accumulators of dQ in attention's backward pass (`attention_backward.py`).

dQ of a tile of queries is a sum over blocks of keys. Between two blocks it is kept in float32, in
thread order (`attention_tiles.py`): the last tiles' accumulators in shared memory, the others' in
global memory. With the last block it is rotated back and written out.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and device values: Python has no types for them.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from scratchlm.accelerate.kernels.hopper.attention_tiles import (
    THREAD_ORDER,
    TILE_SIZE,
    atomic_add_tile,
    from_thread_order,
    load_cos_sin,
    scale_and_rotate_back,
    to_thread_order,
)


@gluon.jit
def _accumulate(dq, pointers, in_shared, slot, started):
    """Add a tile to its accumulator, or write it there if the sum has not `started`."""
    if slot >= 0:
        x = to_thread_order(dq)
        if started:
            x += in_shared.index(slot).load(THREAD_ORDER)
        in_shared.index(slot).store(x)
    elif started:
        atomic_add_tile(pointers, dq)
    else:
        gl.store(pointers, to_thread_order(dq))


@gluon.jit
def _total(dq, pointers, in_shared, slot, started):
    """Return a tile plus its accumulator."""
    if started:
        if slot >= 0:
            dq += from_thread_order(in_shared.index(slot).load(THREAD_ORDER))
        else:  # past the L1 cache, which may hold an older sum
            dq += from_thread_order(gl.load(pointers, cache_modifier=".cg"))
    return dq


@gluon.jit
def head_origin(unit, sizes):
    """Return the row and the column where the queries of a (batch, head) begin."""
    heads, blocks, _ = sizes
    return unit // heads * blocks * 128, unit % heads * 64


@gluon.jit
def accumulate_dq(
    dq,
    pending,
    rope,
    outputs,
    sizes,
    INTERLEAVED: gl.constexpr,
    SPLIT: gl.constexpr,
    C: gl.constexpr,
):
    """Accumulate a tile of dQ; write it out if this was its last block of keys."""
    unit, tile, j, _ = pending
    accumulators, in_shared, first_in_shared, out, grad = outputs
    pointers = accumulators + tile * TILE_SIZE + gl.arange(0, TILE_SIZE, THREAD_ORDER)
    slot = tile - first_in_shared
    if SPLIT:  # other programs add to it too
        atomic_add_tile(pointers + unit.to(gl.int64) * sizes[1] * 2 * TILE_SIZE, dq)
    elif tile >> 1 == j:
        cos_sin = load_cos_sin(rope, unit, tile, sizes[0], INTERLEAVED)
        total = _total(dq, pointers, in_shared, slot, j > 0)
        tma.store_wait(0)  # the previous block has left the buffer long ago
        out.index(2 * C).store(scale_and_rotate_back(total, cos_sin, INTERLEAVED))
        fence_async_shared()
        row, column = head_origin(unit, sizes)
        tma.async_copy_shared_to_global(grad, [row + tile * 64, column], out.index(2 * C))
    else:
        _accumulate(dq, pointers, in_shared, slot, j > 0)
