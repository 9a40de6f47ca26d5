"""What proposes tokens for an engine's requests: a draft model, their own text, or nothing.

Before a step it is said how much is proposed (`propose`); a draft model says what once the step is
laid out (`draft`). `speculation.py` has the rule by which proposals are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxtyping import Int
from torch import Tensor

from scratchlm.inference.drafting import Drafted, Drafter
from scratchlm.inference.speculation import DraftLength, Lookup, Speculate
from scratchlm.inference.step_plan import Plan, Request
from scratchlm.paged import Runner


def why_not_verified(runner: Runner) -> str | None:
    """Return why nothing is proposed for steps of a runner, or None where it verifies proposals."""
    if getattr(runner, "verifies", True):
        return None
    return "the model's own forward reads proposals one by one, for the same bits"


class Proposer:
    """Proposes for requests as each of them says, or as they do by default."""

    def __init__(
        self, drafter: Drafter | None, draft_tokens: int, default: Speculate | None
    ) -> None:
        if draft_tokens < 1:
            raise ValueError(f"draft_tokens must be at least 1; got draft_tokens={draft_tokens}")
        self.drafter, self.draft_tokens = drafter, draft_tokens
        self.default = self._checked(default or ("draft" if drafter else "off"))
        self._is_used = False  # whether any request ever speculated

    def _checked(self, speculate: Speculate) -> Speculate:
        if speculate not in ("off", "lookup", "draft"):
            raise ValueError(f"speculate must be one of off, lookup, draft; got {speculate!r}")
        if speculate == "draft" and self.drafter is None:
            raise ValueError("speculate='draft' needs a draft model; got none")
        return speculate

    def speculator(self, speculate: Speculate | None) -> Lookup | DraftLength | None:
        """Return what decides how much is proposed for a new request."""
        match self._checked(speculate or self.default):
            case "lookup":
                found: Lookup | DraftLength = Lookup()
            case "draft":
                found = DraftLength(self.draft_tokens)
            case _:
                return None
        self._is_used = True
        return found

    def propose(
        self, running: Sequence[Request], runner: Runner, catch_up: Callable[[], None]
    ) -> bool:
        """Say what is to be verified of the requests that speculate; return whether anything is.

        `catch_up` reads all chosen tokens: proposals follow the newest.
        """
        if not self._is_used:
            return False
        rows = [r for r in running if r.speculator is not None and r.is_decoding]
        if not any(r.speculator.may_propose(r.row.ids) for r in rows if r.speculator):
            return False
        catch_up()
        if why_not_verified(runner) is not None:
            return False
        for request in rows:
            if request.ended or request.speculator is None:
                continue
            if isinstance(request.speculator, Lookup):
                request.proposed = request.speculator.propose(request.row.ids)
                request.ahead = len(request.proposed)
            else:
                request.ahead = request.speculator.length
        return any(request.ahead for request in rows)

    def draft(
        self, plan: Plan, tables: Int[Tensor, "slots max_pages"], last: Int[Tensor, " slots"]
    ) -> dict[Request, Drafted]:
        """Let a draft model read a step and write its proposals into it."""
        return {} if self.drafter is None else self.drafter.draft(plan, tables, last)
