"""Cross-entropy of a slice of logits, and its gradient written over them, up to a factor a row.

    lse = log Σ exp(x),    loss = lse − x[target] + z·lse²
    ∂loss/∂x = f·softmax(x) − onehot(target)        f = 1 + 2·z·lse

The sum under the softmax is known when a row has been read; written out, the gradient would cost a
second reading. So what is written is

    x ← exp(x − r) − onehot(target)·Z/f             Z = Σ exp(x − r),  r near the row's maximum

and f/Z is the row's factor, left to what is multiplied with the row next (`scale_rows`). Any r will
do that lets nothing overflow: bfloat16 and float32 are as precise near e⁴⁰ as near 1. It is the
maximum of the row's first block; where a later block rises more than `RISE` above it, what is
written already is brought down to the higher one: rare, and as costly as a second reading.

Logits are low-precision in memory and float32 in registers; columns past the vocabulary (the
head's padding) take no part and get gradient 0.

On Hopper the product itself writes exp(x − r) and its sums (`exp_product.py`), with the target's
logit, which is known beforehand, for r: then a row is finished without reading it. Where one rises
more than that product's `CAP` above r, its logits are formed again, one by one, and taken as above.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 8
LANE = 8  # neighbours in a row that one thread reads at once
TYPES = (torch.bfloat16, torch.float32)  # their range is wide enough for exp(x − r)
RISE = tl.constexpr(40.0)
# Lower than any logit, yet finite: the difference of two such is 0, not NaN.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _lower(start, end, by, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply what stands in the first `end` columns of a row."""
    for first in range(0, end, BLOCK):
        place = start + first + tl.arange(0, BLOCK)
        tl.store(place, (tl.load(place).to(tl.float32) * by).to(start.dtype.element_ty))


@triton.jit
def _slope(lse, z_loss):  # type: ignore[no-untyped-def]
    """Return f = 1 + 2·z·lse, never 0: the target's entry is over it."""
    slope = 1 + 2 * z_loss * lse
    return tl.where(tl.abs(slope) < 1e-6, 1e-6, slope)


