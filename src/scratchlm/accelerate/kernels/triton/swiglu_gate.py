"""SwiGLU's gate on the fused projection [a; b] = [W1 x; W3 x], forward and backward.

    h = SiLU(a) ⊙ b,    ∂a = ∂h ⊙ b ⊙ σ(a)(1 + a(1 − σ(a))),    ∂b = ∂h ⊙ SiLU(a)

The backward kernel reads a, b and ∂h once and writes [∂a; ∂b] contiguously, as the next GEMMs need
it; a compiler would read them twice to concatenate. For fp8 GEMMs, the `_amax` variants also
return max|h| or max|[∂a; ∂b]|, which `quantize` needs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _atomic_amax(amax, magnitude):  # type: ignore[no-untyped-def]
    # Starts from 0, as in quantize: NaNs are ignored, and the order of programs does not matter.
    block_amax = tl.max(tl.maximum(magnitude, 0.0), axis=0)
    tl.atomic_max(amax, block_amax, sem="relaxed")


@triton.jit
def _swiglu_gate_kernel(gate_up, h, amax, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    start = gate_up + row * 2 * width
    a = tl.load(start + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(start + width + column, mask=mask, other=0.0).to(tl.float32)
    out = (a * tl.sigmoid(a) * b).to(h.dtype.element_ty)
    tl.store(h + row * width + column, out, mask=mask)
    if amax is not None:
        _atomic_amax(amax, tl.abs(out.to(tl.float32)))


@triton.jit
def _swiglu_gate_backward_kernel(  # type: ignore[no-untyped-def]
    gate_up, dh, out, amax, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    start = gate_up + row * 2 * width
    a = tl.load(start + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(start + width + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dh + row * width + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(a)
    da = (grad * b * sigmoid * (1 + a * (1 - sigmoid))).to(out.dtype.element_ty)
    db = (grad * a * sigmoid).to(out.dtype.element_ty)
    target = out + row * 2 * width + column
    tl.store(target, da, mask=mask)
    tl.store(target + width, db, mask=mask)
    if amax is not None:
        _atomic_amax(amax, tl.maximum(tl.abs(da.to(tl.float32)), tl.abs(db.to(tl.float32))))


def _forward(gate_up: Tensor, amax: Tensor | None) -> Tensor:
    width = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    h = gate_up.new_empty(*gate_up.shape[:-1], width)
    rows = gate_up.numel() // (2 * width)
    _swiglu_gate_kernel[(rows, triton.cdiv(width, BLOCK))](gate_up, h, amax, width, BLOCK=BLOCK)
    return h


def _backward(gate_up: Tensor, dh: Tensor, amax: Tensor | None) -> Tensor:
    width = gate_up.shape[-1] // 2
    gate_up, dh = gate_up.contiguous(), dh.contiguous()
    out = torch.empty_like(gate_up)
    rows = gate_up.numel() // (2 * width)
    _swiglu_gate_backward_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate_up, dh, out, amax, width, BLOCK=BLOCK
    )
    return out


def launch_swiglu_gate(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension, times the second half."""
    return _forward(gate_up, None)


def launch_swiglu_gate_backward(gate_up: Tensor, dh: Tensor) -> Tensor:
    """Return the gradient [∂a; ∂b] of `gate_up`."""
    return _backward(gate_up, dh, None)


def launch_swiglu_gate_amax(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return h and max|h|."""
    amax = torch.zeros((), dtype=torch.float32, device=gate_up.device)
    return _forward(gate_up, amax), amax


def launch_swiglu_gate_backward_amax(gate_up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient [∂a; ∂b] of `gate_up` and its largest magnitude."""
    amax = torch.zeros((), dtype=torch.float32, device=gate_up.device)
    return _backward(gate_up, dh, amax), amax


# Custom ops: opaque to torch.compile, which does not recompute them either

swiglu_gate = torch.library.custom_op(
    "scratchlm::swiglu_gate", launch_swiglu_gate, mutates_args=(), device_types="cuda"
)
swiglu_gate_backward = torch.library.custom_op(
    "scratchlm::swiglu_gate_backward",
    launch_swiglu_gate_backward,
    mutates_args=(),
    device_types="cuda",
)
swiglu_gate_amax = torch.library.custom_op(
    "scratchlm::swiglu_gate_amax", launch_swiglu_gate_amax, mutates_args=(), device_types="cuda"
)
swiglu_gate_backward_amax = torch.library.custom_op(
    "scratchlm::swiglu_gate_backward_amax",
    launch_swiglu_gate_backward_amax,
    mutates_args=(),
    device_types="cuda",
)


@swiglu_gate.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@swiglu_gate_backward.register_fake
def _(gate_up: Tensor, dh: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


@swiglu_gate_amax.register_fake
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    h = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return h, gate_up.new_empty((), dtype=torch.float32)


@swiglu_gate_backward_amax.register_fake
def _(gate_up: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    return gate_up.new_empty(gate_up.shape), gate_up.new_empty((), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd_backward(ctx: Any, dh: Tensor) -> Tensor:
    grad: Tensor = swiglu_gate_backward(ctx.saved_tensors[0], dh)
    return grad


swiglu_gate.register_autograd(_autograd_backward, setup_context=_save)
