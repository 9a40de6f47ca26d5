"""What a step with proposals chooses: who at each line of its logits, how, and what is taken.

A request with k proposals has k + 1 lines. Where a draft model proposed and the request draws, its
tokens are chosen by rejection sampling (`speculation.py`); everywhere else as without proposals.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.inference.device_sampling import Chooser, ChooserAhead, to_device
from scratchlm.inference.drafting import Drafted
from scratchlm.inference.sampling import uniform
from scratchlm.inference.speculation import rejection_sample
from scratchlm.inference.step_plan import Plan, Request


def choosers(plan: Plan) -> list[Chooser]:
    """Return who chooses at each line of a step's logits."""
    found: list[Chooser] = []
    for request in plan.choosing:
        if not request.ahead:
            found.append(request)
            continue
        for i in range(1 + request.ahead):
            found.append(ChooserAhead.of(request, request.proposed[:i]))
    return found


def accept(
    requests: list[Request],
    tokens: list[int],
    take: Callable[[Request, int], None],
    count: Callable[[Request, int], None],
) -> dict[Request, int]:
    """Take every request's tokens up to the first that is not the one proposed.

    `take` gives a request the token of a line, `count` is told how many proposals were accepted.
    Return each request's newest token.
    """
    at, newest = 0, {}
    for request in requests:
        proposed, accepted = request.proposed[: request.ahead], 0
        for i, token in enumerate(tokens[at : at + 1 + len(proposed)]):
            take(request, at + i)
            newest[request] = token
            if request.ended or proposed[i : i + 1] != [token]:
                break
            accepted += 1
        at += 1 + len(proposed)
        if proposed and request.speculator is not None:
            request.speculator.learn(len(proposed), accepted)
        if not request.ended:
            count(request, accepted)
    return newest


def verify(
    choosing: list[Request],
    drafted: dict[Request, Drafted],
    tokens: Int[Tensor, " lines"],
    p: Float[Tensor, "lines vocab"],
    numbers: Float[Tensor, " lines"],
) -> Int[Tensor, " lines"]:
    """Choose again, by rejection sampling, for requests that draw and have a draft."""
    lines, proposed, q, accept = [], [], [], []
    at = 0
    for request in choosing:
        if request in drafted and request.row.sampling.temperature:
            draft = drafted[request]
            for i in range(1 + request.ahead):
                lines.append(at + i)
                proposed.append(draft.tokens[i])
                q.append(draft.probabilities[i])
                accept.append(uniform(request.row.seed, request.chosen + i, "accept"))
        at += 1 + request.ahead
    if not lines:
        return tokens
    device = tokens.device
    index = to_device(lines, torch.long, device)
    again = rejection_sample(
        p[index],
        torch.stack(q),
        to_device(proposed, torch.long, device),
        to_device(accept, torch.float64, device),
        numbers[index],
    )
    return tokens.index_copy(0, index, again)
