"""SwiGLU where a Hopper GPU trains in bfloat16: its gate is part of the products beside it.

    [a | b] = x [W1; W3]ᵀ,  h = SiLU(a) ⊙ b,  y = h W2ᵀ
    [∂a | ∂b] from ∂y W2,   ∂x = [∂a | ∂b] [W1; W3],   ∂[W1; W3] = [∂a | ∂b]ᵀ x,   ∂W2 = ∂yᵀ h

The first of each row is a kernel (`kernels/swiglu.py`); elsewhere the gate is a kernel of its own.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

# Of Triton, whose Gluon the kernels are written in: those they were tried with.
VERSIONS = ("3.6", "3.7")


def _is_known() -> bool:
    try:
        return ".".join(version("triton").split(".")[:2]) in VERSIONS
    except PackageNotFoundError:
        return False


_KNOWN = _is_known()


def takes(x: Tensor, w2: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels are for this input, multiplied in `dtype`."""
    rows, (d, d_ff) = x.shape[:-1].numel(), w2.shape
    whole = rows % 128 == 0 and d % 64 == 0 and d_ff % 8 == 0 and rows > 0
    return whole and dtype == torch.bfloat16 and x.is_cuda and _is_hopper(x.device.index)


@torch.compiler.assume_constant_result  # a compiler asks once, and does not look inside
def _is_hopper(device: int) -> bool:
    return _KNOWN and torch.cuda.get_device_capability(device) == (9, 0)


def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """W2(SiLU(W1 x) ⊙ W3 x) for x of any shape, all in bfloat16, where `takes` says so."""
    y: Tensor = of_rows(x.reshape(-1, x.shape[-1]), w13, w2)[0]
    return y.view(*x.shape[:-1], len(w2))


# As torch sees it: whole operations, which a compiler does not open. SwiGLU has its gradient from
# torch.library, so that a compiler, too, computes it again where it is told to keep nothing (of an
# autograd.Function torch 2.11 keeps everything).


@torch.library.custom_op("scratchlm::swiglu", mutates_args=(), device_types="cuda")
def of_rows(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y of rows x, and what is kept for the backward pass: [a | b] and h."""
    from scratchlm.ops.kernels.swiglu import gated_product

    joined, hidden = gated_product(x, w13)
    return hidden @ w2.t(), joined, hidden


@torch.library.custom_op("scratchlm::swiglu_gate_back", mutates_args=(), device_types="cuda")
def through_gate(dy: Tensor, w2: Tensor, joined: Tensor) -> Tensor:
    """Return [∂a | ∂b]."""
    from scratchlm.ops.kernels.swiglu import gated_product_back

    return gated_product_back(dy, w2, joined)


@of_rows.register_fake
def _(x: Tensor, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    joined, hidden = x.new_empty(len(x), len(w13)), x.new_empty(len(x), len(w13) // 2)
    return x.new_empty(len(x), len(w2)), joined, hidden


@through_gate.register_fake
def _(dy: Tensor, w2: Tensor, joined: Tensor) -> Tensor:
    return joined.new_empty(joined.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _back(ctx: Any, slope: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    x, w13, w2, joined, hidden = ctx.saved_tensors
    for_x, for_13, for_2 = ctx.needs_input_grad
    of_x: Tensor | None = None
    of_13: Tensor | None = None
    if for_x or for_13:
        of_joined = through_gate(slope, w2, joined)
        of_x = of_joined @ w13 if for_x else None
        of_13 = of_joined.t() @ x if for_13 else None
    return of_x, of_13, slope.t() @ hidden if for_2 else None


of_rows.register_autograd(_back, setup_context=_keep)
