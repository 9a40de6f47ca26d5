"""Cross-entropy of a slice of logits, and its gradient written over them.

One program per row reads the row twice and writes it once:

    lse = log Σ exp(x),    loss = lse − x[target] + z·lse²
    x  ← (1 + 2·z·lse)·softmax(x) − onehot(target)

Logits are low-precision in memory and float32 in registers; columns past the vocabulary (the
head's padding) take no part and get gradient 0.

A program is as many threads as a row can feed: few rows are then under way at once, and the second
reading finds the row in the L2 cache. Each lane keeps a largest number and a sum of its own, over
`LANE` neighbours at a time; they meet once, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 16
LANE = tl.constexpr(8)
# Lower than any logit, yet finite: the difference of two such is 0, not NaN.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _log_sum_exp(start, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, BLOCK // LANE)
    top = tl.full((BLOCK // LANE,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK // LANE,), tl.float32)
    for first in range(0, vocab, BLOCK):
        column = first + lane[:, None] * LANE + tl.arange(0, LANE)[None, :]
        x = tl.load(start + column, mask=column < vocab, other=_LOWEST).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), axis=1)
        top = higher
    highest = tl.max(top, axis=0)
    return highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0))


@triton.jit
def _loss_and_gradient(  # type: ignore[no-untyped-def]
    logits, targets, losses, stride, vocab, z_loss, BLOCK: tl.constexpr, GRADIENT: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    counts = target >= 0
    chosen = tl.load(start + target, mask=counts, other=0.0).to(tl.float32)  # before it is written
    lse = _log_sum_exp(start, vocab, BLOCK)
    tl.store(losses + row, tl.where(counts, lse - chosen + z_loss * lse * lse, 0.0))
    if GRADIENT:
        slope = 1 + 2 * z_loss * lse
        for first in range(0, stride, BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = tl.load(start + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            gradient = slope * tl.exp(x - lse) - tl.where(column == target, 1.0, 0.0)
            inside = counts & (column < vocab)
            gradient = tl.where(inside, gradient, 0.0)
            tl.store(start + column, gradient.to(logits.dtype.element_ty), mask=column < stride)


def loss_and_gradient_(
    logits: Tensor, targets: Tensor, vocab: int, z_loss: float, gradient: bool
) -> Tensor:
    """Return the loss of every row; with `gradient`, write it over the logits.

    `targets` are −1 where they do not count; `logits` are (rows, padded vocabulary), contiguous.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    block = min(BLOCK, max(LANE.value, triton.next_power_of_2(logits.shape[1])))
    _loss_and_gradient[(len(logits),)](
        logits,
        targets,
        losses,
        logits.shape[1],
        vocab,
        z_loss,
        BLOCK=block,
        GRADIENT=gradient,
        num_warps=max(1, min(WARPS, block // (32 * LANE.value))),
    )
    return losses
