"""Inverse questions: the largest batch, context or model that fits a memory.

Memory grows monotonically with each of them, so the largest is found by bisection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from scratchlm.accounting.memory import memory_bindings, serving_tree, training_trees
from scratchlm.accounting.parameters import count_parameters
from scratchlm.accounting.setup import Setup
from scratchlm.config import ModelConfig

_MAX_SIZE = 2**27


@dataclass(frozen=True)
class Fits:
    """The largest sizes that fit; 0 or None: not even the smallest does."""

    memory: int
    needed: int  # by the model and setup as given
    batch: int  # the largest, at this context
    context: int  # the largest, at this batch
    model: ModelConfig | None  # the largest of this shape, at this batch and context
    parameters: int


def peak_bytes(config: ModelConfig, setup: Setup, serving: bool = False) -> int:
    """Return the predicted peak of one GPU, training or serving."""
    env = memory_bindings(config, setup)
    if serving:
        return round(serving_tree(config, setup).value(env))
    return max(round(tree.value(env)) for tree in training_trees(config, setup).values())


def fits(config: ModelConfig, setup: Setup, memory: int, serving: bool = False) -> Fits:
    """Answer all three questions for one memory."""
    if memory < 1:
        raise ValueError(f"the memory to fit must be greater than 0; got {memory} bytes")

    def with_batch(n: int) -> bool:
        return peak_bytes(config, dataclasses.replace(setup, batch=n), serving) <= memory

    def with_context(n: int) -> bool:
        # a cache has room for the whole context
        changed = dataclasses.replace(setup, context=n, cache=n - 1, documents=(), prompt=None)
        return peak_bytes(longer(config, n), changed, serving) <= memory

    context = setup.context or config.context_length
    fixed = dataclasses.replace(setup, context=context)

    unit = setup.tensor_ranks

    def with_model(n: int) -> bool:
        try:
            model = scaled(config, n, unit)
        except ValueError:  # beyond the sizes a config allows
            return False
        return peak_bytes(model, fixed, serving) <= memory

    heads = largest_that(with_model)
    model = scaled(config, heads, unit) if heads else None
    return Fits(
        memory=memory,
        needed=peak_bytes(config, setup, serving),
        batch=largest_that(with_batch),
        context=largest_that(with_context),
        model=model,
        parameters=count_parameters(model).unique if model else 0,
    )


def longer(config: ModelConfig, context: int) -> ModelConfig:
    """Return the model made for a context of at least this length."""
    return dataclasses.replace(config, context_length=max(context, config.context_length))


def scaled(config: ModelConfig, n: int, unit: int = 1) -> ModelConfig:
    """Return the model of the same shape with n·unit KV heads: depth and width grow together.

    The width of a head, query heads per KV head, d_ff / d_model and d_model / num_layers stay.
    """
    kv_heads = n * unit
    ratio = kv_heads / config.num_kv_heads
    group = config.num_heads // config.num_kv_heads
    d_model = max(2, round(config.d_model * ratio / 2) * 2)
    return dataclasses.replace(
        config,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * group,
        d_model=d_model,
        d_ff=max(1, round(config.d_ff * ratio / unit)) * unit,
        num_layers=max(1, round(config.num_layers * ratio)),
    )


def largest_that(holds: Callable[[int], bool], most: int = _MAX_SIZE) -> int:
    """Return the largest n in [1, most] for which a monotone condition holds; 0 if none."""
    if not holds(1):
        return 0
    low, high = 1, 2
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
