"""RMSNorm, optionally fused with the residual addition before it: forward and backward.

    y = x + δ,    n = y / rms(y) · w
    ∂x = ∂δ = ∂y + (∂n·w − y·mean(∂n·w·y)/rms²)/rms,    ∂w = Σ ∂n · y/rms

`add_rms_norm` saves y, where a compiler saves x and δ and reads both again. Its backward adds the
gradient ∂y of the residual stream in the same pass. `rms_norm` is the same without δ and ∂y.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

PROGRAMS = 1056  # of the persistent backward kernel: 8 on each of 132 SMs


@triton.jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, delta, weight, y, n, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    offsets = tl.program_id(0).to(tl.int64) * WIDTH + column
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(y.dtype.element_ty)
        tl.store(y + offsets, rounded, mask=mask)
        value = rounded.to(tl.float32)
    inv_rms = 1 / tl.sqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(n + offsets, (value * inv_rms * w).to(n.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
    y,
    weight,
    dy,
    dn,
    dx,
    ddelta,
    dweight_partial,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    WRITE_DDELTA: tl.constexpr,
):
    """Persistent: each program takes every num_programs-th row, and prefetches the next one."""
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64)  # so that row · WIDTH may pass 2³¹
    step = tl.num_programs(0).to(tl.int64)
    offsets, row_mask = first * WIDTH + column, mask & (first < rows)
    y_row = tl.load(y + offsets, mask=row_mask, other=0.0)
    dn_row = tl.load(dn + offsets, mask=row_mask, other=0.0)
    dy_row = tl.zeros((BLOCK,), tl.float32)
    if ADD:
        dy_row = tl.load(dy + offsets, mask=row_mask, other=0.0)
    for row in range(first, rows, step):
        next_offsets = (row + step) * WIDTH + column
        next_mask = mask & (row + step < rows)
        next_y = tl.load(y + next_offsets, mask=next_mask, other=0.0)
        next_dn = tl.load(dn + next_offsets, mask=next_mask, other=0.0)
        next_dy = dy_row
        if ADD:
            next_dy = tl.load(dy + next_offsets, mask=next_mask, other=0.0)
        value, grad = y_row.to(tl.float32), dn_row.to(tl.float32)
        mean_square = tl.sum(value * value, axis=0) / WIDTH
        mean_dot = tl.sum(grad * w * value, axis=0) / WIDTH
        inv_rms = 1 / tl.sqrt(mean_square + eps)
        dweight += grad * value * inv_rms
        total = (grad * w - value * (mean_dot * inv_rms * inv_rms)) * inv_rms
        total = total + dy_row.to(tl.float32)
        offsets = row * WIDTH + column
        tl.store(dx + offsets, total.to(dx.dtype.element_ty), mask=mask)
        if WRITE_DDELTA:
            tl.store(ddelta + offsets, total.to(ddelta.dtype.element_ty), mask=mask)
        y_row, dn_row, dy_row = next_y, next_dn, next_dy
    tl.store(dweight_partial + tl.program_id(0) * WIDTH + column, dweight, mask=mask)


@triton.jit
def _rms_norm_dweight_kernel(  # type: ignore[no-untyped-def]
    dweight_partial, dweight, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum the partial weight gradients of the backward programs."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column < WIDTH)[None, :]
        total += tl.load(dweight_partial + row * WIDTH + column[None, :], mask=mask, other=0.0)
    total = tl.sum(total, axis=0).to(dweight.dtype.element_ty)
    tl.store(dweight + column, total, mask=column < WIDTH)


def _num_warps(width: int) -> int:
    return min(16, max(1, triton.next_power_of_2(width) // 256))


def launch_add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return y = x + δ in x's dtype and its RMSNorm in `out_dtype`."""
    x = x.contiguous()
    y, n = torch.empty_like(x), torch.empty_like(x, dtype=out_dtype)
    _forward(x, delta.contiguous(), weight, y, n, eps)
    return y, n


