"""Decode kernels for one row and matrices in blocks of few bits: every byte is read once.

The kernels of a layer as in `decode.py`; Ŵ is what the bytes of W stand for, x̂ is x rounded to
8 bits in groups of 32 (`ops/quantized.py`):

    q, k, v = Ŵ_qkv · norm(x)^          norm_project_blocks
    x       = x + Ŵ_O â                 project_add_blocks
    u       = act(Ŵ1 ĥ) ⊙ Ŵ3 ĥ          norm_up_blocks          h = norm(x)

A program owns BLOCK_N rows of a matrix over their whole width. It loads their bytes before the PDL
wait, then reads x, rounds it, and multiplies four whole numbers by four in one instruction (dp4a).
Every program rounds x anew: that is cheaper than one more kernel. RMSNorm's division is moved
behind the product; rounding is to a share of a group's largest, so it does not change.

A unit is what a thread takes at a time: a block of 32 weights of q8_0 (8 words of four) or q4_0
(4 words of eight: low halves are the first 16 weights, high ones the others), two sub-blocks of
q4_k (8 words: low halves the first 32). Matrices lie in planes (`quantization/layouts.py`).
"""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

from scratchlm.accelerate.kernels.triton.decode import activation, launch_dependents_and_wait
from scratchlm.accelerate.kernels.triton.quantized_gemv import dot_of_bytes, scales_q4_k

