"""The LM head and the cross-entropy in one: the logits never exist all at once.

The rows are taken in chunks. For each chunk the logits are formed, replaced in place by their
gradient

    ∂loss/∂logits = softmax(logits) − onehot(target)

and multiplied into the gradients of the hidden states and of the head, all in the forward pass; the
backward pass only scales the two by grad_output. Three matrix products, as without chunks, and
memory for one chunk instead of for the batch times the vocabulary.

A kernel leaves each row of that gradient G short of a factor s (`kernels/triton/cross_entropy.py`).
The rows around it take it instead: ∂hidden = s ⊙ (G W), and ∂W = Gᵀ (s ⊙ hidden).

On a GPU a vocabulary that is no multiple of 8 is padded inside: rows of logits that start off a
16-byte border make the product several times slower.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from scratchlm.accelerate import hopper
from scratchlm.accelerate.kernels import launches_for
from scratchlm.ops.ranges import can_look, counted_targets

CHUNK_ELEMENTS = {"cpu": 2**21, "cuda": 2**28}  # logits at a time: the cache's size, 0.5 GB


def chunked_lm_head_loss(
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
    if torch.compiler.is_compiling():  # without autocast: see `supports_compiled`
        from scratchlm.accelerate.lm_head_loss_op import loss_and_gradients

        wants = rows.requires_grad, weight.requires_grad
        total = loss_and_gradients(rows, weight, labels, z_loss, *wants)[0]
    else:
        device = hidden.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            rows = rows.to(torch.get_autocast_dtype(device))
        total = _ChunkedLoss.apply(rows, weight, labels, z_loss)
    if wrong is not None:
        total = total.masked_fill(wrong.any(), torch.nan)
    return total if reduction == "sum" else total / counts.sum().clamp(min=1)


def supports_compiled(hidden: Tensor, weight: Tensor) -> bool:
    """Whether compiled code, too, calls the chunked loss: it trains on a CPU, in one precision."""
    return (
        hidden.is_cpu
        and torch.is_grad_enabled()
        and (hidden.requires_grad or weight.requires_grad)
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
    )


class _ChunkedLoss(torch.autograd.Function):
    """The sum of the rows' losses; targets are −1 where they do not count."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor, z_loss: float) -> Tensor:
        total, ctx.gradients = chunked_loss(
            rows, weight, targets, z_loss, *ctx.needs_input_grad[:2]
        )
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():  # `once_differentiable` sees a graph only behind grad_output
            raise RuntimeError(
                "the chunked LM-head loss has first derivatives only; for second ones, "
                "plain(model) or accelerate(model, without=['chunked_lm_head_loss'])"
            )
        return (*ctx.gradients.scaled(grad_output), None, None)


