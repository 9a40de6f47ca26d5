"""Q, K, V projection and attention of one new token in one kernel, for Hopper's clusters.

    q, k, v = W_q h, W_k h, W_v h        h = norm(x)
    a       = softmax(q · k / √d) v      over the new key and those in the cache

Elsewhere these are two kernels (`triton/decode.py`, `triton/decode_attention.py`): a head's query
is known only when all programs that multiplied its rows are done, and a few multiprocessors are too
slow to read its weights. The eight CTAs of a cluster write into each other's shared memory, and a
cluster barrier takes less time than the end of one kernel and the start of the next. A cluster
takes a head:

    a CTA       multiplies 8 rows of each of W_q, W_k, W_v, two of each per warp
    every CTA   receives all 128 values of q and k, and applies RoPE
    a warp      attends to one of 32 KV splits
    a CTA       receives the 32 splits' outputs for its 8 channels, and combines them with the new
                value, of which it has just these channels:

    M = max s_i,   a = Σ a_i exp(s_i − M) / Σ exp(s_i − M)       s_i = m_i + log l_i

Weights, old keys and values do not depend on the kernel before: they are loaded before the wait of
programmatic dependent launch. For long rows, W_v and the old values, which are needed last, are
only prefetched into the L2 cache.

The first dimension of every tensor here is the CTA. Gluon cannot send a value to another CTA yet
(3.6 and 3.7 refuse a conversion between them), so a few lines are PTX.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are pointers and device values: Python has no types for them.

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CTAS, WARPS = 8, 4
SHORT = gl.constexpr(8)  # keys per warp up to which everything fits into registers
# Lower than any score, yet finite: the difference of two of them is 0, not NaN.
_LOWEST = gl.constexpr(-1e30)


@gluon.constexpr_function
def _by_cta(each, lanes, warps):
    """Return a layout in which each CTA has its own entry of the first dimension."""
    rank = len(each)
    ctas = [[n] + [0] * (rank - 1) for n in (1, 2, 4)]
    return gl.BlockedLayout(each, lanes, warps, list(range(rank - 1, -1, -1)), ctas)


@gluon.jit
def _cluster_arrive():
    """Signal that this CTA runs: before, no other CTA may write into its shared memory."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _send(value, to, slot):
    """Write a value into CTA `to`, at byte `slot` of its box; return the box's address.

    One value per thread.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .shared .align 16 .b8 box[512];
            .reg .u32 there;
            barrier.cluster.wait.aligned;
            mov.u32 $0, box;
            add.u32 there, $0, $3;
            mapa.shared::cluster.u32 there, there, $2;
            st.shared::cluster.f32 [there], $1;
            barrier.cluster.arrive.release.aligned;
        }
        """,
        "=&r,f,r,r",
        [value, to, slot],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _receive(box, first, second):
    """Wait until all CTAs have sent; return the values at two byte offsets of the box."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .u32 there;
            barrier.cluster.wait.acquire.aligned;
            add.u32 there, $2, $3;
            ld.shared.f32 $0, [there];
            add.u32 there, $2, $4;
            ld.shared.f32 $1, [there];
        }
        """,
        "=&f,=&f,r,r,r",
        [box, first, second],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _exchange_splits(mean, lse, to, slot, source):
    """Send (mean, lse) of two neighbouring channels to CTA `to`; return two pairs from `source`.

    Two channels per thread. In the box, a channel has its 32 pairs of 8 bytes in a row.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .shared .align 16 .b8 pairs[2048];
            .reg .u32 here, there;
            mov.u32 here, pairs;
            add.u32 there, here, $10;
            mapa.shared::cluster.u32 there, there, $8;
            st.shared::cluster.v2.f32 [there], {$4, $6};
            st.shared::cluster.v2.f32 [there + 256], {$5, $7};
            barrier.cluster.arrive.release.aligned;
            barrier.cluster.wait.acquire.aligned;
            add.u32 there, here, $12;
            ld.shared.v4.f32 {$0, $2, $1, $3}, [there];
        }
        """,
        "=&f,=&f,=&f,=&f,f,f,f,f,r,r,r,r,r,r",
        [mean, lse, to, slot, source],
        dtype=(gl.float32, gl.float32),
        is_pure=False,
        pack=2,
    )


