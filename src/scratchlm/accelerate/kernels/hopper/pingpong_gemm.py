"""The main loop of a GEMM on Hopper's tensor cores, for kernels with a fused epilogue.

After a cuBLAS GEMM, another kernel reads and writes the result once more. A Triton GEMM can fuse
that epilogue, but its tensor cores idle meanwhile. So this is Gluon, Triton's lower-level language:
one persistent program per multiprocessor, made of three warp-specialized parts:

    a loading warp    fills a ring of operand tiles by TMA
    two consumers     of four warps, ping-pong: they take tiles of 128 × 128 alternately, so that
                      one's epilogue overlaps with the other's main loop

Tile i of a program belongs to consumer c = i mod 2. The barriers:

    full[s]     the copies into stage s of the ring have landed
    empty[s]    stage s has been multiplied
    order[c]    c may run its main loop: the other consumer has waited for all of its stages. This
                also keeps the parity waits valid: no one waits for a stage two fills ahead

Gluon is experimental and has no CPU interpreter: `accelerate/hopper.py` says where this runs.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and device values: Python has no types for them.

from __future__ import annotations

import threading
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

TILE, BLOCK_K = 128, 64  # rows and columns of an output tile; of the inner dimension, per stage
STAGES = 5  # 32 KiB each; with 64 KiB of output buffers all the shared memory there is
GROUP = 8  # rows of tiles whose operands stay in the L2 cache together
REGISTERS = 240  # per consumer thread; the loader has the rest of 504
LAUNCH_REGISTERS = 168  # 65,536 spread over 12 warps, until each part sets its own
# These change from model to model: none is compiled in.
SIZES = ["tiles_m", "tiles_n", "k_blocks"]
SHARED_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)

# A barrier of one part's threads; Triton 3.7 or 3.6
partition_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def tile_position(tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Return the row and the column of a tile: down each column of a group of rows."""
    group = tile // (GROUP * tiles_n)
    rest = tile % (GROUP * tiles_n)
    rows = gl.minimum(tiles_m - group * GROUP, GROUP)
    rows = gl.maximum(rows, 1)  # past the last tile, where the result is unused
    return group * GROUP + rest % rows, rest // rows


@gluon.jit
def exp2(x):
    """Return 2ˣ by one instruction."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def split_columns(acc):
    """Split a 128 × 128 accumulator into left and right halves; no value changes its thread."""
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left, right = acc.reshape(128, 2, 64).permute(0, 2, 1).split()
    left = gl.convert_layout(left, half, assert_trivial=True)
    return left, gl.convert_layout(right, half, assert_trivial=True)


@gluon.jit
def multiply(
    a_ring, b_ring, full, empty, i, k_blocks, STAGES: gl.constexpr, TRANSPOSE_B: gl.constexpr
):
    """Accumulate over the next `k_blocks` stages; release all but the last, and return its index.

    The previous stage is computed, not remembered: a name assigned from another before a loop, and
    again inside it, keeps its first value (Triton 3.6 and 3.7).
    """
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    s = (i * k_blocks) % STAGES
    phase = ((i * k_blocks) // STAGES) & 1
    acc = gl.zeros([128, 128], gl.float32, whole)
    for k in range(k_blocks):
        mbarrier.wait(full.index(s), phase)
        b = b_ring.index(s)
        if TRANSPOSE_B:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_ring.index(s), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])  # this one runs on, the previous one is done
        mbarrier.arrive(empty.index((s + STAGES - 1) % STAGES), count=1, pred=k > 0)
        s += 1
        if s == STAGES:
            s = 0
            phase ^= 1
    return acc, (s + STAGES - 1) % STAGES


@gluon.jit
def num_tiles(tiles_m, tiles_n):
    """Return how many tiles this program computes: every num_programs-th."""
    rest = tiles_m * tiles_n - gl.program_id(0)
    return (rest + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def ith_tile(i, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Return the row and the column of this program's i-th tile."""
    tile = gl.program_id(0) + i * gl.num_programs(0)
    return tile_position(tile, tiles_m, tiles_n, GROUP)


@gluon.jit
def pingpong_multiply(
    rings, bars, i, k_blocks, STAGES: gl.constexpr, C: gl.constexpr, TRANSPOSE_B: gl.constexpr
):
    """Wait until consumer C may run its main loop, run it, and let the other consumer go."""
    full, empty, order = bars
    mbarrier.wait(order.index(C), (i // 2 & 1) ^ (1 - C))  # consumer 0's first wait passes at once
    acc, last = multiply(rings[0], rings[1], full, empty, i, k_blocks, STAGES, TRANSPOSE_B)
    mbarrier.arrive(order.index(1 - C), count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(last), count=1)
    return acc


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT barriers, each completed by ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(COUNT):
        mbarrier.init(bars.index(b), count=ARRIVALS)
    return bars


@gluon.jit
def allocate(x, w, y, STAGES: gl.constexpr, BUFFERS: gl.constexpr, TRANSPOSE_B: gl.constexpr):
    """Allocate shared memory: rings for both operands, output buffers, barriers."""
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], x.layout)
    if TRANSPOSE_B:
        b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, 64], w.layout)
    else:
        b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], w.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, 128, 64], y.layout)
    bars = (make_barriers(STAGES, 1), make_barriers(STAGES, 1), make_barriers(2, 1))
    fence_async_shared()
    return (a_ring, b_ring), out, bars


@gluon.jit
def load_operands(
    x, w, rings, bars, sizes, STAGES: gl.constexpr, GROUP: gl.constexpr, TRANSPOSE_B: gl.constexpr
):
    """The loading warp: x (m, k) and w, (n, k) if it is to be transposed, else (k, n).

    TMA fills with zeros what lies outside a matrix.
    """
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
            tma.async_copy_global_to_shared(x, [m * 128, k * 64], bar, rings[0].index(s))
            if TRANSPOSE_B:
                tma.async_copy_global_to_shared(w, [n * 128, k * 64], bar, rings[1].index(s))
            else:
                tma.async_copy_global_to_shared(w, [k * 64, n * 128], bar, rings[1].index(s))
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1


# Host side

_thread = threading.local()


def tma_descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe a matrix for TMA, which reads zeros, and drops writes, outside of it."""
    if not getattr(_thread, "has_context", False):
        # The driver encodes a descriptor in the thread's CUDA context. A thread of autograd whose
        # first CUDA call this is has none yet: any small launch makes one.
        matrix.new_zeros(1)
        _thread.has_context = True
    return TensorDescriptor.from_tensor(matrix, [rows, columns], SHARED_LAYOUT)


def num_programs(items: int, programs: int) -> int:
    """Return `programs` (0: one per multiprocessor), but no more than there are items."""
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
    """Launch a GEMM of `sizes` (`SIZES`) with `programs` programs (0: one per multiprocessor)."""
    kernel[(num_programs(sizes[0] * sizes[1], programs),)](  # type: ignore[index]
        *arguments,
        *sizes,
        STAGES=stages,
        GROUP=GROUP,
        REGISTERS=REGISTERS,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
        **constants,
    )
