"""From logits to tokens, for rows that each choose in their own way, without asking the device.

    settings = Settings.of(requests, …)             tensors, made when rows come or go
    tokens   = choose(logits, settings, numbers)    −1: nothing left to choose from

Order: bias, repetition, presence, frequency (these shift logits); temperature; top-k, top-p,
min-p, typical (these mask tokens, each applied to the result of the one before). A filter is
applied to the rows that use it. Probabilities are float64; what a row gets does not depend on the
others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scratchlm import acceleration
from scratchlm.inference import filters
from scratchlm.inference.drawing import argmax, draw, draw_rows
from scratchlm.inference.rows import Row
from scratchlm.inference.sampling import Sampling
from scratchlm.paged import Choice

NO_VALID_TOKEN = (
    "the logits leave nothing to choose from: one is NaN or +∞, or every token is forbidden"
)
Logits = Float[Tensor, "rows vocab"]
Tokens = Int[Tensor, " rows"]


class Chooser(Protocol):
    """Whoever chooses: a row with its sampling, and how many top log-probabilities it wants."""

    @property
    def row(self) -> Row | Ahead:
        """Tokens so far, and the sampling."""

    @property
    def num_logprobs(self) -> int | None:
        """How many; None: not even the chosen token's."""


@dataclass(frozen=True, eq=False)
class Ahead:
    """A row with some proposals behind its tokens, as far as choosing goes."""

    sampling: Sampling
    num_prompt: int
    ids: Sequence[int]


@dataclass(frozen=True)
class ChooserAhead:
    """Chooses the token behind some proposals of a row."""

    row: Ahead
    num_logprobs: int | None

    @classmethod
    def of(cls, chooser: Chooser, proposed: Sequence[int]) -> ChooserAhead:
        """Let a row choose behind these proposals; only penalties look at them."""
        row = chooser.row
        ids = [*row.ids, *proposed] if row.sampling.penalizes else ()
        return cls(Ahead(row.sampling, row.num_prompt, ids), chooser.num_logprobs)


@dataclass(frozen=True)
class Use:
    """A filter's values, for the rows that use it."""

    rows: Int[Tensor, " some"] | None  # None: all
    value: Tensor  # (some, 1)

    def apply(self, x: Tensor, do: Callable[..., Tensor], *more: Any) -> Tensor:
        """Filter the rows that use it, and leave the others."""
        if self.rows is None:
            return do(x, *more, self.value)
        return x.index_copy(0, self.rows, do(x[self.rows], *more, self.value))


@dataclass(frozen=True)
class Seen:
    """Which tokens a penalised row has read and how often it has written each."""

    rows: Int[Tensor, " some"]
    prompt: Bool[Tensor, "some vocab"]
    answer: Int[Tensor, "some vocab"]
    by_row: dict[Row | Ahead, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, tokens: Tokens) -> None:
        """Count what these rows have just written."""
        column = tokens[self.rows].clamp(min=0)[:, None]
        self.answer.scatter_add_(1, column, torch.ones_like(column, dtype=self.answer.dtype))


@dataclass(frozen=True)
class Settings:
    """How each row of a step chooses, on the device."""

    is_greedy: bool  # every row takes the argmax of its raw logits
    is_simple: bool  # nothing but temperature, top-k and top-p
    draws: bool  # whether any row draws
    samplings: list[Sampling]
    temperature: Float[Tensor, " rows"]  # 0: greedy
    top_k: Int[Tensor, " rows"]  # the vocabulary's size: all
    top_p: Float[Tensor, " rows"]
    largest_k: int
    some_fused: bool  # whether one kernel may choose for some rows
    not_fused: Bool[Tensor, " rows"] | None  # those it does not choose for; None: none
    fused_k: Int[Tensor, " rows"]  # top-k, or 1 for those
    greedy: Bool[Tensor, " rows"] | None  # rows at temperature 0; None: none
    divisor: Float[Tensor, "rows 1"]  # the temperature, 1 for greedy rows
    bias: tuple[Tensor, Tensor, Tensor] | None  # row, token, what is added
    seen: Seen | None
    uses: dict[str, Use]
    logprobs: list[tuple[int, list[int], Int[Tensor, " some"]]]  # how many besides, for which rows

    @classmethod
    def of(
        cls,
        choosers: Sequence[Chooser],
        vocab_size: int,
        device: torch.device,
        before: Settings | None = None,
    ) -> Settings:
        """Gather the settings of rows; counts of tokens are carried on from `before`."""
        samplings = [chooser.row.sampling for chooser in choosers]
        zero = [s.temperature == 0 for s in samplings]
        tensor = _Maker(device)
        temperatures = [s.temperature for s in samplings]
        ks = [min(s.top_k or vocab_size, vocab_size) for s in samplings]
        is_greedy = all(s.is_plain_greedy for s in samplings)
        drawing = [i for i, greedy in enumerate(zero) if not greedy]
        others = [not _is_fused(s, vocab_size) for s in samplings]
        return cls(
            is_greedy=is_greedy,
            is_simple=all(s.is_simple for s in samplings),
            draws=bool(drawing),
            samplings=samplings,
            temperature=tensor(temperatures),
            top_k=tensor(ks, torch.int64),
            top_p=tensor([s.top_p for s in samplings]),
            largest_k=max((ks[i] for i in drawing if ks[i] < vocab_size), default=0),
            some_fused=not all(others),
            not_fused=tensor(others, torch.bool) if any(others) else None,
            fused_k=tensor([1 if o else k for o, k in zip(others, ks, strict=True)], torch.int64),
            greedy=tensor(zero, torch.bool) if any(zero) else None,
            divisor=tensor([[t or 1.0] for t in temperatures]),
            bias=_bias(samplings, tensor),
            seen=_seen(choosers, vocab_size, tensor, before),
            uses=_uses(samplings, drawing, vocab_size, tensor),
            logprobs=_wanted_logprobs(choosers, tensor),
        )


