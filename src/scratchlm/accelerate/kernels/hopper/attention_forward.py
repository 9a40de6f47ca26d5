"""The forward pass of causal attention over heads of 64 channels, on Hopper's tensor cores.

    S = Q Kᵀ/8,    O = Σ exp(S − m) V / Σ exp(S − m),    L = m + log Σ exp(S − m)

over the keys a query sees. For any m these are the same numbers, as long as none is too large or
too small: so m comes from one tile's scores, and is not a maximum that runs along, for which every
tile would compare all of its scores and correct all sums. Tiles of keys are taken from the last to
the first. The last, on the diagonal, has a key for every query; m lies 96 powers of two above the
largest score there, which so counts 2⁻⁹⁶. Another may be 122 nats larger, n of them 122 − log n:
where a sum is above 2⁸⁰ in the end, its tile of queries is taken once more, with a running maximum,
and the other queries of that tile round otherwise. What is 21 nats smaller is dropped, at most
n · 2⁻³⁰ of a sum; values below 2⁻³⁰ would be too.

A program is made of a loading warp, which fills a ring with tiles of 64 keys and their values, and
four consumers of four warps. An item is four tiles of 64 queries, one a consumer's. S is summed in
its registers, P multiplied from them: while one consumer takes exponentials, others multiply. The
first of four tiles sees three tiles of keys less than the last: consumers take them in one order
and, in the next item, in the other; the ring is deep enough for one to be ahead meanwhile.

What waits for what:

    full[s], empty[s]         stage s of the ring: its copies, all consumers
    given[c], q_empty[c]      consumer c's queries: their copy; it has them in registers
    own[c]                    copies of consumer c's own, when it takes queries once more

Gluon is experimental, and nothing interprets it on a CPU: `ops/hopper.py` says where this runs.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and numbers of the device: Python has no types for them.

from __future__ import annotations

import math

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

from scratchlm.accelerate.kernels.hopper.attention_tiles import LEFT, SUMS, TO_POWERS
from scratchlm.accelerate.kernels.hopper.pingpong_gemm import (
    barriers,
    described,
    meet,
    power_of_two,
    programs_for,
)
from scratchlm.accelerate.kernels.hopper.work_schedule import how_many, shared_out, taken

WIDTH, TILE = 64, 64  # of a head; queries, and keys, at a time
CONSUMERS = 4
STAGES = 6
REGISTERS = 112  # of a consumer's thread, 120 of the first's; the loader has what is left, 24
BEFORE = 96  # 65,536 shared out over 20 warps, until they are given their own
COUNTS = ["heads", "tiles", "stride"]  # none is compiled in

_LOG_2 = gl.constexpr(math.log(2))
_ABOVE, _MOST = gl.constexpr(96.0), gl.constexpr(2.0**80)
_CONSUMERS = gl.constexpr(CONSUMERS)
_ROWS = gl.constexpr(gl.SliceLayout(1, SUMS.value))


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _scores(q, keys):
    none = gl.zeros([64, 64], gl.float32, SUMS)
    s = warpgroup_mma(q, keys.permute((1, 0)), none, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _mixed(p, values, acc):
    left = gl.convert_layout(p.to(gl.bfloat16), LEFT, assert_trivial=True)
    acc = warpgroup_mma(left, values, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _seen(s):
    """Hide the keys after each query, on the diagonal."""
    query = gl.arange(0, 64, _ROWS).expand_dims(1)
    key = gl.arange(0, 64, gl.SliceLayout(0, SUMS)).expand_dims(0)
    return gl.where(key <= query, s, float("-inf"))


@gluon.jit
def _own_sums(p):
    """Sum what each thread has of a query: (64, 64) → (64, 4); no number moves to another."""
    return gl.reduce(gl.reduce(p.reshape(64, 8, 4, 2), 3, _sum), 1, _sum)


@gluon.jit
def _take(s, shift, total, values, acc):
    """Add a tile's exponentials and what they mix to the sums."""
    p = power_of_two(s * TO_POWERS - shift.expand_dims(1))
    return total + _own_sums(p), _mixed(p, values, acc)


@gluon.jit
def _copied(joined, place, bar, buffer, phase):
    """Wait for a copy of this consumer's own, once all its warps are done with the buffer."""
    meet()
    mbarrier.expect(bar, 64 * 64 * 2)
    tma.async_copy_global_to_shared(joined, place, bar, buffer)
    mbarrier.wait(bar, phase)


