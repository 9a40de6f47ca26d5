"""The backward pass of causal attention with heads of 64 channels, on Hopper's tensor cores.

    S = Q Kᵀ/8,    P = exp(S − L) below the diagonal;    L and D = Σ dO ⊙ O: one per query
    dV = Pᵀ dO,    dS = P ⊙ (dO Vᵀ − D),    dK = dSᵀ Q/8,    dQ = dS K/8

RoPE's backward pass is fused: dQ and dK are rotated back as they are written, beside dV, into the
gradient of the joined product [Q | K | V]. It takes what `qkv_rope.py` writes:

    sequences     of a multiple of 128 tokens
    heads         any number of query heads; key/value heads that divide it (grouped queries)

A unit of work is a (batch, query head). A program takes its keys in blocks of 128, one after the
other. It is made of a loading warp, which fills a ring with tiles of 64 queries and what belongs to
them, and two consumers of four warps. Consumer c has 64 of the keys. Keys are rows: Sᵀ and dPᵀ are
accumulated in its registers, Pᵀ and dSᵀ are multiplied from them, dK and dV stay in them until all
queries have passed.

dQ is a sum over keys: of both consumers, then of all blocks. So dSᵀ passes through shared memory.
dQ of tile i is consumer (i mod 2)'s; it is computed one tile later, when the other consumer has
written its part. `dq_accumulators.py` keeps it between two blocks. Blocks go upwards: the first
tiles of each, on the diagonal, see their last key and are written out. All sums are taken in one
order: the same inputs give the same bits.

Long sequences have too few heads for that, and accumulators too large for the L2 cache. Their heads
are split: the blocks of keys are scheduled over all programs, which add dQ to accumulators in
global memory by atomics, and another kernel rotates it back (`triton/dq_rope.py`). The order of
these sums varies.

With grouped queries a query head reads K and V of its group, and dK and dV of every query head go
to a buffer, which another kernel sums over the group (`triton/dkv_group_sum.py`).

The barriers:

    full[s], empty[s]       stage s of the ring: its copies, both consumers
    keys_*, values_*        the same for a block's keys, of which there are two, and values
    ds_full[c]              both have written their part of dSᵀ of consumer c's tile
    ds_empty[c]             consumer c has multiplied it

Gluon is experimental and has no CPU interpreter: `accelerate/hopper.py` says where this runs.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and device values: Python has no types for them.

from __future__ import annotations

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

from scratchlm.accelerate.hopper import MAX_WHOLE_HEAD
from scratchlm.accelerate.kernels.hopper.attention_tiles import (
    ACCUMULATOR,
    OPERAND_A,
    SCALE_LOG2E,
    TILE_SIZE,
    load_cos_sin,
    scale_and_rotate_back,
)
from scratchlm.accelerate.kernels.hopper.dq_accumulators import accumulate_dq, head_origin
from scratchlm.accelerate.kernels.hopper.pingpong_gemm import (
    LAUNCH_REGISTERS,
    REGISTERS,
    exp2,
    make_barriers,
    num_programs,
    partition_barrier,
    tma_descriptor,
)
from scratchlm.accelerate.kernels.hopper.work_schedule import load_item, make_schedule, num_items
from scratchlm.accelerate.kernels.triton.attention_stats import attention_stats
from scratchlm.accelerate.kernels.triton.dkv_group_sum import sum_dkv_groups
from scratchlm.accelerate.kernels.triton.dq_rope import rotate_dq_back, table_steps

HEAD_DIM, BLOCK = 64, 128  # BLOCK: keys at a time
STAGES = 3
SHARED_TILES = 4  # of dQ's accumulators, in shared memory
# These change from model to model: none is compiled in.
SIZES = ["group", "heads", "blocks", "stride", "table_tiles", "batch_step"]
STATS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def _product(a, b):
    none = gl.zeros([64, 64], gl.float32, ACCUMULATOR)
    return warpgroup_mma(a, b, none, use_acc=False, is_async=True)


@gluon.jit
def _probabilities(s, shift, diagonal, PARITY: gl.constexpr, C: gl.constexpr):
    """Return Pᵀ: 0 where a query does not see the key."""
    x = s * SCALE_LOG2E + shift
    if PARITY > C:  # these queries come after all of the consumer's keys
        return exp2(x)
    if diagonal:
        key = gl.arange(0, 64, gl.SliceLayout(1, ACCUMULATOR)).expand_dims(1) + 64 * (C - PARITY)
        query = gl.arange(0, 64, gl.SliceLayout(0, ACCUMULATOR)).expand_dims(0)
        x = gl.where(key <= query, x, float("-inf"))
    return exp2(x)


@gluon.jit
def _share_ds(ds, ds_buffers, bars, n, PARITY: gl.constexpr, C: gl.constexpr):
    """Write this consumer's part of dSᵀ to shared memory, for the one that computes dQ."""
    full, empty = bars
    mbarrier.wait(empty.index(PARITY), ((n >> 1) & 1) ^ 1)
    ds_buffers.index(PARITY).slice(64 * C, 64).store(ds)
    fence_async_shared()
    partition_barrier()
    mbarrier.arrive(full.index(PARITY), count=1)


