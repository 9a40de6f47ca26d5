"""Split-KV attention of one new token per row over the KV cache; also appends to the cache.

A program takes one query head of one row and one of `SPLITS` ranges of the keys. Split 0 also
takes the new key and value, straight from the projection, so that no program waits for another's
write; it writes them into the cache. Each program runs online softmax over its range

    m = max s,   l = Σ exp(s − m),   acc = Σ exp(s − m) v        s = q · k / √d

and the splits of a head are combined:

    M = max m_i,   out = Σ acc_i exp(m_i − M) / Σ l_i exp(m_i − M)

Few splits are combined by the kernel that reads them (deferred combine, in `project_add`): each
program leaves acc / l and its log-sum-exp m + log l, without synchronization. Many splits are
combined here by the last program to finish (an atomic ticket per head): a round trip to memory.

Keys and values lie in pages (`scratchlm/paged.py`). The rows' lengths and page tables are in device
memory, so a captured CUDA graph stays valid as rows grow, come and go; a length of −1 is a row that
is not there. The first block of cached keys and values is loaded before the PDL wait: earlier steps
wrote it.
"""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

from scratchlm.accelerate.kernels.triton.decode import launch_dependents_and_wait

NO_ROPE, HALF, INTERLEAVED = 0, 1, 2
# Lower than any score, yet finite: the difference of two such is 0, not NaN.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _rope_pairs(D: tl.constexpr, BLOCK_D: tl.constexpr, ROPE: tl.constexpr):
    """Return each channel's partner, the index of their RoPE pair, and whether it comes first."""
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
def _load_channels(head, channel, mask):
    return tl.load(head + channel, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _norm_rope(
    x,
    partner,
    weight,
    partner_weight,
    c,
    s,
    is_first,
    D: tl.constexpr,
    EPS: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Apply QK-norm and RoPE to one head's query or key, in float32."""
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 0) / D + EPS)
        x = x * scale * weight
        partner = partner * scale * partner_weight
    if ROPE != 0:
        x = x * c + tl.where(is_first, -partner, partner) * s
    return x


