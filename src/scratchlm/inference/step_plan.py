"""A request on its way, and a step: whose tokens it reads, and which it chooses or scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scratchlm.inference.pages import Key
from scratchlm.inference.rows import Row
from scratchlm.inference.speculation import DraftLength, Lookup
from scratchlm.paged import LAST, Step


@dataclass(eq=False)
class Request:
    """A row on its way: where its tokens lie, and how far it has been read.

    Counts include tokens that were chosen on the device and not yet read by the host.
    """

    row: Row
    salt: str = ""
    num_logprobs: int | None = None
    targets: Sequence[int] | None = None  # to be scored, not chosen: what follows the last tokens
    slot: int = -1  # −1: not running
    pages: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # of the pages that may be shared
    num_registered: int = 0  # of these, how many can be found by others
    start: int = 0  # of the window: the first token that is still seen
    base: int = 0  # tokens of the window that are read as a prompt
    length: int = 0  # tokens of the window
    computed: int = 0  # of these, how many have keys in the pages
    chosen: int = 0  # tokens of the answer
    on_device: bool = False  # whether the device knows the newest token
    speculator: Lookup | DraftLength | None = None
    ahead: int = 0  # proposals to be verified in the next step
    proposed: list[int] = field(default_factory=list)  # these, where they are known beforehand
    ended: bool = False

    @property
    def is_reading(self) -> bool:
        """Whether some of its prompt is still to be read."""
        return self.computed < self.base

    @property
    def num_context(self) -> int:
        """How many tokens of a prompt may be found: what is after them needs logits."""
        return self.base - (1 if self.targets is None else len(self.targets))

    @property
    def is_decoding(self) -> bool:
        """Whether all but its newest token has been read, and that one comes next."""
        return not self.is_reading and self.slot >= 0 and self.computed == self.length - 1

    @property
    def drafts(self) -> bool:
        """Whether a draft model proposes its tokens."""
        return isinstance(self.speculator, DraftLength)


@dataclass(frozen=True)
class Scored:
    """Logits of a step that score a request's targets: the first of both, and how many."""

    at: int  # among the step's logits
    request: Request
    first: int  # among its targets
    count: int


@dataclass
class Plan:
    """One step, and whose it is."""

    step: Step
    requests: list[Request]  # of each row
    choosing: list[Request]  # the same list again while nobody comes or goes
    scoring: list[Scored]
    is_verified: bool = False  # some of it was proposed: its tokens are looked at before the next


def lay_out(rows: list[tuple[Request, int]]) -> Plan:
    """Lay rows (whose, how many tokens) end to end; proposals are the last of a row's."""
    tokens: list[int] = []
    chooses, num_scored, choosing, scoring = [], [], [], []
    num_logits = 0
    for request, count in rows:
        at, end, ahead = request.computed, request.computed + count, request.ahead
        if request.on_device and at == request.length - 1 and not ahead:
            tokens.append(LAST)
        else:
            first = request.start + at
            tokens += request.row.ids[first : first + count - ahead]
            tokens += (request.proposed or [LAST] * ahead)[:ahead]  # to be drafted
        chooses.append(request.targets is None and end - ahead == request.length)
        num_scored.append(0)
        if chooses[-1]:
            choosing.append(request)
            num_logits += 1 + ahead
        elif request.targets is not None:
            from_target = max(at - request.num_context, 0)
            to_target = max(end - request.num_context, 0)
            num_scored[-1] = to_target - from_target
            if num_scored[-1] > 0:
                scoring.append(Scored(num_logits, request, from_target, num_scored[-1]))
            num_logits += num_scored[-1]
    requests = [request for request, _ in rows]
    step = Step(
        tokens,
        [count for _, count in rows],
        [request.computed for request in requests],
        [request.slot for request in requests],
        chooses,
        [r.ahead for r in requests] if any(r.ahead for r in requests) else [],
        num_scored if scoring else [],
    )
    is_verified = bool(step.num_proposed) or any(r.drafts for r in choosing)
    return Plan(step, requests, choosing, scoring, is_verified)
