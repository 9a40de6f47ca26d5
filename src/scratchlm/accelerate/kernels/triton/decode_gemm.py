"""Decode kernels for a batch of rows: skinny GEMMs that read every weight once.

The same kernels of a layer as in `decode.py`, with tensor cores in place of sums over registers:

    q, k, v = norm(X) W_qkvᵀ            norm_project_batch
    X       = X + A W_Oᵀ                project_add_batch
    U       = act(H W1ᵀ) ⊙ H W3ᵀ        norm_up_batch           H = norm(X)

X is (ROWS, K), padded to BLOCK_M rows. A program owns BLOCK_N rows of a matrix, which lie side by
side in memory. Before the PDL wait it asks for all of them to be brought into the L2 cache, as they
depend on no other kernel: memory is read while the previous kernel still runs. The product itself
is a pipelined loop over BLOCK_K columns.

RMSNorm's division is moved behind the product, (g ⊙ x / rms) Wᵀ = ((g ⊙ x) Wᵀ) / rms: the sum of
squares and the product are made in one pass over X. LayerNorm takes two more.
"""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

from scratchlm.accelerate.kernels.triton.decode import (
    activation,
    launch_dependents_and_wait,
    select_matrix,
)


@triton.jit
def _prefetch(matrix, first, N, K: tl.constexpr, BLOCK_N: tl.constexpr, PIECE: tl.constexpr):
    """Ask for BLOCK_N rows of a matrix in the L2 cache, in pieces of PIECE bytes (0: do not)."""
    if PIECE > 0:
        size: tl.constexpr = matrix.dtype.element_ty.primitive_bitwidth // 8
        pieces: tl.constexpr = BLOCK_N * K * size // PIECE
        row = tl.maximum(tl.minimum(first, N - BLOCK_N), 0).to(tl.int64)
        begin = (matrix + row * K).to(tl.uint64)
        address = begin + tl.arange(0, pieces).to(tl.uint64) * PIECE
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [address, tl.full((pieces,), PIECE, tl.uint32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _load_block(x, k, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load columns k of X (ROWS, K); zeros outside."""
    m = tl.arange(0, BLOCK_M)
    mask = (m < ROWS)[:, None] & (k < K)[None, :]
    return tl.load(x + m[:, None] * K + k[None, :], mask=mask, other=0.0)


@triton.jit
def _load_weight_block(matrix, first, k, N, K: tl.constexpr, BLOCK_N: tl.constexpr):
    n = first + tl.arange(0, BLOCK_N)
    mask = (n < N)[:, None] & (k < K)[None, :]
    offsets = matrix + n.to(tl.int64)[:, None] * K + k[None, :]
    return tl.load(offsets, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _mean_and_scale(
    x,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return each row's mean and 1 / standard deviation."""
    total = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        total += tl.sum(_load_block(x, k, ROWS, K, BLOCK_M).to(tl.float32), 1)
    mean = total / K
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        centred = _load_block(x, k, ROWS, K, BLOCK_M).to(tl.float32) - mean[:, None]
        squares += tl.sum(tl.where((k < K)[None, :], centred * centred, 0.0), 1)
    return mean, tl.rsqrt(squares / K + EPS)


@triton.jit
def _normed_block(
    x,
    k,
    norm_weight,
    norm_bias,
    mean,
    scale,
    dtype: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return columns k of norm(X) before RMSNorm's division, and their sums of squares."""
    value = _load_block(x, k, ROWS, K, BLOCK_M).to(tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    if NORM != 0:
        weight = tl.load(norm_weight + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM == 1:
            squares = tl.sum(value * value, 1)
            value = value * weight[None, :]
        else:
            value = (value - mean[:, None]) * scale[:, None] * weight[None, :]
            if norm_bias is not None:
                bias = tl.load(norm_bias + k, mask=k < K, other=0.0).to(tl.float32)
                value += bias[None, :]
    return value.to(dtype), squares


@triton.jit
def _statistics(
    x,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    mean, scale = tl.zeros((BLOCK_M,), tl.float32), tl.full((BLOCK_M,), 1.0, tl.float32)
    if NORM == 2:
        mean, scale = _mean_and_scale(x, ROWS, K, EPS, BLOCK_M, BLOCK_K)
    return mean, scale


@triton.jit
def _add_bias(out, bias, n, N):
    if bias is not None:
        out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def _store_block(y, out, n, N, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    m = tl.arange(0, BLOCK_M)
    mask = (m < ROWS)[:, None] & (n < N)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def norm_project_batch(
    x,
    norm_weight,
    norm_bias,
    w0,
    w1,
    w2,
    b0,
    b1,
    b2,
    y0,
    y1,
    y2,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Y_i = norm(X) W_iᵀ (+ b_i) for three matrices."""
    blocks0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    blocks1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0)
    first, N, matrix = select_matrix(block, w0, w1, w2, N0, N1, N2, blocks0, blocks1, BLOCK_N)
    _prefetch(matrix, first, N, K, BLOCK_N, PIECE)
    launch_dependents_and_wait(PDL)
    mean, scale = _statistics(x, NORM, ROWS, K, EPS, BLOCK_M, BLOCK_K)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        weight = _load_weight_block(matrix, first, k, N, K, BLOCK_N)
        h, more = _normed_block(
            x, k, norm_weight, norm_bias, mean, scale, w0.dtype.element_ty, NORM, ROWS, K, BLOCK_M
        )
        out = tl.dot(h, tl.trans(weight), out, input_precision="ieee")
        squares += more
    if NORM == 1:
        out = out * tl.rsqrt(squares / K + EPS)[:, None]
    first, N, y = select_matrix(block, y0, y1, y2, N0, N1, N2, blocks0, blocks1, BLOCK_N)
    n = first + tl.arange(0, BLOCK_N)
    if BIAS:
        _, _, bias = select_matrix(block, b0, b1, b2, N0, N1, N2, blocks0, blocks1, BLOCK_N)
        out = _add_bias(out, bias, n, N)
    _store_block(y, out, n, N, ROWS, BLOCK_M)


@triton.jit
def norm_up_batch(
    x,
    norm_weight,
    norm_bias,
    w1,
    w3,
    b1,
    b3,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Y = act(H W1ᵀ + b1) ⊙ (H W3ᵀ + b3), H = norm(X); without w3, Y = act(H W1ᵀ + b1)."""
    first = tl.program_id(0) * BLOCK_N
    _prefetch(w1, first, N, K, BLOCK_N, PIECE)
    if w3 is not None:
        _prefetch(w3, first, N, K, BLOCK_N, PIECE)
    launch_dependents_and_wait(PDL)
    mean, scale = _statistics(x, NORM, ROWS, K, EPS, BLOCK_M, BLOCK_K)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    out1 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    out3 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        weight = _load_weight_block(w1, first, k, N, K, BLOCK_N)
        h, more = _normed_block(
            x, k, norm_weight, norm_bias, mean, scale, w1.dtype.element_ty, NORM, ROWS, K, BLOCK_M
        )
        out1 = tl.dot(h, tl.trans(weight), out1, input_precision="ieee")
        if w3 is not None:
            weight = _load_weight_block(w3, first, k, N, K, BLOCK_N)
            out3 = tl.dot(h, tl.trans(weight), out3, input_precision="ieee")
        squares += more
    if NORM == 1:
        scale = tl.rsqrt(squares / K + EPS)
        out1 = out1 * scale[:, None]
        out3 = out3 * scale[:, None]
    n = first + tl.arange(0, BLOCK_N)
    out = activation(_add_bias(out1, b1, n, N), ACTIVATION)
    if w3 is not None:
        out = out * _add_bias(out3, b3, n, N)
    _store_block(y, out, n, N, ROWS, BLOCK_M)


@triton.jit
def project_add_batch(
    x,
    v,
    w,
    bias,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Y = X + V Wᵀ (+ b). Y must not be X, which other programs may not have read yet."""
    first = tl.program_id(0) * BLOCK_N
    _prefetch(w, first, N, K, BLOCK_N, PIECE)
    launch_dependents_and_wait(PDL)
    n = first + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    mask = (m < ROWS)[:, None] & (n < N)[None, :]
    out = tl.load(x + m[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        block = _load_block(v, k, ROWS, K, BLOCK_M)
        weight = _load_weight_block(w, first, k, N, K, BLOCK_N)
        out = tl.dot(block, tl.trans(weight), out, input_precision="ieee")
    _store_block(y, _add_bias(out, bias, n, N), n, N, ROWS, BLOCK_M)
