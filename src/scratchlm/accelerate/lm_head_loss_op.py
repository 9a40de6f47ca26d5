"""The head and the loss on a CPU as one whole operation, which a compiler does not open.

A compiler that sees the product and the cross-entropy keeps all logits and their gradient: on a
CPU, memory that is mapped, cleared and given back in every step. `ops/loss.py` needs a slice. Its
loop would be unrolled by the compiler, so it is handed over closed; what the backward pass scales
by is left outside, where the compiler sees it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scratchlm.ops.loss import sliced_loss


def _loss_and_gradients(
    rows: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float,
    wants_rows: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of the rows' losses and both gradients; one nobody wants is empty."""
    total, gradients = sliced_loss(rows, weight, targets, z_loss, wants_rows, wants_weight)
    of_rows, of_weight = gradients.of_rows, gradients.of_weight
    return (
        total,
        rows.new_empty(0) if of_rows is None else of_rows,
        rows.new_empty(0) if of_weight is None else of_weight,
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


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.wants_rows, ctx.wants_weight = inputs[4:]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


@once_differentiable
def _back(ctx: Any, above: Tensor, *of_gradients: Tensor) -> tuple[Tensor | None, ...]:
    of_rows, of_weight = ctx.saved_tensors
    return (
        of_rows * above if ctx.wants_rows else None,
        of_weight * above if ctx.wants_weight else None,
        None,
        None,
        None,
        None,
    )


loss_and_gradients.register_autograd(_back, setup_context=_keep)
