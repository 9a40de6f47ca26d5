"""SwiGLU where a Hopper GPU trains in bfloat16: its gate is part of the products beside it.

    [a | b] = x [W1; W3]ᵀ,  h = SiLU(a) ⊙ b,  y = h W2ᵀ (+ onto)
    [∂a | ∂b] from ∂y W2,   ∂x = [∂a | ∂b] [W1; W3],   ∂[W1; W3] = [∂a | ∂b]ᵀ x,   ∂W2 = ∂yᵀ h

The first of each row is a kernel (`kernels/swiglu.py`); elsewhere the gate is a kernel of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scratchlm.ops import hopper


def takes(x: Tensor, w2: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels are for this input, multiplied in `dtype`."""
    rows, (d, d_ff) = x.shape[:-1].numel(), w2.shape
    whole = rows % 128 == 0 and d % 64 == 0 and d_ff % 8 == 0 and rows > 0
    return whole and dtype == torch.bfloat16 and x.is_cuda and hopper.is_hopper(x.device.index)


def swiglu(x: Tensor, w13: Tensor, w2: Tensor, onto: Tensor | None = None) -> Tensor:
    """W2(SiLU(W1 x) ⊙ W3 x), added to `onto`; all in bfloat16, where `takes` says so."""
    from scratchlm.ops.kernels.swiglu import swiglu as by_kernels

    rows = x.reshape(-1, x.shape[-1])
    below = None if onto is None else onto.reshape(rows.shape)
    y: Tensor = by_kernels(rows, w13, w2, below)[0]
    return y.view(*x.shape[:-1], len(w2))