@gluon.jit
def _prefetch(pointers):
    """Prefetch the lines of 128 bytes that these point into."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [pointers],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _axis(SIZE: gl.constexpr, layout: gl.constexpr, DIM: gl.constexpr):
    """Return 0 … SIZE − 1 along dimension DIM of three."""
    if DIM == 0:
        i = gl.arange(0, SIZE, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    elif DIM == 1:
        i = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    else:
        i = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return i


@gluon.jit
def _warp_row(rows, j: gl.constexpr, ONE: gl.constexpr):
    """Broadcast the j-th of a warp's two rows, of (CTA, row), to all of its lanes."""
    pairs = rows.reshape(8, 4, 2)
    layout: gl.constexpr = pairs.type.layout
    one = gl.sum(gl.where(_axis(2, layout, 2) == j, pairs, 0.0), 2)
    return gl.convert_layout(one, gl.SliceLayout(2, ONE), assert_trivial=True)[:, :, None]


@gluon.jit
def _select(both, row: gl.constexpr, out_layout: gl.constexpr):
    """Return a row of (CTA, 2, channel), as a sum over registers with the other row masked."""
    layout: gl.constexpr = both.type.layout
    one = gl.sum(gl.where(_axis(2, layout, 1) == row, both, 0.0), 1)
    return gl.convert_layout(one, out_layout, assert_trivial=True)


@gluon.jit
def _broadcast_qk(q, k, ONE: gl.constexpr):
    """Send (CTA, row) of q and k to all CTAs; return the box where they gather, q and then k.

    All lanes have a warp's two values of each: eight lanes send each of them, to eight CTAs.
    """
    cta, warp, lane = _axis(8, ONE, 0), _axis(4, ONE, 1), _axis(32, ONE, 2)
    kind, odd = lane // 16, lane // 8 % 2
    q_value = gl.where(odd == 0, _warp_row(q, 0, ONE), _warp_row(q, 1, ONE))
    k_value = gl.where(odd == 0, _warp_row(k, 0, ONE), _warp_row(k, 1, ONE))
    slot = (kind * 64 + cta * 8 + warp * 2 + odd) * 4
    return _send(gl.where(kind == 0, q_value, k_value), lane % 8, slot)


@gluon.jit
def _rope_pairs(i, ROPE: gl.constexpr):
    """Return the partner of each of 128 values, q and then k, their pair, and which is first."""
    if ROPE == 1:
        is_first = i % 64 < 32
        partner = gl.where(is_first, i + 32, i - 32)
        pair = i % 32
    else:
        is_first = i % 2 == 0
        partner = i ^ 1
        pair = i % 64 // 2
    return partner, pair, is_first


@gluon.jit
def _attend_split(query, k_block, v_block, visible):
    """Return (mean, lse) of each warp's KV split: (CTA, warp, channel) and (CTA, warp, 1)."""
    score = gl.sum(k_block.to(gl.float32) * query[:, None, None, :], 3)
    score = gl.where(visible, score, _LOWEST)
    top = gl.max(score, 2)
    weight = gl.where(visible, gl.exp(score - top[:, :, None]), 0.0)
    total = gl.sum(weight, 2)
    acc = gl.sum(weight[:, :, :, None] * v_block.to(gl.float32), 2)
    TWO: gl.constexpr = _by_cta([1, 1, 2], [1, 1, 32], [1, 4, 1])  # two channels per thread
    top = gl.convert_layout(top, gl.SliceLayout(2, TWO), assert_trivial=True)
    total = gl.convert_layout(total, gl.SliceLayout(2, TWO), assert_trivial=True)
    filled = total > 0.0  # a short row leaves splits empty
    total = gl.where(filled, total, 1.0)
    lse = gl.where(filled, top + gl.log(total), _LOWEST)
    return gl.convert_layout(acc, TWO) / total[:, :, None], lse[:, :, None]