@triton.jit
def slot_in_pages(
    table, kv_head, t, is_valid, PAGE: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr
):
    """Return where position t of a row's head lies in the pages: an offset in elements."""
    page = tl.load(table + t // PAGE, mask=is_valid, other=0).to(tl.int64)
    return ((page * KV_HEADS + kv_head) * PAGE + t % PAGE) * D


@triton.jit
def _load_kv_block(cache, slots, is_valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tile = cache + slots[:, None] + d[None, :]
    return tl.load(tile, mask=is_valid[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _online_softmax(q, k, v, begin, end, running_max, total, acc, BLOCK_T: tl.constexpr):
    """Update the running max, sum and accumulator with one block of keys and values."""
    is_valid = begin + tl.arange(0, BLOCK_T) < end
    score = tl.where(is_valid, tl.sum(k.to(tl.float32) * q[None, :], 1), _LOWEST)
    new_max = tl.maximum(running_max, tl.max(score, 0))
    weight = tl.where(is_valid, tl.exp(score - new_max), 0.0)
    rescale = tl.exp(running_max - new_max)
    acc = acc * rescale + tl.sum(weight[:, None] * v.to(tl.float32), 0)
    return new_max, total * rescale + tl.sum(weight, 0), acc


@triton.jit
def decode_attention(
    q,
    k,
    v,
    q_weight,
    k_weight,
    cos,
    sin,
    keys,
    values,
    lengths,
    tables,
    partial,
    tickets,
    out,
    lse,
    PAGE: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    MAX_KV_LEN: tl.constexpr,
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

    Grid: (HEADS, SPLITS, rows). No row has more than MAX_KV_LEN keys; `tables` (rows, MAX_PAGES).
    WINDOW = 0: no sliding window. With `lse` (splits, rows, heads), `out` is (splits, rows, heads,
    d) and the splits are not combined. Without, `partial` holds (acc, m, l) per row, head and split
    in float32; `tickets` are zero before and after.
    """
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)
    d = tl.arange(0, BLOCK_D)
    mask = d < D
    length = tl.load(lengths + row).to(tl.int32)  # also the new token's position
    is_there = length >= 0
    length = tl.maximum(length, 0)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW + 1, 0)
    keys_per_split = tl.cdiv(length - oldest, SPLITS)
    begin = oldest + split * keys_per_split
    end = tl.minimum(begin + keys_per_split, length)
    table = tables + row * MAX_PAGES
    t = begin + tl.arange(0, BLOCK_T)
    slots = slot_in_pages(table, kv_head, t, t < end, PAGE, KV_HEADS, D)
    k_block = _load_kv_block(keys, slots, t < end, D, BLOCK_D)
    v_block = _load_kv_block(values, slots, t < end, D, BLOCK_D)
    new_slot = slot_in_pages(table, kv_head, length, is_there, PAGE, KV_HEADS, D)
    partner, pair, is_first = _rope_pairs(D, BLOCK_D, ROPE)
    c, s, qw, kw, qw_partner, kw_partner = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    if ROPE != 0:
        c = _load_channels(cos, length * (D // 2) + pair, mask)
        s = _load_channels(sin, length * (D // 2) + pair, mask)
    if QK_NORM:
        qw, qw_partner = _load_channels(q_weight, d, mask), _load_channels(q_weight, partner, mask)
        kw, kw_partner = _load_channels(k_weight, d, mask), _load_channels(k_weight, partner, mask)
    launch_dependents_and_wait(PDL)

    # All loads come before the first reduction. A partner is loaded from memory, not shuffled, so
    # that one code serves both RoPE layouts.
    q_head = q + (row * HEADS + head) * D
    new = (row * KV_HEADS + kv_head) * D
    query, query_partner = _load_channels(q_head, d, mask), _load_channels(q_head, partner, mask)
    new_key = _load_channels(k + new, d, mask)
    new_key_partner = _load_channels(k + new, partner, mask)
    new_value = tl.load(v + new + d, mask=mask, other=0.0).to(values.dtype.element_ty)
    query = _norm_rope(query, query_partner, qw, qw_partner, c, s, is_first, D, EPS, QK_NORM, ROPE)
    new_key = _norm_rope(
        new_key, new_key_partner, kw, kw_partner, c, s, is_first, D, EPS, QK_NORM, ROPE
    )
    new_key = new_key.to(keys.dtype.element_ty)  # rounded as in the cache
    has_new_key = split == 0
    writes = mask & has_new_key & is_there & (head % (HEADS // KV_HEADS) == 0)
    tl.store(keys + new_slot + d, new_key, mask=writes)
    tl.store(values + new_slot + d, new_value, mask=writes)

    query *= SCALE
    running_max = tl.where(has_new_key, tl.sum(query * new_key.to(tl.float32), 0), _LOWEST)
    total = tl.where(has_new_key, 1.0, 0.0)
    acc = tl.where(has_new_key, new_value.to(tl.float32), 0.0)
    running_max, total, acc = _online_softmax(
        query, k_block, v_block, begin, end, running_max, total, acc, BLOCK_T
    )
    if MAX_KV_LEN > SPLITS * BLOCK_T:  # otherwise the first block holds all keys
        for start in range(begin + BLOCK_T, end, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            slots = slot_in_pages(table, kv_head, t, t < end, PAGE, KV_HEADS, D)
            k_block = _load_kv_block(keys, slots, t < end, D, BLOCK_D)
            v_block = _load_kv_block(values, slots, t < end, D, BLOCK_D)
            running_max, total, acc = _online_softmax(
                query, k_block, v_block, start, end, running_max, total, acc, BLOCK_T
            )

    result = out + (row * HEADS + head) * D + d
    if SPLITS == 1:
        tl.store(result, (acc / total).to(out.dtype.element_ty), mask=mask)
    elif lse is not None:
        rows_before = split * tl.num_programs(2)
        has_keys = total > 0.0  # a short row leaves splits empty
        split_out = acc / tl.where(has_keys, total, 1.0)
        target = result + rows_before * HEADS * D
        tl.store(target, split_out.to(out.dtype.element_ty), mask=mask)
        split_lse = running_max + tl.log(tl.where(has_keys, total, 1.0))
        split_lse = tl.where(has_keys, split_lse, _LOWEST)
        tl.store(lse + (rows_before + row) * HEADS + head, split_lse)
    else:
        slot = partial + ((row * HEADS + head) * SPLITS + split) * (D + 2)
        tl.store(slot + d, acc, mask=mask)
        tl.store(slot + D, running_max)
        tl.store(slot + D + 1, total)
        tl.debug_barrier()  # all threads have stored before the ticket is taken
        ticket = tl.atomic_add(tickets + row * HEADS + head, 1, sem="acq_rel")
        if ticket == SPLITS - 1:
            _combine_splits(
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
def _combine_splits(
    partial,
    result,
    dtype: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
):
    """Write Σ acc_i exp(m_i − M) / Σ l_i exp(m_i − M). Loads bypass L1, which may be stale."""
    i, d = tl.arange(0, SPLITS_2), tl.arange(0, BLOCK_D)
    mask = i < SPLITS
    split = partial + i * (D + 2)
    split_max = tl.load(split + D, mask=mask, other=_LOWEST, cache_modifier=".cg")
    total = tl.load(split + D + 1, mask=mask, other=0.0, cache_modifier=".cg")
    tile_mask = mask[:, None] & (d < D)[None, :]
    acc = tl.load(split[:, None] + d[None, :], mask=tile_mask, other=0.0, cache_modifier=".cg")
    weight = tl.exp(split_max - tl.max(split_max, 0))
    combined = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(result, combined.to(dtype), mask=d < D)
