"""Known mistakes in RMSNorm, RoPE and SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scratchlm.check.definitions import DEFINITIONS
from scratchlm.check.mistakes.table import Table
from scratchlm.ops import reference

NORMS = Table()

# RMSNorm


def _rms(name: str, hints: tuple[str, str, str], *functions: Callable[..., Any]) -> None:
    NORMS.add("run_rmsnorm", name, hints, *functions)


def _square(x: Tensor, dim: Any = -1) -> Tensor:
    """mean(x²) of what is widened already."""
    return x.pow(2).mean(dim, keepdim=True)


def _wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute in float32 at least and return the input's dtype, as one should."""

    def widened(d: int, eps: float, g: Tensor, x: Tensor) -> Tensor:
        y = x.float() if x.dtype.itemsize == 2 else x
        return function(d, eps, g, y).to(x.dtype)

    return widened


_rms(
    "the sum of squares, not their mean",
    (
        "What is the RMS of four ones?",
        "M in RMS is the mean.",
        "in_features.pow(2).mean(-1, keepdim=True)",
    ),
    _wide(lambda d, eps, g, x: x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt() * g),
)
_rms(
    "ε outside the root",
    (
        "Try it with small numbers: where must ε be to matter?",
        "ε is added to the mean of the squares.",
        "torch.sqrt(mean + eps), not torch.sqrt(mean) + eps",
    ),
    _wide(lambda d, eps, g, x: x / (_square(x).sqrt() + eps) * g),
)
_rms(
    "ε is missing",
    (
        "What does your function do with a row of zeros?",
        "Something must keep the root from being 0.",
        "torch.sqrt(in_features.pow(2).mean(-1, keepdim=True) + eps)",
    ),
    _wide(lambda d, eps, g, x: x / _square(x).sqrt() * g),
)
_rms(
    "the root is missing",
    (
        "Double x: should the result change?",
        "The R in RMS is a root.",
        "torch.sqrt(in_features.pow(2).mean(-1, keepdim=True) + eps)",
    ),
    _wide(lambda d, eps, g, x: x / (_square(x) + eps) * g),
)
_rms(
    "the mean is subtracted (that is LayerNorm)",
    (
        "Add 1 to all of x: should the result change?",
        "RMSNorm divides, and moves nothing.",
        "in_features / rms, not (in_features - mean) / rms",
    ),
    _wide(
        lambda d, eps, g, x: (
            (x - x.mean(-1, keepdim=True)) / (x.var(-1, False, keepdim=True) + eps).sqrt() * g
        )
    ),
)
NORMS.add(
    "run_rmsnorm",
    "the mean is subtracted (that is LayerNorm), and the variance is the unbiased one",
    (
        "Add 1 to all of x: should the result change?",
        "RMSNorm divides by the root of the mean square, and moves nothing.",
        "in_features.pow(2).mean(-1, keepdim=True), not in_features.var(-1)",
    ),
    _wide(
        lambda d, eps, g, x: (
            (x - x.mean(-1, keepdim=True)) / (x.var(-1, True, keepdim=True) + eps).sqrt() * g
        )
    ),
    double=True,
)
_rms(
    "the standard deviation instead of the RMS",
    (
        "Is the mean of x zero?",
        "var and std subtract the mean first.",
        "in_features.pow(2).mean(-1, keepdim=True), not in_features.var(-1)",
    ),
    _wide(lambda d, eps, g, x: x / (x.var(-1, False, keepdim=True) + eps).sqrt() * g),
    _wide(lambda d, eps, g, x: x / (x.var(-1, True, keepdim=True) + eps).sqrt() * g),
)
_rms(
    "the gain is not applied",
    (
        "What do the weights do in your function?",
        "The normed vector is multiplied by g, channel by channel.",
        "… * weights",
    ),
    _wide(lambda d, eps, g, x: x / (_square(x) + eps).sqrt()),
)
_rms(
    "the gain is taken as 1 + g",
    (
        "With weights of 1, what should the RMS of the result be?",
        "Some models store g − 1; this one stores g.",
        "… * weights, not * (1 + weights)",
    ),
    _wide(lambda d, eps, g, x: x / (_square(x) + eps).sqrt() * (1 + g)),
)
_rms(
    "the gain is applied before the norm",
    (
        "Of what is the RMS taken?",
        "Norm first, gain after.",
        "in_features / rms * weights, with the rms of in_features",
    ),
    _wide(lambda d, eps, g, x: x * g / (_square(x * g) + eps).sqrt()),
)
_rms(
    "the mean runs over the wrong axes",
    (
        "Does one row of your result depend on another?",
        "The mean runs along the last axis alone, and keeps it.",
        ".mean(-1, keepdim=True)",
    ),
    _wide(lambda d, eps, g, x: x / (x.pow(2).mean() + eps).sqrt() * g),
    _wide(lambda d, eps, g, x: x / (_square(x, 0) + eps).sqrt() * g),
    _wide(lambda d, eps, g, x: x / (_square(x, 1 if x.ndim > 1 else 0) + eps).sqrt() * g),
)
_rms(
    "squares in 16 bits overflow",
    (
        "What is the largest number float16 can hold?",
        "Square in float32, and return to the input's dtype at the end.",
        "x = in_features.float()  …  return (x / rms * weights).to(in_features.dtype)",
    ),
    lambda d, eps, g, x: x / (_square(x) + eps).sqrt() * g,
)

# RoPE


def _rope(name: str, hints: tuple[str, str, str], *functions: Callable[..., Any]) -> None:
    NORMS.add("run_rope", name, hints, *functions)


