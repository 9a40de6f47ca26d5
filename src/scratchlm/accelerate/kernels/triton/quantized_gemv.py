"""y = Ŵ x̂ (+ b) for few rows of x: every byte of a quantised matrix is read once.

Rows of x are rounded to 8 bits in groups of 32 (`ops/quantized.py`). Four products of whole numbers
are one instruction (dp4a); a thread holds whole blocks of several rows of W, so that sums of a
block stay in it and x is read once for all these rows; the width K is known to the compiler, who
then sees that rows begin at multiples of 16 bytes. int8 and fp8 have one scale a row and take
x as it is. Matrices lie in planes (`quantization/layouts.py`).
"""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scratchlm.quantization.layouts import split_planes

ROWS_AT_ONCE, BLOCKS_AT_ONCE, WARPS = 4, 32, 1
WEIGHTS_AT_ONCE = 1024  # of a row, where it has one scale


@triton.jit
def dot_of_bytes(a, b, ASM: tl.constexpr):
    """Return the sum of the products of four signed bytes."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1
        )
    total = (a << 24 >> 24) * (b << 24 >> 24) + (a << 16 >> 24) * (b << 16 >> 24)
    return total + (a << 8 >> 24) * (b << 8 >> 24) + (a >> 24) * (b >> 24)


@triton.jit
def _round_rows_kernel(x, q, scales, groups, GROUPS: tl.constexpr):
    """Round groups of 32 to scale · q. Grid: (groups of all rows / GROUPS,)."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (group < groups)[:, None]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    inverse = 127.0 / tl.where(largest > 0, largest, 1.0)
    scaled = values * inverse[:, None]
    whole = (scaled + 12582912.0) - 12582912.0  # 1.5 · 2²³: rounds to whole numbers
    whole = tl.where(whole == whole, whole, 0.0)
    tl.store(q + at, whole.to(tl.int8), mask=inside)
    odd = tl.sum(values * 0.0, axis=1)  # NaN, where one of them or an infinity is
    tl.store(scales + group, largest / 127.0 + odd, mask=group < groups)


