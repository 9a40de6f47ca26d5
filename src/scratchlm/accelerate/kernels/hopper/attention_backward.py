"""The backward pass of causal attention over heads of 64 channels, on Hopper's tensor cores.

    S = Q Kᵀ/8,    P = exp(S − L) where a query sees the key;    L and D = Σ ∂O ⊙ O: one a query
    ∂V = Pᵀ ∂O,    ∂S = P ⊙ (∂O Vᵀ − D),    ∂K = ∂Sᵀ Q/8,    ∂Q = ∂S K/8

∂Q and ∂K leave turned back to where the rotation found them, side by side with ∂V: the gradient of
the product that Q, K and V are views of. As kernels of their own, cuDNN's two around its backward
pass and ours after it carry all of that to the memory and back.

A program takes keys in blocks of 128, a head's one after the other. It is made of a loading warp,
which fills a ring with tiles of 64 queries and what belongs to them, and two consumers of four
warps. Consumer c has 64 of the keys. Keys are rows: Sᵀ and ∂Pᵀ are summed in its registers, Pᵀ and
∂Sᵀ are multiplied from them, ∂K and ∂V stay in them until all queries have passed.

∂Q is a sum over keys: of both consumers, then of all blocks. So ∂Sᵀ passes through shared memory, a
tile i's ∂Q is consumer (i mod 2)'s, and is computed a tile later, when the other has surely come so
far. What it amounts to lies between two blocks on shelves or in the memory (`query_sums.py`).
Blocks go upwards: the first tiles of each, on the diagonal, see their last key, and leave. All sums
are taken in one order: the same numbers give the same bits.

Long sequences have too few heads for that, and sums too long for the L2 cache. Their heads are cut:
the blocks are shared out over the programs, who add all of ∂Q to sums in the memory as they come to
it, and a kernel of its own turns these back (`turn_sums.py`). The order is not always the same.

What waits for what:

    full[s], empty[s]       stage s of the ring: its copies, both consumers
    keys_*, values_*        the same for a block's keys, of which there are two, and values
    slopes_full[c]          both have written their part of ∂Sᵀ of consumer c's tile
    slopes_empty[c]         consumer c has multiplied it

Gluon is experimental, and nothing interprets it on a CPU: `ops/hopper.py` says where this runs.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and numbers of the device: Python has no types for them.

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

from scratchlm.accelerate.hopper import LONGEST
from scratchlm.accelerate.kernels.hopper.attention_tiles import (
    LEFT,
    SIZE,
    SUMS,
    TO_POWERS,
    tables_of,
    turned_back,
)
from scratchlm.accelerate.kernels.hopper.dq_accumulators import corner, finish
from scratchlm.accelerate.kernels.hopper.pingpong_gemm import (
    BEFORE,
    REGISTERS,
    barriers,
    described,
    meet,
    power_of_two,
    programs_for,
)
from scratchlm.accelerate.kernels.hopper.work_schedule import how_many, shared_out, taken
from scratchlm.accelerate.kernels.triton.attention_stats import row_stats
from scratchlm.accelerate.kernels.triton.dkv_group_sum import sum_dkv_groups
from scratchlm.accelerate.kernels.triton.dq_rope import turn_sums, where_tables_lie

WIDTH, BLOCK = 64, 128  # of a head; keys at a time
STAGES = 3
SHELVES = 4
COUNTS = ["group", "heads", "blocks", "stride", "places", "step"]  # none is compiled in
NUMBERS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@gluon.jit
def _product(a, b):
    none = gl.zeros([64, 64], gl.float32, SUMS)
    return warpgroup_mma(a, b, none, use_acc=False, is_async=True)


@gluon.jit
def _powers(s, shift, diagonal, PARITY: gl.constexpr, C: gl.constexpr):
    """Return Pᵀ: 0 where a query does not see the key."""
    x = s * TO_POWERS + shift
    if PARITY > C:  # they come after all of its keys
        return power_of_two(x)
    if diagonal:
        key = gl.arange(0, 64, gl.SliceLayout(1, SUMS)).expand_dims(1) + 64 * (C - PARITY)
        query = gl.arange(0, 64, gl.SliceLayout(0, SUMS)).expand_dims(0)
        x = gl.where(key <= query, x, float("-inf"))
    return power_of_two(x)


@gluon.jit
def _pass_on(ds, slopes, bars, n, PARITY: gl.constexpr, C: gl.constexpr):
    """Lay this consumer's part of ∂Sᵀ where the one who multiplies it finds it."""
    full, empty = bars
    mbarrier.wait(empty.index(PARITY), ((n >> 1) & 1) ^ 1)
    slopes.index(PARITY).slice(64 * C, 64).store(ds)
    fence_async_shared()
    meet()
    mbarrier.arrive(full.index(PARITY), count=1)