@gluon.jit
def _start_dq(ds_buffers, keys, bars, n, C: gl.constexpr):
    """Start the product dS K of tile n, one of consumer C's."""
    mbarrier.wait(bars[0].index(C), (n >> 1) & 1, pred=n >= 0)
    return _product(ds_buffers.index(C).permute((1, 0)), keys)


@gluon.jit
def _query_tile(
    dkv,
    operands,
    rings,
    bars,
    n,
    args,
    STAGES: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    SPLIT: gl.constexpr,
    PARITY: gl.constexpr,
    C: gl.constexpr,
):
    """Take a tile of queries; compute dQ of the previous one if that is this consumer's."""
    dk, dv = dkv
    k, v = operands
    diagonal, pending, rope, outputs, sizes = args
    queries, grad_outs, keys, ds_buffers, shifts, deltas = rings
    full, empty = bars[0]
    stage = n % STAGES
    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
    q, do = queries.index(stage), grad_outs.index(stage)
    s = _product(k, q.permute((1, 0)))
    dp = _product(v, do.permute((1, 0)))
    shift = shifts.index(stage).load(ACCUMULATOR)
    delta = deltas.index(stage).load(ACCUMULATOR)
    s = warpgroup_mma_wait(1, deps=[s])
    p = _probabilities(s, shift, diagonal, PARITY, C)
    p_operand = gl.convert_layout(p.to(gl.bfloat16), OPERAND_A, assert_trivial=True)
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    ds = (p * (dp - delta)).to(gl.bfloat16)
    dk = warpgroup_mma(gl.convert_layout(ds, OPERAND_A, assert_trivial=True), q, dk, is_async=True)
    if PARITY == C:
        _share_ds(ds, ds_buffers, bars[1], n, PARITY, C)
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        mbarrier.arrive(empty.index(stage), count=1)
    else:
        dq = _start_dq(ds_buffers, keys.index(pending[3]), bars[1], n - 1, C)
        _share_ds(ds, ds_buffers, bars[1], n, PARITY, C)
        dk, dv, dq = warpgroup_mma_wait(0, deps=[dk, dv, dq])
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(bars[1][1].index(C), count=1, pred=n > 0)
        if n > 0:
            accumulate_dq(dq, pending, rope, outputs, sizes, INTERLEAVED, SPLIT, C)
    return dk, dv


@gluon.jit
def _consume(
    work,
    rings,
    buffers,
    bars,
    sizes,
    STAGES: gl.constexpr,
    SHARED_TILES: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    SPLIT: gl.constexpr,
    C: gl.constexpr,
):
    """Consumer C: its half of each block of keys."""
    schedule, grad, grad_kv, rope, accumulators = work
    heads, blocks, stride = sizes
    values, in_shared, out = buffers
    keys = rings[2]
    keys_full, keys_empty = bars[2]
    values_full, values_empty = bars[3]
    if not SPLIT:
        accumulators += gl.program_id(0).to(gl.int64) * blocks * 2 * TILE_SIZE
    outputs = (accumulators, in_shared, 2 * blocks - SHARED_TILES, out, grad)
    n = 0  # tiles taken so far
    # The tile whose dQ is to be computed: its unit, its index, the block of keys and its buffer
    pending_unit = 0
    pending_tile = 0
    pending_j = 0
    pending_keys = 0
    for r in range(num_items(schedule, stride)):
        unit, j = load_item(schedule, stride, r, blocks)
        slot = r & 1
        mbarrier.wait(keys_full.index(slot), (r >> 1) & 1)
        k = keys.index(slot).slice(64 * C, 64).load(OPERAND_A)
        mbarrier.wait(values_full.index(0), r & 1)
        v = values.index(0).slice(64 * C, 64).load(OPERAND_A)
        mbarrier.arrive(values_empty.index(0), count=1)
        dk = gl.zeros([64, 64], gl.float32, ACCUMULATOR)
        dv = gl.zeros([64, 64], gl.float32, ACCUMULATOR)
        for m in range(j, blocks):
            for parity in gl.static_range(2):
                pending = (pending_unit, pending_tile, pending_j, pending_keys)
                args = (m == j, pending, rope, outputs, sizes)
                dkv = (dk, dv)
                dk, dv = _query_tile(
                    dkv, (k, v), rings, bars, n, args, STAGES, INTERLEAVED, SPLIT, parity, C
                )
                if parity == C:
                    pending_unit = unit
                    pending_tile = 2 * m + parity
                    pending_j = j
                    pending_keys = slot
                elif C == 1:  # no dQ waits for the previous block's keys any more
                    done = (m == j) & (n > 0)
                    mbarrier.arrive(keys_empty.index(1 - slot), count=1, pred=done)
                n += 1
        if C == 0:
            mbarrier.arrive(keys_empty.index(slot), count=1)
        cos_sin = load_cos_sin(rope, unit, 2 * j + C, heads, INTERLEAVED)
        tma.store_wait(0)
        out.index(2 * C + 1).store(dv.to(gl.bfloat16))
        out.index(2 * C).store(scale_and_rotate_back(dk, cos_sin, INTERLEAVED))
        fence_async_shared()
        row, column = head_origin(unit, sizes)
        row += j * 128 + 64 * C
        dv_corner = [row, column + heads * 64]
        tma.async_copy_shared_to_global(grad_kv, dv_corner, out.index(2 * C + 1))
        tma.async_copy_shared_to_global(grad_kv, [row, column], out.index(2 * C))
    if C == 1:
        dq = _start_dq(rings[3], keys.index(pending_keys), bars[1], n - 1, C)
        dq = warpgroup_mma_wait(0, deps=[dq])
        pending = (pending_unit, pending_tile, pending_j, pending_keys)
        accumulate_dq(dq, pending, rope, outputs, sizes, INTERLEAVED, SPLIT, C)
    tma.store_wait(0)


