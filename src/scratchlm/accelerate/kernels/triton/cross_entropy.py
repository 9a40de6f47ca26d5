"""Cross-entropy of a chunk of logits; dlogits overwrite the logits, up to a factor per row.

    lse = log Σ exp(x),    loss = lse − x[target] + z·lse²
    ∂loss/∂x = f·softmax(x) − onehot(target)        f = 1 + 2·z·lse

The softmax's denominator is known only after a row has been read; writing dlogits exactly would
cost a second read. So one pass writes

    x ← exp(x − r) − onehot(target)·Z/f             Z = Σ exp(x − r),  r near the row's maximum

and leaves the row's factor f/Z to the GEMMs that use the row (`scale_rows`). Any r without overflow
will do: bfloat16 and float32 are as precise near e⁴⁰ as near 1. We take the maximum of the row's
first block. If a later block rises more than `MAX_RISE` above it, what was written so far is
rescaled, as in online softmax: rare, and as costly as a second read.

Logits are low-precision in memory and float32 in registers. Columns past the vocabulary (padding
of the LM head) are ignored and get gradient 0.

On Hopper the LM head's GEMM writes exp(x − r) and its row sums in its epilogue (`lm_head_exp.py`),
with the target's logit as r. Then a row is finished without being read. If a logit rises more than
that kernel's `CAP` above r, the row's logits are recomputed and treated as above.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 8
VECTOR = 8  # contiguous columns per thread
TYPES = (torch.bfloat16, torch.float32)  # their range is wide enough for exp(x − r)
MAX_RISE = tl.constexpr(40.0)
# Lower than any logit, yet finite: the difference of two such is 0, not NaN.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _rescale(start, end, by, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply the first `end` columns of a row."""
    for first in range(0, end, BLOCK):
        block = start + first + tl.arange(0, BLOCK)
        tl.store(block, (tl.load(block).to(tl.float32) * by).to(start.dtype.element_ty))


@triton.jit
def _z_loss_factor(lse, z_loss):  # type: ignore[no-untyped-def]
    """Return f = 1 + 2·z·lse, never 0: the target's entry is divided by it."""
    f = 1 + 2 * z_loss * lse
    return tl.where(tl.abs(f) < 1e-6, 1e-6, f)


