"""Where kernels with a backward pass of their own run, and the dtype they multiply in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scratchlm.accelerate.kernels import launches_for
from scratchlm.ops.ranges import is_transformed


def trains_by_kernel(x: Tensor) -> bool:
    """Whether the kernels with a backward pass of their own are for this input."""
    wanted = torch.is_grad_enabled() and x.dtype != torch.float64 and not is_transformed()
    return wanted and launches_for(x)


def why_no_kernel(x: Tensor) -> str | None:
    """Return why no such kernel runs for this input."""
    if trains_by_kernel(x):
        return None
    if not torch.is_grad_enabled():
        return "for training only: gradients are off"
    if is_transformed():
        return "functions are being transformed (torch.func)"
    return "for float64" if x.dtype == torch.float64 else "no current CUDA device with Triton"


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype that x is multiplied in: autocast's, where it is on."""
    device = x.device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def joined_weight(shadow: Tensor | None, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return matrices one below the other in `dtype`: their shadow, or a copy.

    The copy costs nothing extra: the cast that autocast makes anyway writes elsewhere.
    """
    if shadow is not None:
        return shadow
    parts = [part.to(dtype) for part in weights]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def joined_bias(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    """Return biases one after the other, zeros for one that is missing; None if all are."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(weights, biases, strict=True)
    return torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])


def is_readable_gain(weight: Tensor, x: Tensor) -> bool:
    """Whether kernels, which see addresses, read this gain of x right."""
    return weight.is_contiguous() and weight.shape == x.shape[-1:]
