"""Kernels for one token per row: every weight is read once, at the memory's speed.

A step of decoding multiplies each matrix by one vector (or a few), so its time is the time to read
the matrices, plus what is lost where one kernel ends and the next begins. Five kernels make a layer

    q, k, v = W_qkv · norm(x)         norm_project
    a       = attention(q, k, v)      attend              (see `decode_attention.py`)
    x       = x + W_O a               project_add
    u       = act(W1 h) ⊙ W3 h        norm_gate           h = norm(x)
    x       = x + W2 u                project_add

(on a Hopper GPU the first two may be one, `project_attend.py`), and each is written so that the
next can begin early. A program owns a block of matrix rows over their whole width. It asks for its
block of weights first, which depends on nothing, then lets the next kernel start, then waits for
the kernel before it (programmatic dependent launch, `PDL`), and only then reads the vector. So the
memory is busy while one kernel drains and the next one fills.

A program may own several blocks (`TILES`); the next block's loads are issued before the present
one is multiplied. A row may be taken in several parts (`PARTS`): blocks are powers of two wide, and
one of 4,096 for a width of 2,752 leaves a third of its registers empty. `ROWS` vectors are
multiplied by the same block. Sums are in float32.

RMSNorm is taken out of the product, W (g ⊙ x / rms) = (W (g ⊙ x)) / rms, so that the sum of squares
and the product are reduced side by side instead of one after the other.
"""

# mypy: disallow_untyped_defs=False
# Arguments of a kernel are pointers and numbers of the device: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

NO_NORM, RMS_NORM, LAYER_NORM = 0, 1, 2
SILU, GELU, GELU_TANH, RELU = 0, 1, 2, 3
ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU}


@triton.jit
def _ready(PDL: tl.constexpr):
    """Let the next kernel's programs in, then wait until the kernel before has written all."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _weights(
    matrix,
    first,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FROM: tl.constexpr = 0,
):
    """Load rows first … first + BLOCK_N of a matrix (N, K) from a column on, zeros beyond it."""
    n, k = tl.arange(0, BLOCK_N), FROM + tl.arange(0, BLOCK_K)
    begin = matrix + first.to(tl.int64) * K  # a vocabulary times a width may pass 2³¹
    inside = (first + n < N)[:, None] & (k < K)[None, :]
    place = begin + n[:, None] * K + k[None, :]
    return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _parts(
    matrix,
    first,
    N,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Load the same rows in parts of BLOCK_K columns."""
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (_weights(matrix, first, N, K, BLOCK_N, BLOCK_K, i * BLOCK_K),)  # type: ignore[assignment]
    return parts


