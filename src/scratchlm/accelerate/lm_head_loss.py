"""The LM head and the cross-entropy in one: the logits never exist all at once.

The rows are taken in slices. For each slice the logits are formed, turned into their gradient

    ∂loss/∂logits = softmax(logits) − onehot(target)

in place, and multiplied into the gradients of the hidden states and of the head, all in the forward
pass; the backward pass only scales the two by what comes from above. Three matrix products, as
without slices, and memory for one slice instead of for the batch times the vocabulary.

A kernel leaves each row of that gradient G short of a factor s (`kernels/cross_entropy.py`). The
rows around it take it instead: ∂hidden = s ⊙ (G W), and ∂W = Gᵀ (s ⊙ hidden).

On a GPU a vocabulary that is no multiple of 8 is padded inside: rows of logits that start off a
16-byte border make the product several times slower.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scratchlm.accelerate import hopper
from scratchlm.accelerate.kernels import launches_for
from scratchlm.ops.ranges import can_look, counted_targets

SLICE_ELEMENTS = {"cpu": 2**21, "cuda": 2**28}  # logits at a time: the cache's size, 0.5 GB


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Mean of log Σ exp(W h) − (W h)[target] over the targets that count."""
    shape, vocab = hidden.shape[:-1], len(weight)
    index, counts, wrong = counted_targets(shape, vocab, targets, ignore_index)
    rows = hidden.reshape(-1, hidden.shape[-1])
    index, counts = index.reshape(-1), counts.reshape(-1)
    labels = index.masked_fill(~counts, -1)
    if not torch.is_grad_enabled():  # a function is told what requires gradients even so
        rows, weight = rows.detach(), weight.detach()
    total: Tensor
    if torch.compiler.is_compiling():  # without autocast: see `compiles_closed`
        from scratchlm.ops.opaque import loss_and_gradients

        wants = rows.requires_grad, weight.requires_grad
        total = loss_and_gradients(rows, weight, labels, z_loss, *wants)[0]
    else:
        device = hidden.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            rows = rows.to(torch.get_autocast_dtype(device))
        total = _SlicedLoss.apply(rows, weight, labels, z_loss)
    if wrong is not None:
        total = total.masked_fill(wrong.any(), torch.nan)
    return total if reduction == "sum" else total / counts.sum().clamp(min=1)


def compiles_closed(hidden: Tensor, weight: Tensor) -> bool:
    """Whether compiled code, too, calls the sliced loss: it trains on a CPU, in one precision."""
    return (
        hidden.is_cpu
        and torch.is_grad_enabled()
        and (hidden.requires_grad or weight.requires_grad)
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
    )


class _SlicedLoss(torch.autograd.Function):
    """The sum of the rows' losses; targets are −1 where they do not count."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        total, ctx.gradients = sliced_loss(rows, weight, targets, z_loss, *ctx.needs_input_grad[:2])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        return (*ctx.gradients.scaled(above), None, None)


def sliced_loss(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    wants_rows: bool,
    wants_weight: bool,
) -> tuple[Tensor, _Gradients]:
    """Return the sum of the rows' losses, and its gradients; targets of −1 do not count."""
    rows = rows.contiguous()  # as kernels write what is like them
    with torch.autocast(rows.device.type, enabled=False):
        gradients = _Gradients(rows, weight, wants_rows, wants_weight)
        head = _padded(weight, rows.dtype)
        wide = torch.float32 if rows.dtype.itemsize == 2 else rows.dtype
        total = torch.zeros((), dtype=wide, device=rows.device)
        size = _slice_size(len(rows), len(head), rows.device.type)
        buffer = rows.new_empty(size, len(head))
        for start in range(0, len(rows), size):
            part, target = rows[start : start + size], targets[start : start + size]
            wants, out = wants_rows or wants_weight, buffer[: len(part)]
            slopes = _slopes(part, head, target, len(weight), z_loss, wants, out)
            total += slopes.losses.sum()
            gradients.add(start, slopes, part, head)
    return total, gradients


class _Slopes(NamedTuple):
    """What a slice of logits gives."""

    losses: Tensor  # of every row
    matrix: Tensor  # the gradient of the logits, each row of it over …
    factors: Tensor | None  # … its factor, if they are not all 1


