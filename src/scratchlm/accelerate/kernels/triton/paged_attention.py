"""Attention of new tokens over keys and values in pages, for any mix of prompts and decoding rows.

    norm_rope_write       Q, K: norm and RoPE; K and V go into the pages
    paged_attention       softmax(Q Kᵀ / √d) V over a row's pages, by online softmax
    combine_splits        of rows whose keys are split among programs

A tile is up to BLOCK_Q consecutive new tokens of one row, with all query heads that share a head of
keys: BLOCK_Q · GROUP lines of one matrix product, so that a key is read once for all of them. Keys
are taken in blocks counted from position 0, whatever else is in the step.
"""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

# Lower than any score, yet finite: the difference of two such is 0, not NaN.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _norm_rope_heads(
    source,
    heads,
    HEADS: tl.constexpr,
    weight,
    cos,
    sin,
    position,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EPS: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Return (heads, d) of one token, normed and rotated, in float32."""
    d = tl.arange(0, BLOCK_D)
    mask = (heads < HEADS)[:, None] & (d < D)[None, :]
    x = tl.load(source + heads[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROPE == 1:
        is_first = d < D // 2
        partner = tl.where(is_first, d + D // 2, d - D // 2)
        pair = tl.where(is_first, d, d - D // 2)
    else:
        is_first = d % 2 == 0
        partner = d ^ 1
        pair = d // 2
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
        x = x * scale * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if ROPE != 0:
        y = tl.load(source + heads[:, None] * D + partner[None, :], mask=mask, other=0.0)
        y = y.to(tl.float32)
        if QK_NORM:
            y = y * scale * tl.load(weight + partner, mask=d < D, other=0.0).to(tl.float32)[None, :]
        c = tl.load(cos + position * (D // 2) + pair, mask=d < D, other=0.0).to(tl.float32)
        s = tl.load(sin + position * (D // 2) + pair, mask=d < D, other=0.0).to(tl.float32)
        x = x * c[None, :] + tl.where(is_first[None, :], -y, y) * s[None, :]
    return x


@triton.jit
def norm_rope_write(
    q,
    k,
    v,
    queries,
    keys,
    values,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    rows,
    tables,
    Q_STRIDE,
    K_STRIDE,
    V_STRIDE,
    MAX_PAGES,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EPS: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Write one token's queries (tokens, heads, d), and its key and value into its row's page.

    Grid: (tokens,). A position of −1 is a token that is not there.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    is_there = position >= 0
    position = tl.maximum(position, 0)
    d = tl.arange(0, BLOCK_D)
    h = tl.arange(0, BLOCK_H)
    x = _norm_rope_heads(
        *(q + token * Q_STRIDE, h, HEADS, q_weight, cos, sin, position),
        *(D, BLOCK_D, EPS, QK_NORM, ROPE),
    )
    at = queries + token * HEADS * D + h[:, None] * D + d[None, :]
    tl.store(at, x.to(queries.dtype.element_ty), mask=(h < HEADS)[:, None] & (d < D)[None, :])

    h = tl.arange(0, BLOCK_KV)
    x = _norm_rope_heads(
        *(k + token * K_STRIDE, h, KV_HEADS, k_weight, cos, sin, position),
        *(D, BLOCK_D, EPS, QK_NORM, ROPE),
    )
    row = tl.load(rows + token)
    page = tl.load(tables + row * MAX_PAGES + position // PAGE, mask=is_there, other=0)
    slot = (page.to(tl.int64) * KV_HEADS + h) * PAGE + position % PAGE
    mask = (h < KV_HEADS)[:, None] & (d < D)[None, :] & is_there
    at = slot[:, None] * D + d[None, :]
    tl.store(keys + at, x.to(keys.dtype.element_ty), mask=mask)
    y = tl.load(v + token * V_STRIDE + h[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(values + at, y.to(values.dtype.element_ty), mask=mask)


@triton.jit
def paged_attention(
    queries,
    keys,
    values,
    out,
    partial,
    lse,
    tile_rows,
    tile_tokens,
    tile_counts,
    positions,
    tables,
    MAX_PAGES,
    SPLITS,
    SPLIT_KEYS,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out (tokens, heads, d) of one tile and one head of keys. Grid: (tiles, KV_HEADS, SPLITS).

    GROUP: query heads to a head of keys, padded. BLOCK_T divides PAGE. With IS_SPLIT a program
    takes SPLIT_KEYS keys, and `partial` (tokens, heads, splits, d) and `lse` get the results.
    WINDOW = 0: no sliding window.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first = tl.load(tile_rows + tile), tl.load(tile_tokens + tile).to(tl.int64)
    count, start = tl.load(tile_counts + tile), tl.load(positions + first)
    end = tl.where(count > 0, start + count, 0)  # of the keys that the tile's last token sees
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // BLOCK_T * BLOCK_T
    if IS_SPLIT:
        begin = tl.maximum(begin, split * SPLIT_KEYS)
        end = tl.minimum(end, (split + 1) * SPLIT_KEYS)

    m, d, t = tl.arange(0, BLOCK_Q * GROUP), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)
    token, in_group = m // GROUP, m % GROUP
    head = kv_head * (HEADS // KV_HEADS) + in_group
    is_real = (token < count) & (in_group < HEADS // KV_HEADS)
    line = (first + token) * HEADS + head
    mask = is_real[:, None] & (d < D)[None, :]
    q = tl.load(queries + line[:, None] * D + d[None, :], mask=mask, other=0.0)
    position = start + token

    running_max = tl.full((BLOCK_Q * GROUP,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK_Q * GROUP,), tl.float32)
    acc = tl.zeros((BLOCK_Q * GROUP, BLOCK_D), tl.float32)
    table = tables + row * MAX_PAGES
    for block in tl.range(begin, end, BLOCK_T, num_stages=STAGES):
        page = tl.load(table + block // PAGE).to(tl.int64)
        slot = (page * KV_HEADS + kv_head) * PAGE + block % PAGE
        here = block + t
        inside = (here < end)[:, None] & (d < D)[None, :]
        at = (slot + t)[:, None] * D + d[None, :]
        k = tl.load(keys + at, mask=inside, other=0.0)
        v = tl.load(values + at, mask=inside, other=0.0)
        score = tl.dot(q, k.trans(), input_precision="ieee") * SCALE
        visible = (here[None, :] <= position[:, None]) & (here < end)[None, :]
        if WINDOW > 0:
            visible = visible & (here[None, :] > position[:, None] - WINDOW)
        score = tl.where(visible, score, _LOWEST)
        new_max = tl.maximum(running_max, tl.max(score, 1))
        weight = tl.where(visible, tl.exp(score - new_max[:, None]), 0.0)
        rescale = tl.exp(running_max - new_max)
        acc = acc * rescale[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        total = total * rescale + tl.sum(weight, 1)
        running_max = new_max

    sees = total > 0.0
    result = acc / tl.where(sees, total, 1.0)[:, None]
    if not IS_SPLIT:
        tl.store(out + line[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=mask)
    else:
        of_split = line * SPLITS + split
        tl.store(partial + of_split[:, None] * D + d[None, :], result, mask=mask & sees[:, None])
        log_sum = tl.where(sees, running_max + tl.log(tl.where(sees, total, 1.0)), _LOWEST)
        tl.store(lse + of_split, log_sum, mask=is_real)


@triton.jit
def combine_splits(
    partial,
    lse,
    out,
    tile_tokens,
    tile_counts,
    SPLITS,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """out[token, head] = Σ softmax(lse)ᵢ partialᵢ. Grid: (tiles · BLOCK_Q, HEADS)."""
    tile, in_tile = tl.program_id(0) // BLOCK_Q, tl.program_id(0) % BLOCK_Q
    if in_tile < tl.load(tile_counts + tile):
        token = tl.load(tile_tokens + tile).to(tl.int64) + in_tile
        line = token * HEADS + tl.program_id(1)
        i, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        log_sum = tl.load(lse + line * SPLITS + i, mask=i < SPLITS, other=_LOWEST)
        weight = tl.where(log_sum > _LOWEST, tl.exp(log_sum - tl.max(log_sum, 0)), 0.0)
        mask = (weight > 0.0)[:, None] & (d < D)[None, :]
        at = (line * SPLITS + i)[:, None] * D + d[None, :]
        parts = tl.load(partial + at, mask=mask, other=0.0)
        whole = tl.sum(parts * weight[:, None], 0) / tl.maximum(tl.sum(weight, 0), 1e-30)
        tl.store(out + line * D + d, whole.to(out.dtype.element_ty), mask=d < D)
