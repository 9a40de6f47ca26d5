"""Decode kernels for one token per row: GEMVs that read every weight once, memory-bound.

Decoding multiplies each matrix by one vector (or a few), so a step takes as long as reading the
weights, plus what is lost between kernels. A layer is five kernels

    q, k, v = W_qkv · norm(x)         norm_project
    a       = attention(q, k, v)      decode_attention    (see `decode_attention.py`)
    x       = x + W_O a               project_add
    u       = act(W1 h) ⊙ W3 h        norm_up             h = norm(x)
    x       = x + W2 u                project_add

(on Hopper the first two may be one, `decode_qkv_attention.py`), which overlap by programmatic
dependent launch (`PDL`). A program owns a block of matrix rows over their whole width. It loads its
weights first, which depend on no other kernel; lets the next kernel start; waits for the previous
kernel; and only then reads the vector. So weights stream in while one kernel drains and the next
one starts.

A program may own several blocks (`TILES`); it prefetches the next block before it multiplies the
current one. A row may be split into `CHUNKS` along K, because blocks are powers of two: one of
4,096 for a width of 2,752 would waste a third of its registers. The same weights multiply `ROWS`
vectors. Sums are in float32.

RMSNorm is moved out of the product, W (g ⊙ x / rms) = (W (g ⊙ x)) / rms, so that the sum of squares
and the product are reduced side by side.
"""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

NO_NORM, RMS_NORM, LAYER_NORM = 0, 1, 2
SILU, GELU, GELU_TANH, RELU = 0, 1, 2, 3
ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU}


@triton.jit
def launch_dependents_and_wait(PDL: tl.constexpr):
    """PDL: let the next kernel start, then wait until the previous kernel has finished."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _load_weights(
    matrix,
    first,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FIRST_K: tl.constexpr = 0,
):
    """Load rows first … first + BLOCK_N of a matrix (N, K) from a column on, zeros outside."""
    n, k = tl.arange(0, BLOCK_N), FIRST_K + tl.arange(0, BLOCK_K)
    begin = matrix + first.to(tl.int64) * K  # vocabulary · width may pass 2³¹
    mask = (first + n < N)[:, None] & (k < K)[None, :]
    offsets = begin + n[:, None] * K + k[None, :]
    return tl.load(offsets, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_weight_chunks(
    matrix,
    first,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Load the same rows in chunks of BLOCK_K columns."""
    chunks = ()
    for i in tl.static_range(CHUNKS):
        chunks += (_load_weights(matrix, first, N, K, BLOCK_N, BLOCK_K, i * BLOCK_K),)  # type: ignore[assignment]
    return chunks


