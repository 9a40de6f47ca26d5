"""Speculative decoding: tokens proposed cheaply, verified by the model several at a time.

A step reads a row's newest token and k proposals x₁ … x_k in one pass, which costs little more than
one token where reading the weights is what takes the time. It gives the model's distribution at
k + 1 positions; a token is chosen at each, and those up to the first that is not the one proposed
are taken. arXiv:2211.17192, arXiv:2302.01318.

Prompt lookup proposes what followed the row's last tokens where they stood before. The token is
drawn as without speculation, and a proposal is accepted where it is that token:

    P(accepted) = p(x),    otherwise drawn from p without x:    rejection sampling with q(x) = 1

A draft model proposes x ~ q, its own distribution after the same filters. At every position

    token = x  where u · q(x) < p(x),    otherwise drawn from max(p − q, 0) / Σ max(p − q, 0)

so that P(token) = min(p, q) + (1 − Σ min(p, q)) · max(p − q, 0) / Σ max(p − q, 0) = p. Also the
token behind the last proposal is chosen so, the draft reading one token more. So neither way can a
token depend on how many were proposed at a time, by which request, or whether there was room: it is
a function of the seed, its position, and the tokens before it. A greedy row takes the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.inference.drawing import draw

Speculate = Literal["off", "lookup", "draft"]

# What a proposal costs, as a share of a step, and what may be spent without gain for every token.
COST, ALLOWANCE = 0.25, 0.02
FIRST_CREDIT, MOST_CREDIT = 1.0, 4.0


def rejection_sample(
    p: Float[Tensor, "rows vocab"],
    q: Float[Tensor, "rows vocab"],
    proposed: Int[Tensor, " rows"],
    accept: Float[Tensor, " rows"],
    numbers: Float[Tensor, " rows"],
) -> Int[Tensor, " rows"]:
    """Return tokens of distribution p, given ones drawn from q; both vectors are in [0, 1)."""
    column = proposed[:, None]
    is_accepted = accept * q.gather(1, column)[:, 0] < p.gather(1, column)[:, 0]
    rest = (p - q).clamp(min=0)  # arXiv:2211.17192 eq. in §2.3
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)  # p = q, but for rounding
    return torch.where(is_accepted, proposed, draw(rest, numbers))


class Lookup:
    """Proposes what followed a row's last `NGRAM` tokens where they stood before.

    It keeps account: a proposal costs, an accepted one saves a step, and without gain no more than
    `ALLOWANCE` of the steps is spent. So text that repeats nothing is hardly slowed down.
    """

    NGRAM = 3
    FIRST, MOST = 4, 16  # proposals at a time

    def __init__(self) -> None:
        self.length, self.credit = self.FIRST, FIRST_CREDIT
        self._after: dict[tuple[int, ...], int] = {}  # an n-gram: where what followed it begins
        self._indexed = self.NGRAM  # ends of n-grams before this are known
        self._paid = -1  # up to this length there was an allowance

    def propose(self, ids: Sequence[int]) -> list[int]:
        """Return proposals to follow `ids`, which has grown at its end since the last call."""
        at = self._find(ids)
        most = min(self.length, int(self.credit / COST))
        if at is None or most < 1:
            return []
        period = len(ids) - at  # where the text ends it is assumed to repeat itself
        return [ids[at + i % period] for i in range(most)]

    def may_propose(self, ids: Sequence[int]) -> bool:
        """Whether it proposes something here; the host need not wait for the newest token if not.

        Where that token is not yet known, a match is found one token late.
        """
        return self._find(ids) is not None and self.credit >= COST

    def _find(self, ids: Sequence[int]) -> int | None:
        """Return where what followed the last tokens before begins, and count what is new."""
        if self._paid >= 0:
            self.credit = min(self.credit + ALLOWANCE * (len(ids) - self._paid), MOST_CREDIT)
        self._paid = len(ids)
        after, n = self._after, self.NGRAM
        for end in range(self._indexed, len(ids)):
            after[tuple(ids[end - n : end])] = end
        self._indexed = max(self._indexed, len(ids))
        return after.get(tuple(ids[-n:]))

    def learn(self, proposed: int, accepted: int) -> None:
        """Take into account how many of the proposals were accepted."""
        self.credit = min(self.credit - COST * proposed + accepted, MOST_CREDIT)
        if accepted == proposed:
            self.length = min(2 * self.length, self.MOST)
        else:
            self.length = max(accepted, 2)


class DraftLength:
    """How many tokens a draft model proposes at a time: more while all are accepted."""

    def __init__(self, most: int) -> None:
        self.length, self.most = min(2, most), most

    def may_propose(self, ids: Sequence[int]) -> bool:
        """Whether it proposes something here: always."""
        return True

    def learn(self, proposed: int, accepted: int) -> None:
        """Take into account how many of the proposals were accepted."""
        if accepted == proposed:
            self.length = min(self.length + 2, self.most)
        else:
            self.length = max(self.length - 1, 1)
