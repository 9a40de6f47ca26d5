"""Elementwise kernels between matrix products, for many tokens at once.

x += δ,   h = norm(x)         add_norm
u  = act(a) ⊙ b               gate
"""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

from scratchlm.accelerate.kernels.triton.decode import (
    activation,
    load_norm_parameters,
    load_vector,
    normalize,
)


@triton.jit
def add_norm(
    x,
    delta,
    norm_weight,
    norm_bias,
    h,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x += delta in place (unless it is None); h = norm(x). One program per row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    y = load_vector(x + row * K, K, BLOCK_K)
    if delta is not None:
        y += load_vector(delta + row * K, K, BLOCK_K)
        tl.store(x + row * K + k, y.to(x.dtype.element_ty), mask=k < K)
    w, b = load_norm_parameters(norm_weight, norm_bias, K, BLOCK_K, NORM)
    v, scale = normalize(y, w, b, K, EPS, NORM)
    tl.store(h + row * K + k, (v * scale).to(h.dtype.element_ty), mask=k < K)


@triton.jit
def gate(a, b, u, width, stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """u = act(a) ⊙ b; act(a) if b is None. Grid: (rows, blocks); `stride` is that of a and b."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + row * stride + i, mask=i < width, other=0.0).to(tl.float32)
    out = activation(x, ACTIVATION)
    if b is not None:
        out *= tl.load(b + row * stride + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(u + row * width + i, out.to(u.dtype.element_ty), mask=i < width)
