"""Which tokens a step chooses: what rows ask for is gathered once, while the rows are the same."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.inference.device_sampling import (
    Settings,
    choice_of,
    choose_into,
    logprobs,
    probabilities,
    to_device,
)
from scratchlm.inference.drafting import Drafted
from scratchlm.inference.outcome import Outcome
from scratchlm.inference.sampling import uniform
from scratchlm.inference.scheduler import Plan, Request
from scratchlm.inference.verifying import choosers, verify
from scratchlm.paged import Choice


class TokenChooser:
    """Chooses the next token of every row of a step, and writes it to the row's slot of `last`."""

    def __init__(self, last: Int[Tensor, " slots"], vocab_size: int) -> None:
        self.last, self.vocab_size = last, vocab_size
        self._requests: list[Request] | None = None  # whose settings these are:
        self._settings: Settings | None = None
        self._slots = last[:0]
        self._choice_requests: list[Request] | None = None  # whose choice this is:
        self._choice: Choice | None = None

    def choose(
        self, plan: Plan, logits: Float[Tensor, "lines vocab"], drafted: dict[Request, Drafted]
    ) -> Outcome:
        """Choose from logits, on their device."""
        requests, device = plan.choosing, logits.device
        if requests is not self._requests:
            every = choosers(plan)
            self._settings = Settings.of(every, logits.shape[-1], device, self._settings)
            self._requests = requests
            slots = [r.slot for r in requests for _ in range(1 + r.ahead)]
            self._slots = to_device(slots, torch.long, device)
        settings = self._settings
        assert settings is not None
        numbers = None
        if settings.draws:
            draws = [
                uniform(r.row.seed, r.chosen + i) for r in requests for i in range(1 + r.ahead)
            ]
            numbers = to_device(draws, torch.float64, device)
        tokens = choose_into(self.last, self._slots, logits, settings, numbers)
        if drafted and numbers is not None:
            tokens = verify(requests, drafted, tokens, probabilities(logits, settings), numbers)
        if settings.seen is not None:
            settings.seen.add(tokens)
        wanted = logprobs(logits, tokens, settings) if settings.logprobs else []
        return Outcome(tokens, wanted)

    def choice(self, requests: list[Request], draws: bool) -> Choice | None:
        """Return how these requests choose, where a runner, which `draws` or not, can choose so."""
        if requests is not self._choice_requests:
            self._choice_requests = requests
            self._choice = choice_of(requests, self.vocab_size)
        made = self._choice
        if made is None or not made.draws:
            return made
        if not draws:
            return None
        return replace(made, numbers=[uniform(r.row.seed, r.chosen) for r in requests])