@triton.jit
def _finish(y, bias, sums, m, n, N, BIAS: tl.constexpr):
    inside = n < N
    if BIAS:
        sums += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + m.to(tl.int64) * N + n, sums.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gemv_q8_0_kernel(
    w, d_w, q, d_x, bias, y, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """w = d · q in blocks of 32. Grid: (rows of x, rows of W / BLOCK_N)."""
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, count = n.to(tl.int64)[:, None], K // 32
    i = tl.arange(0, 8)[None, None, :]
    acc = tl.zeros((BLOCK_N, BLOCKS), tl.float32)
    for first in range(0, count, BLOCKS):
        b = (first + tl.arange(0, BLOCKS))[None, :]
        there, inside = b < count, (n < N)[:, None] & (b < count)
        weights = tl.load(w + row[:, :, None] * (K // 4) + b[:, :, None] * 8 + i,
                          mask=inside[:, :, None], other=0)  # fmt: skip
        x = tl.load(q + m * (K // 4) + b[:, :, None] * 8 + i, mask=there[:, :, None], other=0)
        sums = tl.sum(dot_of_bytes(weights, x, ASM), axis=2)
        by = tl.load(d_x + m * count + b, mask=there, other=0.0)
        scale = tl.load(d_w + row * count + b, mask=inside, other=0.0).to(tl.float32)
        acc += sums.to(tl.float32) * (scale * by)
    _finish(y, bias, tl.sum(acc, axis=1), m, n, N, BIAS)


@triton.jit
def _gemv_q4_0_kernel(
    w, d_w, q, d_x, bias, y, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """w = d · (q − 8) in blocks of 32: low halves of 16 bytes, then high ones."""
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, count = n.to(tl.int64)[:, None], K // 32
    i = tl.arange(0, 4)[None, None, :]
    acc = tl.zeros((BLOCK_N, BLOCKS), tl.float32)
    for first in range(0, count, BLOCKS):
        b = (first + tl.arange(0, BLOCKS))[None, :]
        there, inside = b < count, (n < N)[:, None] & (b < count)
        both = tl.load(w + row[:, :, None] * (K // 8) + b[:, :, None] * 4 + i,
                       mask=inside[:, :, None], other=0)  # fmt: skip
        x_at = q + m * (K // 4) + b[:, :, None] * 8 + i
        x_low = tl.load(x_at, mask=there[:, :, None], other=0)
        x_high = tl.load(x_at + 4, mask=there[:, :, None], other=0)
        ones = x_low * 0 + 0x01010101
        of_x = tl.sum(dot_of_bytes(x_low, ones, ASM) + dot_of_bytes(x_high, ones, ASM), axis=2)
        dots = dot_of_bytes(both & 0x0F0F0F0F, x_low, ASM)
        dots += dot_of_bytes(both >> 4 & 0x0F0F0F0F, x_high, ASM)
        sums = tl.sum(dots, axis=2) - 8 * of_x
        by = tl.load(d_x + m * count + b, mask=there, other=0.0)
        scale = tl.load(d_w + row * count + b, mask=inside, other=0.0).to(tl.float32)
        acc += sums.to(tl.float32) * (scale * by)
    _finish(y, bias, tl.sum(acc, axis=1), m, n, N, BIAS)


@triton.jit
def scales_q4_k(packed, at, inside, j):
    """Return s and t of sub-block j: 6 bits each, in 12 bytes read as three words."""
    byte = j % 4 * 8
    p = tl.load(packed + at, mask=inside, other=0) >> byte & 255
    q = tl.load(packed + at + 1, mask=inside, other=0) >> byte & 255
    r = tl.load(packed + at + 2, mask=inside, other=0) >> byte & 255
    s = tl.where(j < 4, p & 63, (r & 15) | (p >> 6 << 4))
    t = tl.where(j < 4, q & 63, (r >> 4) | (q >> 6 << 4))
    return s.to(tl.float32), t.to(tl.float32)


@triton.jit
def _gemv_q4_k_kernel(
    w, d_w, packed, q, d_x, bias, y, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """w = d · s · q − m · t in sub-blocks of 32, two in each 32 bytes: low and high halves."""
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, count = n.to(tl.int64)[:, None], K // 64
    i = tl.arange(0, 8)[None, None, :]
    acc = tl.zeros((BLOCK_N, BLOCKS), tl.float32)
    for first in range(0, count, BLOCKS):
        b = (first + tl.arange(0, BLOCKS))[None, :]  # pairs of sub-blocks
        there, inside = b < count, (n < N)[:, None] & (b < count)
        both = tl.load(w + row[:, :, None] * (K // 8) + b[:, :, None] * 8 + i,
                       mask=inside[:, :, None], other=0)  # fmt: skip
        x_at = q + m * (K // 4) + b[:, :, None] * 16 + i
        x_low = tl.load(x_at, mask=there[:, :, None], other=0)
        x_high = tl.load(x_at + 8, mask=there[:, :, None], other=0)
        ones = x_low * 0 + 0x01010101
        low_x = tl.sum(dot_of_bytes(x_low, ones, ASM), axis=2).to(tl.float32)
        high_x = tl.sum(dot_of_bytes(x_high, ones, ASM), axis=2).to(tl.float32)
        low = tl.sum(dot_of_bytes(both & 0x0F0F0F0F, x_low, ASM), axis=2).to(tl.float32)
        high = tl.sum(dot_of_bytes(both >> 4 & 0x0F0F0F0F, x_high, ASM), axis=2).to(tl.float32)
        by_low = tl.load(d_x + m * (K // 32) + 2 * b, mask=there, other=0.0)
        by_high = tl.load(d_x + m * (K // 32) + 2 * b + 1, mask=there, other=0.0)
        block = row * (K // 256) + b // 4
        d = tl.load(d_w + 2 * block, mask=inside, other=0.0).to(tl.float32)
        less = tl.load(d_w + 2 * block + 1, mask=inside, other=0.0).to(tl.float32)
        s, t = scales_q4_k(packed, 3 * block, inside, b % 4 * 2)
        acc += by_low * (d * s * low - less * t * low_x)
        s, t = scales_q4_k(packed, 3 * block, inside, b % 4 * 2 + 1)
        acc += by_high * (d * s * high - less * t * high_x)
    _finish(y, bias, tl.sum(acc, axis=1), m, n, N, BIAS)


@triton.jit
def _add_q6_k(acc, weights, x, ones, scale, by, ASM: tl.constexpr):
    of_x = tl.sum(dot_of_bytes(x, ones, ASM), axis=2)
    sums = tl.sum(dot_of_bytes(weights, x, ASM), axis=2) - 32 * of_x
    return acc + sums.to(tl.float32) * (scale * by)


@triton.jit
def _gemv_q6_k_kernel(
    w, s_w, d_w, q, d_x, bias, y, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """w = d · s · (q − 32) in sub-blocks of 16; a unit is one of each quarter of 128 weights."""
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row, count = n.to(tl.int64)[:, None], K // 64
    i = tl.arange(0, 4)[None, None, :]
    acc = tl.zeros((BLOCK_N, BLOCKS), tl.float32)
    for first in range(0, count, BLOCKS):
        u = (first + tl.arange(0, BLOCKS))[None, :]
        half, part = u // 2, u % 2  # of 128 weights; of 32
        there, inside = u < count, (n < N)[:, None] & (u < count)
        block = row * (K // 256) + half // 2
        low_at = (block * 48 + half % 2 * 16 + part * 4)[:, :, None] + i
        wide = inside[:, :, None]
        a = tl.load(w + low_at, mask=wide, other=0)
        b = tl.load(w + low_at + 8, mask=wide, other=0)
        high_at = (block * 48 + 32 + half % 2 * 8 + part * 4)[:, :, None] + i
        two = tl.load(w + high_at, mask=wide, other=0)
        d = tl.load(d_w + block, mask=inside, other=0.0).to(tl.float32)
        scale_at = s_w + block * 16 + half % 2 * 8 + part
        x_at = q + m * (K // 4) + (half * 32 + part * 4)[:, :, None] + i
        by_at = d_x + m * (K // 32) + half * 4
        for quarter in tl.static_range(4):
            low = a if quarter % 2 == 0 else b
            low = (low if quarter < 2 else low >> 4) & 0x0F0F0F0F
            weights = low | (two >> 2 * quarter & 0x03030303) << 4
            x = tl.load(x_at + 8 * quarter, mask=there[:, :, None], other=0)
            by = tl.load(by_at + quarter, mask=there, other=0.0)
            scale = d * tl.load(scale_at + 2 * quarter, mask=inside, other=0).to(tl.float32)
            acc = _add_q6_k(acc, weights, x, x * 0 + 0x01010101, scale, by, ASM)
    _finish(y, bias, tl.sum(acc, axis=1), m, n, N, BIAS)


@triton.jit
def _gemv_row_scale_kernel(
    w, d_w, x, bias, y, N,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """w = d · q with one scale a row, in int8 or fp8; x is as it is."""
    m, n = tl.program_id(0), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = n.to(tl.int64)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = (first + tl.arange(0, BLOCK_K))[None, :]
        inside = (n < N)[:, None] & (k < K)
        weights = tl.load(w + row * K + k, mask=inside, other=0.0).to(tl.float32)
        acc += weights * tl.load(x + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    scale = tl.load(d_w + n, mask=n < N, other=0.0)
    _finish(y, bias, tl.sum(acc, axis=1) * scale, m, n, N, BIAS)


_KERNELS = {
    "q8_0": _gemv_q8_0_kernel,
    "q4_0": _gemv_q4_0_kernel,
    "q4_k": _gemv_q4_k_kernel,
    "q6_k": _gemv_q6_k_kernel,
}
# What each plane is read as.
_VIEWS = {
    "q8_0": (torch.int32, torch.float16),
    "q4_0": (torch.int32, torch.float16),
    "q4_k": (torch.int32, torch.float16, torch.int32),
    "q6_k": (torch.int32, torch.int8, torch.float16),
    "int8": (torch.int8, torch.float32),
    "fp8": (torch.float8_e4m3fn, torch.float32),
}


def has_kernel(format: str, rows: int, d_in: int) -> bool:
    """Whether the planes of such a matrix can be read as words."""
    return format in _VIEWS and rows * d_in % 16 == 0 and d_in % 4 == 0


def planes_of(stored: Tensor, format: str, count: int) -> list[Tensor]:
    """Return the planes of a matrix as the kernels read them."""
    planes = split_planes(stored, format, count)
    return [plane.view(dtype) for plane, dtype in zip(planes, _VIEWS[format], strict=True)]


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows (m, k) to 8 bits; return them as words of four, and the scales of each 32."""
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(len(x), x.shape[1] // 32, device=x.device)
    groups = scales.numel()
    _round_rows_kernel[(triton.cdiv(groups, 32),)](x, q, scales, groups, 32, **_options(1))
    return q.view(torch.int32), scales


def quantized_gemv(
    planes: list[Tensor], format: str, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return Ŵ x̂ + b for few rows x (m, k), contiguous; nothing waits for the device."""
    rows, columns = len(x), len(planes[0])
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    grid = (rows, triton.cdiv(columns, ROWS_AT_ONCE))
    sizes = (columns, x.shape[1], ROWS_AT_ONCE)
    if format in _KERNELS:
        of_x = round_rows(x)
        _KERNELS[format][grid](
            *(*planes, *of_x, bias, y, *sizes, BLOCKS_AT_ONCE, bias is not None),
            ASM=not _is_interpreted() and torch.version.hip is None,
            **_options(WARPS),
        )
    else:
        _gemv_row_scale_kernel[grid](
            *(*planes, x, bias, y, *sizes, WEIGHTS_AT_ONCE, bias is not None), **_options(4)
        )
    return y


def _is_interpreted() -> bool:
    return not isinstance(_gemv_q8_0_kernel, triton.JITFunction)


def _options(warps: int) -> dict[str, Any]:
    return {} if _is_interpreted() else {"num_warps": warps}
