"""Products on Hopper's tensor cores, with work of ours at the end of every tile: the common parts.

cuBLAS multiplies, and what follows reads and writes the result once more. Triton's own products can
do it at the end of a tile, but stand still meanwhile. So this is Gluon, Triton's lower language:
one program on each multiprocessor, made of three parts:

    a loading warp    fills a ring of operand tiles by TMA
    two consumers     of four warps, take tiles of 128 × 128 in turn: what one does at the end of
                      its tile runs under the other's products

i is a program's i-th tile, c = i mod 2 its consumer. What waits for what:

    full[s]     the copies into stage s of the ring
    empty[s]    stage s has been multiplied
    turn[c]     c may multiply: the other has waited for all of its stages. This also keeps a
                barrier's parity true: nobody waits for a stage two fills ahead

Gluon is experimental, and nothing interprets it on a CPU: `ops/hopper.py` says where this runs.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and numbers of the device: Python has no types for them.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE, DEEP = 128, 64  # rows and columns of a tile of the result; of what is summed over, at a time
STAGES = 5  # 32 KiB each; with 64 KiB for what leaves all the shared memory there is
GROUP = 8  # rows of tiles whose operands stay in the L2 cache together
REGISTERS = 240  # of a consumer's thread; the loader has what is left of 504
BEFORE = 168  # 65,536 shared out over 12 warps, until they are given their own
# Of numbers that change from model to model, none is compiled in.
SIZES = ["tiles_down", "tiles_across", "depth"]
LINES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

meet = getattr(gl, "barrier", None) or gl.thread_barrier  # of a part's threads; Triton 3.7 or 3.6


@gluon.jit
def place(tile, tiles_down, tiles_across, GROUP: gl.constexpr):
    """Return the row and the column of a tile: down each column of a group of rows."""
    group = tile // (GROUP * tiles_across)
    rest = tile % (GROUP * tiles_across)
    rows = gl.minimum(tiles_down - group * GROUP, GROUP)
    rows = gl.maximum(rows, 1)  # past the last tile, where nobody looks
    return group * GROUP + rest % rows, rest // rows


@gluon.jit
def power_of_two(x):
    """Return 2ˣ by the instruction there is for it."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def halves(acc):
    """Cut 128 × 128 sums into left and right; no number moves to another thread."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left, right = acc.reshape(128, 2, 64).permute(0, 2, 1).split()
    left = gl.convert_layout(left, half, assert_trivial=True)
    return left, gl.convert_layout(right, half, assert_trivial=True)


@gluon.jit
def multiply(a_ring, b_ring, full, empty, i, depth, STAGES: gl.constexpr, FLIP: gl.constexpr):
    """Sum over the ring's next `depth` stages; hand all but the last back, and return which it is.

    The stage before is computed, not remembered: a name given another's value before a loop, and
    again inside it, keeps its first value (Triton 3.6 and 3.7).
    """
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    s = (i * depth) % STAGES
    phase = ((i * depth) // STAGES) & 1
    acc = gl.zeros([128, 128], gl.float32, whole)
    for k in range(depth):
        mbarrier.wait(full.index(s), phase)
        b = b_ring.index(s)
        if FLIP:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_ring.index(s), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # this one runs on, the one before is done
        mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1, pred=k > 0)
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1
    return acc, (s + STAGES - 1) % STAGES


@gluon.jit
def count(tiles_down, tiles_across):
    """Return how many tiles are this program's: every num_programs-th."""
    rest = tiles_down * tiles_across - gl.program_id(0)
    return (rest + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def mine(i, tiles_down, tiles_across, GROUP: gl.constexpr):
    """Return the row and the column of this program's i-th tile."""
    tile = gl.program_id(0) + i * gl.num_programs(0)
    return place(tile, tiles_down, tiles_across, GROUP)


@gluon.jit
def taken_in_turn(rings, bars, i, depth, STAGES: gl.constexpr, C: gl.constexpr, FLIP: gl.constexpr):
    """Wait for the turn of consumer C, multiply, let the other have its turn."""
    full, empty, turn = bars
    mbarrier.wait(turn.index(C), (i // 2 & 1) ^ (1 - C))  # the first turn is there from the start
    acc, last = multiply(rings[0], rings[1], full, empty, i, depth, STAGES, FLIP)
    mbarrier.arrive(turn.index(1 - C), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(last), count=1)
    return acc


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return that many, each passed by so many arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(COUNT):
        mbarrier.init(bars.index(b), count=ARRIVALS)
    return bars


@gluon.jit
def shared(x, w, y, STAGES: gl.constexpr, BUFFERS: gl.constexpr, FLIP: gl.constexpr):
    """Share the memory out: rings for both operands, buffers for what leaves, barriers."""
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], x.layout)
    if FLIP:
        b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], w.layout)
    else:
        b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], w.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, 128, 64], y.layout)
    bars = (barriers(STAGES, 1), barriers(STAGES, 1), barriers(2, 1))
    fence_async_shared()
    return (a_ring, b_ring), out, bars


@gluon.jit
def load(x, w, rings, bars, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr, FLIP: gl.constexpr):
    """The loading warp: x (rows, summed over) and w, (columns, summed over) if it is to be flipped.

    TMA fills with zeros what lies past a matrix's edges.
    """
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
            tma.async_copy_global_to_shared(x, [m * 128, k * 64], bar, rings[0].index(s))
            if FLIP:
                tma.async_copy_global_to_shared(w, [n * 128, k * 64], bar, rings[1].index(s))
            else:
                tma.async_copy_global_to_shared(w, [k * 64, n * 128], bar, rings[1].index(s))
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1


# Calls


def described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix for TMA, which fills with zeros, and cuts off, what lies past its edges."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns], LINES)


def programs_for(items: int, programs: int) -> int:
    """Return `programs`, or as many as there are multiprocessors; no more than have work."""
    if programs == 0:
        programs = torch.cuda.get_device_properties().multi_processor_count
    return min(items, programs)


def launch(
    kernel: object,
    arguments: list[Any],
    sizes: tuple[int, int, int],
    programs: int,
    stages: int = STAGES,
    **constants: Any,
) -> None:
    """Start as many programs as there are multiprocessors, or `programs`."""
    kernel[(programs_for(sizes[0] * sizes[1], programs),)](  # type: ignore[index]
        *arguments,
        *sizes,
        STAGES=stages,
        GROUP=GROUP,
        REGISTERS=REGISTERS,
        num_warps=4,
        maxnreg=BEFORE,
        **constants,
    )
