"""How a token is chosen: the settings, and a counter-based RNG.

Order: bias, repetition, presence, frequency (these shift logits); temperature; top-k, top-p,
min-p, typical (these mask tokens, each applied to the result of the one before).

A draw is a pure function of a row's seed and of how many tokens the row has generated,

    u = hash(seed, step) ∈ [0, 1),    token = the first i with p_0 + … + p_i > u,

so a row's result does not depend on the rest of the batch, on padding, or on the cache, and there
is no RNG state to keep. Probabilities are float64. `device_sampling.py` does it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field


def _check(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {name}={value!r}")
    if math.isfinite(value) and (low < value if open_low else low <= value) and value <= high:
        return
    rule = "must be finite"
    if low > -math.inf:
        rule += f" and {'greater than' if open_low else 'at least'} {low:g}"
    if high < math.inf:
        rule += f" and at most {high:g}"
    raise ValueError(f"{name} {rule}; got {name}={value}")


MIN_TEMPERATURE = 1e-6  # logits divided by less overflow; there it is greedy long since


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults leave the model's distribution as it is."""

    temperature: float = 1.0  # 0: greedy
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    typical: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, low=0)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}; got "
                f"temperature={self.temperature}"
            )
        _check("top_p", self.top_p, low=0, high=1, open_low=True)
        _check("min_p", self.min_p, low=0, high=1)
        _check("typical", self.typical, low=0, high=1, open_low=True)
        _check("repetition_penalty", self.repetition_penalty, low=0, open_low=True)
        _check("presence_penalty", self.presence_penalty)
        _check("frequency_penalty", self.frequency_penalty)
        if self.top_k is not None:
            if isinstance(self.top_k, bool) or not isinstance(self.top_k, int):
                raise TypeError(f"top_k must be a whole number; got top_k={self.top_k!r}")
            if self.top_k < 1:
                raise ValueError(f"top_k must be at least 1; got top_k={self.top_k}")
        for token, bias in self.logit_bias.items():
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"logit_bias must name token ids; got {token!r}")
            if bias != -math.inf:
                _check(f"logit_bias[{token}]", bias)

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits of later ones."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the model's raw logits."""
        return self.temperature == 0 and not self.penalizes and not self.logit_bias

    @property
    def is_simple(self) -> bool:
        """Whether nothing but temperature, top-k and top-p is in use."""
        return not self.penalizes and not self.logit_bias and self.min_p == 0 and self.typical == 1


AS_IS = Sampling()
GREEDY = Sampling(temperature=0.0)


def uniform(seed: int, step: int, use: str = "") -> float:
    """Hash (seed, step) to a number in [0, 1), another for each `use`: 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(f"{seed},{step}{use}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
