"""The parts a model is composed of: positions, feed-forward, normalisation, attention.

Each is a small frozen dataclass that checks itself; `ModelConfig` puts them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# Sanity limits: a larger value is more likely a typo than a model.
SIZE_LIMITS = {
    "vocab_size": 2**24,
    "context_length": 2**27,
    "d_model": 2**20,
    "num_layers": 2**14,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "d_head": 2**14,
    "d_ff": 2**22,
    "num_experts": 2**14,
    "experts_per_token": 2**14,
    "sliding_window": 2**27,
    "original_context_length": 2**27,
}


def check_size(name: str, value: object) -> None:
    """Refuse anything but a whole number from 1 to the field's limit."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number; got {name}={value!r}")
    if not 1 <= value <= SIZE_LIMITS[name]:
        raise ValueError(f"{name} must lie between 1 and {SIZE_LIMITS[name]}; got {name}={value}")


# Models compute in float32: a smaller number is 0 there, a larger one infinite.
SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127


def check_number(name: str, value: object, *, above: float) -> None:
    """Refuse anything but a finite number greater than `above`, within float32's range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {name}={value!r}")
    if not (math.isfinite(value) and value > above):
        raise ValueError(f"{name} must be finite and greater than {above:g}; got {name}={value}")
    if not (value == 0 or SMALLEST <= abs(value) <= LARGEST):
        raise ValueError(f"{name} must be a number that float32 can hold; got {name}={value}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse anything but one of the names."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {name}={value!r}")


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false; got {name}={value!r}")


# Positions


@dataclass(frozen=True)
class LinearScaling:
    """Stretch positions: every frequency divided by `factor` (arXiv:2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        check_number("factor", self.factor, above=0)


@dataclass(frozen=True)
class NTKScaling:
    """Stretch the slow frequencies only, by a larger base: θ' = θ · factor^(d/(d−2))."""

    factor: float

    def __post_init__(self) -> None:
        check_number("factor", self.factor, above=0)


@dataclass(frozen=True)
class YarnScaling:
    """Interpolate by wavelength, and sharpen attention (arXiv:2309.00071)."""

    factor: float
    original_context_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1·ln(factor) + 1
    truncate: bool = True  # round the ramp's ends to whole dimensions

    def __post_init__(self) -> None:
        check_number("factor", self.factor, above=0)
        check_size("original_context_length", self.original_context_length)
        check_number("beta_slow", self.beta_slow, above=0)
        check_number("beta_fast", self.beta_fast, above=self.beta_slow)
        if self.attention_factor is not None:
            check_number("attention_factor", self.attention_factor, above=0)
        check_flag("truncate", self.truncate)


@dataclass(frozen=True)
class Llama3Scaling:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between (Llama 3.1)."""

    factor: float
    original_context_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        check_number("factor", self.factor, above=0)
        check_size("original_context_length", self.original_context_length)
        check_number("low_freq_factor", self.low_freq_factor, above=0)
        check_number("high_freq_factor", self.high_freq_factor, above=self.low_freq_factor)


RopeScaling = LinearScaling | NTKScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (arXiv:2104.09864). `layout` says which two channels form a pair."""

    theta: float = 10_000.0
    layout: Literal["interleaved", "half"] = "interleaved"
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_number("theta", self.theta, above=0)
        check_choice("layout", self.layout, ("interleaved", "half"))
        if isinstance(self.scaling, YarnScaling) and self.theta <= 1:
            raise ValueError(
                f"theta must be greater than 1 with YaRN, which divides by its logarithm; got "
                f"theta={self.theta}"
            )


@dataclass(frozen=True)
class Learned:
    """A trained vector for every position, added to the token's."""


@dataclass(frozen=True)
class Sinusoidal:
    """The fixed sine and cosine table of arXiv:1706.03762, section 3.5."""


@dataclass(frozen=True)
class NoPositions:
    """No position information beyond the causal mask."""


Positions = Rotary | Learned | Sinusoidal | NoPositions

# Feed-forward

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class SwiGLU:
    """W2(SiLU(W1 x) ⊙ W3 x) (arXiv:2002.05202)."""

    bias: bool = False

    def __post_init__(self) -> None:
        check_flag("bias", self.bias)


@dataclass(frozen=True)
class MLP:
    """W2 act(W1 x)."""

    activation: Activation = "gelu_tanh"
    bias: bool = False

    def __post_init__(self) -> None:
        check_choice("activation", self.activation, _ACTIVATIONS)
        check_flag("bias", self.bias)


@dataclass(frozen=True)
class MoE:
    """A router and `num_experts` SwiGLU experts of width `d_ff`, a few of them per token."""

    num_experts: int
    experts_per_token: int
    renormalize: bool = True  # make the chosen experts' weights sum to 1
    load_balance_weight: float = 0.01  # coefficient of the load-balancing loss

    def __post_init__(self) -> None:
        check_size("num_experts", self.num_experts)
        check_size("experts_per_token", self.experts_per_token)
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                "experts_per_token must not exceed num_experts; got "
                f"experts_per_token={self.experts_per_token}, num_experts={self.num_experts}"
            )
        check_flag("renormalize", self.renormalize)
        if self.load_balance_weight != 0:
            check_number("load_balance_weight", self.load_balance_weight, above=0)


FeedForward = SwiGLU | MLP | MoE

# Normalisation


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x²) + ε) · g (arXiv:1910.07467)."""

    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_number("eps", self.eps, above=0)


@dataclass(frozen=True)
class LayerNorm:
    """(x − mean) / sqrt(var + ε) · g + b (arXiv:1607.06450)."""

    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        check_number("eps", self.eps, above=0)
        check_flag("bias", self.bias)


@dataclass(frozen=True)
class NoNorm:
    """No normalisation anywhere: an ablation."""


Norm = RMSNorm | LayerNorm | NoNorm


@dataclass(frozen=True)
class Attention:
    """Options of attention beyond the default."""

    qk_norm: bool = False  # RMSNorm over each head's query and key, before the rotation
    sliding_window: int | None = None  # a query sees itself and the window − 1 tokens before it
    bias: Literal["none", "qkv", "all"] = "none"

    def __post_init__(self) -> None:
        check_flag("qk_norm", self.qk_norm)
        if self.sliding_window is not None:
            check_size("sliding_window", self.sliding_window)
        check_choice("bias", self.bias, ("none", "qkv", "all"))
