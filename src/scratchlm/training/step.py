"""One step: gradients of the mean loss over all targets of a batch, clipped, one update.

A batch too large for the machine is taken in micro-batches. The loss of the whole is

    Σᵢ nᵢ·meanᵢ / Σᵢ nᵢ

with nᵢ the targets that count in micro-batch i: what the big batch gives, however they fall. (An
expert layer's load-balancing term is a statistic of the rows at hand: it alone depends on how they
are cut.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scratchlm.data import Batch
from scratchlm.errors import ScratchLMError
from scratchlm.training.learner import Learner
from scratchlm.training.optimizers import ScalesGradients, clip_factor, clip_grad_norm, global_norm

if TYPE_CHECKING:
    from scratchlm.parallel.ranks import Ranks


class NotFiniteError(ScratchLMError):
    """A loss or a gradient that is not finite: all ranks stop at it, and none is gone."""


@dataclass(frozen=True)
class StepResult:
    """What a step measured, before its update."""

    loss: float
    grad_norm: float


def take_step(learner: Learner, batch: Batch, step: int, lr: float) -> StepResult:
    """Make update number `step`; a loss or gradient that is not finite stops before it."""
    learner.begin_step(step)
    own_loss = loss = backward(learner, batch)
    if learner.layout is not None:
        learner.layout.ranks.beat(step + 0.5)
        learner.layout.reduce_gradients()
        loss = learner.layout.sum(own_loss)
    norm, factor = clip_gradients(learner)
    prepared = [o.prepare() if isinstance(o, ScalesGradients) else None for o in learner.optimizers]
    values = torch.stack((loss, norm.to(loss))).tolist()  # the step's one wait for the device
    result = StepResult(*values)
    for what, value in (("loss", result.loss), ("gradient norm", result.grad_norm)):
        if not math.isfinite(value):
            where = "" if learner.ranks is None else _where(learner.ranks, own_loss)
            raise NotFiniteError(
                f"step {step}: the {what} is {value}{where}; stopped before the update "
                "(a smaller train.lr or a longer train.warmup_steps often helps)"
            )
    learner.set_lr(lr)
    for optimizer, work in zip(learner.optimizers, prepared, strict=True):
        if isinstance(optimizer, ScalesGradients):
            optimizer.step(scale=factor, prepared=work)
        else:
            optimizer.step()
    if learner.layout is not None:
        learner.layout.share_weights()
    learner.update_average(step)
    return result


def _where(ranks: Ranks, own_loss: Tensor) -> str:
    """Say on which ranks the loss is not finite; all of them ask."""
    finite = ranks.gather("finite", math.isfinite(own_loss.item()))
    wrong = [str(rank) for rank, fine in enumerate(finite) if not fine]
    return f" (the loss of rank {', '.join(wrong)} is not finite)" if wrong else ""


def clip_gradients(learner: Learner) -> tuple[Tensor, Tensor | None]:
    """Clip the gradients; return the norm they had, and the factor if that is left to the update.

    Our AdamW multiplies a gradient as it reads it, which saves reading and writing all of them.
    """
    clip, parameters = learner.settings.clip, list(learner.parameters.values())
    left = all(isinstance(optimizer, ScalesGradients) for optimizer in learner.optimizers)
    if learner.layout is not None:
        norm = learner.layout.norm()
        factor = clip_factor(norm, clip) if clip else None
        if factor is not None and not left:
            torch._foreach_mul_(learner.layout.gradients(), factor)
        return norm, factor if left else None
    if clip and not left:
        return clip_grad_norm(parameters, clip), None
    norm = global_norm([p.grad for p in parameters if p.grad is not None])
    return norm, clip_factor(norm, clip) if clip else None


def backward(learner: Learner, batch: Batch) -> Tensor:
    """Fill the gradients with those of the batch's mean loss; return that loss."""
    if learner.recorded is not None:
        learner.recorded.begin_step()
    else:
        for p in learner.parameters.values():
            p.grad = None
    if learner.shadow is not None:
        learner.shadow.refresh()
    batch = learner.own_part(batch)
    settings, total = learner.settings, batch.num_targets()
    if learner.ranks is not None:
        total = round(learner.ranks.sum([total])[0])
    total = max(1, total)
    parts = list(batch.cut(settings.micro_batch_size or settings.batch_size))
    shares = []
    for number, part in enumerate(parts, 1):
        if learner.layout is not None:
            learner.layout.begin_backward(is_last=number == len(parts))
        weight = torch.tensor(part.num_targets() / total, dtype=torch.float64)
        if learner.recorded is not None:
            shares.append(learner.recorded(part, weight))
        else:
            shares.append(learner.backward(part, weight))
        if learner.layout is not None:
            learner.layout.end_backward(is_last=number == len(parts))
    return torch.stack(shares).sum()
