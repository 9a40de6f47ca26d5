"""SwiGLU where a Hopper GPU trains in bfloat16: its gate is part of the products beside it.

    [a | b] = x [W1; W3]ᵀ,  h = SiLU(a) ⊙ b,  y = h W2ᵀ
    [∂a | ∂b] from ∂y W2,   ∂x = [∂a | ∂b] [W1; W3],   ∂[W1; W3] = [∂a | ∂b]ᵀ x,   ∂W2 = ∂yᵀ h

The first of each row is a kernel (`kernels/swiglu.py`); elsewhere the gate is a kernel of its own.
"""

from __future__ import annotations

from torch import Tensor


def swiglu(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """W2(SiLU(W1 x) ⊙ W3 x) for x of any shape, all in bfloat16, where `hopper.takes_gate`."""
    from scratchlm.accelerate.kernels.hopper.swiglu import swiglu as by_kernels

    y: Tensor = by_kernels(x.reshape(-1, x.shape[-1]), w13, w2)[0]
    return y.view(*x.shape[:-1], len(w2))
