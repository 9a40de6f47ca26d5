"""The LM head's GEMM with a fused exponential: exp(x Wᵀ − r) and its row sums, on Hopper.

    e[t, v] = exp(min(x[t]·W[v] − r[t], CAP)),    sums[n, t] = Σ e[t, v] over the v of tile n

The logits never lie in memory. e is the gradient of a cross-entropy up to a factor per row
(`triton/cross_entropy.py`), where r is a number near the row's largest logit. A logit more than
`CAP` above r is clamped, and the row's sum shows it. The main loop: `pingpong_gemm.py`.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and device values: Python has no types for them.

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from scratchlm.accelerate.kernels.hopper.pingpong_gemm import (
    BLOCK_K,
    SIZES,
    TILE,
    allocate,
    exp2,
    ith_tile,
    launch,
    load_operands,
    num_tiles,
    pingpong_multiply,
    split_columns,
    tma_descriptor,
)

CAP = 60.0  # e⁶⁰ times a vocabulary's size is far below float32's maximum
_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _consume(
    descs,
    rows_args,
    rings,
    out,
    bars,
    sizes,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    CAP: gl.constexpr,
    C: gl.constexpr,
):
    """Consumer C: the GEMM's tiles, and the exponential as their epilogue."""
    references, sums, rows, vocab = rows_args
    tiles_m, tiles_n, k_blocks = sizes
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    for i in range(C, num_tiles(tiles_m, tiles_n), 2):
        m, n = ith_tile(i, tiles_m, tiles_n, GROUP)
        row = m * 128 + gl.arange(0, 128, gl.SliceLayout(1, whole))
        reference = gl.load(references + row, mask=row < rows, other=0.0) * _LOG2_E
        acc = pingpong_multiply(rings, bars, i, k_blocks, STAGES, C, True)
        power = acc * _LOG2_E - gl.expand_dims(reference, 1)
        power = gl.where(power > CAP * _LOG2_E, CAP * _LOG2_E, power)  # NaN stays
        e = exp2(power)
        if (n + 1) * 128 > vocab:
            column = n * 128 + gl.arange(0, 128, gl.SliceLayout(0, whole))
            e = gl.where(gl.expand_dims(column, 0) < vocab, e, 0.0)
        gl.store(sums + n.to(gl.int64) * rows + row, gl.sum(e, 1), mask=row < rows)
        halves = split_columns(e)
        tma.store_wait(0)  # the previous tile has left the buffers long ago
        for h in gl.static_range(2):
            out.index(2 * C + h).store(halves[h].to(gl.bfloat16))
        fence_async_shared()
        for h in gl.static_range(2):
            corner = [m * 128, n * 128 + 64 * h]
            tma.async_copy_shared_to_global(descs[2], corner, out.index(2 * C + h))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*SIZES, "rows", "vocab"])
def _lm_head_exp_kernel(
    x,
    w,
    y,
    references,
    sums,
    rows,
    vocab,
    tiles_m,
    tiles_n,
    k_blocks,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
    CAP: gl.constexpr,
):
    rings, out, bars = allocate(x, w, y, STAGES, 4, True)
    descs = (x, w, y)
    rows_args = (references, sums, rows, vocab)
    sizes = (tiles_m, tiles_n, k_blocks)
    gl.warp_specialize(
        [
            (_consume, (descs, rows_args, rings, out, bars, sizes, STAGES, GROUP, CAP, 0)),
            (_consume, (descs, rows_args, rings, out, bars, sizes, STAGES, GROUP, CAP, 1)),
            (load_operands, (x, w, rings, bars, sizes, STAGES, GROUP, True)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


def lm_head_exp(
    x: Tensor, w: Tensor, references: Tensor, vocab: int, out: Tensor, programs: int = 0
) -> Tensor:
    """Write e into `out` (rows, len(w)), and return the sums (tiles, rows) in float32.

    Rows of w from `vocab` on are padding: there e is 0.
    """
    (rows, d), columns = x.shape, len(w)
    sizes = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), triton.cdiv(d, BLOCK_K))
    sums = torch.empty(sizes[1], rows, dtype=torch.float32, device=x.device)
    descriptors = [
        tma_descriptor(x, TILE, BLOCK_K),
        tma_descriptor(w, TILE, BLOCK_K),
        tma_descriptor(out, TILE, 64),
    ]
    arguments = [*descriptors, references, sums, rows, vocab]
    launch(_lm_head_exp_kernel, arguments, sizes, programs, CAP=CAP)
    return sums
