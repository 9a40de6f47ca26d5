"""fp8 quantization with one scale per tensor; writes the matrix and its transpose.

    scale = max|x| / the format's largest number,    q = x / scale

Hopper's fp8 tensor cores need both operands contiguous along the reduction dimension. A matrix used
in the forward and in the backward GEMM is therefore needed in both layouts: one pass writes both.
A pass before it computes max|x| (amax), unless the kernel that made x has done so.

NaNs are ignored in max|x|. On a GPU a NaN is clamped in q but stays NaN in the transpose, so the
backward pass shows it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16  # in words of four bytes; a tile is 64 rows by 64 columns


@triton.jit
def _amax_kernel(x, amax, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    block_amax = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, count, step):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(x + offsets, mask=offsets < count, other=0.0)
        block_amax = tl.maximum(block_amax, tl.abs(value))
    tl.atomic_max(amax, tl.max(block_amax, axis=0))


@triton.jit
def _pack4(a, b, c, d, FORMAT: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round four numbers to fp8 and pack them into one word, `a` in the lowest byte."""
    if PTX:  # inline assembly: LLVM's packing of bytes is wrong for some layouts
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high;"
            " cvt.rn.satfinite." + FORMAT + "x2.f32 low, $2, $1;"
            " cvt.rn.satfinite." + FORMAT + "x2.f32 high, $4, $3;"
            " mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        dtype: tl.constexpr = tl.float8e4nv if FORMAT == "e4m3" else tl.float8e5
        word = a.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32)
        word |= b.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        word |= c.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        word |= d.to(dtype).to(tl.uint8, bitcast=True).to(tl.int32) << 24
    return word


@triton.jit
def _load_4_rows(x, row, column, columns, inv_scale, mask):  # type: ignore[no-untyped-def]
    start = x + row[:, None] * columns + column[None, :]
    a = tl.load(start, mask=mask, other=0.0).to(tl.float32) * inv_scale
    b = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32) * inv_scale
    c = tl.load(start + 2 * columns, mask=mask, other=0.0).to(tl.float32) * inv_scale
    d = tl.load(start + 3 * columns, mask=mask, other=0.0).to(tl.float32) * inv_scale
    return a, b, c, d


@triton.jit
def _fp8_quantize_kernel(  # type: ignore[no-untyped-def]
    x,
    amax,
    scale,
    q,
    q_t,
    rows,
    columns,
    FP8_MAX: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Quantize a tile of 4·TILE rows and columns into q and into its transpose."""
    first_row = tl.program_id(0).to(tl.int64) * 4 * TILE
    first_column = tl.program_id(1).to(tl.int64) * 4 * TILE
    x_amax = tl.load(amax)
    inv_scale = FP8_MAX / tl.where(x_amax > 0, x_amax, FP8_MAX)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, 1 / inv_scale)
    words, elements = tl.arange(0, TILE), tl.arange(0, 4 * TILE)
    row, column = first_row + elements, first_column + elements
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    offsets = row[:, None] * columns + column[None, :]
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) * inv_scale
    value = tl.minimum(tl.maximum(value, -FP8_MAX), FP8_MAX)
    tl.store(q + offsets, value.to(q.dtype.element_ty), mask=mask)
    # Transpose words of four rows: Triton transposes words correctly, but not bytes.
    group = first_row // 4 + words
    mask = (4 * group < rows)[:, None] & (column < columns)[None, :]
    a, b, c, d = _load_4_rows(x, 4 * group, column, columns, inv_scale, mask)
    packed = tl.trans(_pack4(a, b, c, d, FORMAT, PTX))
    mask_t = (column < columns)[:, None] & (4 * group < rows)[None, :]
    tl.store(q_t + column[:, None] * (rows // 4) + group[None, :], packed, mask=mask_t)


def launch_amax(x: Tensor) -> Tensor:
    """Return max|x| in float32; NaNs are ignored."""
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    programs = min(1024, triton.cdiv(x.numel(), 2048))
    _amax_kernel[(programs,)](x, amax, x.numel(), BLOCK=2048)
    return amax


def launch_quantize(
    x: Tensor, dtype: torch.dtype, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix (rows, columns) in fp8, its transpose in fp8, and the scale of both.

    Both sides must be multiples of 4. `amax` is max|x|, if already known.
    """
    x = x.contiguous()
    rows, columns = x.shape
    assert rows % 4 == columns % 4 == 0
    amax = launch_amax(x) if amax is None else amax
    scale = torch.empty_like(amax)
    q = torch.empty(rows, columns, dtype=dtype, device=x.device)
    q_t = torch.empty(columns, rows, dtype=dtype, device=x.device)
    _fp8_quantize_kernel[(triton.cdiv(rows, 4 * TILE), triton.cdiv(columns, 4 * TILE))](
        x,
        amax,
        scale,
        q,
        q_t.view(torch.int32),
        rows,
        columns,
        FP8_MAX=torch.finfo(dtype).max,
        FORMAT="e4m3" if dtype == torch.float8_e4m3fn else "e5m2",
        TILE=TILE,
        PTX=x.is_cuda,
    )
    return q, q_t, scale


# A custom op: opaque to torch.compile

quantize = torch.library.custom_op(
    "scratchlm::quantize", launch_quantize, mutates_args=(), device_types="cuda"
)


@quantize.register_fake
def _(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    q, q_t = x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype)
    return q, q_t, x.new_empty((), dtype=torch.float32)
