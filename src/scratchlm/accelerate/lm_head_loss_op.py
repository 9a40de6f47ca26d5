"""The chunked LM head loss on a CPU as a custom operator, which a compiler does not open.

A compiler that sees the product and the cross-entropy keeps all logits and their gradient: on a
CPU, memory that is mapped, cleared and given back in every step. `lm_head_loss.py` needs a chunk,
but the compiler would unroll its loop. What the backward pass scales by is left outside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scratchlm.accelerate.lm_head_loss import chunked_loss


def _loss_and_gradients(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    wants_rows: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the rows' losses and both gradients; one nobody wants is empty."""
    total, gradients = chunked_loss(rows, weight, targets, z_loss, wants_rows, wants_weight)
    grad_rows, grad_weight = gradients.grad_rows, gradients.grad_weight
    return (
        total,
        rows.new_empty(0) if grad_rows is None else grad_rows,
        rows.new_empty(0) if grad_weight is None else grad_weight,
    )


loss_and_gradients = torch.library.custom_op(
    "scratchlm::loss_and_gradients", _loss_and_gradients, mutates_args=(), device_types="cpu"
)


@loss_and_gradients.register_fake
def _(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    wants_rows: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        rows.new_empty(()),
        torch.empty_like(rows) if wants_rows else rows.new_empty(0),
        torch.empty_like(weight) if wants_weight else rows.new_empty(0),
    )


def _setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    ctx.wants_rows, ctx.wants_weight = inputs[4:]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


@once_differentiable
def _backward(ctx: Any, grad_output: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
    grad_rows, grad_weight = ctx.saved_tensors
    return (
        grad_rows * grad_output if ctx.wants_rows else None,
        grad_weight * grad_output if ctx.wants_weight else None,
        None,
        None,
        None,
        None,
    )


loss_and_gradients.register_autograd(_backward, setup_context=_setup_context)
