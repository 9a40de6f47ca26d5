"""Indices that must lie in a range: refused where one can look, kept harmless where one cannot.

An index outside its table is an error on the CPU and a fault that ends the use of the device on a
GPU. On the CPU we look, and refuse. On an accelerator a look would wait for the device in every
step, and inside a compiled graph there is nobody to ask: there the index is clamped before the
lookup, and the caller marks what it touches with NaN, which the next reading of the loss shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def constant_in_graphs(function: F) -> F:
    """Let a compiler call this while it traces, and take the result for a constant.

    `torch.compiler.assume_constant_result` sets the same mark, and imports the compiler for it:
    two seconds for everybody who compiles nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def can_look(index: Tensor) -> bool:
    """Whether the values can be read here and now at no cost."""
    if torch.compiler.is_compiling():
        return False
    return index.device.type == "cpu" and not is_transformed()


def is_transformed() -> bool:
    """Whether functions are being transformed (`torch.func`, forward-mode derivatives).

    Values cannot be read then, and an operation of ours has a backward pass alone: other
    derivatives of it would be zeros.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or goes_forward()


def goes_forward() -> bool:
    """Whether derivatives are taken going forward: `torch.func.jvp`, or dual numbers."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def check_range(index: Tensor, limit: int, what: str) -> None:
    """Refuse what is not a whole number, and values outside [0, limit) where one can look."""
    if index.dtype not in (torch.int64, torch.int32):  # what torch looks up
        raise TypeError(f"{what}s must be whole numbers, int64 or int32; got {index.dtype}")
    if not can_look(index) or not index.numel():
        return
    low, high = (int(bound) for bound in index.aminmax())
    if low < 0 or high >= limit:
        raise ValueError(f"{what} must lie in [0, {limit}); got {low if low < 0 else high}")


def keep_in_range(index: Tensor, limit: int) -> tuple[Tensor, Tensor | None]:
    """Return an index that is safe to look up, and where it had to be changed (None: nowhere)."""
    if can_look(index):
        return index, None
    safe = index.clamp(0, limit - 1)
    return safe, safe != index


def mark(rows: Tensor, wrong: Tensor | None) -> Tensor:
    """Turn rows to NaN where the index was wrong."""
    if wrong is None:
        return rows
    # By a sum, which costs nothing going backward.
    return rows + torch.zeros_like(wrong, dtype=rows.dtype).masked_fill(wrong, torch.nan)[..., None]


def counted_targets(
    shape: torch.Size, vocab: int, targets: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return targets safe to look up, which of them count, and which were out of range."""
    if targets.shape != shape:
        raise ValueError(
            "targets must have the shape of the logits without the last dimension, "
            f"{tuple(shape)}; got {tuple(targets.shape)}"
        )
    counts = targets != ignore_index
    index = targets.masked_fill(~counts, 0)
    check_range(index, vocab, "target")
    index, wrong = keep_in_range(index, vocab)
    return index, counts, wrong
