"""A matrix in 8-bit floating point, as it lies and turned over, under one scale.

    scale = max|x| / the format's largest number,    q = x / scale

The tensor cores of Hopper multiply 8-bit matrices only along contiguous rows. A matrix that takes
part in the forward and in the backward product is needed both ways: one pass writes both. One more
before it finds max|x|, unless the kernel that made x has done so.

A NaN does not count in max|x|. On a GPU it is clamped like a number as it lies, and stays a NaN
turned over: the backward pass, whose products read that, shows it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16  # words of four; a tile is 64 rows by 64 columns


@triton.jit
def _greatest(x, greatest, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    top = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, count, step):
        place = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.abs(tl.load(x + place, mask=place < count, other=0.0)))
    tl.atomic_max(greatest, tl.max(top, axis=0))


@triton.jit
def _packed(a, b, c, d, KIND: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return four numbers, rounded to 8 bits, as one word: `a` in its lowest byte."""
    if PTX:  # by hand: LLVM's own joining of bytes is not right for every layout
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high;"
            " cvt.rn.satfinite." + KIND + "x2.f32 low, $2, $1;"
            " cvt.rn.satfinite." + KIND + "x2.f32 high, $4, $3;"
            " mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        kind: tl.constexpr = tl.float8e4nv if KIND == "e4m3" else tl.float8e5
        word = a.to(kind).to(tl.uint8, bitcast=True).to(tl.int32)
        word |= b.to(kind).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        word |= c.to(kind).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        word |= d.to(kind).to(tl.uint8, bitcast=True).to(tl.int32) << 24
    return word


@triton.jit
def _four_rows(x, row, column, columns, up, inside):  # type: ignore[no-untyped-def]
    place = x + row[:, None] * columns + column[None, :]
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32) * up
    b = tl.load(place + columns, mask=inside, other=0.0).to(tl.float32) * up
    c = tl.load(place + 2 * columns, mask=inside, other=0.0).to(tl.float32) * up
    d = tl.load(place + 3 * columns, mask=inside, other=0.0).to(tl.float32) * up
    return a, b, c, d


@triton.jit
def _quantize(  # type: ignore[no-untyped-def]
    x,
    greatest,
    scale,
    q,
    turned,
    rows,
    columns,
    LARGEST: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Write a tile of 4·TILE rows and columns as it lies, and turned over."""
    first_row = tl.program_id(0).to(tl.int64) * 4 * TILE
    first_column = tl.program_id(1).to(tl.int64) * 4 * TILE
    top = tl.load(greatest)
    up = LARGEST / tl.where(top > 0, top, LARGEST)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, 1 / up)
    few, many = tl.arange(0, TILE), tl.arange(0, 4 * TILE)
    row, column = first_row + many, first_column + many
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * up
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    tl.store(q + place, value.to(q.dtype.element_ty), mask=inside)
    # turned over: words of four rows, because words are turned right and bytes are not
    group = first_row // 4 + few
    inside = (4 * group < rows)[:, None] & (column < columns)[None, :]
    a, b, c, d = _four_rows(x, 4 * group, column, columns, up, inside)
    words = tl.trans(_packed(a, b, c, d, KIND, PTX))
    there = (column < columns)[:, None] & (4 * group < rows)[None, :]
    tl.store(turned + column[:, None] * (rows // 4) + group[None, :], words, mask=there)


def greatest_of(x: Tensor) -> Tensor:
    """Return the largest magnitude in float32; a NaN does not count."""
    greatest = torch.zeros((), dtype=torch.float32, device=x.device)
    programs = min(1024, triton.cdiv(x.numel(), 2048))
    _greatest[(programs,)](x, greatest, x.numel(), BLOCK=2048)
    return greatest


def quantize_both_ways(
    x: Tensor, kind: torch.dtype, greatest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows, columns) in 8 bits, its transpose in 8 bits, and the scale of both.

    Both sides must be multiples of 4. `greatest` is max|x|, where whoever made x knows it.
    """
    x = x.contiguous()
    rows, columns = x.shape
    assert rows % 4 == columns % 4 == 0
    greatest = greatest_of(x) if greatest is None else greatest
    scale = torch.empty_like(greatest)
    q = torch.empty(rows, columns, dtype=kind, device=x.device)
    turned = torch.empty(columns, rows, dtype=kind, device=x.device)
    _quantize[(triton.cdiv(rows, 4 * TILE), triton.cdiv(columns, 4 * TILE))](
        x,
        greatest,
        scale,
        q,
        turned.view(torch.int32),
        rows,
        columns,
        LARGEST=torch.finfo(kind).max,
        KIND="e4m3" if kind == torch.float8_e4m3fn else "e5m2",
        TILE=TILE,
        PTX=x.is_cuda,
    )
    return q, turned, scale


# As torch sees it: a whole operation, which a compiler does not open

quantize = torch.library.custom_op(
    "scratchlm::quantize", quantize_both_ways, mutates_args=(), device_types="cuda"
)


@quantize.register_fake
def _(
    x: Tensor, kind: torch.dtype, greatest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    q, turned = x.new_empty(rows, columns, dtype=kind), x.new_empty(columns, rows, dtype=kind)
    return q, turned, x.new_empty((), dtype=torch.float32)
