"""exp(x Wᵀ − r) and its rows' sums, on Hopper's tensor cores: logits that never lie in memory.

    e[t, v] = exp(min(x[t]·W[v] − r[t], CAP)),    sums[n, t] = Σ e[t, v] over the v of tile n

This is the gradient of a cross-entropy short of a factor a row (`cross_entropy.py`), where r is a
number near the row's largest logit. What rises more than `CAP` above r is cut off, and the row's
sum shows it.
"""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are descriptors and numbers of the device: Python has no types for them.

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from scratchlm.accelerate.kernels.hopper.pingpong_gemm import (
    DEEP,
    SIZES,
    TILE,
    count,
    described,
    halves,
    launch,
    load,
    mine,
    power_of_two,
    shared,
    taken_in_turn,
)

CAP = 60.0  # e⁶⁰ times a vocabulary is far from float32's end
_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _consume(
    descs,
    numbers,
    rings,
    out,
    bars,
    sizes,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    CAP: gl.constexpr,
    C: gl.constexpr,
):
    references, sums, rows, vocab = numbers
    tiles_down, tiles_across, depth = sizes
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    for i in range(C, count(tiles_down, tiles_across), 2):
        m, n = mine(i, tiles_down, tiles_across, GROUP)
        row = m * 128 + gl.arange(0, 128, gl.SliceLayout(1, whole))
        reference = gl.load(references + row, mask=row < rows, other=0.0) * _LOG2_E
        acc = taken_in_turn(rings, bars, i, depth, STAGES, C, True)
        power = acc * _LOG2_E - gl.expand_dims(reference, 1)
        power = gl.where(power > CAP * _LOG2_E, CAP * _LOG2_E, power)  # NaN stays
        e = power_of_two(power)
        if (n + 1) * 128 > vocab:
            column = n * 128 + gl.arange(0, 128, gl.SliceLayout(0, whole))
            e = gl.where(gl.expand_dims(column, 0) < vocab, e, 0.0)
        gl.store(sums + n.to(gl.int64) * rows + row, gl.sum(e, 1), mask=row < rows)
        parts = halves(e)
        tma.store_wait(0)  # of the tile before: long since read out
        for h in gl.static_range(2):
            out.index(2 * C + h).store(parts[h].to(gl.bfloat16))
        fence_async_shared()
        for h in gl.static_range(2):
            place = [m * 128, n * 128 + 64 * h]
            tma.async_copy_shared_to_global(descs[2], place, out.index(2 * C + h))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*SIZES, "rows", "vocab"])
def _exp_product(
    x,
    w,
    y,
    references,
    sums,
    rows,
    vocab,
    tiles_down,
    tiles_across,
    depth,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    REGISTERS: gl.constexpr,
    CAP: gl.constexpr,
):
    rings, out, bars = shared(x, w, y, STAGES, 4, True)
    descs = (x, w, y)
    numbers = (references, sums, rows, vocab)
    sizes = (tiles_down, tiles_across, depth)
    gl.warp_specialize(
        [
            (_consume, (descs, numbers, rings, out, bars, sizes, STAGES, GROUP, CAP, 0)),
            (_consume, (descs, numbers, rings, out, bars, sizes, STAGES, GROUP, CAP, 1)),
            (load, (x, w, rings, bars, sizes, STAGES, GROUP, True)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )


def exp_product(
    x: Tensor, w: Tensor, references: Tensor, vocab: int, out: Tensor, programs: int = 0
) -> Tensor:
    """Write e into `out` (rows, len(w)), and return the sums (tiles, rows) in float32.

    Of w's rows, those from `vocab` on do not count: there e is 0.
    """
    (rows, d), columns = x.shape, len(w)
    sizes = (triton.cdiv(rows, TILE), triton.cdiv(columns, TILE), triton.cdiv(d, DEEP))
    sums = torch.empty(sizes[1], rows, dtype=torch.float32, device=x.device)
    tensors = [described(x, TILE, DEEP), described(w, TILE, DEEP), described(out, TILE, 64)]
    given = [*tensors, references, sums, rows, vocab]
    launch(_exp_product, given, sizes, programs, CAP=CAP)
    return sums
