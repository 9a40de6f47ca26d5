"""SwiGLU's gate on the joined product [W1 x; W3 x], forward and backward, each in one pass.

    h = SiLU(a) ⊙ b,    ∂a = ∂h ⊙ b ⊙ σ(a)(1 + a(1 − σ(a))),    ∂b = ∂h ⊙ SiLU(a)

The backward pass reads a, b and ∂h once and writes [∂a; ∂b] where the two products of the next
step want it; left to a compiler, joining the halves reads them twice. For products in 8 bits,
both passes can say as well the largest magnitude of what they wrote, which `quantize` wants.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _raise(greatest, magnitude):  # type: ignore[no-untyped-def]
    # From 0 upwards, as in quantize: a NaN does not count, and the order of programs neither.
    top = tl.max(tl.maximum(magnitude, 0.0), axis=0)
    tl.atomic_max(greatest, top, sem="relaxed")


@triton.jit
def _gate_rows(joined, hidden, greatest, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = joined + row * 2 * width
    a = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(start + width + column, mask=inside, other=0.0).to(tl.float32)
    h = (a * tl.sigmoid(a) * b).to(hidden.dtype.element_ty)
    tl.store(hidden + row * width + column, h, mask=inside)
    if greatest is not None:
        _raise(greatest, tl.abs(h.to(tl.float32)))


@triton.jit
def _gate_rows_back(  # type: ignore[no-untyped-def]
    joined, slope, out, greatest, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = joined + row * 2 * width
    a = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(start + width + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(slope + row * width + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    of_a = (g * b * s * (1 + a * (1 - s))).to(out.dtype.element_ty)
    of_b = (g * a * s).to(out.dtype.element_ty)
    place = out + row * 2 * width + column
    tl.store(place, of_a, mask=inside)
    tl.store(place + width, of_b, mask=inside)
    if greatest is not None:
        _raise(greatest, tl.maximum(tl.abs(of_a.to(tl.float32)), tl.abs(of_b.to(tl.float32))))


def _forward(joined: Tensor, greatest: Tensor | None) -> Tensor:
    width = joined.shape[-1] // 2
    joined = joined.contiguous()
    hidden = joined.new_empty(*joined.shape[:-1], width)
    rows = joined.numel() // (2 * width)
    _gate_rows[(rows, triton.cdiv(width, BLOCK))](joined, hidden, greatest, width, BLOCK=BLOCK)
    return hidden


def _backward(joined: Tensor, slope: Tensor, greatest: Tensor | None) -> Tensor:
    width = joined.shape[-1] // 2
    joined, slope = joined.contiguous(), slope.contiguous()
    out = torch.empty_like(joined)
    rows = joined.numel() // (2 * width)
    _gate_rows_back[(rows, triton.cdiv(width, BLOCK))](
        joined, slope, out, greatest, width, BLOCK=BLOCK
    )
    return out


def gate_forward(joined: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension, times the second half."""
    return _forward(joined, None)


def gate_backward(joined: Tensor, slope: Tensor) -> Tensor:
    """Return the gradient of `joined` where `slope` is that of the gate's result."""
    return _backward(joined, slope, None)


def measured_gate_forward(joined: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gate's result and its largest magnitude."""
    greatest = torch.zeros((), dtype=torch.float32, device=joined.device)
    return _forward(joined, greatest), greatest


def measured_gate_backward(joined: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of `joined` and its largest magnitude."""
    greatest = torch.zeros((), dtype=torch.float32, device=joined.device)
    return _backward(joined, slope, greatest), greatest


# As torch sees them: whole operations, which a compiler neither opens nor repeats

_gate_backward = torch.library.custom_op(
    "scratchlm::gate_backward", gate_backward, mutates_args=(), device_types="cuda"
)
gate = torch.library.custom_op(
    "scratchlm::gate", gate_forward, mutates_args=(), device_types="cuda"
)
measured_gate = torch.library.custom_op(
    "scratchlm::measured_gate", measured_gate_forward, mutates_args=(), device_types="cuda"
)
measured_gate_back = torch.library.custom_op(
    "scratchlm::measured_gate_back", measured_gate_backward, mutates_args=(), device_types="cuda"
)


@gate.register_fake
def _(joined: Tensor) -> Tensor:
    return joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)


@_gate_backward.register_fake
def _(joined: Tensor, slope: Tensor) -> Tensor:
    return joined.new_empty(joined.shape)


@measured_gate.register_fake
def _(joined: Tensor) -> tuple[Tensor, Tensor]:
    hidden = joined.new_empty(*joined.shape[:-1], joined.shape[-1] // 2)
    return hidden, joined.new_empty((), dtype=torch.float32)


@measured_gate_back.register_fake
def _(joined: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    return joined.new_empty(joined.shape), joined.new_empty((), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, slope: Tensor) -> Tensor:
    grown: Tensor = _gate_backward(ctx.saved_tensors[0], slope)
    return grown


gate.register_autograd(_back, setup_context=_keep)
