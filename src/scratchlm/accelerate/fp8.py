"""Training's matrix products in 8-bit floating point, on GPUs that multiply it.

    y = W x          both rounded to e4m3 (3 bits of fraction), summed in float32
    ∂x = Wᵀ ∂y,  ∂W = ∂y xᵀ       the gradient ∂y rounded to e5m2 (a wider range)

Every matrix is scaled by its own largest magnitude, found anew each time: by a pass of its own, or,
in SwiGLU, by the gate that writes it. What products keep for the backward pass is 8 bits too.
Everything else, the head and the loss included, is `ops/fast.py`'s.
Opt-in: `TransformerLM(config, ops="fp8")`, or `train.precision = "fp8"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scratchlm.accelerate.kernels import launches_for
from scratchlm.ops import fast

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_WHOLE = 16  # what every side of an 8-bit product must be a multiple of


def runs_by_kernel(x: Tensor) -> bool:
    """Whether our kernels are for this matrix."""
    return launches_for(x)


def quantize(
    x: Tensor, kind: torch.dtype, greatest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix in 8 bits, its transpose in 8 bits, and the scale of both.

    `greatest` is its largest magnitude, where whoever made the matrix knows it.
    """
    if runs_by_kernel(x):
        from scratchlm.accelerate.kernels.triton.fp8_quantize import quantize as by_kernel

        q, turned, scale = by_kernel(x, kind, greatest)
        return q, turned, scale
    top, largest = _greatest_of(x) if greatest is None else greatest, torch.finfo(kind).max
    scale = torch.where(top > 0, top / largest, 1.0)
    q = (x.float() / scale).clamp(-largest, largest).to(kind)
    return q, q.t().contiguous(), scale


def _greatest_of(x: Tensor) -> Tensor:
    return x.abs().amax().float()


class _Product(torch.autograd.Function):
    """x Wᵀ over rows, in 8 bits both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        low_x, turned_x, scale_x = quantize(x, FORWARD)
        low_w, turned_w, scale_w = quantize(weight, FORWARD)
        ctx.save_for_backward(turned_x, scale_x, turned_w, scale_w)
        return _multiply(low_x, low_w, scale_x, scale_w)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        turned_x, scale_x, turned_w, scale_w = ctx.saved_tensors
        low, turned, scale = quantize(slope, BACKWARD)
        of_x = _multiply(low, turned_w, scale, scale_w)
        return of_x, _multiply(turned, turned_x, scale, scale_x)


class _SwiGLU(torch.autograd.Function):
    """W2(SiLU(W1 x) ⊙ W3 x) over rows, [W1; W3] in one.

    Two `_Product`s and the gate between them to the last bit, and keeps what they keep.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        low_x, turned_x, scale_x = quantize(x, FORWARD)
        low_13, turned_13, scale_13 = quantize(w13, FORWARD)
        joined = _multiply(low_x, low_13, scale_x, scale_13)
        hidden, greatest = _gate(joined)
        low_h, turned_h, scale_h = quantize(hidden, FORWARD, greatest)
        low_2, turned_2, scale_2 = quantize(w2, FORWARD)
        scales = scale_x, scale_13, scale_h, scale_2
        ctx.save_for_backward(joined, turned_x, turned_13, turned_h, turned_2, *scales)
        return _multiply(low_h, low_2, scale_h, scale_2)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joined, turned_x, turned_13, turned_h, turned_2, *scales = ctx.saved_tensors
        scale_x, scale_13, scale_h, scale_2 = scales
        low, turned, scale = quantize(slope, BACKWARD)
        of_h = _multiply(low, turned_2, scale, scale_2)
        of_2 = _multiply(turned, turned_h, scale, scale_h)
        of_joined, greatest = _gate_back(joined, of_h)
        low, turned, scale = quantize(of_joined, BACKWARD, greatest)
        of_x = _multiply(low, turned_13, scale, scale_13)
        return of_x, _multiply(turned, turned_x, scale, scale_x), of_2


def _gate(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Return h = SiLU(a) ⊙ b of the joined [a; b], and its largest magnitude."""
    if runs_by_kernel(joined):
        from scratchlm.accelerate.kernels.triton.swiglu_gate import measured_gate as by_kernel

        hidden, greatest = by_kernel(joined)
        return hidden, greatest
    a, b = joined.chunk(2, dim=-1)
    hidden = F.silu(a) * b
    return hidden, _greatest_of(hidden)


def _gate_back(joined: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Return [∂a; ∂b] where `slope` is ∂h, and its largest magnitude."""
    if runs_by_kernel(joined):
        from scratchlm.accelerate.kernels.triton.swiglu_gate import measured_gate_back as by_kernel

        of_joined, greatest = by_kernel(joined, slope)
        return of_joined, greatest
    a, b = joined.chunk(2, dim=-1)
    of_a = torch.ops.aten.silu_backward(slope * b, a)
    of_joined = torch.cat((of_a, slope * F.silu(a)), dim=-1)
    return of_joined, _greatest_of(of_joined)


def _multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """a bᵀ in bfloat16."""
    low = torch.bfloat16
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=low, use_fast_accum=True)


def _fits(rows: int, weight: Tensor) -> bool:
    return all(side % _WHOLE == 0 for side in (rows, *weight.shape))


def _product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """[W₁ x; W₂ x; …]: in 8 bits where training runs low and the sides are whole."""
    joined = fast.in_one(weights, torch.bfloat16)
    rows = x.reshape(-1, x.shape[-1])
    if _fits(len(rows), joined):
        y = _Product.apply(rows.to(torch.bfloat16), joined).view(*x.shape[:-1], len(joined))
    else:
        y = F.linear(x, joined)
    if all(bias is None for bias in biases):
        return y
    parts = zip(weights, biases, strict=True)
    return y + torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in parts]).to(y.dtype)


def _runs_low(x: Tensor) -> bool:
    return torch.is_grad_enabled() and torch.is_autocast_enabled(x.device.type)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = W x (+ b)."""
    return _product(x, [weight], [bias]) if _runs_low(x) else fast.linear(x, weight, bias)


def joined_product(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """[W₁ x; W₂ x; …] in one product."""
    product = _product if _runs_low(x) else fast.joined_product
    return product(x, weights, biases)


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Several maps of one input, in one product."""
    if not _runs_low(x):
        return fast.linears(x, weights, biases)
    return _product(x, weights, biases).split([len(weight) for weight in weights], dim=-1)


def swiglu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
) -> Tensor:
    """W2(SiLU(W1 x) ⊙ W3 x)."""
    if not _runs_low(x):
        return fast.swiglu(x, w1, w2, w3, b1, b2, b3)
    rows = x.reshape(-1, x.shape[-1])
    plain = b1 is None and b2 is None and b3 is None
    if plain and _fits(len(rows), w1) and _fits(len(rows), w2):
        w13, w2 = fast.in_one((w1, w3), torch.bfloat16), fast.in_one((w2,), torch.bfloat16)
        y = _SwiGLU.apply(rows.to(torch.bfloat16), w13, w2)
        return y.view(*x.shape[:-1], len(w2))
    return linear(fast.gate(_product(x, (w1, w3), (b1, b3))), w2, b2)


def mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "gelu_tanh",
) -> Tensor:
    """W2 act(W1 x)."""
    return linear(fast.ACTIVATIONS[activation](linear(x, w1, b1)), w2, b2)