def _is_fused(sampling: Sampling, vocab_size: int) -> bool:
    """Whether one kernel may choose by these settings."""
    if sampling.is_plain_greedy:
        return True
    k = min(sampling.top_k or vocab_size, vocab_size)
    by_k = k <= acceleration.MAX_FUSED_K and k < vocab_size
    return sampling.is_simple and (by_k or (k == vocab_size and sampling.top_p == 1))


def choice_of(choosers: Sequence[Chooser], vocab_size: int) -> Choice | None:
    """Return how rows choose, where temperature, top-k and top-p say it all; no draws yet."""
    samplings = [chooser.row.sampling for chooser in choosers]
    if not all(_is_fused(s, vocab_size) for s in samplings):
        return None
    if any(chooser.num_logprobs is not None for chooser in choosers):
        return None
    return Choice(
        temperature=[s.temperature for s in samplings],
        top_k=[min(s.top_k or vocab_size, vocab_size) for s in samplings],
        top_p=[s.top_p for s in samplings],
        numbers=[0.0] * len(samplings),
    )


class _Maker:
    """Puts lists onto the device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, values: Sequence[Any], dtype: torch.dtype = torch.float64) -> Tensor:
        return to_device(values, dtype, self.device)


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a list as a tensor on a device, without waiting for the device."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _uses(
    samplings: Sequence[Sampling], drawing: list[int], vocab_size: int, tensor: _Maker
) -> dict[str, Use]:
    """Return the filters in use. Penalties have their rows in `Seen`; a greedy row masks none."""
    penalised = [i for i, s in enumerate(samplings) if s.penalizes]
    found: dict[str, Use] = {}

    def use(name: str, rows: list[int], value: Callable[[Sampling], float], every: int) -> None:
        if rows:
            index = None if len(rows) == every else tensor(rows, torch.int64)
            dtype = torch.int64 if name == "top_k" else torch.float64
            found[name] = Use(index, tensor([[value(samplings[i])] for i in rows], dtype))

    def some(test: Callable[[Sampling], bool]) -> list[int]:
        return [i for i in drawing if test(samplings[i])]

    every = len(samplings)
    for name, neutral in (
        ("repetition_penalty", 1),
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
    ):
        if any(getattr(samplings[i], name) != neutral for i in penalised):
            use(name, penalised, lambda s, name=name: getattr(s, name), len(penalised))  # type: ignore[misc]
    use(
        "top_k", some(lambda s: (s.top_k or vocab_size) < vocab_size), lambda s: s.top_k or 0, every
    )
    use("top_p", some(lambda s: s.top_p < 1), lambda s: s.top_p, every)
    use("min_p", some(lambda s: s.min_p > 0), lambda s: math.log(s.min_p), every)
    use("typical", some(lambda s: s.typical < 1), lambda s: s.typical, every)
    return found


def _bias(samplings: Sequence[Sampling], tensor: _Maker) -> tuple[Tensor, Tensor, Tensor] | None:
    named = [(i, t, b) for i, s in enumerate(samplings) for t, b in s.logit_bias.items()]
    if not named:
        return None
    rows, tokens, added = zip(*named, strict=True)
    return tensor(rows, torch.int64), tensor(tokens, torch.int64), tensor(added)


def _seen(
    choosers: Sequence[Chooser], vocab_size: int, tensor: _Maker, before: Settings | None
) -> Seen | None:
    kept = {} if before is None or before.seen is None else before.seen.by_row
    penalised = [i for i, chooser in enumerate(choosers) if chooser.row.sampling.penalizes]
    if not penalised:
        return None
    counts = []
    for i in penalised:
        row = choosers[i].row
        counts.append(kept.get(row) or _count(row, vocab_size, tensor))
    prompt, answer = (torch.stack(part) for part in zip(*counts, strict=True))
    by_row = {
        choosers[i].row: (prompt[at], answer[at]) for at, i in enumerate(penalised)
    }  # views: what is added to the whole is added to them
    return Seen(tensor(penalised, torch.int64), prompt, answer, by_row)


def _count(row: Row | Ahead, vocab_size: int, tensor: _Maker) -> tuple[Tensor, Tensor]:
    prompt, answer = (
        tensor(ids, torch.int64).bincount(minlength=vocab_size)
        for ids in (row.ids[: row.num_prompt], row.ids[row.num_prompt :])
    )
    return prompt > 0, answer


def _wanted_logprobs(
    choosers: Sequence[Chooser], tensor: _Maker
) -> list[tuple[int, list[int], Tensor]]:
    """Group rows by how many they want: on ties, the best n are not the first of the best m."""
    groups: dict[int, list[int]] = {}
    for i, chooser in enumerate(choosers):
        if chooser.num_logprobs is not None:
            groups.setdefault(chooser.num_logprobs, []).append(i)
    return [(best, rows, tensor(rows, torch.int64)) for best, rows in groups.items()]


# Choosing


def choose_into(
    last: Int[Tensor, " slots"],
    slots: Int[Tensor, " rows"],
    logits: Logits,
    settings: Settings,
    numbers: Float[Tensor, " rows"] | None = None,
) -> Tokens:
    """Choose every row's token and write it to its slot; by one kernel, where that can be.

    Which of the two ways a row goes depends on its own settings alone.
    """
    fused = None
    if settings.some_fused:
        p = settings.top_p
        fused = acceleration.choose_tokens(
            logits, settings.temperature, settings.fused_k, p, numbers, slots, last
        )
    if fused is not None and settings.not_fused is None:
        return fused
    tokens = choose(logits, settings, numbers)
    if fused is not None and settings.not_fused is not None:
        tokens = torch.where(settings.not_fused, tokens, fused)
    last.index_copy_(0, slots, tokens.clamp(min=0))
    return tokens


def choose(
    logits: Logits, settings: Settings, numbers: Float[Tensor, " rows"] | None = None
) -> Tokens:
    """Choose every row's token; `numbers` in [0, 1) are its draws, where any row draws."""
    if settings.is_greedy:
        return argmax(logits)
    x = shifted(logits, settings)
    if x.device.type == "cpu":
        return draw_rows(x, settings.samplings, numbers)
    if numbers is None or not settings.draws:
        return argmax(x)
    tokens = draw(masked(x, settings).softmax(dim=-1), numbers)
    return tokens if settings.greedy is None else torch.where(settings.greedy, argmax(x), tokens)


