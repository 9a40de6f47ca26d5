"""A matrix in 8-bit floating point, as it lies and turned over, under one scale.

    scale = max|x| / the format's largest number,    q = x / scale

The tensor cores of Hopper multiply 8-bit matrices only along contiguous rows. A matrix that takes
part in the forward and in the backward product is needed both ways: one pass writes both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


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
def _quantize(  # type: ignore[no-untyped-def]
    x, greatest, scale, q, turned, rows, columns, LARGEST: tl.constexpr, TILE: tl.constexpr
):
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    top = tl.load(greatest)
    up = LARGEST / tl.where(top > 0, top, LARGEST)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, 1 / up)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * up
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    tl.store(q + place, value.to(q.dtype.element_ty), mask=inside)
    over = column[:, None] * rows + row[None, :]
    there = (column < columns)[:, None] & (row < rows)[None, :]
    # Turned before it is rounded: Triton 3.6 does not turn 8-bit tiles right.
    tl.store(turned + over, tl.trans(value).to(q.dtype.element_ty), mask=there)


def quantize_both_ways(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows, columns) in 8 bits, its transpose in 8 bits, and the scale of both."""
    x = x.contiguous()
    rows, columns = x.shape
    greatest = torch.zeros((), dtype=torch.float32, device=x.device)
    scale = torch.empty_like(greatest)
    q = torch.empty(rows, columns, dtype=kind, device=x.device)
    turned = torch.empty(columns, rows, dtype=kind, device=x.device)
    programs = min(1024, triton.cdiv(x.numel(), 2048))
    _greatest[(programs,)](x, greatest, x.numel(), BLOCK=2048)
    _quantize[(triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))](
        x, greatest, scale, q, turned, rows, columns, LARGEST=LARGEST[kind], TILE=TILE
    )
    return q, turned, scale


# As torch sees it: a whole operation, which a compiler does not open

quantize = torch.library.custom_op(
    "scratchlm::quantize", quantize_both_ways, mutates_args=(), device_types="cuda"
)


@quantize.register_fake
def _(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    q, turned = x.new_empty(rows, columns, dtype=kind), x.new_empty(columns, rows, dtype=kind)
    return q, turned, x.new_empty((), dtype=torch.float32)