@triton.jit
def load_vector(x, K: tl.constexpr, BLOCK_K: tl.constexpr, FIRST_K: tl.constexpr = 0):
    """Load BLOCK_K elements of a vector of K as float32, zeros outside."""
    k = FIRST_K + tl.arange(0, BLOCK_K)
    return tl.load(x + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _load_vector_chunks(x, K: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr):
    chunks = ()
    for i in tl.static_range(CHUNKS):
        chunks += (load_vector(x, K, BLOCK_K, i * BLOCK_K),)  # type: ignore[assignment]
    return chunks


@triton.jit
def normalize(x, norm_weight, norm_bias, K: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr):
    """Return (v, s) with norm(x) = v · s, s a scalar."""
    scale = 1.0
    if NORM == 1:
        scale = tl.rsqrt(tl.sum(x * x, 0) / K + EPS)
        x = x * norm_weight
    elif NORM == 2:
        mask = tl.arange(0, x.shape[0]) < K
        x = tl.where(mask, x - tl.sum(x, 0) / K, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / K + EPS) * norm_weight + norm_bias
    return x, scale


@triton.jit
def load_norm_parameters(
    norm_weight, norm_bias, K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr
):
    """Load a norm's weight and bias: constants, so before the PDL wait."""
    w, b = tl.full((BLOCK_K,), 1.0, tl.float32), tl.full((BLOCK_K,), 0.0, tl.float32)
    if NORM != 0:
        w = load_vector(norm_weight, K, BLOCK_K)
        if norm_bias is not None:
            b = load_vector(norm_bias, K, BLOCK_K)
    return w, b


@triton.jit
def _to_float32(weights):
    """Widen weights; int8 by adding to 1.5 · 2²³, as conversions run at an eighth of the rate."""
    if weights.dtype == tl.int8:
        wide = (weights.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    else:
        wide = weights.to(tl.float32)
    return wide


@triton.jit
def _matvec(weights, vector):
    return tl.sum(_to_float32(weights) * vector[None, :], 1)


@triton.jit
def _matvec_chunks(weights, vector, CHUNKS: tl.constexpr):
    products = _to_float32(weights[0]) * vector[0][None, :]
    for i in tl.static_range(1, CHUNKS):
        products += _to_float32(weights[i]) * vector[i][None, :]
    return tl.sum(products, 1)


@triton.jit
def activation(x, ACTIVATION: tl.constexpr):
    """Apply one of `ACTIVATIONS`."""
    if ACTIVATION == 0:
        y = x * tl.sigmoid(x)
    elif ACTIVATION == 1:
        y = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * tl.sigmoid(2.0 * inner)  # (1 + tanh z) / 2 = σ(2z)
    else:
        y = tl.maximum(x, 0.0)
    return y


@triton.jit
def embed(
    ids,
    table,
    positions,
    lengths,
    x,
    VOCAB: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """x = E[id] (+ P[length]); an id outside the table gives NaN, as in the model."""
    row = tl.program_id(0)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    launch_dependents_and_wait(PDL)
    token = tl.load(ids + row).to(tl.int64)
    is_valid = (token >= 0) & (token < VOCAB)
    y = tl.load(table + tl.where(is_valid, token, 0) * K + k, mask=k < K, other=0.0).to(tl.float32)
    if positions is not None:
        position = tl.maximum(tl.load(lengths + row).to(tl.int64), 0)
        y += tl.load(positions + position * K + k, mask=k < K, other=0.0).to(tl.float32)
    y = tl.where(is_valid, y, float("nan"))
    tl.store(x + row * K + k, y.to(x.dtype.element_ty), mask=k < K)


@triton.jit
def norm_project(
    x,
    norm_weight,
    norm_bias,
    w0,
    w1,
    w2,
    b0,
    b1,
    b2,
    s0,
    s1,
    s2,
    y0,
    y1,
    y2,
    lengths,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y_i = W_i norm(x) (+ b_i) for up to three matrices; also increments `lengths`, if given."""
    blocks0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    blocks1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0)
    step = tl.num_programs(0)
    first, N, matrix = select_matrix(block, w0, w1, w2, N0, N1, N2, blocks0, blocks1, BLOCK_N)
    weights = _load_weights(matrix, first, N, K, BLOCK_N, BLOCK_K)
    w, b = load_norm_parameters(norm_weight, norm_bias, K, BLOCK_K, NORM)
    launch_dependents_and_wait(PDL)
    for tile in tl.static_range(TILES):
        if tile + 1 < TILES:
            next_block = block + step
            first, N, matrix = select_matrix(
                next_block, w0, w1, w2, N0, N1, N2, blocks0, blocks1, BLOCK_N
            )
            next_weights = _load_weights(matrix, first, N, K, BLOCK_N, BLOCK_K)
        first, N, y = select_matrix(block, y0, y1, y2, N0, N1, N2, blocks0, blocks1, BLOCK_N)
        n = first + tl.arange(0, BLOCK_N)
        for row in tl.static_range(ROWS):
            if ROWS > 1 or tile == 0:  # one vector stays in registers, several are reloaded
                v, scale = normalize(load_vector(x + row * K, K, BLOCK_K), w, b, K, EPS, NORM)
            out = _matvec(weights, v) * scale
            if s0 is not None:
                _, _, scales = select_matrix(
                    block, s0, s1, s2, N0, N1, N2, blocks0, blocks1, BLOCK_N
                )
                out *= tl.load(scales + n, mask=n < N, other=0.0)
            if BIAS:
                _, _, bias = select_matrix(block, b0, b1, b2, N0, N1, N2, blocks0, blocks1, BLOCK_N)
                out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
            tl.store(y + row * N + n, out.to(y.dtype.element_ty), mask=n < N)
        if tile + 1 < TILES:
            weights = next_weights
            block = next_block
    if lengths is not None:
        row = tl.arange(0, triton.next_power_of_2(ROWS))
        mask = (row < ROWS) & (tl.program_id(0) == 0)
        tl.store(lengths + row, tl.load(lengths + row, mask=mask, other=0) + 1, mask=mask)


@triton.jit
def select_matrix(
    block,
    p0,
    p1,
    p2,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    BLOCKS0: tl.constexpr,
    BLOCKS1: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Map a block to its matrix: return its first row, the rows of the matrix, and its pointer."""
    first, N, pointer = block * BLOCK_N, N0, p0
    if N1 > 0:  # otherwise there is one matrix
        if block >= BLOCKS0 + BLOCKS1:
            first, N, pointer = (block - BLOCKS0 - BLOCKS1) * BLOCK_N, N2, p2
        elif block >= BLOCKS0:
            first, N, pointer = (block - BLOCKS0) * BLOCK_N, N1, p1
    return first, N, pointer


@triton.jit
def norm_up(
    x,
    norm_weight,
    norm_bias,
    w1,
    w3,
    b1,
    b3,
    s1,
    s3,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = act(W1 h + b1) ⊙ (W3 h + b3), h = norm(x); without w3, y = act(W1 h + b1)."""
    first = tl.program_id(0) * BLOCK_N
    step = tl.num_programs(0) * BLOCK_N
    weights1 = _load_weights(w1, first, N, K, BLOCK_N, BLOCK_K)
    if w3 is not None:
        weights3 = _load_weights(w3, first, N, K, BLOCK_N, BLOCK_K)
    w, b = load_norm_parameters(norm_weight, norm_bias, K, BLOCK_K, NORM)
    launch_dependents_and_wait(PDL)
    for tile in tl.static_range(TILES):
        if tile + 1 < TILES:
            next_weights1 = _load_weights(w1, first + step, N, K, BLOCK_N, BLOCK_K)
            if w3 is not None:
                next_weights3 = _load_weights(w3, first + step, N, K, BLOCK_N, BLOCK_K)
        n = first + tl.arange(0, BLOCK_N)
        for row in tl.static_range(ROWS):
            if ROWS > 1 or tile == 0:  # one vector stays in registers, several are reloaded
                v, scale = normalize(load_vector(x + row * K, K, BLOCK_K), w, b, K, EPS, NORM)
            out = _matvec(weights1, v) * scale
            if s1 is not None:
                out *= tl.load(s1 + n, mask=n < N, other=0.0)
            if b1 is not None:
                out += tl.load(b1 + n, mask=n < N, other=0.0).to(tl.float32)
            out = activation(out, ACTIVATION)
            if w3 is not None:
                product3 = _matvec(weights3, v) * scale
                if s3 is not None:
                    product3 *= tl.load(s3 + n, mask=n < N, other=0.0)
                if b3 is not None:
                    product3 += tl.load(b3 + n, mask=n < N, other=0.0).to(tl.float32)
                out *= product3
            tl.store(y + row * N + n, out.to(y.dtype.element_ty), mask=n < N)
        if tile + 1 < TILES:
            weights1 = next_weights1
            if w3 is not None:
                weights3 = next_weights3
            first += step


@triton.jit
def _combine_splits(
    split_out,
    lse,
    row,
    K: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Combine KV splits: return Σ a_i exp(s_i) / Σ exp(s_i) for every head, s_i the split's LSE."""
    head = tl.arange(0, BLOCK_K // D)
    mask = head < K // D
    offsets = head[:, None] * D + tl.arange(0, D)[None, :]
    running_max = tl.full((BLOCK_K // D,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_K // D,), tl.float32)
    acc = tl.zeros((BLOCK_K // D, D), tl.float32)
    for split in tl.static_range(SPLITS):
        split_row = split * ROWS + row
        split_lse = tl.load(lse + split_row * (K // D) + head, mask=mask, other=-1e30)
        value = tl.load(split_out + split_row * K + offsets, mask=mask[:, None], other=0.0)
        new_max = tl.maximum(running_max, split_lse)
        rescale, weight = tl.exp(running_max - new_max), tl.exp(split_lse - new_max)
        acc = acc * rescale[:, None] + value.to(tl.float32) * weight[:, None]
        total = total * rescale + weight
        running_max = new_max
    return tl.reshape(acc / total[:, None], (BLOCK_K,))


@triton.jit
def project_add(
    x,
    vector,
    lse,
    w,
    bias,
    scales,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x + W v (+ b). y must not be x, which other programs may not have read yet.

    With `lse` (SPLITS, ROWS, heads), v holds the KV splits (SPLITS, ROWS, heads, D) that
    `decode_attention` left uncombined, and CHUNKS is 1.
    """
    first = tl.program_id(0) * BLOCK_N
    step = tl.num_programs(0) * BLOCK_N
    weights = _load_weight_chunks(w, first, N, K, BLOCK_N, BLOCK_K, CHUNKS)
    launch_dependents_and_wait(PDL)
    for tile in tl.static_range(TILES):
        if tile + 1 < TILES:
            next_weights = _load_weight_chunks(w, first + step, N, K, BLOCK_N, BLOCK_K, CHUNKS)
        n = first + tl.arange(0, BLOCK_N)
        for row in tl.static_range(ROWS):
            residual = tl.load(x + row * N + n, mask=n < N, other=0.0).to(tl.float32)
            if ROWS > 1 or tile == 0:
                if lse is None:
                    v = _load_vector_chunks(vector + row * K, K, BLOCK_K, CHUNKS)
                else:
                    v = (_combine_splits(vector, lse, row, K, D, SPLITS, ROWS, BLOCK_K),)
            out = _matvec_chunks(weights, v, CHUNKS)
            if scales is not None:
                out *= tl.load(scales + n, mask=n < N, other=0.0)
            out += residual
            if bias is not None:
                out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
            tl.store(y + row * N + n, out.to(y.dtype.element_ty), mask=n < N)
        if tile + 1 < TILES:
            weights = next_weights
            first += step