def chunked_loss(
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
        size = _chunk_size(len(rows), len(head), rows.device.type)
        buffer = rows.new_empty(size, len(head))
        for start in range(0, len(rows), size):
            part, target = rows[start : start + size], targets[start : start + size]
            wants, out = wants_rows or wants_weight, buffer[: len(part)]
            dlogits = _dlogits(part, head, target, len(weight), z_loss, wants, out)
            total += dlogits.losses.sum()
            gradients.add(start, dlogits, part, head)
    return total, gradients


class _DLogits(NamedTuple):
    """What a chunk of logits gives."""

    losses: Tensor  # of every row
    matrix: Tensor  # the gradient of the logits, each row of it over …
    factors: Tensor | None  # … its factor, if they are not all 1


class _Gradients:
    """∂loss/∂rows and ∂loss/∂weight, gathered chunk by chunk."""

    def __init__(self, rows: Tensor, weight: Tensor, wants_rows: bool, wants_weight: bool) -> None:
        self.grad_rows = torch.empty_like(rows) if wants_rows else None
        self.grad_weight: Tensor | None = None
        self.wants_weight, self.vocab, self.dtype = wants_weight, len(weight), weight.dtype
        self.factors: list[Tensor] = []  # that the rows of `grad_rows` still lack, chunk by chunk
        self.used = False

    def add(self, start: int, chunk: _DLogits, part: Tensor, head: Tensor) -> None:
        """Take one chunk's gradient of the logits in."""
        dlogits, factors = chunk.matrix, chunk.factors
        if self.grad_rows is not None:
            torch.mm(dlogits, head, out=self.grad_rows[start : start + len(part)])
            self.factors += [] if factors is None else [factors]
        if self.wants_weight:
            if factors is not None:
                part = _scaled_rows(part, factors, None, torch.empty_like(part))
            self.grad_weight = _add_product(self.grad_weight, dlogits.t(), part)

    def scaled(self, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return both, times grad_output; once, because it is done in place."""
        if self.used:
            raise RuntimeError("the gradients of this loss were already given out and freed")
        self.used = True
        grad_rows, grad_weight = self.grad_rows, self.grad_weight
        self.grad_rows = self.grad_weight = None
        if grad_rows is not None:
            if self.factors:
                _scaled_rows(grad_rows, torch.cat(self.factors), grad_output, grad_rows)
            else:
                grad_rows.mul_(grad_output)
        if grad_weight is not None:
            torch._foreach_mul_([grad_weight], grad_output)  # wider loads than `mul_` has
            grad_weight = grad_weight.to(self.dtype)
            if len(grad_weight) > self.vocab:  # a view, which autograd would not add to in place
                grad_weight = grad_weight[: self.vocab]
        return grad_rows, grad_weight


def _scaled_rows(x: Tensor, factors: Tensor, grad_output: Tensor | None, out: Tensor) -> Tensor:
    from scratchlm.accelerate.kernels.triton.cross_entropy import scale_rows

    return scale_rows(x, factors, grad_output, out)


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


def _chunk_size(rows: int, vocab: int, device: str) -> int:
    """Return how many rows to take at a time: equal chunks, of whole tiles on a GPU."""
    most = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"])
    chunks = -(-rows * vocab // most)
    tile = 128 if device == "cuda" else 1
    size = -(-rows // max(1, chunks))
    return min(max(rows, 1), -(-max(size, 128) // tile) * tile)


def _dlogits(
    part: Tensor,
    head: Tensor,
    targets: Tensor,
    vocab: int,
    z_loss: float,
    gradient: bool,
    out: Tensor,
) -> _DLogits:
    """Return what the logits of a chunk of rows give, in the memory of `out`."""
    if gradient and hopper.supports_lm_head_exp(part, head):
        from scratchlm.accelerate.kernels.triton.cross_entropy import lm_head_loss_and_dlogits

        losses, factors = lm_head_loss_and_dlogits(part, head, targets, vocab, z_loss, out)
        return _DLogits(losses, out, factors)
    logits = torch.mm(part, head.t(), out=out)
    return _loss_and_dlogits(logits, targets, vocab, z_loss, gradient)


def _loss_and_dlogits(
    logits: Tensor, targets: Tensor, vocab: int, z_loss: float, gradient: bool
) -> _DLogits:
    """Return every row's loss and the gradient of the logits, which may lie where they lay."""
    if launches_for(logits):
        from scratchlm.accelerate.kernels.triton.cross_entropy import TYPES, loss_and_dlogits_

        if logits.dtype in TYPES:
            losses, factors = loss_and_dlogits_(logits, targets, vocab, z_loss, gradient)
            return _DLogits(losses, logits, factors)
    wide = logits.float() if logits.dtype.itemsize == 2 else logits
    if wide.shape[1] > vocab:
        wide[:, vocab:] = -torch.inf
    counts = targets >= 0
    column = targets.clamp(min=0)[:, None]
    chosen = wide.gather(1, column)[:, 0]
    if gradient and wide.is_cpu:
        lse, dlogits = _softmax_in_place(wide)
        losses = lse - chosen
    else:
        logs = wide.log_softmax(dim=-1)
        losses = -logs.gather(1, column)[:, 0]
        lse = chosen + losses
    if z_loss:
        losses = losses + z_loss * lse.pow(2)
    losses = losses.masked_fill(~counts, 0.0)
    if not gradient:
        return _DLogits(losses, logits, None)
    if not wide.is_cpu:
        dlogits = logs.exp_()
    if z_loss:
        dlogits *= (1 + 2 * z_loss * lse)[:, None]
    dlogits.scatter_add_(1, column, dlogits.new_full(column.shape, -1.0))
    if not (can_look(counts) and bool(counts.all())):
        dlogits.masked_fill_(~counts[:, None], 0.0)
    return _DLogits(losses, dlogits.to(logits.dtype), None)


def _softmax_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log Σ exp of every row, and the softmax where the logits lay: one exponential each.

    The largest weight of a row is exp(top − lse), and never tiny: lse is read off it.
    """
    top = logits.amax(dim=-1)
    weights = torch.softmax(logits, dim=-1, out=logits)
    return top - weights.amax(dim=-1).log_(), weights