Q8_0, Q4_0, Q4_K = 0, 1, 2
FORMATS = {"q8_0": Q8_0, "q4_0": Q4_0, "q4_k": Q4_K}
UNIT = {"q8_0": 32, "q4_0": 32, "q4_k": 64}  # weights


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
    UNITS: tl.constexpr,
):
    """Load rows first … first + BLOCK_N: words, and of each unit two factors and two summands."""
    n = first + tl.arange(0, BLOCK_N)
    unit = tl.arange(0, UNITS)[None, :]
    words: tl.constexpr = 4 if FORMAT == 1 else 8  # of a unit
    count: tl.constexpr = K // 64 if FORMAT == 2 else K // 32
    row = n.to(tl.int64)[:, None]
    inside = (n < N)[:, None] & (unit < count)
    i = tl.arange(0, words)[None, None, :]
    at = (row * count + unit)[:, :, None] * words + i
    both = tl.load(w + at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
    if FORMAT == 2:
        block = row * (K // 256) + unit // 4
        scale = tl.load(d + 2 * block, mask=inside, other=0.0).to(tl.float32)
        less = tl.load(d + 2 * block + 1, mask=inside, other=0.0).to(tl.float32)
        s, t = scales_q4_k(packed, 3 * block, inside, unit % 4 * 2)
        s2, t2 = scales_q4_k(packed, 3 * block, inside, unit % 4 * 2 + 1)
        return both, scale * s, scale * s2, less * t, less * t2
    scale = tl.load(d + row * count + unit, mask=inside, other=0.0).to(tl.float32)
    return both, scale, scale, scale, scale


@triton.jit
def _load_part(
    x, unit, K: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, WORDS: tl.constexpr
):
    """Load 4 · WORDS numbers of each unit of SIZE, from its FIRST on."""
    i, t = tl.arange(0, WORDS)[None, :, None], tl.arange(0, 4)[None, None, :]
    at = unit[:, None, None] * SIZE + FIRST + 4 * i + t
    mask = (unit < K // SIZE)[:, None, None]
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _normed_part(
    value,
    norm_weight,
    norm_bias,
    mean,
    factor,
    unit,
    K: tl.constexpr,
    NORM: tl.constexpr,
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Apply a norm; RMSNorm without its division."""
    if NORM == 1:
        value = value * _load_part(norm_weight, unit, K, SIZE, FIRST, WORDS)
    elif NORM == 2:
        value = (value - mean) * factor * _load_part(norm_weight, unit, K, SIZE, FIRST, WORDS)
        if norm_bias is not None:
            value += _load_part(norm_bias, unit, K, SIZE, FIRST, WORDS)
    return value


@triton.jit
def _largest(value):
    """Return each unit's largest size; NaN, where a number is none."""
    odd = tl.sum(tl.sum(value * 0.0, 2), 1)
    return tl.max(tl.max(tl.abs(value), 2), 1) + odd


@triton.jit
def _to_words(value, largest):
    inverse = 127.0 / tl.where(largest > 0, largest, 1.0)
    scaled = value * inverse[:, None, None]
    whole = (scaled + 12582912.0) - 12582912.0  # 1.5 · 2²³: rounds to whole numbers
    whole = tl.where(whole == whole, whole, 0.0)
    byte = whole.to(tl.int32) & 255
    return tl.sum(byte << (8 * tl.arange(0, 4))[None, None, :], 2)


@triton.jit
def _sum_of_squares(value, mean, unit, K: tl.constexpr, SIZE: tl.constexpr):
    """Return Σ (x − mean)² over the units that are there."""
    difference = tl.where((unit < K // SIZE)[:, None, None], value - mean, 0.0)
    return tl.sum(difference * difference)


@triton.jit
def _load_rounded(
    x,
    norm_weight,
    norm_bias,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    FORMAT: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Return norm(x)^ as two halves of words (units, words), their scales, and a factor of all."""
    SIZE: tl.constexpr = 64 if FORMAT == 2 else 32
    WORDS: tl.constexpr = 4 if FORMAT == 1 else 8  # of each half; q8_0 has one
    SECOND: tl.constexpr = SIZE // 2
    unit = tl.arange(0, UNITS)
    value = _load_part(x, unit, K, SIZE, 0, WORDS)
    other = value
    if FORMAT != 0:
        other = _load_part(x, unit, K, SIZE, SECOND, WORDS)
    mean, factor = 0.0, 1.0
    if NORM == 2:
        mean = tl.sum(value) / K
        if FORMAT != 0:
            mean += tl.sum(other) / K
    if NORM != 0:
        squares = _sum_of_squares(value, mean, unit, K, SIZE)
        if FORMAT != 0:
            squares += _sum_of_squares(other, mean, unit, K, SIZE)
        factor = tl.rsqrt(squares / K + EPS)
    value = _normed_part(value, norm_weight, norm_bias, mean, factor, unit, K, NORM, SIZE, 0, WORDS)
    largest = _largest(value)
    largest2 = largest
    if FORMAT == 0:
        low = _to_words(value, largest)
        high = low
    else:
        other = _normed_part(
            other, norm_weight, norm_bias, mean, factor, unit, K, NORM, SIZE, SECOND, WORDS
        )
        largest2 = _largest(other)
        if FORMAT == 1:  # one group
            largest = tl.maximum(largest, largest2, propagate_nan=tl.PropagateNan.ALL)
            largest2 = largest
        low, high = _to_words(value, largest), _to_words(other, largest2)
    if NORM == 2:  # it is in the values
        factor = 1.0
    return low, high, largest / 127.0, largest2 / 127.0, factor


@triton.jit
def _multiply(matrix, x, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Return Ŵ x̂ for the rows of a program."""
    both, scale, scale2, less, less2 = matrix
    low, high, by, by2, factor = x
    low, high = low[None, :, :], high[None, :, :]
    if FORMAT == 0:
        sums = tl.sum(dot_of_bytes(both, both * 0 + low, ASM), 2).to(tl.float32)
        out = sums * (scale * by[None, :])
    else:
        ones = low * 0 + 0x01010101
        of_low = tl.sum(dot_of_bytes(low, ones, ASM), 2)
        of_high = tl.sum(dot_of_bytes(high, ones, ASM), 2)
        dots = tl.sum(dot_of_bytes(both & 0x0F0F0F0F, both * 0 + low, ASM), 2)
        dots2 = tl.sum(dot_of_bytes(both >> 4 & 0x0F0F0F0F, both * 0 + high, ASM), 2)
        if FORMAT == 1:
            sums = dots + dots2 - 8 * (of_low + of_high)
            out = sums.to(tl.float32) * (scale * by[None, :])
        else:
            first = scale * dots.to(tl.float32) - less * of_low.to(tl.float32)
            second = scale2 * dots2.to(tl.float32) - less2 * of_high.to(tl.float32)
            out = first * by[None, :] + second * by2[None, :]
    return tl.sum(out, 1) * factor


@triton.jit
def _select(block, p0, p1, p2, BLOCKS0: tl.constexpr, BLOCKS1: tl.constexpr):
    pointer = p0
    if block >= BLOCKS0 + BLOCKS1:
        pointer = p2
    elif block >= BLOCKS0:
        pointer = p1
    return pointer


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
    UNITS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y_i = Ŵ_i norm(x)^ (+ b_i) for one or three matrices."""
    blocks0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    blocks1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0)
    first, N, w, d, packed, bias, y = block * BLOCK_N, N0, w0, d0, p0, b0, y0
    if N1 > 0:
        if block >= blocks0 + blocks1:
            first, N = (block - blocks0 - blocks1) * BLOCK_N, N2
        elif block >= blocks0:
            first, N = (block - blocks0) * BLOCK_N, N1
        w = _select(block, w0, w1, w2, blocks0, blocks1)
        d = _select(block, d0, d1, d2, blocks0, blocks1)
        y = _select(block, y0, y1, y2, blocks0, blocks1)
        if p0 is not None:
            packed = _select(block, p0, p1, p2, blocks0, blocks1)
        if b0 is not None:
            bias = _select(block, b0, b1, b2, blocks0, blocks1)
    matrix = _load_matrix(w, d, packed, first, N, K, FORMAT, BLOCK_N, UNITS)
    launch_dependents_and_wait(PDL)
    vector = _load_rounded(x, norm_weight, norm_bias, K, EPS, NORM, FORMAT, UNITS)
    out = _multiply(matrix, vector, FORMAT, ASM)
    n = first + tl.arange(0, BLOCK_N)
    if b0 is not None:
        out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=n < N)


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
    UNITS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = act(Ŵ1 ĥ + b1) ⊙ (Ŵ3 ĥ + b3), h = norm(x); without w3, y = act(Ŵ1 ĥ + b1)."""
    first = tl.program_id(0) * BLOCK_N
    matrix1 = _load_matrix(w1, d1, p1, first, N, K, FORMAT, BLOCK_N, UNITS)
    if w3 is not None:
        matrix3 = _load_matrix(w3, d3, p3, first, N, K, FORMAT, BLOCK_N, UNITS)
    launch_dependents_and_wait(PDL)
    vector = _load_rounded(x, norm_weight, norm_bias, K, EPS, NORM, FORMAT, UNITS)
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
    UNITS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x + Ŵ v̂ (+ b). y must not be x, which other programs may not have read yet."""
    first = tl.program_id(0) * BLOCK_N
    matrix = _load_matrix(w, d, packed, first, N, K, FORMAT, BLOCK_N, UNITS)
    launch_dependents_and_wait(PDL)
    n = first + tl.arange(0, BLOCK_N)
    out = tl.load(x + n, mask=n < N, other=0.0).to(tl.float32)
    v = _load_rounded(vector, None, None, K, 0.0, 0, FORMAT, UNITS)
    out += _multiply(matrix, v, FORMAT, ASM)
    if bias is not None:
        out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, out.to(y.dtype.element_ty), mask=n < N)