def _forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, y: Tensor, n: Tensor, eps: float
) -> None:
    width = x.shape[-1]
    _rms_norm_kernel[(x.numel() // width,)](
        *(x, x if delta is None else delta, weight, y, n, eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ADD=delta is not None,
        num_warps=_num_warps(width),
    )


def launch_add_rms_norm_backward(
    y: Tensor, weight: Tensor, dy: Tensor, dn: Tensor, eps: float, delta_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ∂x, ∂w and ∂δ; ∂δ is empty if δ has x's dtype, for it equals ∂x."""
    dx, ddelta = torch.empty_like(y), _empty_ddelta(y, delta_dtype)
    dweight = _backward(y, weight, dy.contiguous(), dn, dx, ddelta, eps)
    return dx, dweight, ddelta


def _backward(
    y: Tensor, weight: Tensor, dy: Tensor | None, dn: Tensor, dx: Tensor, ddelta: Tensor, eps: float
) -> Tensor:
    """Write ∂x, also into `ddelta` unless that is empty; return ∂w."""
    width = y.shape[-1]
    rows = y.numel() // width
    programs = max(1, min(rows, PROGRAMS))
    partial = torch.empty(programs, width, dtype=torch.float32, device=y.device)
    _rms_norm_backward_kernel[(programs,)](
        *(y, weight, y if dy is None else dy, dn.contiguous(), dx, ddelta, partial, rows, eps),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ADD=dy is not None,
        WRITE_DDELTA=ddelta.numel() > 0,
        num_warps=_num_warps(width),
    )
    dweight = torch.empty_like(weight)
    columns = 16  # 64 bytes of a row
    _rms_norm_dweight_kernel[(triton.cdiv(width, columns),)](
        partial, dweight, programs, WIDTH=width, ROWS=128, COLUMNS=columns, num_warps=8
    )
    return dweight


def _empty_ddelta(y: Tensor, dtype: torch.dtype) -> Tensor:
    return y.new_empty(0) if dtype == y.dtype else torch.empty_like(y, dtype=dtype)


class _RMSNormKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        n = torch.empty_like(x)
        _forward(x, None, weight, n, n, eps)
        return n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dn: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x)
        return dx, _backward(x, weight, None, dn, dx, x.new_empty(0), ctx.eps), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · w in x's dtype, for contiguous x.

    For eager code: torch.compile generates its own kernel, fused with the residual gradient.
    """
    n: Tensor = _RMSNormKernel.apply(x, weight, eps)
    return n


# Custom ops: opaque to torch.compile

add_rms_norm = torch.library.custom_op(
    "scratchlm::add_rms_norm", launch_add_rms_norm, mutates_args=(), device_types="cuda"
)
add_rms_norm_backward = torch.library.custom_op(
    "scratchlm::add_rms_norm_backward",
    launch_add_rms_norm_backward,
    mutates_args=(),
    device_types="cuda",
)


@add_rms_norm.register_fake
def _(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=out_dtype)


@add_rms_norm_backward.register_fake
def _(
    y: Tensor, weight: Tensor, dy: Tensor, dn: Tensor, eps: float, delta_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return y.new_empty(y.shape), torch.empty_like(weight), _empty_ddelta(y, delta_dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, delta, weight, ctx.eps, _ = inputs
    ctx.delta_dtype = delta.dtype
    ctx.save_for_backward(output[0], weight)


def _autograd_backward(ctx: Any, dy: Tensor | None, dn: Tensor | None) -> tuple[Tensor | None, ...]:
    y, weight = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dy
    dn = torch.zeros_like(y) if dn is None else dn
    dx, dweight, ddelta = add_rms_norm_backward(y, weight, dy, dn, ctx.eps, ctx.delta_dtype)
    return dx, dx if ctx.delta_dtype == y.dtype else ddelta, dweight, None, None


add_rms_norm.register_autograd(_autograd_backward, setup_context=_save)
