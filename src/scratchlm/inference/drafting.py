"""The draft model of an engine: reads what the model reads, and proposes what comes next.

Its keys lie in pages of the same numbers, in a cache of its own: a page that is found, shared or
given up for the model is so for the draft. In a step it reads the same tokens, without proposals;
then, token by token, what it proposes itself, one token farther than the model is to verify: so it
has a distribution at every position where a token is chosen, and the keys of all that is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm import acceleration
from scratchlm.config import ModelConfig
from scratchlm.inference.device_sampling import Settings, choose, probabilities, to_device
from scratchlm.inference.drawing import draw
from scratchlm.inference.plain_runner import PlainRunner
from scratchlm.inference.sampling import uniform
from scratchlm.inference.step_plan import Plan, Request
from scratchlm.model import TransformerLM
from scratchlm.paged import LAST, PagedCache, Runner, Step


@dataclass
class Drafted:
    """What the draft proposes for one request, position by position."""

    tokens: list[int] = field(default_factory=list)
    probabilities: list[Float[Tensor, " vocab"]] = field(default_factory=list)  # if it draws


class Drafter:
    """Reads steps of a draft model beside those of the model."""

    def __init__(
        self,
        model: TransformerLM,
        cache: PagedCache,
        *,
        max_rows: int,
        exact: bool,
        accelerate: bool,
    ) -> None:
        self.model, self.cache = model, cache
        self.plain = PlainRunner(model, cache, exact=exact)
        found = None
        if accelerate:
            found = acceleration.make_runner(model, cache, max_rows=max_rows, exact=exact)
        self.runner: Runner = self.plain if found is None else found
        device = model.token_embeddings.weight.device
        self.last = torch.zeros(max_rows, dtype=torch.long, device=device)

    @property
    def chunk(self) -> int | None:
        """Where pieces of prompts end, if that matters to its runner."""
        return getattr(self.runner, "chunk", None)

    def draft(
        self, plan: Plan, tables: Int[Tensor, "slots max_pages"], last: Int[Tensor, " slots"]
    ) -> dict[Request, Drafted]:
        """Read a step's tokens and propose; write the proposals into the step."""
        runner = self.runner if getattr(self.runner, "unchanged", True) else self.plain
        self.last.copy_(last)
        step = _without_proposals(plan)
        if step is None:
            return {}
        rows = [r for r in plan.choosing if r.drafts]
        logits = runner.run(step, tables, self.last)
        found = {request: Drafted() for request in rows}
        ahead = {request: request.ahead for request in rows}
        settings: Settings | None = None
        drawn: list[tuple[list[Request], Tensor]] = []
        depth = 0
        while rows:
            if settings is None or len(rows) < len(drawn[-1][0]):
                settings = Settings.of(rows, logits.shape[-1], logits.device, settings)
            tokens = self._choose(rows, depth, logits, settings, found)
            drawn.append((rows, tokens))
            slots = to_device([r.slot for r in rows], torch.long, tokens.device)
            self.last.index_copy_(0, slots, tokens.clamp(min=0))
            depth += 1
            rows = [r for r in rows if ahead[r] >= depth]
            if rows:
                logits = runner.run(_next_step(rows, depth), tables, self.last)
        for several, tokens in drawn:
            for request, token in zip(several, tokens.tolist(), strict=True):
                found[request].tokens.append(max(token, 0))
        _write_proposals(plan, found)
        return found

    def _choose(
        self,
        rows: list[Request],
        depth: int,
        logits: Tensor,
        settings: Settings,
        found: dict[Request, Drafted],
    ) -> Int[Tensor, " rows"]:
        if not settings.draws:
            tokens = choose(logits, settings)
        else:
            draws = [uniform(r.row.seed, r.chosen + depth, "draft") for r in rows]
            q = probabilities(logits, settings)
            tokens = draw(q, to_device(draws, torch.float64, logits.device))
            if settings.greedy is not None:
                tokens = torch.where(settings.greedy, choose(logits, settings), tokens)
            for request, one in zip(rows, q, strict=True):
                found[request].probabilities.append(one)
        if settings.seen is not None:
            settings.seen.add(tokens)
        return tokens


def check_draft(draft: TransformerLM, config: ModelConfig, device: torch.device) -> None:
    """Refuse a draft whose tokens or positions are not the model's."""
    for name in ("vocab_size", "context_length"):
        mine, its = getattr(draft.config, name), getattr(config, name)
        if mine != its if name == "vocab_size" else mine < its:
            rule = "equal" if name == "vocab_size" else "be at least"
            raise ValueError(f"the draft's {name} must {rule} the model's {its}; got {mine}")
    its_device = draft.token_embeddings.weight.device
    if its_device != device:
        raise ValueError(f"the draft must be on {device}, like the model; got {its_device}")


def _without_proposals(plan: Plan) -> Step | None:
    """Return what the draft reads of a step: prompts, and all of the rows that it drafts for."""
    step, at = plan.step, 0
    made = Step([], [], [], [], [])
    for i, (request, count) in enumerate(zip(plan.requests, step.counts, strict=True)):
        if request.is_reading or request.drafts:
            known = count - request.ahead
            made.tokens.extend(step.tokens[at : at + known])
            made.counts.append(known)
            made.starts.append(step.starts[i])
            made.slots.append(step.slots[i])
            made.chooses.append(step.chooses[i] and request.drafts)
        at += count
    return made if made.counts else None


def _next_step(rows: list[Request], depth: int) -> Step:
    """Return a step that reads what these rows have proposed last."""
    starts = [request.length - 1 + depth for request in rows]
    slots = [request.slot for request in rows]
    return Step([LAST] * len(rows), [1] * len(rows), starts, slots, [True] * len(rows))


def _write_proposals(plan: Plan, found: dict[Request, Drafted]) -> None:
    end = 0
    for request, count in zip(plan.requests, plan.step.counts, strict=True):
        end += count
        if request.drafts and request.ahead:
            request.proposed = found[request].tokens[: request.ahead]
            plan.step.tokens[end - request.ahead : end] = request.proposed
