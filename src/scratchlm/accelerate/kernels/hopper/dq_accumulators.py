"""What becomes of a tile of ∂Q (`attend_back.py`): its sums wait for more keys, or it leaves.

Between two blocks of keys the sums lie as the threads hold them (`head_tiles.py`): the last tiles'
on shelves in shared memory, the others' in the memory.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and numbers of the device: Python has no types for them.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from scratchlm.accelerate.kernels.hopper.attention_tiles import (
    LINES,
    SIZE,
    add,
    as_tile,
    in_lines,
    tables_of,
    turned_back,
)


@gluon.jit
def _put_aside(dq, place, shelves, shelf, some):
    """Add a tile of ∂Q to its sums, or begin them where there are not `some`."""
    if shelf >= 0:
        x = in_lines(dq)
        if some:
            x += shelves.index(shelf).load(LINES)
        shelves.index(shelf).store(x)
    elif some:
        add(place, dq)
    else:
        gl.store(place, in_lines(dq))


@gluon.jit
def _with_sums(dq, place, shelves, shelf, some):
    """Return a tile of ∂Q with its sums so far."""
    if some:
        if shelf >= 0:
            dq += as_tile(shelves.index(shelf).load(LINES))
        else:  # past the L1 cache, where older sums may lie
            dq += as_tile(gl.load(place, cache_modifier=".cg"))
    return dq


@gluon.jit
def corner(unit, sizes):
    """Return the row and the column where a head's queries begin."""
    heads, blocks, _ = sizes
    return unit // heads * blocks * 128, unit % heads * 64


@gluon.jit
def finish(
    dq, due, turn, ends, sizes, INTERLEAVED: gl.constexpr, CUT: gl.constexpr, C: gl.constexpr
):
    """Put a tile of ∂Q aside, or write it out where its sums are complete."""
    unit, tile, j, _ = due
    sums, shelves, first_shelf, out, grad = ends
    place = sums + tile * SIZE + gl.arange(0, SIZE, LINES)
    shelf = tile - first_shelf
    if CUT:  # others add to them too
        add(place + unit.to(gl.int64) * sizes[1] * 2 * SIZE, dq)
    elif tile >> 1 == j:
        tables = tables_of(turn, unit, tile, sizes[0], INTERLEAVED)
        whole = _with_sums(dq, place, shelves, shelf, j > 0)
        tma.store_wait(0)  # of the block before: long since read out
        out.index(2 * C).store(turned_back(whole, tables, INTERLEAVED))
        fence_async_shared()
        row, column = corner(unit, sizes)
        tma.async_copy_shared_to_global(grad, [row + tile * 64, column], out.index(2 * C))
    else:
        _put_aside(dq, place, shelves, shelf, j > 0)