class _Gradients:
    """∂loss/∂rows and ∂loss/∂weight, gathered slice by slice."""

    def __init__(self, rows: Tensor, weight: Tensor, wants_rows: bool, wants_weight: bool) -> None:
        self.of_rows = torch.empty_like(rows) if wants_rows else None
        self.of_weight: Tensor | None = None
        self.wants_weight, self.vocab, self.dtype = wants_weight, len(weight), weight.dtype
        self.factors: list[Tensor] = []  # that the rows of `of_rows` still lack, slice by slice
        self.used = False

    def add(self, start: int, slopes: _Slopes, part: Tensor, head: Tensor) -> None:
        """Take one slice's gradient of the logits in."""
        slope, factors = slopes.matrix, slopes.factors
        if self.of_rows is not None:
            torch.mm(slope, head, out=self.of_rows[start : start + len(part)])
            self.factors += [] if factors is None else [factors]
        if self.wants_weight:
            if factors is not None:
                part = _scaled_rows(part, factors, None, torch.empty_like(part))
            self.of_weight = _add_product(self.of_weight, slope.t(), part)

    def scaled(self, above: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return both, times what comes from above; once, because it is done in place."""
        if self.used:
            raise RuntimeError("the gradients of this loss were already given out and freed")
        self.used = True
        of_rows, of_weight = self.of_rows, self.of_weight
        self.of_rows = self.of_weight = None
        if of_rows is not None:
            if self.factors:
                _scaled_rows(of_rows, torch.cat(self.factors), above, of_rows)
            else:
                of_rows.mul_(above)
        if of_weight is not None:
            torch._foreach_mul_([of_weight], above)  # reads wider than `mul_` by one number does
            of_weight = of_weight.to(self.dtype)
            if len(of_weight) > self.vocab:  # a view, which autograd would not add to in place
                of_weight = of_weight[: self.vocab]
        return of_rows, of_weight


def _scaled_rows(x: Tensor, factors: Tensor, above: Tensor | None, out: Tensor) -> Tensor:
    from scratchlm.accelerate.kernels.triton.cross_entropy import scale_rows

    return scale_rows(x, factors, above, out)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a·b to a float32 total without rounding the product to 16 bits first."""
    if a.dtype.itemsize > 2:
        return a @ b if total is None else total.addmm_(a, b)
    if not a.is_cuda:
        product = a.float() @ b.float()
        return product if total is None else total.add_(product)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the head in the dtype it is multiplied in, on a GPU with a length divisible by 8."""
    weight = weight.detach()
    if not weight.is_cuda or len(weight) % 8 == 0:
        return weight.to(dtype).contiguous()  # kernels see addresses
    length = -(-len(weight) // 128) * 128
    padded = weight.new_zeros(length, weight.shape[1], dtype=dtype)
    padded[: len(weight)] = weight
    return padded


def _slice_size(rows: int, vocab: int, device: str) -> int:
    """Return how many rows to take at a time: equal slices, of whole tiles on a GPU."""
    most = SLICE_ELEMENTS.get(device, SLICE_ELEMENTS["cuda"])
    slices = -(-rows * vocab // most)
    tile = 128 if device == "cuda" else 1
    size = -(-rows // max(1, slices))
    return min(max(rows, 1), -(-max(size, 128) // tile) * tile)


def _slopes(
    part: Tensor,
    head: Tensor,
    targets: Tensor,
    vocab: int,
    z_loss: float,
    gradient: bool,
    out: Tensor,
) -> _Slopes:
    """Return what the logits of a slice of rows give, in the memory of `out`."""
    if gradient and hopper.takes_head(part, head):
        from scratchlm.accelerate.kernels.triton.cross_entropy import loss_and_gradient_of

        losses, factors = loss_and_gradient_of(part, head, targets, vocab, z_loss, out)
        return _Slopes(losses, out, factors)
    logits = torch.mm(part, head.t(), out=out)
    return _loss_and_gradient(logits, targets, vocab, z_loss, gradient)


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, vocab: int, z_loss: float, gradient: bool
) -> _Slopes:
    """Return every row's loss and the gradient of the logits, which may lie where they lay."""
    if launches_for(logits):
        from scratchlm.accelerate.kernels.triton.cross_entropy import TYPES, loss_and_gradient_

        if logits.dtype in TYPES:
            losses, factors = loss_and_gradient_(logits, targets, vocab, z_loss, gradient)
            return _Slopes(losses, logits, factors)
    wide = logits.float() if logits.dtype.itemsize == 2 else logits
    if wide.shape[1] > vocab:
        wide[:, vocab:] = -torch.inf
    counts = targets >= 0
    column = targets.clamp(min=0)[:, None]
    chosen = wide.gather(1, column)[:, 0]
    if gradient and wide.is_cpu:
        lse, slope = _softmax_in_place(wide)
        losses = lse - chosen
    else:
        logs = wide.log_softmax(dim=-1)
        losses = -logs.gather(1, column)[:, 0]
        lse = chosen + losses
    if z_loss:
        losses = losses + z_loss * lse.pow(2)
    losses = losses.masked_fill(~counts, 0.0)
    if not gradient:
        return _Slopes(losses, logits, None)
    if not wide.is_cpu:
        slope = logs.exp_()
    if z_loss:
        slope *= (1 + 2 * z_loss * lse)[:, None]
    slope.scatter_add_(1, column, slope.new_full(column.shape, -1.0))
    if not (can_look(counts) and bool(counts.all())):
        slope.masked_fill_(~counts[:, None], 0.0)
    return _Slopes(losses, slope.to(logits.dtype), None)


def _softmax_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log Σ exp of every row, and the softmax where the logits lay: one exponential each.

    The largest weight of a row is exp(top − lse), and never tiny: lse is read off it.
    """
    top = logits.amax(dim=-1)
    weights = torch.softmax(logits, dim=-1, out=logits)
    return top - weights.amax(dim=-1).log_(), weights