def _angles(d: int, theta: float, places: Tensor, power: Callable[[Tensor], Tensor]) -> Tensor:
    return places[..., None].double() * theta ** -power(torch.arange(d // 2).double())


def _rotated(x: Tensor, angle: Tensor, half: bool = False, sign: float = 1.0) -> Tensor:
    y = x.double()
    a, b = y.chunk(2, -1) if half else (y[..., 0::2], y[..., 1::2])
    c, s = angle.cos(), sign * angle.sin()
    if 2 < angle.ndim == y.ndim - 1:
        c, s = c.unsqueeze(-3), s.unsqueeze(-3)
    pair = a * c - b * s, a * s + b * c
    out = torch.cat(pair, -1) if half else torch.stack(pair, -1).flatten(-2)
    return out.to(x.dtype)


def wrong_rope(**knobs: Any) -> Callable[..., Tensor]:
    """Make RoPE with something wrong in it."""

    def rope(d: int, theta: float, longest: int, x: Tensor, places: Tensor) -> Tensor:
        if knobs.get("ignores"):
            places = torch.arange(x.shape[-2])
        base = knobs.get("theta", theta)
        power = knobs.get("power", lambda i, d: 2 * i / d)
        angle = _angles(d, base, places + knobs.get("first", 0), lambda i: power(i, d))
        y = _rotated(x, angle, knobs.get("half", False), knobs.get("sign", 1.0))
        return y

    return rope


_rope(
    "halves are paired, not neighbours",
    (
        "Which two channels belong together?",
        "The pairs are (0, 1), (2, 3), …; (i, i + d/2) is the layout of Llama's files.",
        "a, b = x[..., 0::2], x[..., 1::2]",
    ),
    wrong_rope(half=True),
)
_rope(
    "rotated backwards",
    (
        "At position 1, does (1, 0) go to (cos, sin) or to (cos, −sin)?",
        "Look at the two signs of sin.",
        "a * cos - b * sin, a * sin + b * cos",
    ),
    wrong_rope(sign=-1.0),
)
_rope(
    "token_positions are ignored",
    (
        "What happens when the positions do not start at 0?",
        "The angle comes from token_positions, not from the place in the tensor.",
        "cos[token_positions], not cos[:seq_len]",
    ),
    wrong_rope(ignores=True),
)
_rope(
    "positions count from 1",
    (
        "What should happen to the token at position 0?",
        "Position 0 is not rotated.",
        "angle = token_positions[..., None] * frequency",
    ),
    wrong_rope(first=1),
)
_rope(
    "the exponent is i/d, not 2i/d",
    (
        "How fast does the last pair rotate?",
        "i counts pairs, so the exponent runs from 0 to nearly 1.",
        "theta ** (-torch.arange(0, d_k, 2) / d_k)",
    ),
    wrong_rope(power=lambda i, d: i / d),
)
_rope(
    "the exponent is doubled: 4i/d",
    (
        "How fast does the last pair rotate?",
        "arange(0, d_k, 2) is 2i already.",
        "theta ** (-torch.arange(0, d_k, 2) / d_k)",
    ),
    wrong_rope(power=lambda i, d: 4 * i / d),
)
_rope(
    "θ is fixed at 10000",
    (
        "Does your result depend on theta?",
        "theta is an argument.",
        "theta ** (-torch.arange(0, d_k, 2) / d_k)",
    ),
    wrong_rope(theta=10000.0),
)
_rope(
    "the frequencies grow instead of falling",
    (
        "Which pair should rotate fastest?",
        "The exponent is negative.",
        "1.0 / theta ** (torch.arange(0, d_k, 2) / d_k)",
    ),
    wrong_rope(power=lambda i, d: -2 * i / d),
)

# SwiGLU


def _swiglu(name: str, hints: tuple[str, str, str], *formulas: Callable[..., Tensor]) -> None:
    def of(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda d, d_ff, w1, w2, w3, x: formula(x @ w1.mT, x @ w3.mT) @ w2.mT

    NORMS.add("run_swiglu", name, hints, *map(of, formulas))


_silu_of = DEFINITIONS.run_silu
_RIGHT = "hidden = silu(in_features @ w1_weight.T) * (in_features @ w3_weight.T)"

_swiglu(
    "the other branch is gated: W1 x ⊙ SiLU(W3 x)",
    ("Which of the two goes through SiLU?", "W1's branch is the gate.", _RIGHT),
    lambda a, b: a * _silu_of(b),
)
_swiglu(
    "SiLU is missing",
    ("Is your layer bilinear in x?", "Something must come between the two products.", _RIGHT),
    lambda a, b: a * b,
)
_swiglu(
    "σ instead of SiLU (that is GLU)",
    ("What stands in the gate?", "SiLU(x) = x · σ(x), not σ(x).", _RIGHT),
    lambda a, b: torch.sigmoid(a) * b,
)
_swiglu(
    "GELU or ReLU instead of SiLU",
    ("Which activation stands in the gate?", "Swi is Swish, which is SiLU.", _RIGHT),
    lambda a, b: reference.gelu(a) * b,
    lambda a, b: reference.relu(a) * b,
)
_swiglu(
    "the gated branch is missing: W2 SiLU(W1 x)",
    ("Where is W3?", "Two products of x are multiplied, cell by cell.", _RIGHT),
    lambda a, b: _silu_of(a),
)
_swiglu(
    "added where it should be multiplied",
    ("What closes when the gate is 0?", "⊙ is a product, cell by cell.", _RIGHT),
    lambda a, b: _silu_of(a) + b,
)
_swiglu(
    "SiLU of the product",
    ("What goes into SiLU?", "SiLU takes W1 x alone, before the product.", _RIGHT),
    lambda a, b: _silu_of(a * b),
)
