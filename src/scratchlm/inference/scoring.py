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
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.config import ModelConfig
from scratchlm.inference.device_sampling import Logprobs, to_device
from scratchlm.inference.outcome import Outcome
from scratchlm.inference.rows import Generation, Piece, Row, TokenLogprob
from scratchlm.inference.sampling import AS_IS

if TYPE_CHECKING:
    from scratchlm.inference.engine import Engine
    from scratchlm.inference.step_plan import Request

Scoring = list[tuple[int, "Request", int]]  # which of the logits, whose, of which target
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
    def of(cls, result: Generation) -> Likelihood:
        """Take what a scored request came back with."""
        found = result.logprobs or []
        return cls(
            tuple(result.token_ids),
            tuple(one.logprob for one in found),
            tuple(one.best for one in found),
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
            found[i] = Likelihood.of(handle.result())
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

    def take(self, token: int, logprob: TokenLogprob | None) -> Piece:
        """Count the next token as scored."""
        self.targets = self.targets[1:]
        return Piece(self.index, token, "", logprob, None if self.targets else "length")


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


def rows_that_choose(scoring: Scoring, num_logits: int) -> list[int]:
    """Return which logits are those of rows that choose a token."""
    scored = {at for at, _, _ in scoring}
    return [at for at in range(num_logits) if at not in scored]


def score_logits(logits: Float[Tensor, "rows vocab"], scoring: Scoring) -> Outcome:
    """Return the log-probabilities of a step's targets, on their way to the host."""
    wanted = [request.targets[of] for _, request, of in scoring if request.targets is not None]
    targets = to_device(wanted, torch.long, logits.device)
    groups: dict[int, list[int]] = {}  # on ties, the best n are not the first of the best m
    for row, (_, request, _) in enumerate(scoring):
        groups.setdefault(request.num_logprobs or 1, []).append(row)
    found = []
    for most, rows in groups.items():
        own, own_targets = logits, targets
        if len(rows) < len(logits):
            own = logits[to_device([scoring[row][0] for row in rows], torch.long, logits.device)]
            own_targets = targets[to_device(rows, torch.long, logits.device)]
        size = max(1, _AT_ONCE[logits.is_cuda] // logits.shape[-1])
        parts = map(partial(_score, most=most), own.split(size), own_targets.split(size))
        chosen, ids, values = (torch.cat(part) for part in zip(*parts, strict=True))
        found.append(Logprobs(rows, chosen, ids, values))
    return Outcome(targets, found)


def _score(
    logits: Float[Tensor, "rows vocab"], targets: Int[Tensor, " rows"], most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the targets' log-probabilities, and the best `most` tokens with theirs."""
    top, argmax = logits.max(dim=-1, keepdim=True)  # the lowest id on ties
    best, ids = (top, argmax) if most == 1 else logits.topk(most, dim=-1)
    largest = logits.softmax(dim=-1, dtype=torch.float32).gather(1, argmax).double().log()
    chosen = logits.gather(1, targets[:, None])
    of_chosen, of_best = (x.double() - top.double() + largest for x in (chosen, best))
    return of_chosen[:, 0], ids, of_best