@gluon.jit
def _combine_splits(mean, lse, new_score, v_new):
    """Exchange the splits; return them and the new value combined, (CTA, channel)."""
    TWO: gl.constexpr = mean.type.layout
    cta, warp, i = _axis(8, TWO, 0), _axis(4, TWO, 1), _axis(64, TWO, 2)
    slot, source = (i % 8 * 32 + cta * 4 + warp) * 8, (warp * 64 + i) * 8
    mean, lse = _exchange_splits(mean, lse, i // 8, slot, source)
    mean, lse = mean.reshape(8, 8, 32), lse.reshape(8, 8, 32)  # (CTA, channel, split)
    SUM: gl.constexpr = gl.SliceLayout(2, mean.type.layout)
    new_score = gl.convert_layout(new_score, gl.SliceLayout(1, SUM))[:, None]
    top = gl.maximum(gl.max(lse, 2), new_score)
    weight, new_weight = gl.exp(lse - top[:, :, None]), gl.exp(new_score - top)
    attn_out = gl.sum(weight * mean, 2) + new_weight * gl.convert_layout(v_new, SUM)
    return attn_out / (gl.sum(weight, 2) + new_weight)


@gluon.jit
def decode_qkv_attention(
    x,
    norm_weight,
    w_q,
    w_k,
    w_v,
    cos,
    sin,
    keys,
    values,
    lengths,
    table,
    out,
    K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    HEADS: gl.constexpr,
    PAGE: gl.constexpr,
    KEYS: gl.constexpr,
    EPS: gl.constexpr,
    ROPE: gl.constexpr,
    SCALE: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[head] = attention of the new token; its key and value go into the cache.

    Grid: one program, which is a cluster, per head of 64 channels. A warp takes KEYS old keys, so
    no row may have more than 32 · KEYS of them before this step. ROPE, pages and a length of −1: as
    in `decode_attention.py`.
    """
    EARLY: gl.constexpr = KEYS <= SHORT
    _cluster_arrive()
    head = gl.program_id(0)

    W: gl.constexpr = _by_cta([1, 2, 8], [1, 1, 32], [1, 4, 1])  # (CTA, row, column)
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(1, W)))
    channel = _axis(8, W, 0) * 8 + _axis(8, W, 1)
    at = (head * 64 + channel) * K + k[None, None, :]
    inside = (k < K)[None, None, :] & (channel < 64)
    rows_q = gl.load(w_q + at, mask=inside, other=0.0, eviction_policy="evict_first")
    rows_k = gl.load(w_k + at, mask=inside, other=0.0, eviction_policy="evict_first")
    if EARLY:
        rows_v = gl.load(w_v + at, mask=inside, other=0.0, eviction_policy="evict_first")
        g = gl.load(norm_weight + k, mask=k < K, other=0.0)

    KV: gl.constexpr = _by_cta(
        [1, 1, 1, 8], [1, 1, 4, 8], [1, 4, 1, 1]
    )  # (CTA, warp, key, channel)
    CWT: gl.constexpr = gl.SliceLayout(3, KV)
    length = gl.load(lengths).to(gl.int32)  # and so the new token's position
    is_there = length >= 0
    length = gl.maximum(length, 0)
    t = (_axis(8, CWT, 0) * 4 + _axis(4, CWT, 1)) * KEYS + _axis(KEYS, CWT, 2)
    d = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, KV))))
    page = gl.load(table + t // PAGE, mask=t < length, other=0).to(gl.int64)
    slots = ((page * HEADS + head) * PAGE + t % PAGE) * 64
    new_page = gl.load(table + length // PAGE).to(gl.int64)
    new_slot = ((new_page * HEADS + head) * PAGE + length % PAGE) * 64
    old = slots[:, :, :, None] + d[None, None, None, :]
    visible = (t < length)[:, :, :, None] & (d < 64)[None, None, None, :]
    k_block = gl.load(keys + old, mask=visible, other=0.0)
    if EARLY:
        v_block = gl.load(values + old, mask=visible, other=0.0)
    else:
        LINES: gl.constexpr = _by_cta([1, 1, 1], [1, 2, 16], [1, 4, 1])
        row = head * 64 + _axis(8, LINES, 0) * 8 + _axis(8, LINES, 1)
        _prefetch(w_v + row * K + gl.minimum(_axis(BLOCK_K // 64, LINES, 2) * 64, K - 1))
        _prefetch(values + slots)

    ONE: gl.constexpr = _by_cta([1, 1, 1], [1, 1, 32], [1, 4, 1])  # one value per thread
    i = _axis(4, ONE, 1) * 32 + _axis(32, ONE, 2)
    partner, pair, is_first = _rope_pairs(i, ROPE)
    if ROPE != 0:
        cosine, sine = gl.load(cos + length * 32 + pair), gl.load(sin + length * 32 + pair)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    h = gl.load(x + k, mask=k < K, other=0.0)
    norm = gl.rsqrt(gl.sum(h * h, 0) / K + EPS)
    if not EARLY:
        g = gl.load(norm_weight + k, mask=k < K, other=0.0)
    h = (h * g.to(gl.float32))[None, None, :]
    q = gl.sum(rows_q.to(gl.float32) * h, 2) * norm
    k_new = gl.sum(rows_k.to(gl.float32) * h, 2) * norm
    if not EARLY:
        rows_v = gl.load(w_v + at, mask=inside, other=0.0, eviction_policy="evict_first")
        v_block = gl.load(values + old, mask=visible, other=0.0)
    box = _broadcast_qk(q, k_new, ONE)
    v_new = (gl.sum(rows_v.to(gl.float32) * h, 2) * norm).to(values.dtype.element_ty)
    CR: gl.constexpr = gl.SliceLayout(2, W)
    c, r = gl.arange(0, 8, gl.SliceLayout(1, CR)), gl.arange(0, 8, gl.SliceLayout(0, CR))
    channel = c[:, None] * 8 + r[None, :]
    gl.store(values + new_slot + channel, v_new, mask=(channel < 64) & is_there)

    y, y_partner = _receive(box, i * 4, partner * 4)
    if ROPE != 0:
        y = y * cosine + gl.where(is_first, -y_partner, y_partner) * sine
    # From one value per thread to the eight channels that a thread has of every key
    BOTH: gl.constexpr = gl.SliceLayout(1, _by_cta([1, 1, 2, 8], [1, 1, 4, 8], [1, 4, 1, 1]))
    CD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, KV))
    y = gl.convert_layout(y.reshape(8, 2, 64), BOTH)
    query = _select(y, 0, CD) * SCALE
    new_key = _select(y, 1, CD).to(keys.dtype.element_ty)  # as the cache will return it
    c, d = gl.arange(0, 8, gl.SliceLayout(1, CD)), gl.arange(0, 64, gl.SliceLayout(0, CD))
    slot = new_slot + c[:, None] * 0 + d[None, :]
    gl.store(keys + slot, new_key, mask=(c == 0)[:, None] & (d < 64)[None, :] & is_there)

    mean, lse = _attend_split(query, k_block, v_block, t < length)
    new_score = gl.sum(query * new_key.to(gl.float32), 1)
    attn_out = _combine_splits(mean, lse, new_score, v_new.to(gl.float32))
    SUM: gl.constexpr = attn_out.type.layout
    c, d = gl.arange(0, 8, gl.SliceLayout(1, SUM)), gl.arange(0, 8, gl.SliceLayout(0, SUM))
    gl.store(out + head * 64 + c[:, None] * 8 + d[None, :], attn_out.to(out.dtype.element_ty))


def keys_per_warp(max_kv_len: int) -> int:
    """Return how many keys each of a cluster's warps takes of rows of up to `max_kv_len`."""
    return max(4, triton.next_power_of_2(triton.cdiv(max_kv_len, CTAS * WARPS)))
