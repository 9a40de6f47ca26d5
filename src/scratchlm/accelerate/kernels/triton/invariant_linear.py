"""y = x Wᵀ + b, each line of it a function of that line of x alone, to the bit.

cuBLAS chooses a kernel by the number of lines, and with it the order in which a sum is taken. Here
the tile is always the same, and so is the order: over k in steps of BLOCK_K from 0.
"""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M = 64, 128, 64, 8


@triton.jit
def _invariant_linear_kernel(
    x,
    w,
    b,
    y,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One tile of y; tiles that share columns of W are neighbours. Grid: (tiles,)."""
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    in_group = GROUP_M * tiles_n
    first_m = program // in_group * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + program % in_group % group_m
    tile_n = program % in_group // group_m
    m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at, w_at = x + m[:, None] * K + k[None, :], w + n[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, K, BLOCK_K):
        inside = begin + k < K
        x_block = tl.load(x_at + begin, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        w_block = tl.load(w_at + begin, mask=(n < N)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x_block, w_block, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(b + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=mask)


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return x Wᵀ + b; x (lines, k) and W (n, k) are contiguous."""
    (lines, width), columns = x.shape, len(weight)
    if out is None:
        out = torch.empty(lines, columns, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(lines, BLOCK_M) * triton.cdiv(columns, BLOCK_N)
    options = {"num_warps": 4, "num_stages": 4} if x.dtype.itemsize == 2 else {"num_warps": 8}
    if not isinstance(_invariant_linear_kernel, triton.JITFunction):  # interpreted, in tests
        options = {}
    _invariant_linear_kernel[(tiles,)](
        *(x, weight, bias, out, lines, columns, width),
        *(BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, bias is not None),
        **options,
    )
    return out
