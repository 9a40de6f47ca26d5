"""What stands between the library's products when many rows are decoded at once.

x += δ,   h = norm(x)         add_norm
u  = act(a) ⊙ b               gate
"""

# mypy: disallow_untyped_defs=False
# Arguments of a kernel are pointers and numbers of the device: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

from scratchlm.accelerate.kernels.triton.decode import _activate, _centre, _parameters, _vector


@triton.jit
def add_norm(
    x,
    delta,
    gain,
    shift,
    h,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x += delta in place; h = norm(x). One program per row, for batches that multiply by GEMM."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    y = _vector(x + row * K, K, BLOCK_K)
    if delta is not None:
        y += _vector(delta + row * K, K, BLOCK_K)
        tl.store(x + row * K + k, y.to(x.dtype.element_ty), mask=k < K)
    g, b = _parameters(gain, shift, K, BLOCK_K, NORM)
    v, scale = _centre(y, g, b, K, EPS, NORM)
    tl.store(h + row * K + k, (v * scale).to(h.dtype.element_ty), mask=k < K)


@triton.jit
def gate(up, factor, u, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """u = act(up) ⊙ factor, element by element."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    out = _activate(tl.load(up + i, mask=i < count, other=0.0).to(tl.float32), ACTIVATION)
    if factor is not None:
        out *= tl.load(factor + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(u + i, out.to(u.dtype.element_ty), mask=i < count)