@gluon.jit
def _carefully(q, joined, corner, heads, mine, bar, buffer):
    """Take a tile of queries with a maximum that runs along; tile by tile through one buffer."""
    row, column = corner
    acc = gl.zeros([64, 64], gl.float32, SUMS)
    top = gl.full([64], float("-inf"), gl.float32, _ROWS)
    total = gl.full([64], 0.0, gl.float32, _ROWS)
    tma.store_wait(0)
    for t in range(mine + 1):
        _copied(joined, [row + t * 64, column + heads * 64], bar, buffer, 0)
        s = _scores(q, buffer)
        if t == mine:
            s = _seen(s)
        above = gl.maximum(top, gl.reduce(s, 1, _larger) * TO_POWERS)
        fade = power_of_two(top - above)
        p = power_of_two(s * TO_POWERS - above.expand_dims(1))
        total = total * fade + gl.reduce(p, 1, _sum)
        top = above
        _copied(joined, [row + t * 64, column + 2 * heads * 64], bar, buffer, 1)
        acc = _mixed(p, buffer, acc * fade.expand_dims(1))
    meet()
    return acc, top, total


@gluon.jit
def _tile_of(first, r, C: gl.constexpr):
    """Return which tile of queries is consumer C's: upwards, and downwards every other time."""
    return first + C + (r & 1) * (_CONSUMERS - 1 - 2 * C)


@gluon.jit
def _item(plan, r, sizes):
    """Return the head, and the first of four tiles of queries; those that see most come first."""
    _, tiles, stride = sizes
    blocks = (tiles + _CONSUMERS - 1) // _CONSUMERS
    unit, j = taken(plan, stride, r, blocks)
    return unit, (blocks - 1 - j) * _CONSUMERS


@gluon.jit
def _corner(unit, sizes):
    """Return the row and the column where a head's queries begin."""
    heads, tiles, _ = sizes
    return unit // heads * tiles * 64, unit % heads * 64


