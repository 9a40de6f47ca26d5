"""Attention of one new token per row over the key-value cache, and the cache's new entry.

A program takes one query head of one row and one of `SPLITS` shares of the keys. Split 0 holds the
new key besides: straight from the projection, not through the cache, so that no program waits for
another's write; it also writes the new key and value into their slot. Each keeps

    m = max s,   l = Σ exp(s − m),   acc = Σ exp(s − m) v        s = q · k / √d

over its share, and the shares of a head are added up:

    M = max m_i,   out = Σ acc_i exp(m_i − M) / Σ l_i exp(m_i − M)

A few shares are added up by the kernel that reads them (`project_add`): each leaves acc / l and
s = m + log l, and nobody waits for anybody. Many are added up here, by the program that finishes
last (a ticket per head): a trip to memory and back.

How long each row is stands in device memory, so a recorded graph goes on being right as it grows.
The first block of old keys and values is asked for before the wait: earlier steps wrote it.
"""

# mypy: disallow_untyped_defs=False
# Arguments of a kernel are pointers and numbers of the device: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

from scratchlm.accelerate.kernels.triton.decode import _ready

NO_ROPE, HALF, INTERLEAVED = 0, 1, 2
# Lower than any score, yet finite: the difference of two such is 0, not NaN.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _pairs(D: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr):
    """Return each channel's partner, the pair they form, and whether it is the pair's first."""
    d = tl.arange(0, BLOCK_D)
    if ROPE == 1:
        is_first = d < D // 2
        partner = tl.where(is_first, d + D // 2, d - D // 2)
        pair = tl.where(is_first, d, d - D // 2)
    else:
        is_first = d % 2 == 0
        partner = d ^ 1
        pair = d // 2
    return partner, pair, is_first


@triton.jit
def _channels(head, channel, inside):
    return tl.load(head + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _turned(
    x,
    partner,
    gain,
    partner_gain,
    c,
    s,
    is_first,
    D: tl.constexpr,
    EPS: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Return one head's query or key, normed and turned to its place, in float32."""
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 0) / D + EPS)
        x = x * scale * gain
        partner = partner * scale * partner_gain
    if ROPE != 0:
        x = x * c + tl.where(is_first, -partner, partner) * s
    return x


@triton.jit
def _block(cache, begin, end, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t, d = begin + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    place = cache + t[:, None] * D + d[None, :]
    return tl.load(place, mask=(t < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _take_in(q, k, v, begin, end, top, total, acc, BLOCK_T: tl.constexpr):
    """Add one block of keys and values to what was gathered so far."""
    seen = begin + tl.arange(0, BLOCK_T) < end
    score = tl.where(seen, tl.sum(k.to(tl.float32) * q[None, :], 1), _LOWEST)
    new_top = tl.maximum(top, tl.max(score, 0))
    weight = tl.where(seen, tl.exp(score - new_top), 0.0)
    fade = tl.exp(top - new_top)
    acc = acc * fade + tl.sum(weight[:, None] * v.to(tl.float32), 0)
    return new_top, total * fade + tl.sum(weight, 0), acc


@triton.jit
def attend(
    q,
    k,
    v,
    q_gain,
    k_gain,
    cos,
    sin,
    keys,
    values,
    lengths,
    partial,
    tickets,
    out,
    sums,
    CAPACITY: tl.constexpr,
    REACH: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    EPS: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROPE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row, head] = attention of the new token; its key and value go into the cache.

    Grid: (HEADS, SPLITS, rows). REACH: keys that a row may have at most, of CAPACITY in the cache.
    WINDOW = 0: no sliding window. With `sums` (splits, rows, heads), `out` is (splits, rows, heads,
    d) and the shares stay apart. Without, `partial` holds (acc, m, l) per row, head and split in
    float32; `tickets` are zero before and after.
    """
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    length = tl.load(lengths + row).to(tl.int32)  # and so the new token's slot
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW + 1, 0)
    share = tl.cdiv(length - oldest, SPLITS)
    begin = oldest + split * share
    end = tl.minimum(begin + share, length)
    own = (row.to(tl.int64) * KV_HEADS + kv_head) * CAPACITY * D
    k_block = _block(keys + own, begin, end, D, BLOCK_T, BLOCK_D)
    v_block = _block(values + own, begin, end, D, BLOCK_T, BLOCK_D)
    partner, pair, is_first = _pairs(D, BLOCK_D, ROPE)
    c, s, qg, kg, qg_, kg_ = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    if ROPE != 0:
        c = _channels(cos, length * (D // 2) + pair, inside)
        s = _channels(sin, length * (D // 2) + pair, inside)
    if QK_NORM:
        qg, qg_ = _channels(q_gain, d, inside), _channels(q_gain, partner, inside)
        kg, kg_ = _channels(k_gain, d, inside), _channels(k_gain, partner, inside)
    _ready(PDL)

    # All loads before the first sum. A partner is read from memory, not shuffled: one code for
    # both layouts of the rotation.
    q_head = q + (row * HEADS + head) * D
    new = (row * KV_HEADS + kv_head) * D
    query, query_ = _channels(q_head, d, inside), _channels(q_head, partner, inside)
    new_key, new_key_ = _channels(k + new, d, inside), _channels(k + new, partner, inside)
    new_value = tl.load(v + new + d, mask=inside, other=0.0).to(values.dtype.element_ty)
    query = _turned(query, query_, qg, qg_, c, s, is_first, D, EPS, QK_NORM, ROPE)
    new_key = _turned(new_key, new_key_, kg, kg_, c, s, is_first, D, EPS, QK_NORM, ROPE)
    new_key = new_key.to(keys.dtype.element_ty)  # as the cache will give it back
    holds_new = split == 0
    writes = inside & holds_new & (head % (HEADS // KV_HEADS) == 0)
    tl.store(keys + own + length * D + d, new_key, mask=writes)
    tl.store(values + own + length * D + d, new_value, mask=writes)

    query *= SCALE
    top = tl.where(holds_new, tl.sum(query * new_key.to(tl.float32), 0), _LOWEST)
    total = tl.where(holds_new, 1.0, 0.0)
    acc = tl.where(holds_new, new_value.to(tl.float32), 0.0)
    top, total, acc = _take_in(query, k_block, v_block, begin, end, top, total, acc, BLOCK_T)
    if REACH > SPLITS * BLOCK_T:  # else the first block is all there can ever be
        for start in range(begin + BLOCK_T, end, BLOCK_T):
            k_block = _block(keys + own, start, end, D, BLOCK_T, BLOCK_D)
            v_block = _block(values + own, start, end, D, BLOCK_T, BLOCK_D)
            top, total, acc = _take_in(
                query, k_block, v_block, start, end, top, total, acc, BLOCK_T
            )

    result = out + (row * HEADS + head) * D + d
    if SPLITS == 1:
        tl.store(result, (acc / total).to(out.dtype.element_ty), mask=inside)
    elif sums is not None:
        rows_before = split * tl.num_programs(2)
        some = total > 0.0  # a short row leaves shares empty
        mean = acc / tl.where(some, total, 1.0)
        place = result + rows_before * HEADS * D
        tl.store(place, mean.to(out.dtype.element_ty), mask=inside)
        score = tl.where(some, top + tl.log(tl.where(some, total, 1.0)), _LOWEST)
        tl.store(sums + (rows_before + row) * HEADS + head, score)
    else:
        mine = partial + ((row * HEADS + head) * SPLITS + split) * (D + 2)
        tl.store(mine + d, acc, mask=inside)
        tl.store(mine + D, top)
        tl.store(mine + D + 1, total)
        tl.debug_barrier()  # every thread's part is written before the ticket is drawn
        ticket = tl.atomic_add(tickets + row * HEADS + head, 1, sem="acq_rel")
        if ticket == SPLITS - 1:
            _add_up(
                partial + (row * HEADS + head) * SPLITS * (D + 2),
                result,
                out.dtype.element_ty,
                D,
                BLOCK_D,
                SPLITS,
                SPLITS_2,
            )
            tl.store(tickets + row * HEADS + head, 0)


@triton.jit
def _add_up(
    shares,
    result,
    dtype: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
):
    """Write Σ acc_i exp(m_i − M) / Σ l_i exp(m_i − M). Past the L1, which may hold older shares."""
    i, d = tl.arange(0, SPLITS_2), tl.arange(0, BLOCK_D)
    there = i < SPLITS
    share = shares + i * (D + 2)
    top = tl.load(share + D, mask=there, other=_LOWEST, cache_modifier=".cg")
    total = tl.load(share + D + 1, mask=there, other=0.0, cache_modifier=".cg")
    both = there[:, None] & (d < D)[None, :]
    acc = tl.load(share[:, None] + d[None, :], mask=both, other=0.0, cache_modifier=".cg")
    weight = tl.exp(top - tl.max(top, 0))
    mixed = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(result, mixed.to(dtype), mask=d < D)
