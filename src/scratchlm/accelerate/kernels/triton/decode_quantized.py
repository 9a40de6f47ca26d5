"""Decode kernels for one row and matrices in blocks of few bits: every byte is read once.

The kernels of a layer as in `decode.py`; Ŵ is what the bytes of W stand for, x̂ is x rounded to
8 bits in groups of 32 (`ops/quantized.py`):

    q, k, v = Ŵ_qkv · norm(x)^          norm_project_blocks
    x       = x + Ŵ_O â                 project_add_blocks
    u       = act(Ŵ1 ĥ) ⊙ Ŵ3 ĥ          norm_up_blocks          h = norm(x)

A program owns TILES times BLOCK_N rows of a matrix over their whole width. It loads the bytes of
the first ones before the PDL wait, then reads x, rounds it once for all, and multiplies four whole
numbers by four in one instruction (dp4a), with the next rows' bytes on their way.
RMSNorm's division is moved behind the product; rounding is to a share of a group's largest, so it
does not change.

A unit is the 16 bytes that a thread takes at a time: half a block of q8_0, a block of q4_0 (low
halves of the bytes are the first 16 weights, high ones the others), or half of two sub-blocks of
q4_k (low halves of the first, high ones of the second). Matrices lie in planes
(`quantization/layouts.py`).
"""

# mypy: disallow_untyped_defs=False, disable-error-code="assignment, misc"
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

from scratchlm.accelerate.kernels.triton.decode import activation, launch_dependents_and_wait
from scratchlm.accelerate.kernels.triton.quantized_gemv import dot_of_bytes, scales_q4_k

Q8_0, Q4_0, Q4_K = 0, 1, 2
FORMATS = {"q8_0": Q8_0, "q4_0": Q4_0, "q4_k": Q4_K}
UNIT = {"q8_0": 16, "q4_0": 32, "q4_k": 32}  # weights
WORDS = 4  # of a unit