@triton.jit
def _vector(x, K: tl.constexpr, BLOCK_K: tl.constexpr, FROM: tl.constexpr = 0):
    k = FROM + tl.arange(0, BLOCK_K)
    return tl.load(x + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _vector_in_parts(x, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr):
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (_vector(x, K, BLOCK_K, i * BLOCK_K),)  # type: ignore[assignment]
    return parts


@triton.jit
def _centre(x, gain, shift, K: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr):
    """Return (v, s) with norm(x) = v · s, s a number."""
    scale = 1.0
    if NORM == 1:
        scale = tl.rsqrt(tl.sum(x * x, 0) / K + EPS)
        x = x * gain
    elif NORM == 2:
        inside = tl.arange(0, x.shape[0]) < K
        x = tl.where(inside, x - tl.sum(x, 0) / K, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / K + EPS) * gain + shift
    return x, scale


@triton.jit
def _parameters(gain, shift, K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr):
    """Load a norm's gain and shift: constants, so before the wait."""
    g, b = tl.full((BLOCK_K,), 1.0, tl.float32), tl.full((BLOCK_K,), 0.0, tl.float32)
    if NORM != 0:
        g = _vector(gain, K, BLOCK_K)
        if shift is not None:
            b = _vector(shift, K, BLOCK_K)
    return g, b


@triton.jit
def _product(weights, vector):
    return tl.sum(weights.to(tl.float32) * vector[None, :], 1)


@triton.jit
def _product_of_parts(weights, vector, PARTS: tl.constexpr):
    products = weights[0].to(tl.float32) * vector[0][None, :]
    for i in tl.static_range(1, PARTS):
        products += weights[i].to(tl.float32) * vector[i][None, :]
    return tl.sum(products, 1)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
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
    """x = E[id] (+ P[length]); an id outside the table gives NaN, as in `Transformer._embed`."""
    row = tl.program_id(0)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    _ready(PDL)
    token = tl.load(ids + row).to(tl.int64)
    known = (token >= 0) & (token < VOCAB)
    y = tl.load(table + tl.where(known, token, 0) * K + k, mask=k < K, other=0.0).to(tl.float32)
    if positions is not None:
        place = tl.load(lengths + row).to(tl.int64)
        y += tl.load(positions + place * K + k, mask=k < K, other=0.0).to(tl.float32)
    y = tl.where(known, y, float("nan"))
    tl.store(x + row * K + k, y.to(x.dtype.element_ty), mask=k < K)


@triton.jit
def norm_project(
    x,
    gain,
    shift,
    w0,
    w1,
    w2,
    b0,
    b1,
    b2,
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
    """y_i = W_i norm(x) (+ b_i) for up to three matrices; with `lengths`, count one token more."""
    blocks0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    blocks1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0)
    step = tl.num_programs(0)
    first, N, matrix = _choose(block, w0, w1, w2, N0, N1, N2, blocks0, blocks1, BLOCK_N)
    weights = _weights(matrix, first, N, K, BLOCK_N, BLOCK_K)
    g, b = _parameters(gain, shift, K, BLOCK_K, NORM)
    _ready(PDL)
    for tile in tl.static_range(TILES):
        if tile + 1 < TILES:
            ahead = block + step
            first_, N_, matrix_ = _choose(ahead, w0, w1, w2, N0, N1, N2, blocks0, blocks1, BLOCK_N)
            coming = _weights(matrix_, first_, N_, K, BLOCK_N, BLOCK_K)
        first, N, y = _choose(block, y0, y1, y2, N0, N1, N2, blocks0, blocks1, BLOCK_N)
        n = first + tl.arange(0, BLOCK_N)
        for row in tl.static_range(ROWS):
            if ROWS > 1 or tile == 0:  # one vector stays in registers, several are read again
                v, scale = _centre(_vector(x + row * K, K, BLOCK_K), g, b, K, EPS, NORM)
            out = _product(weights, v) * scale
            if BIAS:
                _, _, bias = _choose(block, b0, b1, b2, N0, N1, N2, blocks0, blocks1, BLOCK_N)
                out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
            tl.store(y + row * N + n, out.to(y.dtype.element_ty), mask=n < N)
        if tile + 1 < TILES:
            weights = coming
            block = ahead
    if lengths is not None:
        row = tl.arange(0, triton.next_power_of_2(ROWS))
        mine = (row < ROWS) & (tl.program_id(0) == 0)
        tl.store(lengths + row, tl.load(lengths + row, mask=mine, other=0) + 1, mask=mine)


@triton.jit
def _choose(
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
    """Return the first row of a block, the rows of its matrix (0 past the last), its pointer."""
    first, N, pointer = block * BLOCK_N, N0, p0
    if N1 > 0:  # else there is one matrix
        if block >= BLOCKS0 + BLOCKS1:
            first, N, pointer = (block - BLOCKS0 - BLOCKS1) * BLOCK_N, N2, p2
        elif block >= BLOCKS0:
            first, N, pointer = (block - BLOCKS0) * BLOCK_N, N1, p1
    return first, N, pointer


@triton.jit
def norm_gate(
    x,
    gain,
    shift,
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = act(W1 h + b1) ⊙ (W3 h + b3), h = norm(x); without w3, y = act(W1 h + b1)."""
    first = tl.program_id(0) * BLOCK_N
    step = tl.num_programs(0) * BLOCK_N
    up = _weights(w1, first, N, K, BLOCK_N, BLOCK_K)
    if w3 is not None:
        gate = _weights(w3, first, N, K, BLOCK_N, BLOCK_K)
    g, b = _parameters(gain, shift, K, BLOCK_K, NORM)
    _ready(PDL)
    for tile in tl.static_range(TILES):
        if tile + 1 < TILES:
            next_up = _weights(w1, first + step, N, K, BLOCK_N, BLOCK_K)
            if w3 is not None:
                next_gate = _weights(w3, first + step, N, K, BLOCK_N, BLOCK_K)
        n = first + tl.arange(0, BLOCK_N)
        for row in tl.static_range(ROWS):
            if ROWS > 1 or tile == 0:  # one vector stays in registers, several are read again
                v, scale = _centre(_vector(x + row * K, K, BLOCK_K), g, b, K, EPS, NORM)
            out = _product(up, v) * scale
            if b1 is not None:
                out += tl.load(b1 + n, mask=n < N, other=0.0).to(tl.float32)
            out = _activate(out, ACTIVATION)
            if w3 is not None:
                factor = _product(gate, v) * scale
                if b3 is not None:
                    factor += tl.load(b3 + n, mask=n < N, other=0.0).to(tl.float32)
                out *= factor
            tl.store(y + row * N + n, out.to(y.dtype.element_ty), mask=n < N)
        if tile + 1 < TILES:
            up = next_up
            if w3 is not None:
                gate = next_gate
            first += step


@triton.jit
def _added_up(
    means,
    sums,
    row,
    K: tl.constexpr,
    D: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return Σ a_i exp(s_i) / Σ exp(s_i), head by head: attention out of its shares."""
    head = tl.arange(0, BLOCK_K // D)
    there = head < K // D
    place = head[:, None] * D + tl.arange(0, D)[None, :]
    top = tl.full((BLOCK_K // D,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_K // D,), tl.float32)
    mixed = tl.zeros((BLOCK_K // D, D), tl.float32)
    for share in tl.static_range(SHARES):
        before = share * ROWS + row
        score = tl.load(sums + before * (K // D) + head, mask=there, other=-1e30)
        mean = tl.load(means + before * K + place, mask=there[:, None], other=0.0)
        new_top = tl.maximum(top, score)
        fade, weight = tl.exp(top - new_top), tl.exp(score - new_top)
        mixed = mixed * fade[:, None] + mean.to(tl.float32) * weight[:, None]
        total = total * fade + weight
        top = new_top
    return tl.reshape(mixed / total[:, None], (BLOCK_K,))


@triton.jit
def project_add(
    x,
    vector,
    sums,
    w,
    bias,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x + W v (+ b). y must not be x: other programs may still be waiting to read.

    With `sums` (SHARES, ROWS, heads), v is what `attend` left in shares (SHARES, ROWS, heads, D),
    and PARTS is 1.
    """
    first = tl.program_id(0) * BLOCK_N
    step = tl.num_programs(0) * BLOCK_N
    weights = _parts(w, first, N, K, BLOCK_N, BLOCK_K, PARTS)
    _ready(PDL)
    for tile in tl.static_range(TILES):
        if tile + 1 < TILES:
            coming = _parts(w, first + step, N, K, BLOCK_N, BLOCK_K, PARTS)
        n = first + tl.arange(0, BLOCK_N)
        for row in tl.static_range(ROWS):
            before = tl.load(x + row * N + n, mask=n < N, other=0.0).to(tl.float32)
            if ROWS > 1 or tile == 0:
                if sums is None:
                    v = _vector_in_parts(vector + row * K, K, BLOCK_K, PARTS)
                else:
                    v = (_added_up(vector, sums, row, K, D, SHARES, ROWS, BLOCK_K),)
            out = before + _product_of_parts(weights, v, PARTS)
            if bias is not None:
                out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
            tl.store(y + row * N + n, out.to(y.dtype.element_ty), mask=n < N)
        if tile + 1 < TILES:
            weights = coming
            first += step