@triton.jit
def _take_row(  # type: ignore[no-untyped-def]
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
    chosen = tl.load(start + target, mask=counts, other=_LOWEST).to(tl.float32)
    tl.debug_barrier()  # read before somebody writes there
    reference = tl.full((), _LOWEST, tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)  # each thread its own; they meet at the end
    column = tl.arange(0, BLOCK)
    coming = tl.load(start + column, mask=column < stride, other=float("-inf"))
    for first in range(0, stride, BLOCK):
        column = first + tl.arange(0, BLOCK)
        # Not by the load's mask: it reads 16 bytes at once only if all or none of them count.
        x = tl.where(column < vocab, coming.to(tl.float32), float("-inf"))
        later = column + BLOCK  # asked for before this one's maximum is waited for
        coming = tl.load(start + later, mask=later < stride, other=float("-inf"))
        top = tl.max(x, axis=0)
        if (first == 0) | (top > reference + RISE):
            higher = tl.maximum(top, _LOWEST)
            by = tl.exp(reference - higher)
            totals *= by
            if GRADIENT:
                _lower(start, first, by, BLOCK)
            reference = higher
        e = tl.exp(x - reference)
        totals += e
        if GRADIENT:
            e = tl.where(counts, e, 0.0).to(logits.dtype.element_ty)
            tl.store(start + column, e, mask=column < stride)
    total = tl.sum(totals, axis=0)
    lse = reference + tl.log(total)
    tl.store(losses + row, tl.where(counts, lse - chosen + z_loss * lse * lse, 0.0))
    if GRADIENT:
        slope = _slope(lse, z_loss)
        tl.store(factors + row, tl.where(counts, slope / total, 0.0))
        tl.debug_barrier()  # another thread has written there
        entry = tl.exp(chosen - reference) - total / slope
        tl.store(start + target, entry.to(logits.dtype.element_ty), mask=counts)


@triton.jit
def _loss_and_gradient(  # type: ignore[no-untyped-def]
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
    _take_row(row, logits, targets, losses, factors, stride, vocab, z_loss, BLOCK, GRADIENT)


def loss_and_gradient_(
    logits: Tensor, targets: Tensor, vocab: int, z_loss: float, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss of every row; with `gradient`, write it over the logits up to a factor a row.

    `targets` are −1 where they do not count; `logits` are (rows, padded vocabulary), contiguous.
    """
    losses, factors = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
    block = min(BLOCK, max(LANE, triton.next_power_of_2(logits.shape[1])))
    _loss_and_gradient[(len(logits),)](
        logits,
        targets,
        losses,
        factors,
        logits.shape[1],
        vocab,
        z_loss,
        BLOCK=block,
        GRADIENT=gradient,
        num_warps=max(1, min(WARPS, block // (32 * LANE))),
    )
    return losses, factors


# Where the product writes exp(x − r)


@triton.jit
def _target_logits(  # type: ignore[no-untyped-def]
    x, head, targets, out, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.maximum(tl.load(targets + row), 0)  # of a row that does not count, any
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    a = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(head + target * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(a * b, axis=0))


@triton.jit
def _form_row(  # type: ignore[no-untyped-def]
    row, x, head, logits, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    """Write the logits of one row."""
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, stride, 16):
        line = (first + tl.arange(0, 16)).to(tl.int64)
        within = (line < stride)[:, None] & inside[None, :]
        place = head + line[:, None] * WIDTH + column[None, :]
        weight = tl.load(place, mask=within, other=0.0).to(tl.float32)
        logit = tl.sum(weight * value[None, :], axis=1).to(logits.dtype.element_ty)
        tl.store(logits + row * stride + line, logit, mask=line < stride)
    tl.debug_barrier()  # other threads read them


@triton.jit
def _finish_rows(  # type: ignore[no-untyped-def]
    e,
    sums,
    x,
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
    greatest,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    inside = row < rows
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        within = (tile < tiles)[:, None] & inside[None, :]
        part = tl.load(sums + tile[:, None] * rows + row[None, :], mask=within, other=0.0)
        total += tl.sum(part, axis=0)
    total = tl.where(inside, total, 1.0)  # of a row there is, the target's own e is 1
    target = tl.load(targets + row, mask=inside, other=-1)
    counts = target >= 0
    again = counts & (total >= greatest)  # where it is NaN, forming it again would not help
    log = tl.log(total)
    lse = tl.load(references + row, mask=inside, other=0.0) + log
    slope = _slope(lse, z_loss)
    tl.store(losses + row, tl.where(counts, log + z_loss * lse * lse, 0.0), mask=inside)
    tl.store(factors + row, tl.where(counts, slope / total, 0.0), mask=inside)
    entry = (1 - total / slope).to(e.dtype.element_ty)
    tl.store(e + row.to(tl.int64) * stride + target, entry, mask=counts)
    if tl.max(again.to(tl.int32), axis=0) > 0:
        tl.debug_barrier()  # what stands there is written over
        for i in range(ROWS):
            if tl.max(tl.where(row == first + i, again.to(tl.int32), 0), axis=0) > 0:
                one = (first + i).to(tl.int64)
                _form_row(one, x, head, e, stride, WIDTH, PADDED)
                _take_row(one, e, targets, losses, factors, stride, vocab, z_loss, BLOCK, True)


def loss_and_gradient_of(
    x: Tensor, head: Tensor, targets: Tensor, vocab: int, z_loss: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of every row of x; write the gradient of its logits, up to a factor a row.

    `targets` are −1 where they do not count; `out` is (rows, len(head)).
    """
    from scratchlm.accelerate.kernels.hopper.lm_head_exp import CAP, exp_product

    (rows, width), stride = x.shape, len(head)
    losses, factors, references = torch.empty(3, rows, dtype=torch.float32, device=x.device)
    sizes = {"WIDTH": width, "PADDED": triton.next_power_of_2(width)}
    _target_logits[(rows,)](x, head, targets, references, **sizes)
    sums = exp_product(x, head, references, vocab, out)
    per_program = 32
    _finish_rows[(triton.cdiv(rows, per_program),)](
        *(out, sums, x, head, targets, references, losses, factors),
        *(rows, len(sums), stride, vocab, z_loss, math.exp(CAP)),
        ROWS=per_program,
        TILES=64,
        BLOCK=min(BLOCK, max(LANE, triton.next_power_of_2(stride))),
        num_warps=8,
        **sizes,
    )
    return losses, factors


@triton.jit
def _scale_rows(  # type: ignore[no-untyped-def]
    x, factors, above, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ABOVE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(factors + row)
    if ABOVE:
        factor *= tl.load(above)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def scale_rows(x: Tensor, factors: Tensor, above: Tensor | None, out: Tensor) -> Tensor:
    """Multiply every row of a contiguous x by its factor, and all by `above`; `out` may be x."""
    block = min(1024, triton.next_power_of_2(x.shape[1]))
    _scale_rows[(len(x), triton.cdiv(x.shape[1], block))](
        *(x, factors, factors if above is None else above, out),
        WIDTH=x.shape[1],
        BLOCK=block,
        ABOVE=above is not None,
    )
    return out