def probabilities(logits: Logits, settings: Settings) -> Logits:
    """Return what every row draws from, after all filters; of a greedy row it means nothing."""
    return masked(shifted(logits, settings), settings).softmax(dim=-1)


def shifted(logits: Logits, settings: Settings) -> Logits:
    """Apply biases and penalties."""
    x, seen, uses = logits.double(), settings.seen, settings.uses
    if settings.bias is not None:
        x = filters.logit_bias(x, *settings.bias)
    if seen is None:
        return x
    y = x[seen.rows]
    if "repetition_penalty" in uses:
        read_or_written = seen.prompt | (seen.answer > 0)
        y = uses["repetition_penalty"].apply(y, filters.repetition_penalty, read_or_written)
    for name in ("presence_penalty", "frequency_penalty"):
        if name in uses:
            y = uses[name].apply(y, getattr(filters, name), seen.answer)
    return x.index_copy(0, seen.rows, y)


def masked(x: Logits, settings: Settings) -> Logits:
    """Divide by the temperature and mask, filter by filter; masked tokens come out as −∞."""
    x, uses = filters.temperature(x, settings.divisor), settings.uses
    if "top_k" in uses:
        x = uses["top_k"].apply(
            x, lambda some, k: filters.top_k(some, k, largest_k=settings.largest_k)
        )
    for name in ("top_p", "min_p", "typical"):
        if name in uses:
            x = uses[name].apply(x, getattr(filters, name))
    return x


# Log-probabilities


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the tokens some rows chose, and of the best of each."""

    rows: list[int]
    chosen: Float[Tensor, " some"]
    ids: Int[Tensor, "some best"]
    values: Float[Tensor, "some best"]


def logprobs(logits: Logits, tokens: Tokens, settings: Settings) -> list[Logprobs]:
    """Return what rows asked for: under the raw distribution, before any filter."""
    found = []
    for best, rows, index in settings.logprobs:
        table = logits[index].double().log_softmax(dim=-1)
        chosen = table.gather(1, tokens[index].clamp(min=0)[:, None])[:, 0]
        values, ids = table.topk(best, dim=-1)
        found.append(Logprobs(rows, chosen, ids, values))
    return found