@gluon.jit
def _product_due(slopes, keys, bars, n, C: gl.constexpr):
    """Begin ∂Q of tile n, consumer C's own."""
    mbarrier.wait(bars[0].index(C), (n >> 1) & 1, pred=n >= 0)
    return _product(slopes.index(C).permute((1, 0)), keys)


@gluon.jit
def _tile(
    sums_kv,
    operands,
    rings,
    bars,
    n,
    how,
    STAGES: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    CUT: gl.constexpr,
    PARITY: gl.constexpr,
    C: gl.constexpr,
):
    """Take a tile of queries; of the tile before, if it is this consumer's own, compute ∂Q."""
    dk, dv = sums_kv
    k, v = operands
    diagonal, due, turn, ends, sizes = how
    queries, slopes_out, keys, slopes, shifts, deltas = rings
    full, empty = bars[0]
    stage = n % STAGES
    mbarrier.wait(full.index(stage), (n // STAGES) & 1)
    q, do = queries.index(stage), slopes_out.index(stage)
    s = _product(k, q.permute((1, 0)))
    dp = _product(v, do.permute((1, 0)))
    shift = shifts.index(stage).load(SUMS)
    delta = deltas.index(stage).load(SUMS)
    s = warpgroup_mma_wait(1, deps=[s])
    p = _powers(s, shift, diagonal, PARITY, C)
    left = gl.convert_layout(p.to(gl.bfloat16), LEFT, assert_trivial=True)
    dp = warpgroup_mma_wait(0, deps=[dp])
    dv = warpgroup_mma(left, do, dv, is_async=True)
    ds = (p * (dp - delta)).to(gl.bfloat16)
    dk = warpgroup_mma(gl.convert_layout(ds, LEFT, assert_trivial=True), q, dk, is_async=True)
    if PARITY == C:
        _pass_on(ds, slopes, bars[1], n, PARITY, C)
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        mbarrier.arrive(empty.index(stage), count=1)
    else:
        dq = _product_due(slopes, keys.index(due[3]), bars[1], n - 1, C)
        _pass_on(ds, slopes, bars[1], n, PARITY, C)
        dk, dv, dq = warpgroup_mma_wait(0, deps=[dk, dv, dq])
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(bars[1][1].index(C), count=1, pred=n > 0)
        if n > 0:
            finish(dq, due, turn, ends, sizes, INTERLEAVED, CUT, C)
    return dk, dv


@gluon.jit
def _consume(
    work,
    rings,
    rest,
    bars,
    sizes,
    STAGES: gl.constexpr,
    SHELVES: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    CUT: gl.constexpr,
    C: gl.constexpr,
):
    plan, grad, grad_kv, turn, sums = work
    heads, blocks, stride = sizes
    values, shelves, out = rest
    keys = rings[2]
    keys_full, keys_empty = bars[2]
    values_full, values_empty = bars[3]
    if not CUT:
        sums += gl.program_id(0).to(gl.int64) * blocks * 2 * SIZE
    ends = (sums, shelves, 2 * blocks - SHELVES, out, grad)
    n = 0  # tiles that were taken
    # The tile whose ∂Q is due: its head, its number, and of which keys
    due_unit = 0
    due_tile = 0
    due_j = 0
    due_keys = 0
    for r in range(how_many(plan, stride)):
        unit, j = taken(plan, stride, r, blocks)
        held = r & 1
        mbarrier.wait(keys_full.index(held), (r >> 1) & 1)
        k = keys.index(held).slice(64 * C, 64).load(LEFT)
        mbarrier.wait(values_full.index(0), r & 1)
        v = values.index(0).slice(64 * C, 64).load(LEFT)
        mbarrier.arrive(values_empty.index(0), count=1)
        dk = gl.zeros([64, 64], gl.float32, SUMS)
        dv = gl.zeros([64, 64], gl.float32, SUMS)
        for m in range(j, blocks):
            for parity in gl.static_range(2):
                due = (due_unit, due_tile, due_j, due_keys)
                how = (m == j, due, turn, ends, sizes)
                both = (dk, dv)
                dk, dv = _tile(
                    both, (k, v), rings, bars, n, how, STAGES, INTERLEAVED, CUT, parity, C
                )
                if parity == C:
                    due_unit = unit
                    due_tile = 2 * m + parity
                    due_j = j
                    due_keys = held
                elif C == 1:  # nothing is due any more with the keys before
                    done = (m == j) & (n > 0)
                    mbarrier.arrive(keys_empty.index(1 - held), count=1, pred=done)
                n += 1
        if C == 0:
            mbarrier.arrive(keys_empty.index(held), count=1)
        tables = tables_of(turn, unit, 2 * j + C, heads, INTERLEAVED)
        tma.store_wait(0)
        out.index(2 * C + 1).store(dv.to(gl.bfloat16))
        out.index(2 * C).store(turned_back(dk, tables, INTERLEAVED))
        fence_async_shared()
        row, column = corner(unit, sizes)
        row += j * 128 + 64 * C
        of_v = [row, column + heads * 64]
        tma.async_copy_shared_to_global(grad_kv, of_v, out.index(2 * C + 1))
        tma.async_copy_shared_to_global(grad_kv, [row, column], out.index(2 * C))
    if C == 1:
        dq = _product_due(rings[3], keys.index(due_keys), bars[1], n - 1, C)
        dq = warpgroup_mma_wait(0, deps=[dq])
        due = (due_unit, due_tile, due_j, due_keys)
        finish(dq, due, turn, ends, sizes, INTERLEAVED, CUT, C)
    tma.store_wait(0)


@gluon.jit
def _load(plan, joined, kv, d_out, stats, rings, values, bars, sizes, group, STAGES: gl.constexpr):
    """The loading warp."""
    heads, blocks, stride = sizes
    queries, slopes_out, keys, _, shifts, deltas = rings
    full, empty = bars[0]
    keys_full, keys_empty = bars[2]
    values_full, values_empty = bars[3]
    n = 0
    for r in range(how_many(plan, stride)):
        unit, j = taken(plan, stride, r, blocks)
        row, column = corner(unit, sizes)
        column_kv = unit % heads // group * 64
        held = r & 1
        mbarrier.wait(keys_empty.index(held), ((r >> 1) & 1) ^ 1)
        bar = keys_full.index(held)
        mbarrier.expect(bar, 128 * 64 * 2)
        at = row + j * 128
        tma.async_copy_global_to_shared(kv, [at, column_kv], bar, keys.index(held))
        mbarrier.wait(values_empty.index(0), (r & 1) ^ 1)
        bar = values_full.index(0)
        mbarrier.expect(bar, 128 * 64 * 2)
        of_v = [at, column_kv + heads // group * 64]
        tma.async_copy_global_to_shared(kv, of_v, bar, values.index(0))
        for i in range(2 * j, 2 * blocks):
            s = n % STAGES
            mbarrier.wait(empty.index(s), ((n // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * 64 * 64 * 2 + 2 * 64 * 4)
            where = [row + i * 64, column]
            tma.async_copy_global_to_shared(joined, where, bar, queries.index(s))
            tma.async_copy_global_to_shared(d_out, where, bar, slopes_out.index(s))
            at = unit * blocks * 128 + i * 64
            tma.async_copy_global_to_shared(stats, [0, at], bar, shifts.index(s))
            tma.async_copy_global_to_shared(stats, [1, at], bar, deltas.index(s))
            n += 1


@gluon.jit(do_not_specialize=COUNTS)
def _attend_back(
    joined,
    kv,
    d_out,
    grad,
    grad_kv,
    stats,
    lines,
    sums,
    plan,
    group,
    heads,
    blocks,
    stride,
    places,
    step,
    STAGES: gl.constexpr,
    SHELVES: gl.constexpr,
    REGISTERS: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    CUT: gl.constexpr,
):
    queries = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], joined.layout)
    slopes_out = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], joined.layout)
    shifts = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], stats.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], stats.layout)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 64], joined.layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [1, 128, 64], joined.layout)
    slopes = gl.allocate_shared_memory(gl.bfloat16, [2, 128, 64], joined.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shelves = gl.allocate_shared_memory(gl.float32, [SHELVES, SIZE], flat)
    out = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], joined.layout)
    of_ring = (barriers(STAGES, 1), barriers(STAGES, 2))
    of_slopes = (barriers(2, 2), barriers(2, 1))
    of_keys = (barriers(2, 1), barriers(2, 2))
    of_values = (barriers(1, 1), barriers(1, 2))
    bars = (of_ring, of_slopes, of_keys, of_values)
    fence_async_shared()
    rings = (queries, slopes_out, keys, slopes, shifts, deltas)
    sizes = (heads, blocks, stride)
    work = (plan, grad, grad_kv, (lines, places, step), sums)
    rest = (values, shelves, out)
    gl.warp_specialize(
        [
            (_consume, (work, rings, rest, bars, sizes, STAGES, SHELVES, INTERLEAVED, CUT, 0)),
            (_consume, (work, rings, rest, bars, sizes, STAGES, SHELVES, INTERLEAVED, CUT, 1)),
            (_load, (plan, joined, kv, d_out, stats, rings, values, bars, sizes, group, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


# Calls


def attend_back(
    joined: Tensor,
    d_mixed: Tensor,
    stats: Tensor,
    lines: Tensor,
    interleaved: bool,
    cut: bool = False,
    programs: int = 0,
) -> Tensor:
    """Return the gradient of the joined product before RoPE was applied.

    joined (batch, seq, (heads + 2 kv_heads) · 64) is [Q | K | V] as attention read it, d_mixed
    (batch, seq, heads · 64). The tables in `lines` serve each sequence, or are as long as all of
    them together. Heads are `cut` into blocks of keys, or taken whole.
    """
    batch, seq, columns = joined.shape
    heads, blocks = d_mixed.shape[-1] // WIDTH, seq // BLOCK
    group = 2 * heads // (columns // WIDTH - heads)
    joined, d_mixed = joined.contiguous(), d_mixed.contiguous()
    grad = torch.empty_like(joined)
    units = batch * heads
    programs = programs_for(units * blocks if cut else units, programs)
    if cut:
        sums = joined.new_zeros(units, seq, WIDTH, dtype=torch.float32)
    else:
        sums = joined.new_empty(programs, seq, WIDTH, dtype=torch.float32)
    # In 128 queries; what is done once a block takes about as long as one of these.
    costs = tuple(range(blocks + 1, 1, -1))
    plan = shared_out(units, costs, programs, joined.device, whole=not cut)
    rows, grad_rows = joined.view(-1, columns), grad.view(-1, columns)
    if group == 1:
        grad_kv = grad_rows[:, heads * WIDTH :]
    else:  # of each query head, to be summed over the group
        grad_kv = joined.new_empty(batch * seq, 2 * heads * WIDTH)
    _attend_back[(programs,)](
        described(rows, 64, 64),
        described(rows[:, heads * WIDTH :], BLOCK, 64),
        described(d_mixed.view(batch * seq, -1), 64, 64),
        described(grad_rows, 64, 64),
        described(grad_kv, 64, 64),
        TensorDescriptor.from_tensor(stats.view(2, -1), [1, 64], NUMBERS),
        *(lines, sums, plan, group, heads, blocks, plan.shape[1]),
        *where_tables_lie(lines, 2 * blocks),
        STAGES=STAGES,
        SHELVES=SHELVES,
        REGISTERS=REGISTERS,
        INTERLEAVED=interleaved,
        CUT=cut,
        num_warps=4,
        maxnreg=BEFORE,
    )
    if cut:
        turn_sums(sums, lines, grad, interleaved)
    if group > 1:
        sum_dkv_groups(grad_kv, grad_rows)
    return grad


# As torch sees it: a whole operation, which a compiler does not open


@torch.library.custom_op("scratchlm::through_attention", mutates_args=(), device_types="cuda")
def through_attention(
    joined: Tensor,
    mixed: Tensor,
    d_mixed: Tensor,
    log_sums: Tensor,
    lines: Tensor,
    interleaved: bool,
) -> Tensor:
    """Return the gradient of the joined product, where that of what was mixed is `d_mixed`."""
    stats = row_stats(mixed, d_mixed, log_sums)
    return attend_back(joined, d_mixed, stats, lines, interleaved, joined.shape[1] > LONGEST)


@through_attention.register_fake
def _(
    joined: Tensor,
    mixed: Tensor,
    d_mixed: Tensor,
    log_sums: Tensor,
    lines: Tensor,
    interleaved: bool,
) -> Tensor:
    return torch.empty_like(joined)
