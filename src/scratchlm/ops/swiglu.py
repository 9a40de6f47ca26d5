"""SwiGLU where a Hopper GPU trains in bfloat16: its gate is part of the products beside it.

    [a | b] = x [W1; W3]ᵀ,  h = SiLU(a) ⊙ b,  y = h W2ᵀ
    [∂a | ∂b] from ∂y W2,   ∂x = [∂a | ∂b] [W1; W3],   ∂[W1; W3] = [∂a | ∂b]ᵀ x,   ∂W2 = ∂yᵀ h

The first of each row is a kernel (`kernels/swiglu.py`); elsewhere the gate is a kernel of its own.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

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
    from scratchlm.ops.kernels.swiglu import swiglu as by_kernels

    y: Tensor = by_kernels(x.reshape(-1, x.shape[-1]), w13, w2)[0]
    return y.view(*x.shape[:-1], len(w2))
