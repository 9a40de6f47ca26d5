"""x Wᵀ, and ∂x = ∂y W, on Hopper's tensor cores; what it is added to is added on the way out.

As `turns.py` has it, with nothing to do at the end of a tile but to write it: that alone is faster
than cuBLAS at the widths of small and middling models, where a tile's beginning and end weigh most.

    given[2c + h]   half h (64 columns) of what consumer c's tile is added to: asked for before c
                    multiplies, into the buffers that the result leaves from
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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

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


@gluon.jit
def _consume(
    descs,
    rings,
    out,
    bars,
    given,
    sizes,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    C: gl.constexpr,
    FLIP: gl.constexpr,
    ADD: gl.constexpr,
):
    _, _, onto, y = descs
    tiles_down, tiles_across, depth = sizes
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    for i in range(C, count(tiles_down, tiles_across), 2):
        m, n = mine(i, tiles_down, tiles_across, GROUP)
        if ADD:
            tma.store_wait(0)  # of the tile before: long since read out
            for h in gl.static_range(2):
                bar, place = given.index(2 * C + h), out.index(2 * C + h)
                mbarrier.expect(bar, 128 * 64 * 2)
                tma.async_copy_global_to_shared(onto, [m * 128, n * 128 + 64 * h], bar, place)
        parts = halves(taken_in_turn(rings, bars, i, depth, STAGES, C, FLIP))
        if not ADD:
            tma.store_wait(0)
        for h in gl.static_range(2):
            place, value = out.index(2 * C + h), parts[h]
            if ADD:
                mbarrier.wait(given.index(2 * C + h), i // 2 & 1)
                value += place.load(half).to(gl.float32)
            place.store(value.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(y, [m * 128, n * 128 + 64 * h], place)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def _product(
    x,
    w,
    onto,
    y,
    tiles_down,
    tiles_across,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
    FLIP: gl.constexpr,
    ADD: gl.constexpr,
):
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], x.layout)
    if FLIP:
        b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], w.layout)
    else:
        b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], w.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [4, 128, 64], y.layout)
    bars = (barriers(STAGES), barriers(STAGES), barriers(2))
    given = barriers(4)
    fence_async_shared()
    descs = (x, w, onto, y)
    sizes = (tiles_down, tiles_across, depth)
    rings = (a_ring, b_ring)
    gl.warp_specialize(
        [
            (_consume, (descs, rings, out, bars, given, sizes, STAGES, GROUP, 0, FLIP, ADD)),
            (_consume, (descs, rings, out, bars, given, sizes, STAGES, GROUP, 1, FLIP, ADD)),
            (load, (x, w, rings, bars, sizes, STAGES, GROUP, FLIP)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


def multiply_rows(
    x: Tensor, w: Tensor, onto: Tensor | None = None, flip: bool = True, programs: int = 0
) -> Tensor:
    """Return x Wᵀ, or x W without `flip`, added to `onto`: all in bfloat16."""
    x, w = x.contiguous(), w.contiguous()
    (rows, d), columns = x.shape, w.shape[0 if flip else 1]
    y = x.new_empty(rows, columns)
    tensors = [
        described(x, TILE, DEEP),
        described(w, TILE, DEEP) if flip else described(w, DEEP, TILE),
        described(y if onto is None else onto.contiguous(), TILE, 64),
        described(y, TILE, 64),
    ]
    sizes = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), triton.cdiv(d, DEEP))
    launch(_product, tensors, sizes, programs, FLIP=flip, ADD=onto is not None)
    return y


# As torch sees them: whole operations, which a compiler does not open


@torch.library.custom_op("scratchlm::product", mutates_args=(), device_types="cuda")
def product(x: Tensor, w: Tensor, onto: Tensor | None) -> Tensor:
    """Return x Wᵀ of rows x, added to `onto` if there is one."""
    return multiply_rows(x, w, onto)


@torch.library.custom_op("scratchlm::product_back", mutates_args=(), device_types="cuda")
def product_back(dy: Tensor, w: Tensor) -> Tensor:
    """Return ∂y W."""
    return multiply_rows(dy, w, flip=False)


@product.register_fake
def _(x: Tensor, w: Tensor, onto: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(w))


@product_back.register_fake
def _(dy: Tensor, w: Tensor) -> Tensor:
    return dy.new_empty(len(dy), w.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _slopes(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    for_x, for_w, for_onto = ctx.needs_input_grad
    of_x = product_back(slope, w) if for_x else None
    return of_x, slope.t() @ x if for_w else None, slope if for_onto else None


product.register_autograd(_slopes, setup_context=_keep)