@gluon.jit
def _consume(plan, joined, y, sums, rings, out, bars, sizes, STAGES: gl.constexpr, C: gl.constexpr):
    heads, tiles, stride = sizes
    queries, keys, values = rings
    full, empty, given, q_empty, own = bars
    n = 0  # tiles of keys that were taken
    for r in range(how_many(plan, stride)):
        unit, first = _item(plan, r, sizes)
        mine = _tile_of(first, r, C)
        mbarrier.wait(given.index(C), r & 1)
        q = queries.index(C).load(LEFT)
        mbarrier.arrive(q_empty.index(C), count=1)
        last = gl.minimum(first + _CONSUMERS, tiles) - 1
        unseen = last - mine
        if mine > last:  # no queries are left for this consumer
            unseen = last + 1
        for _ in range(unseen):
            mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
            mbarrier.arrive(empty.index(n % STAGES), count=1)
            n += 1
        if mine <= last:
            mbarrier.wait(full.index(n % STAGES), (n // STAGES) & 1)
            s = _seen(_scores(q, keys.index(n % STAGES)))
            shift = gl.reduce(s, 1, _larger) * TO_POWERS + _ABOVE
            acc = gl.zeros([64, 64], gl.float32, SUMS)
            total = _own_sums(acc)  # zeros too
            total, acc = _take(s, shift, total, values.index(n % STAGES), acc)
            mbarrier.arrive(empty.index(n % STAGES), count=1)
            n += 1
            for _ in range(mine):
                stage = n % STAGES
                mbarrier.wait(full.index(stage), (n // STAGES) & 1)
                s = _scores(q, keys.index(stage))
                total, acc = _take(s, shift, total, values.index(stage), acc)
                mbarrier.arrive(empty.index(stage), count=1)
                n += 1
            row, column = _corner(unit, sizes)
            whole = gl.convert_layout(gl.reduce(total, 1, _sum), _ROWS, assert_trivial=True)
            if gl.reduce(whole, 0, _larger) > _MOST:
                corner = (row, column)
                acc, shift, whole = _carefully(
                    q, joined, corner, heads, mine, own.index(C), out.index(C)
                )
            tma.store_wait(0)
            out.index(C).store((acc * (1.0 / whole).expand_dims(1)).to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(y, [row + mine * 64, column], out.index(C))
            place = sums + (unit * tiles + mine).to(gl.int64) * 64 + gl.arange(0, 64, _ROWS)
            gl.store(place, (shift + gl.log2(whole)) * _LOG_2)
    tma.store_wait(0)


@gluon.jit
def _load(plan, joined, rings, bars, sizes, STAGES: gl.constexpr):
    """The loading warp."""
    heads, tiles, stride = sizes
    queries, keys, values = rings
    full, empty, given, q_empty, _ = bars
    n = 0
    for r in range(how_many(plan, stride)):
        unit, first = _item(plan, r, sizes)
        row, column = _corner(unit, sizes)
        for c in gl.static_range(_CONSUMERS):
            mbarrier.wait(q_empty.index(c), (r & 1) ^ 1)
            bar = given.index(c)
            mbarrier.expect(bar, 64 * 64 * 2)
            where = [row + _tile_of(first, r, c) * 64, column]
            tma.async_copy_global_to_shared(joined, where, bar, queries.index(c))
        seen = gl.minimum(first + _CONSUMERS, tiles)
        for i in range(seen):
            s = n % STAGES
            mbarrier.wait(empty.index(s), ((n // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, 2 * 64 * 64 * 2)
            at = row + (seen - 1 - i) * 64
            of_k = [at, column + heads * 64]
            tma.async_copy_global_to_shared(joined, of_k, bar, keys.index(s))
            of_v = [at, column + 2 * heads * 64]
            tma.async_copy_global_to_shared(joined, of_v, bar, values.index(s))
            n += 1


@gluon.jit(do_not_specialize=COUNTS)
def _attend(
    joined,
    y,
    sums,
    plan,
    heads,
    tiles,
    stride,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    queries = gl.allocate_shared_memory(gl.bfloat16, [_CONSUMERS, 64, 64], joined.layout)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], joined.layout)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], joined.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [_CONSUMERS, 64, 64], joined.layout)
    full, empty = barriers(STAGES, 1), barriers(STAGES, _CONSUMERS)
    given, q_empty = barriers(_CONSUMERS, 1), barriers(_CONSUMERS, 1)
    bars = (full, empty, given, q_empty, barriers(_CONSUMERS, 1))
    fence_async_shared()
    rings = (queries, keys, values)
    sizes = (heads, tiles, stride)
    gl.warp_specialize(
        [
            (_consume, (plan, joined, y, sums, rings, out, bars, sizes, STAGES, 0)),
            (_consume, (plan, joined, y, sums, rings, out, bars, sizes, STAGES, 1)),
            (_consume, (plan, joined, y, sums, rings, out, bars, sizes, STAGES, 2)),
            (_consume, (plan, joined, y, sums, rings, out, bars, sizes, STAGES, 3)),
            (_load, (plan, joined, rings, bars, sizes, STAGES)),
        ],
        [4, 4, 4, 1],
        [REGISTERS, REGISTERS, REGISTERS, 24],
    )


# Calls


def attend(joined: Tensor, programs: int = 0) -> tuple[Tensor, Tensor]:
    """Return what attention mixes (batch, seq, heads · 64), and L (batch, heads, seq).

    Q, K and V lie side by side: (batch, seq, 3 · heads · 64), seq a multiple of 64.
    """
    batch, seq, columns = joined.shape
    heads, tiles = columns // (3 * WIDTH), seq // TILE
    joined = joined.contiguous()
    y = joined.new_empty(batch, seq, heads * WIDTH)
    sums = joined.new_empty(batch, heads, seq, dtype=torch.float32)
    costs = tuple(range(tiles, 0, -CONSUMERS))
    programs = programs_for(batch * heads * len(costs), programs)
    plan = shared_out(batch * heads, costs, programs, joined.device)
    _attend[(programs,)](
        described(joined.view(-1, columns), TILE, WIDTH),
        described(y.view(-1, heads * WIDTH), TILE, WIDTH),
        *(sums, plan, heads, tiles, plan.shape[1]),
        STAGES=STAGES,
        REGISTERS=REGISTERS,
        num_warps=4,
        maxnreg=BEFORE,
    )
    return y, sums


# As torch sees it: a whole operation, which a compiler does not open


@torch.library.custom_op("scratchlm::attend_heads", mutates_args=(), device_types="cuda")
def attend_heads(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Return what attention mixes of a joined product, and L."""
    return attend(joined)


@attend_heads.register_fake
def _(joined: Tensor) -> tuple[Tensor, Tensor]:
    batch, seq, columns = joined.shape
    width = columns // 3
    sums = joined.new_empty(batch, width // WIDTH, seq, dtype=torch.float32)
    return joined.new_empty(batch, seq, width), sums
