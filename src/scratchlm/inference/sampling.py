"""From logits to one token: the filters in order, and a draw by a counter-based RNG.

Order: bias, repetition, presence, frequency (these shift logits); temperature; top-k, top-p,
min-p, typical (these mask tokens, each applied to the result of the one before).

A draw is a pure function of a row's seed and of how many tokens the row has generated,

    u = hash(seed, step) ∈ [0, 1),    token = the first i with p_0 + … + p_i > u,

so a row's result does not depend on the rest of the batch, on padding, or on the cache, and there
is no RNG state to keep. Probabilities are float64.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inference import filters


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


AS_IS = Sampling()
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Seen:
    """Token counts of each row's prompt and of its answer."""

    prompt: filters.Counts
    answer: filters.Counts

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Seen:
        """Count the prompts' tokens; all answers are empty."""
        prompt = torch.zeros(len(prompts), vocab_size, dtype=torch.long, device=device)
        for row, ids in zip(prompt, prompts, strict=True):
            row += torch.tensor(ids, device=device).bincount(minlength=vocab_size)
        return cls(prompt, torch.zeros_like(prompt))

    def add(self, tokens: Sequence[int]) -> None:
        """Count one more token of every answer."""
        column = torch.tensor(tokens, device=self.answer.device)[:, None]
        self.answer.scatter_add_(1, column, torch.ones_like(column))

    def rows(self, rows: Sequence[int]) -> Seen:
        """Keep these rows."""
        index = torch.tensor(rows, device=self.prompt.device)
        return Seen(self.prompt[index], self.answer[index])


def filtered(
    logits: Float[Tensor, "batch vocab"], sampling: Sampling, seen: Seen | None = None
) -> Float[Tensor, "batch vocab"]:
    """Apply every filter that is on, in the order above; masked tokens come out as −∞."""
    x = filters.logit_bias(logits.double(), sampling.logit_bias)
    if sampling.penalizes:
        if seen is None:
            raise ValueError("penalties need the tokens seen so far; got none")
        if sampling.repetition_penalty != 1:
            seen_mask = (seen.prompt + seen.answer) > 0
            x = filters.repetition_penalty(x, seen_mask, sampling.repetition_penalty)
        if sampling.presence_penalty != 0:
            x = filters.presence_penalty(x, seen.answer, sampling.presence_penalty)
        if sampling.frequency_penalty != 0:
            x = filters.frequency_penalty(x, seen.answer, sampling.frequency_penalty)
    x = filters.temperature(x, sampling.temperature)
    if sampling.top_k is not None:
        x = filters.top_k(x, sampling.top_k)
    if sampling.top_p < 1:
        x = filters.top_p(x, sampling.top_p)
    if sampling.min_p > 0:
        x = filters.min_p(x, sampling.min_p)
    if sampling.typical < 1:
        x = filters.typical(x, sampling.typical)
    return x


def uniform(seed: int, step: int) -> float:
    """Hash (seed, step) to a number in [0, 1): 53 bits of BLAKE2b."""
    digest = hashlib.blake2b(f"{seed},{step}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(probability: Float[Tensor, "batch vocab"], numbers: Sequence[float]) -> list[int]:
    """Invert each row's CDF at its number in [0, 1)."""
    cdf = probability.double().cumsum(dim=-1)
    total = cdf[:, -1:]
    target = torch.tensor(numbers, dtype=torch.float64, device=total.device)[:, None] * total
    # Rounding must not carry the target to the total: there is no token beyond it.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    chosen: list[int] = torch.searchsorted(cdf, target, right=True)[:, 0].tolist()
    return chosen


def sample(
    logits: Float[Tensor, "batch vocab"],
    sampling: Sampling,
    numbers: Sequence[float],
    seen: Seen | None = None,
) -> list[int]:
    """Choose one token for every row; `numbers` are the rows' draws from `uniform`."""
    if sampling.is_plain_greedy:
        return _argmax(logits)
    x = filtered(logits, sampling, seen)
    if sampling.temperature == 0:
        return _argmax(x)
    probability = x.softmax(dim=-1)
    if not bool(probability.isfinite().all()):
        raise ValueError(_NO_VALID_TOKEN)
    return draw(probability, numbers)


_NO_VALID_TOKEN = (
    "the logits leave nothing to choose from: one is NaN or +∞, or every token is forbidden"
)


def _argmax(logits: Float[Tensor, "batch vocab"]) -> list[int]:
    values, ids = logits.max(dim=-1)  # the lowest id on ties; NaN if there is one
    if not all(map(math.isfinite, values.tolist())):
        raise ValueError(_NO_VALID_TOKEN)
    chosen: list[int] = ids.tolist()
    return chosen
