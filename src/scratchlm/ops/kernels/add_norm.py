"""A sum and the RMSNorm of it, forward and backward, each in one pass.

    y = x + δ,    n = y / rms(y) · g
    ∂x = ∂δ = ∂y + (∂n·g − y·mean(∂n·g·y)/rms²)/rms,    ∂g = Σ ∂n · y/rms

This is what stands between a layer's two halves. y is kept: a compiler keeps x and δ instead, and
reads both wherever y is wanted. The backward pass adds what comes along the residual path itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056  # of the backward pass: eight on each of 132 multiprocessors, rows in turn


@triton.jit
def _add_and_norm(  # type: ignore[no-untyped-def]
    x, delta, gain, y, n, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    total = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
    total = total.to(y.dtype.element_ty)
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
    LOW: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    g = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64)  # and so a row: rows times width may pass 2³¹
    for row in range(first, rows, tl.num_programs(0).to(tl.int64)):
        place = row * WIDTH + column
        value = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
        of_n = tl.load(dn + place, mask=inside, other=0.0).to(tl.float32)
        of_y = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        square = tl.sum(value * value, axis=0) / WIDTH
        along = tl.sum(of_n * g * value, axis=0) / WIDTH
        inverse = 1 / tl.sqrt(square + eps)
        part += of_n * value * inverse
        of_x = of_y + (of_n * g - value * (along * inverse * inverse)) * inverse
        tl.store(dx + place, of_x.to(dx.dtype.element_ty), mask=inside)
        if LOW:
            tl.store(low + place, of_x.to(low.dtype.element_ty), mask=inside)
    tl.store(gain_parts + tl.program_id(0) * WIDTH + column, part, mask=inside)


def _warps(width: int) -> int:
    return min(16, max(1, triton.next_power_of_2(width) // 256))


def add_norm_forward(
    x: Tensor, delta: Tensor, gain: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return y = x + δ in x's dtype and its norm in `dtype`."""
    x, delta = x.contiguous(), delta.contiguous()
    width = x.shape[-1]
    y, n = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    _add_and_norm[(x.numel() // width,)](
        *(x, delta, gain, y, n, eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_warps(width),
    )
    return y, n


def add_norm_backward(
    y: Tensor, gain: Tensor, dy: Tensor, dn: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the gain, and of δ where its `dtype` is not x's (or empty)."""
    dy, dn = dy.contiguous(), dn.contiguous()
    width = y.shape[-1]
    rows = y.numel() // width
    programs = max(1, min(rows, PROGRAMS))
    parts = torch.empty(programs, width, dtype=torch.float32, device=y.device)
    dx, low = torch.empty_like(y), _of_delta(y, dtype)
    _norm_and_add_back[(programs,)](
        *(y, gain, dy, dn, dx, low, parts, rows, eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        LOW=dtype != y.dtype,
        num_warps=_warps(width),
    )
    return dx, parts.sum(dim=0).to(gain.dtype), low


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