@gluon.jit
def _load(
    schedule, qkv, kv, grad_out, stats, rings, values, bars, sizes, group, STAGES: gl.constexpr
):
    """The loading warp."""
    heads, blocks, stride = sizes
    queries, grad_outs, keys, _, shifts, deltas = rings
    full, empty = bars[0]
    keys_full, keys_empty = bars[2]
    values_full, values_empty = bars[3]
    n = 0
    for r in range(num_items(schedule, stride)):
        unit, j = load_item(schedule, stride, r, blocks)
        row, column = head_origin(unit, sizes)
        kv_column = unit % heads // group * 64
        slot = r & 1
        mbarrier.wait(keys_empty.index(slot), ((r >> 1) & 1) ^ 1)
        bar = keys_full.index(slot)
        mbarrier.expect(bar, 128 * 64 * 2)
        at = row + j * 128
        tma.async_copy_global_to_shared(kv, [at, kv_column], bar, keys.index(slot))
        mbarrier.wait(values_empty.index(0), (r & 1) ^ 1)
        bar = values_full.index(0)
        mbarrier.expect(bar, 128 * 64 * 2)
        v_corner = [at, kv_column + heads // group * 64]
        tma.async_copy_global_to_shared(kv, v_corner, bar, values.index(0))
        for i in range(2 * j, 2 * blocks):
            s = n % STAGES
            mbarrier.wait(empty.index(s), ((n // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * 64 * 64 * 2 + 2 * 64 * 4)
            corner = [row + i * 64, column]
            tma.async_copy_global_to_shared(qkv, corner, bar, queries.index(s))
            tma.async_copy_global_to_shared(grad_out, corner, bar, grad_outs.index(s))
            at = unit * blocks * 128 + i * 64
            tma.async_copy_global_to_shared(stats, [0, at], bar, shifts.index(s))
            tma.async_copy_global_to_shared(stats, [1, at], bar, deltas.index(s))
            n += 1


@gluon.jit(do_not_specialize=SIZES)
def _attention_backward_kernel(
    qkv,
    kv,
    grad_out,
    grad,
    grad_kv,
    stats,
    rope_tables,
    accumulators,
    schedule,
    group,
    heads,
    blocks,
    stride,
    table_tiles,
    batch_step,
    STAGES: gl.constexpr,
    SHARED_TILES: gl.constexpr,
    REGISTERS: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    SPLIT: gl.constexpr,
):
    queries = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], qkv.layout)
    grad_outs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], qkv.layout)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], stats.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], stats.layout)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 64], qkv.layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [1, 128, 64], qkv.layout)
    ds_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 64], qkv.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    in_shared = gl.allocate_shared_memory(gl.float32, [SHARED_TILES, TILE_SIZE], flat)
    out = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], qkv.layout)
    ring_bars = (make_barriers(STAGES, 1), make_barriers(STAGES, 2))
    ds_bars = (make_barriers(2, 2), make_barriers(2, 1))
    keys_bars = (make_barriers(2, 1), make_barriers(2, 2))
    values_bars = (make_barriers(1, 1), make_barriers(1, 2))
    bars = (ring_bars, ds_bars, keys_bars, values_bars)
    fence_async_shared()
    rings = (queries, grad_outs, keys, ds_buffers, shifts, deltas)
    sizes = (heads, blocks, stride)
    work = (schedule, grad, grad_kv, (rope_tables, table_tiles, batch_step), accumulators)
    buffers = (values, in_shared, out)
    gl.warp_specialize(
        [
            (
                _consume,
                (work, rings, buffers, bars, sizes, STAGES, SHARED_TILES, INTERLEAVED, SPLIT, 0),
            ),
            (
                _consume,
                (work, rings, buffers, bars, sizes, STAGES, SHARED_TILES, INTERLEAVED, SPLIT, 1),
            ),
            (
                _load,
                (schedule, qkv, kv, grad_out, stats, rings, values, bars, sizes, group, STAGES),
            ),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Host side


def attention_grad_qkv(
    qkv: Tensor,
    grad_attn_out: Tensor,
    stats: Tensor,
    rope_tables: Tensor,
    interleaved: bool,
    split: bool = False,
    programs: int = 0,
) -> Tensor:
    """Return the gradient of the joined product before RoPE was applied.

    qkv (batch, seq, (heads + 2 kv_heads) · 64) is [Q | K | V] as attention read it, grad_attn_out
    (batch, seq, heads · 64), stats from `attention_stats`. The tables (`qkv_rope.rope_tables`)
    serve each sequence, or are as long as all of them together. Heads are `split` into blocks of
    keys, or taken whole.
    """
    batch, seq, columns = qkv.shape
    heads, blocks = grad_attn_out.shape[-1] // HEAD_DIM, seq // BLOCK
    group = 2 * heads // (columns // HEAD_DIM - heads)  # query heads per key/value head
    qkv, grad_attn_out = qkv.contiguous(), grad_attn_out.contiguous()
    grad = torch.empty_like(qkv)
    units = batch * heads
    programs = num_programs(units * blocks if split else units, programs)
    if split:
        accumulators = qkv.new_zeros(units, seq, HEAD_DIM, dtype=torch.float32)
    else:
        accumulators = qkv.new_empty(programs, seq, HEAD_DIM, dtype=torch.float32)
    # In tiles of 128 queries; what is done once per block takes about as long as one of these.
    costs = tuple(range(blocks + 1, 1, -1))
    schedule = make_schedule(units, costs, programs, qkv.device, whole=not split)
    rows, grad_rows = qkv.view(-1, columns), grad.view(-1, columns)
    if group == 1:
        grad_kv = grad_rows[:, heads * HEAD_DIM :]
    else:  # of each query head, to be summed over its group
        grad_kv = qkv.new_empty(batch * seq, 2 * heads * HEAD_DIM)
    _attention_backward_kernel[(programs,)](
        tma_descriptor(rows, 64, 64),
        tma_descriptor(rows[:, heads * HEAD_DIM :], BLOCK, 64),
        tma_descriptor(grad_attn_out.view(batch * seq, -1), 64, 64),
        tma_descriptor(grad_rows, 64, 64),
        tma_descriptor(grad_kv, 64, 64),
        TensorDescriptor.from_tensor(stats.view(2, -1), [1, 64], STATS_LAYOUT),
        *(rope_tables, accumulators, schedule),
        *(group, heads, blocks, schedule.shape[1], *table_steps(rope_tables, 2 * blocks)),
        STAGES=STAGES,
        SHARED_TILES=SHARED_TILES,
        REGISTERS=REGISTERS,
        INTERLEAVED=interleaved,
        SPLIT=split,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS,
    )
    if split:
        rotate_dq_back(accumulators, rope_tables, grad, interleaved)
    if group > 1:
        sum_dkv_groups(grad_kv, grad_rows)
    return grad


# As torch sees it: one opaque op, which a compiler does not trace into


@torch.library.custom_op("scratchlm::attention_backward", mutates_args=(), device_types="cuda")
def attention_backward(
    qkv: Tensor,
    attn_out: Tensor,
    grad_attn_out: Tensor,
    log_sum_exp: Tensor,
    rope_tables: Tensor,
    interleaved: bool,
) -> Tensor:
    """Return the gradient of the joined product, given that of attention's output."""
    stats = attention_stats(attn_out, grad_attn_out, log_sum_exp)
    split = qkv.shape[1] > MAX_WHOLE_HEAD
    return attention_grad_qkv(qkv, grad_attn_out, stats, rope_tables, interleaved, split)


@attention_backward.register_fake
def _(
    qkv: Tensor,
    attn_out: Tensor,
    grad_attn_out: Tensor,
    log_sum_exp: Tensor,
    rope_tables: Tensor,
    interleaved: bool,
) -> Tensor:
    return torch.empty_like(qkv)
