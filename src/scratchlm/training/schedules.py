"""The learning rate at each step: warm-up, then cosine, constant, or stable with a late decay.

Steps count from 1: the first update is made with the rate of step 1, the last with that of the
last step. Step 0 is the start of the warm-up, where the rate is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scratchlm.training.settings import TrainConfig

Schedule = Callable[[int], float]


def cosine_schedule(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, cosine_steps: int
) -> float:
    """Rise linearly from 0 to `max_lr`, fall along a cosine to `min_lr` at `cosine_steps`, stay."""
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    if step >= cosine_steps:
        return min_lr
    progress = (step - warmup_steps) / (cosine_steps - warmup_steps)
    return min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (max_lr - min_lr)


def wsd_schedule(
    step: int,
    max_lr: float,
    min_lr: float,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int,
) -> float:
    """Warm up, stay at `max_lr`, fall linearly to `min_lr` over the last `decay_steps`.

    arXiv:2404.06395. The stable part does not depend on where the run will end.
    """
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    if step >= total_steps:
        return min_lr
    remaining = (total_steps - step) / decay_steps if decay_steps else 1.0
    return min_lr + min(1.0, remaining) * (max_lr - min_lr)


def constant_schedule(step: int, max_lr: float, warmup_steps: int = 0) -> float:
    """Warm up, then stay at `max_lr`."""
    return max_lr * step / warmup_steps if step < warmup_steps else max_lr


def make_schedule(
    kind: str,
    *,
    max_lr: float,
    min_lr: float,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int,
) -> Schedule:
    """Return the learning rate as a function of the step alone."""
    match kind:
        case "cosine":
            return lambda step: cosine_schedule(step, max_lr, min_lr, warmup_steps, total_steps)
        case "wsd":
            return lambda step: wsd_schedule(
                step, max_lr, min_lr, warmup_steps, total_steps, decay_steps
            )
        case "constant":
            return lambda step: constant_schedule(step, max_lr, warmup_steps)
    raise ValueError(f"schedule must be one of cosine, wsd, constant; got {kind!r}")


def schedule_of(settings: TrainConfig) -> Schedule:
    """Return the learning rate of every step that resolved settings describe."""
    return make_schedule(
        settings.schedule,
        max_lr=settings.lr,
        min_lr=settings.min_lr or 0.0,
        warmup_steps=settings.warmup_steps or 0,
        total_steps=settings.steps,
        decay_steps=settings.decay_steps or 0,
    )
