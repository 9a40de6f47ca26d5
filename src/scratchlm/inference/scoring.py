"""How likely given tokens are: log-probabilities of what is there, not of what is chosen.

    ln p(tokens[start:] | tokens[:start]) = Σᵢ ln p(tokens[i] | tokens[:i])

The engine reads the tokens as it reads a prompt, and wants the logits before each that is scored.
`likelihoods` scores many continuations; what they begin with alike is computed once. Of logits x,

    ln p(i) = (xᵢ − max x) − ln Σⱼ e^(xⱼ − max x) = (xᵢ − max x) + ln p(argmax x)

in float64, from the probabilities in float32: a sum of exponentials is exact enough there, and only
the largest of the probabilities is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.config import ModelConfig
from scratchlm.inference.device_sampling import Logprobs, to_device
from scratchlm.inference.outcome import Outcome
from scratchlm.inference.rows import FinishReason, Row, ScoredTokens
from scratchlm.inference.sampling import AS_IS

if TYPE_CHECKING:
    from scratchlm.inference.engine import Engine
    from scratchlm.inference.step_plan import Request, Scored

Ids = Sequence[int]
_AT_ONCE = {False: 1 << 19, True: 1 << 28}  # probabilities, by whether on a GPU


@dataclass(frozen=True)
class Likelihood:
    """A continuation's tokens, their log-probabilities, and the best tokens at each place."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    best: tuple[tuple[tuple[int, float], ...], ...]  # (id, log-probability), at least the best one

    @cached_property
    def total(self) -> float:
        """The log-likelihood: the sum."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would write the continuation."""
        return all(
            token == best[0][0] for token, best in zip(self.token_ids, self.best, strict=True)
        )

    @classmethod
    def of(cls, parts: Sequence[ScoredTokens]) -> Likelihood:
        """Take what a scored request came back with."""
        return cls(
            tuple(chain.from_iterable(part.token_ids for part in parts)),
            tuple(chain.from_iterable(part.logprobs for part in parts)),
            tuple(chain.from_iterable(part.best for part in parts)),
        )


def likelihoods(
    engine: Engine, pairs: Sequence[tuple[Ids, Ids]], num_logprobs: int = 1
) -> list[Likelihood]:
    """Score pairs of a context and its continuation; the best `num_logprobs` tokens come along.

    Contexts that begin alike come after each other. Of a group of contexts the first continuation
    of each is scored first; the others find its pages.
    """
    if num_logprobs < 1:
        raise ValueError(f"num_logprobs must be at least 1; got {num_logprobs}")
    found: list[Likelihood | None] = [None] * len(pairs)
    for group in _groups(pairs, engine.max_rows):
        handles = []
        for i in group:
            context, rest = pairs[i]
            ids = [*context, *rest]
            handles.append((i, engine.submit_score(ids, len(context), num_logprobs=num_logprobs)))
        engine.run()
        for i, handle in handles:
            found[i] = Likelihood.of(handle.scores())
    return [one for one in found if one is not None]


def _groups(pairs: Sequence[tuple[Ids, Ids]], size: int) -> Iterator[list[int]]:
    by_context: dict[tuple[int, ...], list[int]] = {}
    for i, (context, _) in enumerate(pairs):
        by_context.setdefault(tuple(context), []).append(i)
    members = [by_context[context] for context in sorted(by_context)]
    for first in range(0, len(members), size):
        group = members[first : first + size]
        yield [one[0] for one in group] + [i for one in group for i in one[1:]]


# For the engine


class ScoredRow(Row):
    """A row whose next tokens are known."""

    def __init__(self, ids: Ids, start: int) -> None:
        super().__init__(
            0, ids[:-1], limit=1, seed=0, sampling=AS_IS, tokenizer=None, stop=(), eos_ids=()
        )
        self.targets = ids[start:]

    def take_scores(
        self, tokens: Ids, logprobs: Sequence[float], ids: Sequence[Ids], values: Any
    ) -> ScoredTokens:
        """Count the next tokens as scored."""
        self.targets = self.targets[len(tokens) :]
        reason: FinishReason | None = None if self.targets else "length"
        return ScoredTokens(self.index, tokens, logprobs, ids, values, reason)


def scored_row(tokens: Ids, start: int, config: ModelConfig) -> ScoredRow:
    """Return the row that scores the tokens from `start` on; the last of them is not read."""
    ids = list(tokens)
    if not 1 <= start < len(ids):
        raise ValueError(
            f"scored tokens must have one before them; got start={start} of {len(ids)} tokens"
        )
    if len(ids) - 1 > config.context_length:
        raise ValueError(
            f"tokens to be scored must fit context_length={config.context_length} and one more; "
            f"got {len(ids)}"
        )
    for token in ids:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"token id must lie in [0, {config.vocab_size}); got {token}")
    return ScoredRow(ids, start)


class UnreadScores(NamedTuple):
    """Log-probabilities of a step's targets on their way to the host, and whose they are."""

    scoring: list[Scored]
    outcome: Outcome

    def read(self) -> Iterator[tuple[Request, Any]]:
        """Wait for them; give out, of each request, tokens, log-probabilities and the best."""
        columns, at = self.outcome.lists(), 0
        for one in self.scoring:
            yield one.request, [column[at : at + one.count] for column in columns]
            at += one.count


def rows_that_choose(scoring: list[Scored], num_logits: int) -> list[int]:
    """Return which logits are those of rows that choose a token."""
    scored = set(_lines(scoring))
    return [at for at in range(num_logits) if at not in scored]


def score_logits(logits: Float[Tensor, "rows vocab"], scoring: list[Scored]) -> list[UnreadScores]:
    """Send the log-probabilities of a step's targets on their way to the host."""
    groups: dict[int, list[Scored]] = {}  # on ties, the best n are not the first of the best m
    for one in scoring:
        groups.setdefault(one.request.num_logprobs or 1, []).append(one)
    found = []
    size = max(1, _AT_ONCE[logits.is_cuda] // logits.shape[-1])
    for most, own in groups.items():
        wanted: list[int] = []
        for one in own:
            wanted += (one.request.targets or ())[one.first : one.first + one.count]
        targets = to_device(wanted, torch.long, logits.device)
        rows = logits
        if len(wanted) < len(logits):
            rows = logits[to_device(list(_lines(own)), torch.long, logits.device)]
        parts = map(partial(_score, most=most), rows.split(size), targets.split(size))
        chosen, ids, values = (torch.cat(part) for part in zip(*parts, strict=True))
        found.append(UnreadScores(own, Outcome(targets, [Logprobs([], chosen, ids, values)])))
    return found


def _lines(scoring: list[Scored]) -> Iterator[int]:
    return chain.from_iterable(range(one.at, one.at + one.count) for one in scoring)


def _score(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, " rows"], most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the targets' log-probabilities, and the best `most` tokens with theirs."""
    top, argmax = logits.max(dim=-1, keepdim=True)  # the lowest id on ties
    best, ids = (top, argmax) if most == 1 else logits.topk(most, dim=-1)
    if most > 1:  # on ties the first is still the argmax, which greedy decoding chooses
        ids = torch.where(ids == argmax, ids[:, :1], ids)
        ids[:, :1] = argmax
    largest = logits.softmax(dim=-1, dtype=torch.float32).gather(1, argmax).double().log()
    chosen = logits.gather(1, targets[:, None])
    of_chosen, of_best = (x.double() - top.double() + largest for x in (chosen, best))
    return of_chosen[:, 0], ids, of_best
