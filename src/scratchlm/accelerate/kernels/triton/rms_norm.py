"""RMSNorm, of a tensor or of a sum of two, forward and backward, each in one pass.

    y = x + δ,    n = y / rms(y) · g
    ∂x = ∂δ = ∂y + (∂n·g − y·mean(∂n·g·y)/rms²)/rms,    ∂g = Σ ∂n · y/rms

The sum is what stands between a layer's two halves. y is kept: a compiler keeps x and δ instead,
and reads both wherever y is wanted. The backward pass adds what comes along the residual path
itself. A norm alone is the same without δ and ∂y.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PROGRAMS = 1056  # of the backward pass: eight on each of 132 multiprocessors, rows in turn


@triton.jit
def _add_and_norm(  # type: ignore[no-untyped-def]
    x, delta, gain, y, n, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        total = wide.to(y.dtype.element_ty)
        tl.store(y + place, total, mask=inside)
        wide = total.to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    g = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(n + place, (wide * inverse * g).to(n.dtype.element_ty), mask=inside)


@triton.jit
def _norm_and_add_back(  # type: ignore[no-untyped-def]
    y,
    gain,
    dy,
    dn,
    dx,
    low,
    gain_parts,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    LOW: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    g = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64)  # and so a row: rows times width may pass 2³¹
    step = tl.num_programs(0).to(tl.int64)
    place, there = first * WIDTH + column, inside & (first < rows)
    value = tl.load(y + place, mask=there, other=0.0)
    of_n = tl.load(dn + place, mask=there, other=0.0)
    of_y = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        of_y = tl.load(dy + place, mask=there, other=0.0)
    for row in range(first, rows, step):
        # The next row is asked for before this one is waited for.
        next_place = (row + step) * WIDTH + column
        more = inside & (row + step < rows)
        next_value = tl.load(y + next_place, mask=more, other=0.0)
        next_of_n = tl.load(dn + next_place, mask=more, other=0.0)
        next_of_y = of_y
        if ADD:
            next_of_y = tl.load(dy + next_place, mask=more, other=0.0)
        wide, slope = value.to(tl.float32), of_n.to(tl.float32)
        square = tl.sum(wide * wide, axis=0) / WIDTH
        along = tl.sum(slope * g * wide, axis=0) / WIDTH
        inverse = 1 / tl.sqrt(square + eps)
        part += slope * wide * inverse
        of_x = (slope * g - wide * (along * inverse * inverse)) * inverse + of_y.to(tl.float32)
        place = row * WIDTH + column
        tl.store(dx + place, of_x.to(dx.dtype.element_ty), mask=inside)
        if LOW:
            tl.store(low + place, of_x.to(low.dtype.element_ty), mask=inside)
        value, of_n, of_y = next_value, next_of_n, next_of_y
    tl.store(gain_parts + tl.program_id(0) * WIDTH + column, part, mask=inside)


@triton.jit
def _sum_columns(  # type: ignore[no-untyped-def]
    parts, total, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < WIDTH)[None, :]
        sums += tl.load(parts + row * WIDTH + column[None, :], mask=inside, other=0.0)
    sums = tl.sum(sums, axis=0).to(total.dtype.element_ty)
    tl.store(total + column, sums, mask=column < WIDTH)


def _warps(width: int) -> int:
    return min(16, max(1, triton.next_power_of_2(width) // 256))


def add_norm_forward(
    x: Tensor, delta: Tensor, gain: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return y = x + δ in x's dtype and its norm in `dtype`."""
    x = x.contiguous()
    y, n = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    _forward(x, delta.contiguous(), gain, y, n, eps)
    return y, n


def _forward(
    x: Tensor, delta: Tensor | None, gain: Tensor, y: Tensor, n: Tensor, eps: float
) -> None:
    width = x.shape[-1]
    _add_and_norm[(x.numel() // width,)](
        *(x, x if delta is None else delta, gain, y, n, eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ADD=delta is not None,
        num_warps=_warps(width),
    )


def add_norm_backward(
    y: Tensor, gain: Tensor, dy: Tensor, dn: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the gain, and of δ where its `dtype` is not x's (or empty)."""
    dx, low = torch.empty_like(y), _of_delta(y, dtype)
    of_gain = _backward(y, gain, dy.contiguous(), dn, dx, low, eps)
    return dx, of_gain, low


def _backward(
    y: Tensor, gain: Tensor, dy: Tensor | None, dn: Tensor, dx: Tensor, low: Tensor, eps: float
) -> Tensor:
    """Write the gradient of y, also into `low` if that is not empty; return the gain's."""
    width = y.shape[-1]
    rows = y.numel() // width
    programs = max(1, min(rows, PROGRAMS))
    parts = torch.empty(programs, width, dtype=torch.float32, device=y.device)
    _norm_and_add_back[(programs,)](
        *(y, gain, y if dy is None else dy, dn.contiguous(), dx, low, parts, rows, eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ADD=dy is not None,
        LOW=low.numel() > 0,
        num_warps=_warps(width),
    )
    of_gain = torch.empty_like(gain)
    columns = 16  # 64 bytes of a row
    _sum_columns[(triton.cdiv(width, columns),)](
        parts, of_gain, programs, WIDTH=width, ROWS=128, COLUMNS=columns, num_warps=8
    )
    return of_gain


class Norm(torch.autograd.Function):
    """n = x / rms(x) · g in x's dtype, x contiguous; for code that is not compiled.

    A compiler writes its own, and adds what comes along the residual path in its backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Keep x and the gain alone."""
        ctx.eps = eps
        ctx.save_for_backward(x, gain)
        n = torch.empty_like(x)
        _forward(x, None, gain, n, n, eps)
        return n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dn: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and of the gain."""
        x, gain = ctx.saved_tensors
        dx = torch.empty_like(x)
        return dx, _backward(x, gain, None, dn, dx, x.new_empty(0), ctx.eps), None


def _of_delta(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.new_empty(0) if dtype == y.dtype else torch.empty_like(y, dtype=dtype)


# As torch sees them: whole operations, which a compiler does not open

add_norm = torch.library.custom_op(
    "scratchlm::add_norm", add_norm_forward, mutates_args=(), device_types="cuda"
)
_add_norm_backward = torch.library.custom_op(
    "scratchlm::add_norm_backward", add_norm_backward, mutates_args=(), device_types="cuda"
)


@add_norm.register_fake
def _(
    x: Tensor, delta: Tensor, gain: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype)


@_add_norm_backward.register_fake
def _(
    y: Tensor, gain: Tensor, dy: Tensor, dn: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), torch.empty_like(gain), _of_delta(y, dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, delta, gain, ctx.eps, _ = inputs
    ctx.dtype = delta.dtype
    ctx.save_for_backward(output[0], gain)


def _back(ctx: Any, dy: Tensor | None, dn: Tensor | None) -> tuple[Tensor | None, ...]:
    y, gain = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dy
    dn = torch.zeros_like(y) if dn is None else dn
    dx, of_gain, low = _add_norm_backward(y, gain, dy, dn, ctx.eps, ctx.dtype)
    return dx, dx if ctx.dtype == y.dtype else low, of_gain, None, None


add_norm.register_autograd(_back, setup_context=_keep)
