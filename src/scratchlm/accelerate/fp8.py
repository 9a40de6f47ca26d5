"""Training's matrix products in 8-bit floating point, on GPUs that multiply it.

    y = W x          both rounded to e4m3 (3 bits of fraction), summed in float32
    ∂x = Wᵀ ∂y,  ∂W = ∂y xᵀ       the gradient ∂y rounded to e5m2 (a wider range)

Every matrix is scaled by its own largest magnitude, found anew each time: by a pass of its own, or,
in SwiGLU, by the gate that writes it. What products keep for the backward pass is 8 bits too. The
LM head and the loss stay as they are. `train.precision = "fp8"` calls `enable_fp8`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scratchlm.accelerate.kernels import launches_for
from scratchlm.accelerate.table import has_fast_ops
from scratchlm.errors import ScratchLMError

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_WHOLE = 16  # what every side of an 8-bit product must be a multiple of


def runs_by_kernel(x: Tensor) -> bool:
    """Whether our kernels are for this matrix."""
    return launches_for(x)


def quantize(
    x: Tensor, kind: torch.dtype, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix in 8 bits, its transpose in 8 bits, and the scale of both.

    `amax` is its largest magnitude, where whoever made the matrix knows it.
    """
    if runs_by_kernel(x):
        from scratchlm.accelerate.kernels.triton.fp8_quantize import quantize as by_kernel

        q, transposed, scale = by_kernel(x, kind, amax)
        return q, transposed, scale
    top, largest = _amax_of(x) if amax is None else amax, torch.finfo(kind).max
    scale = torch.where(top > 0, top / largest, 1.0)
    q = (x.float() / scale).clamp(-largest, largest).to(kind)
    return q, q.t().contiguous(), scale


def _amax_of(x: Tensor) -> Tensor:
    return x.abs().amax().float()


class _Product(torch.autograd.Function):
    """x Wᵀ over rows, in 8 bits both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        low_x, t_x, scale_x = quantize(x, FORWARD)
        low_w, t_w, scale_w = quantize(weight, FORWARD)
        ctx.save_for_backward(t_x, scale_x, t_w, scale_w)
        return _multiply(low_x, low_w, scale_x, scale_w)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        t_x, scale_x, t_w, scale_w = ctx.saved_tensors
        low, transposed, scale = quantize(grad_output, BACKWARD)
        grad_x = _multiply(low, t_w, scale, scale_w)
        return grad_x, _multiply(transposed, t_x, scale, scale_x)


class _SwiGLU(torch.autograd.Function):
    """W2(SiLU(W1 x) ⊙ W3 x) over rows, [W1; W3] in one.

    Two `_Product`s and the gate between them to the last bit, and keeps what they keep.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        low_x, t_x, scale_x = quantize(x, FORWARD)
        low_13, t_13, scale_13 = quantize(w13, FORWARD)
        joined = _multiply(low_x, low_13, scale_x, scale_13)
        hidden, amax = _gate(joined)
        low_h, t_h, scale_h = quantize(hidden, FORWARD, amax)
        low_2, t_2, scale_2 = quantize(w2, FORWARD)
        scales = scale_x, scale_13, scale_h, scale_2
        ctx.save_for_backward(joined, t_x, t_13, t_h, t_2, *scales)
        return _multiply(low_h, low_2, scale_h, scale_2)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joined, t_x, t_13, t_h, t_2, *scales = ctx.saved_tensors
        scale_x, scale_13, scale_h, scale_2 = scales
        low, transposed, scale = quantize(grad_output, BACKWARD)
        grad_h = _multiply(low, t_2, scale, scale_2)
        grad_w2 = _multiply(transposed, t_h, scale, scale_h)
        grad_joined, amax = _gate_back(joined, grad_h)
        low, transposed, scale = quantize(grad_joined, BACKWARD, amax)
        grad_x = _multiply(low, t_13, scale, scale_13)
        return grad_x, _multiply(transposed, t_x, scale, scale_x), grad_w2


def _gate(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Return h = SiLU(a) ⊙ b of the joined [a; b], and its largest magnitude."""
    if runs_by_kernel(joined):
        from scratchlm.accelerate.kernels.triton.swiglu_gate import swiglu_gate_amax

        hidden, amax = swiglu_gate_amax(joined)
        return hidden, amax
    a, b = joined.chunk(2, dim=-1)
    hidden = F.silu(a) * b
    return hidden, _amax_of(hidden)


def _gate_back(joined: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """Return [∂a; ∂b] where `grad_output` is ∂h, and its largest magnitude."""
    if runs_by_kernel(joined):
        from scratchlm.accelerate.kernels.triton.swiglu_gate import swiglu_gate_backward_amax

        grad_joined, amax = swiglu_gate_backward_amax(joined, grad_output)
        return grad_joined, amax
    a, b = joined.chunk(2, dim=-1)
    grad_a = torch.ops.aten.silu_backward(grad_output * b, a)
    grad_joined = torch.cat((grad_a, grad_output * F.silu(a)), dim=-1)
    return grad_joined, _amax_of(grad_joined)


def _multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """a bᵀ in bfloat16."""
    low = torch.bfloat16
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=low, use_fast_accum=True)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether all sides of the product are multiples of 16."""
    rows = x.shape[:-1].numel()
    return all(side % _WHOLE == 0 for side in (rows, *weight.shape))


def is_on(x: Tensor) -> bool:
    """Whether products of this input run low: training, under autocast."""
    return torch.is_grad_enabled() and torch.is_autocast_enabled(x.device.type)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = W x (+ b) with W in bfloat16: in 8 bits where the sides are whole."""
    if fits(x, weight):
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        y = _Product.apply(rows, weight).view(*x.shape[:-1], len(weight))
    else:
        y = F.linear(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """W2(SiLU(W1 x) ⊙ W3 x) with weights in bfloat16, where the sides `fit`."""
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    y: Tensor = _SwiGLU.apply(rows, w13, w2)
    return y.view(*x.shape[:-1], len(w2))


def enable_fp8(model: nn.Module) -> None:
    """Let the layers' products of an accelerated model run in 8 bits where it trains."""
    layers: nn.Module = model.layers  # type: ignore[assignment]
    able = [m for m in layers.modules() if hasattr(m, "fp8") and has_fast_ops(m, ("linear",))]
    if not able:
        raise ScratchLMError("precision fp8 needs an accelerated model with the fast ops")
    device = next(model.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ScratchLMError(f"precision fp8 needs a GPU that multiplies 8 bits; got {name}")
    for module in able:
        module.fp8 = True  # type: ignore[assignment]