@triton.jit
def _load_matrix(
    w,
    d,
    packed,
    first,
    N,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Load rows first … first + BLOCK_N: words, and of each unit its scales (four with q4_k)."""
    UNITS: tl.constexpr = 2 * GROUPS if FORMAT == 0 else GROUPS
    count: tl.constexpr = K // 16 if FORMAT == 0 else K // 32
    n = first + tl.arange(0, BLOCK_N)
    unit = tl.arange(0, UNITS)[None, :]
    row = n.to(tl.int64)[:, None]
    inside = (n < N)[:, None] & (unit < count)
    at = (row * count + unit)[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    words = tl.load(w + at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
    if FORMAT == 2:
        block, pair = row * (K // 256) + unit // 8, unit // 2 % 4
        scale = tl.load(d + 2 * block, mask=inside, other=0.0).to(tl.float32)
        less = tl.load(d + 2 * block + 1, mask=inside, other=0.0).to(tl.float32)
        s, t = scales_q4_k(packed, 3 * block, inside, pair * 2)
        s2, t2 = scales_q4_k(packed, 3 * block, inside, pair * 2 + 1)
        matrix = (words, scale * s, scale * s2, less * t, less * t2)
    elif FORMAT == 1:
        matrix = (words, tl.load(d + row * count + unit, mask=inside, other=0.0))
    else:
        matrix = (words, tl.load(d + row * (K // 32) + unit // 2, mask=inside, other=0.0))
    return matrix


@triton.jit
def _load_groups(x, K: tl.constexpr, GROUPS: tl.constexpr):
    """Load a vector as (groups, words of a group, 4), in float32; zeros outside."""
    group = tl.arange(0, GROUPS)[:, None, None]
    word, byte = tl.arange(0, 8)[None, :, None], tl.arange(0, 4)[None, None, :]
    at = group * 32 + word * 4 + byte
    return tl.load(x + at, mask=at < K, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _total(value):
    return tl.sum(tl.sum(tl.sum(value, 2), 1), 0)


@triton.jit
def _load_normed(
    x,
    norm_weight,
    norm_bias,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return norm(x) as (groups, 8, 4), RMSNorm without its division, and what it is times."""
    if NORM != 0:
        weight = _load_groups(norm_weight, K, GROUPS)
    value, factor = _load_groups(x, K, GROUPS), 1.0
    if NORM == 1:
        factor = tl.rsqrt(_total(value * value) / K + EPS)
        value = value * weight
    elif NORM == 2:
        is_there = tl.arange(0, GROUPS)[:, None, None] < K // 32
        value = tl.where(is_there, value - _total(value) / K, 0.0)
        value = value * tl.rsqrt(_total(value * value) / K + EPS) * weight
        if norm_bias is not None:
            value += _load_groups(norm_bias, K, GROUPS)
    return value, factor


@triton.jit
def _load_rounded(
    x,
    norm_weight,
    norm_bias,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return norm(x)^ unit by unit: words for low and high halves, and their scales."""
    value, factor = _load_normed(x, norm_weight, norm_bias, K, EPS, NORM, GROUPS)
    odd = tl.sum(tl.sum(value * 0.0, 2), 1)  # NaN, where a number is none
    largest = tl.max(tl.max(tl.abs(value), 2), 1) + odd
    scaled = value * (127.0 / tl.where(largest > 0, largest, 1.0))[:, None, None]
    whole = (scaled + 12582912.0) - 12582912.0  # 1.5 · 2²³: rounds to whole numbers
    whole = tl.where(whole == whole, whole, 0.0)
    byte = whole.to(tl.int32) & 255
    words = tl.sum(byte << (8 * tl.arange(0, 4))[None, None, :], 2)  # (groups, 8)
    by = largest * (factor / 127.0)
    if FORMAT == 0:
        by = tl.reshape(tl.broadcast_to(by[:, None], (GROUPS, 2)), (2 * GROUPS,))
        vector = (tl.reshape(words, (2 * GROUPS, 4)), by)
    elif FORMAT == 1:
        low, high = tl.split(tl.permute(tl.reshape(words, (GROUPS, 2, 4)), (0, 2, 1)))
        vector = (low, high, by)
    else:
        pairs = tl.permute(tl.reshape(words, (GROUPS // 2, 2, 2, 4)), (0, 2, 3, 1))
        low, high = tl.split(pairs)  # (pairs of groups, halves, 4)
        by, by2 = tl.split(tl.reshape(by, (GROUPS // 2, 2)))
        by = tl.reshape(tl.broadcast_to(by[:, None], (GROUPS // 2, 2)), (GROUPS,))
        by2 = tl.reshape(tl.broadcast_to(by2[:, None], (GROUPS // 2, 2)), (GROUPS,))
        vector = (tl.reshape(low, (GROUPS, 4)), tl.reshape(high, (GROUPS, 4)), by, by2)
    return vector


@triton.jit
def _dots(words, x, ASM: tl.constexpr):
    """Return the product of each unit, in whole numbers."""
    return tl.sum(dot_of_bytes(words, tl.broadcast_to(x[None, :, :], words.shape), ASM), 2)


@triton.jit
def _sums(x, ASM: tl.constexpr):
    return tl.sum(dot_of_bytes(x, tl.full(x.shape, 0x01010101, tl.int32), ASM), 1)[None, :]


@triton.jit
def _multiply(matrix, x, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Return Ŵ x̂ for the rows of a tile."""
    words = matrix[0]
    if FORMAT == 0:
        sums = _dots(words, x[0], ASM).to(tl.float32)
        out = sums * (matrix[1].to(tl.float32) * x[1][None, :])
    else:
        low, high = _dots(words & 0x0F0F0F0F, x[0], ASM), _dots(words >> 4 & 0x0F0F0F0F, x[1], ASM)
        if FORMAT == 1:
            sums = low + high - 8 * (_sums(x[0], ASM) + _sums(x[1], ASM))
            out = sums.to(tl.float32) * (matrix[1].to(tl.float32) * x[2][None, :])
        else:
            _, scale, scale2, less, less2 = matrix
            first = scale * low.to(tl.float32) - less * _sums(x[0], ASM).to(tl.float32)
            second = scale2 * high.to(tl.float32) - less2 * _sums(x[1], ASM).to(tl.float32)
            out = first * x[2][None, :] + second * x[3][None, :]
    return tl.sum(out, 1)


@triton.jit
def _select(block, p0, p1, p2, BLOCKS0: tl.constexpr, BLOCKS1: tl.constexpr):
    pointer = p0
    if block >= BLOCKS0 + BLOCKS1:
        pointer = p2
    elif block >= BLOCKS0:
        pointer = p1
    return pointer


@triton.jit
def _load_one_of(
    block,
    w0,
    w1,
    w2,
    d0,
    d1,
    d2,
    p0,
    p1,
    p2,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Load a block of one or three matrices; return it, its first row, and the matrix's rows."""
    blocks0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    blocks1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    first, N, w, d, packed = block * BLOCK_N, N0, w0, d0, p0
    if N1 > 0:
        if block >= blocks0 + blocks1:
            first, N = (block - blocks0 - blocks1) * BLOCK_N, N2
        elif block >= blocks0:
            first, N = (block - blocks0) * BLOCK_N, N1
        w = _select(block, w0, w1, w2, blocks0, blocks1)
        d = _select(block, d0, d1, d2, blocks0, blocks1)
        if p0 is not None:
            packed = _select(block, p0, p1, p2, blocks0, blocks1)
    return _load_matrix(w, d, packed, first, N, K, FORMAT, BLOCK_N, GROUPS), first, N


@triton.jit
def norm_project_blocks(
    x,
    norm_weight,
    norm_bias,
    w0,
    w1,
    w2,
    d0,
    d1,
    d2,
    p0,
    p1,
    p2,
    b0,
    b1,
    b2,
    y0,
    y1,
    y2,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y_i = Ŵ_i norm(x)^ (+ b_i) for one or three matrices."""
    blocks0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    blocks1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    block, step = tl.program_id(0), tl.num_programs(0)
    matrix, first, N = _load_one_of(
        *(block, w0, w1, w2, d0, d1, d2, p0, p1, p2),
        *(N0, N1, N2, K, FORMAT, BLOCK_N, GROUPS),
    )
    launch_dependents_and_wait(PDL)
    vector = _load_rounded(x, norm_weight, norm_bias, K, EPS, NORM, FORMAT, GROUPS)
    for tile in tl.static_range(TILES):
        if tile + 1 < TILES:
            next_matrix, next_first, next_N = _load_one_of(
                *(block + step, w0, w1, w2, d0, d1, d2, p0, p1, p2),
                *(N0, N1, N2, K, FORMAT, BLOCK_N, GROUPS),
            )
        out = _multiply(matrix, vector, FORMAT, ASM)
        n, y, bias = first + tl.arange(0, BLOCK_N), y0, b0
        if N1 > 0:
            y = _select(block, y0, y1, y2, blocks0, blocks1)
            if b0 is not None:
                bias = _select(block, b0, b1, b2, blocks0, blocks1)
        if b0 is not None:
            out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y + n, out.to(y.dtype.element_ty), mask=n < N)
        if tile + 1 < TILES:
            matrix, first, N = next_matrix, next_first, next_N
            block += step


@triton.jit
def norm_up_blocks(
    x,
    norm_weight,
    norm_bias,
    w1,
    w3,
    d1,
    d3,
    p1,
    p3,
    b1,
    b3,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = act(Ŵ1 ĥ + b1) ⊙ (Ŵ3 ĥ + b3), h = norm(x); without w3, y = act(Ŵ1 ĥ + b1)."""
    first, step = tl.program_id(0) * BLOCK_N, tl.num_programs(0) * BLOCK_N
    matrix1 = _load_matrix(w1, d1, p1, first, N, K, FORMAT, BLOCK_N, GROUPS)
    if w3 is not None:
        matrix3 = _load_matrix(w3, d3, p3, first, N, K, FORMAT, BLOCK_N, GROUPS)
    launch_dependents_and_wait(PDL)
    vector = _load_rounded(x, norm_weight, norm_bias, K, EPS, NORM, FORMAT, GROUPS)
    for tile in tl.static_range(TILES):
        if tile + 1 < TILES:
            next1 = _load_matrix(w1, d1, p1, first + step, N, K, FORMAT, BLOCK_N, GROUPS)
            if w3 is not None:
                next3 = _load_matrix(w3, d3, p3, first + step, N, K, FORMAT, BLOCK_N, GROUPS)
        n = first + tl.arange(0, BLOCK_N)
        out = _multiply(matrix1, vector, FORMAT, ASM)
        if b1 is not None:
            out += tl.load(b1 + n, mask=n < N, other=0.0).to(tl.float32)
        out = activation(out, ACTIVATION)
        if w3 is not None:
            factor = _multiply(matrix3, vector, FORMAT, ASM)
            if b3 is not None:
                factor += tl.load(b3 + n, mask=n < N, other=0.0).to(tl.float32)
            out *= factor
        tl.store(y + n, out.to(y.dtype.element_ty), mask=n < N)
        if tile + 1 < TILES:
            matrix1 = next1
            if w3 is not None:
                matrix3 = next3
            first += step


@triton.jit
def project_add_blocks(
    x,
    vector,
    w,
    d,
    packed,
    bias,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x + Ŵ v̂ (+ b). y must not be x, which other programs may not have read yet."""
    first, step = tl.program_id(0) * BLOCK_N, tl.num_programs(0) * BLOCK_N
    matrix = _load_matrix(w, d, packed, first, N, K, FORMAT, BLOCK_N, GROUPS)
    launch_dependents_and_wait(PDL)
    v = _load_rounded(vector, None, None, K, 0.0, 0, FORMAT, GROUPS)
    for tile in tl.static_range(TILES):
        if tile + 1 < TILES:
            following = _load_matrix(w, d, packed, first + step, N, K, FORMAT, BLOCK_N, GROUPS)
        n = first + tl.arange(0, BLOCK_N)
        out = tl.load(x + n, mask=n < N, other=0.0).to(tl.float32)
        out += _multiply(matrix, v, FORMAT, ASM)
        if bias is not None:
            out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y + n, out.to(y.dtype.element_ty), mask=n < N)
        if tile + 1 < TILES:
            matrix = following
            first += step