@triton.jit
def _process_row(  # type: ignore[no-untyped-def]
    row,
    logits,
    targets,
    losses,
    factors,
    stride,
    vocab,
    z_loss,
    BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    start = logits + row * stride
    target = tl.load(targets + row)
    counts = target >= 0
    target_logit = tl.load(start + target, mask=counts, other=_LOWEST).to(tl.float32)
    tl.debug_barrier()  # all threads have read it before one overwrites it
    reference = tl.full((), _LOWEST, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)  # per thread; reduced at the end
    column = tl.arange(0, BLOCK)
    next_x = tl.load(start + column, mask=column < stride, other=float("-inf"))
    for first in range(0, stride, BLOCK):
        column = first + tl.arange(0, BLOCK)
        # Not in the load's mask: 16-byte loads need it to be uniform over 16 bytes.
        x = tl.where(column < vocab, next_x.to(tl.float32), float("-inf"))
        next_column = column + BLOCK  # prefetched before the reduction below
        next_x = tl.load(start + next_column, mask=next_column < stride, other=float("-inf"))
        block_max = tl.max(x, axis=0)
        if (first == 0) | (block_max > reference + MAX_RISE):
            new_reference = tl.maximum(block_max, _LOWEST)
            by = tl.exp(reference - new_reference)
            sums *= by
            if GRADIENT:
                _rescale(start, first, by, BLOCK)
            reference = new_reference
        e = tl.exp(x - reference)
        sums += e
        if GRADIENT:
            e = tl.where(counts, e, 0.0).to(logits.dtype.element_ty)
            tl.store(start + column, e, mask=column < stride)
    total = tl.sum(sums, axis=0)
    lse = reference + tl.log(total)
    tl.store(losses + row, tl.where(counts, lse - target_logit + z_loss * lse * lse, 0.0))
    if GRADIENT:
        f = _z_loss_factor(lse, z_loss)
        tl.store(factors + row, tl.where(counts, f / total, 0.0))
        tl.debug_barrier()  # another thread has written there
        entry = tl.exp(target_logit - reference) - total / f
        tl.store(start + target, entry.to(logits.dtype.element_ty), mask=counts)


@triton.jit
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    factors,
    stride,
    vocab,
    z_loss,
    BLOCK: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _process_row(row, logits, targets, losses, factors, stride, vocab, z_loss, BLOCK, GRADIENT)


def loss_and_dlogits_(
    logits: Tensor, targets: Tensor, vocab: int, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss and the dlogits factor of every row; with `gradient`, overwrite the logits.

    `targets` are −1 where they do not count; `logits` are (rows, padded vocabulary), contiguous.
    """
    losses, factors = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    block = min(BLOCK, max(VECTOR, triton.next_power_of_2(logits.shape[1])))
    _cross_entropy_kernel[(len(logits),)](
        logits,
        targets,
        losses,
        factors,
        logits.shape[1],
        vocab,
        z_loss,
        BLOCK=block,
        GRADIENT=gradient,
        num_warps=max(1, min(WARPS, block // (32 * VECTOR))),
    )
    return losses, factors


# Where the GEMM writes exp(x − r)


@triton.jit
def _target_logits_kernel(  # type: ignore[no-untyped-def]
    hidden, head, targets, out, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.maximum(tl.load(targets + row), 0)  # any, for a row that does not count
    column = tl.arange(0, PADDED)
    mask = column < WIDTH
    x = tl.load(hidden + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(head + target * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(x * w, axis=0))


@triton.jit
def _recompute_logits(  # type: ignore[no-untyped-def]
    row, hidden, head, logits, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    """Write the logits of one row."""
    column = tl.arange(0, PADDED)
    mask = column < WIDTH
    x = tl.load(hidden + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    for first in range(0, stride, 16):
        token = (first + tl.arange(0, 16)).to(tl.int64)
        tile_mask = (token < stride)[:, None] & mask[None, :]
        tile = head + token[:, None] * WIDTH + column[None, :]
        w = tl.load(tile, mask=tile_mask, other=0.0).to(tl.float32)
        logit = tl.sum(w * x[None, :], axis=1).to(logits.dtype.element_ty)
        tl.store(logits + row * stride + token, logit, mask=token < stride)
    tl.debug_barrier()  # other threads read them


@triton.jit
def _lm_head_loss_kernel(  # type: ignore[no-untyped-def]
    e,
    partial_sums,
    hidden,
    head,
    targets,
    references,
    losses,
    factors,
    rows,
    tiles,
    stride,
    vocab,
    z_loss,
    max_total,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    mask = row < rows
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        tile_mask = (tile < tiles)[:, None] & mask[None, :]
        sums = partial_sums + tile[:, None] * rows + row[None, :]
        total += tl.sum(tl.load(sums, mask=tile_mask, other=0.0), axis=0)
    total = tl.where(mask, total, 1.0)  # of a row inside, at least the target's e = 1
    target = tl.load(targets + row, mask=mask, other=-1)
    counts = target >= 0
    recompute = counts & (total >= max_total)  # not for NaN, where it would not help
    log = tl.log(total)
    lse = tl.load(references + row, mask=mask, other=0.0) + log
    f = _z_loss_factor(lse, z_loss)
    tl.store(losses + row, tl.where(counts, log + z_loss * lse * lse, 0.0), mask=mask)
    tl.store(factors + row, tl.where(counts, f / total, 0.0), mask=mask)
    entry = (1 - total / f).to(e.dtype.element_ty)
    tl.store(e + row.to(tl.int64) * stride + target, entry, mask=counts)
    if tl.max(recompute.to(tl.int32), axis=0) > 0:
        tl.debug_barrier()  # the stores above are overwritten
        for i in range(ROWS):
            if tl.max(tl.where(row == first + i, recompute.to(tl.int32), 0), axis=0) > 0:
                one = (first + i).to(tl.int64)
                _recompute_logits(one, hidden, head, e, stride, WIDTH, PADDED)
                _process_row(one, e, targets, losses, factors, stride, vocab, z_loss, BLOCK, True)


def lm_head_loss_and_dlogits(
    hidden: Tensor, head: Tensor, targets: Tensor, vocab: int, z_loss: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss and the dlogits factor of every row of `hidden`; write dlogits into `out`.

    `targets` are −1 where they do not count; `out` is (rows, len(head)).
    """
    from scratchlm.accelerate.kernels.hopper.lm_head_exp import CAP, lm_head_exp

    (rows, width), stride = hidden.shape, len(head)
    losses, factors, references = torch.empty(3, rows, dtype=torch.float32, device=hidden.device)
    sizes = {"WIDTH": width, "PADDED": triton.next_power_of_2(width)}
    _target_logits_kernel[(rows,)](hidden, head, targets, references, **sizes)
    partial_sums = lm_head_exp(hidden, head, references, vocab, out)
    rows_per_program = 32
    _lm_head_loss_kernel[(triton.cdiv(rows, rows_per_program),)](
        *(out, partial_sums, hidden, head, targets, references, losses, factors),
        *(rows, len(partial_sums), stride, vocab, z_loss, math.exp(CAP)),
        ROWS=rows_per_program,
        TILES=64,
        BLOCK=min(BLOCK, max(VECTOR, triton.next_power_of_2(stride))),
        num_warps=8,
        **sizes,
    )
    return losses, factors


@triton.jit
def _scale_rows_kernel(  # type: ignore[no-untyped-def]
    x, factors, grad_output, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    factor = tl.load(factors + row)
    if SCALE:
        factor *= tl.load(grad_output)
    value = tl.load(x + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=mask)


def scale_rows(x: Tensor, factors: Tensor, grad_output: Tensor | None, out: Tensor) -> Tensor:
    """Multiply each row of contiguous x by its factor, and all by the scalar `grad_output`.

    `out` may be x.
    """
    block = min(1024, triton.next_power_of_2(x.shape[1]))
    _scale_rows_kernel[(len(x), triton.cdiv(x.shape[1], block))](
        *(x, factors, factors if grad_output is None else grad_output, out),
        WIDTH=x.shape[1],
        BLOCK=block,
        SCALE=grad_output is not None,
    )
    return out
