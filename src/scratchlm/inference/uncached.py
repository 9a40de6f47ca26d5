"""Every step from scratch, without keys and values of earlier ones: the same result, slowly."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.model import TransformerLM
from scratchlm.paged import LAST, PagedCache, Step


class UncachedRunner:
    """Reads all of a row's tokens again whenever its next one is to be chosen."""

    def __init__(self, model: TransformerLM, cache: PagedCache) -> None:
        self.model = model
        self._rows: dict[int, list[int]] = {}  # by slot

    def run(
        self, step: Step, tables: Int[Tensor, "slots max_pages"], last: Int[Tensor, " slots"]
    ) -> Float[Tensor, "choosing vocab"]:
        """Return logits of the rows that choose."""
        logits, at = [last.new_empty((0, self.model.config.vocab_size), dtype=torch.float32)], 0
        for count, start, slot, wanted in zip(
            step.counts, step.starts, step.slots, step.num_logits, strict=True
        ):
            tokens = step.tokens[at : at + count]
            at += count
            tokens = [int(last[slot])] if tokens == [LAST] else tokens
            row = self._rows[slot] = [*self._rows.get(slot, [])[:start], *tokens]
            if wanted:
                hidden = self.model.hidden(torch.tensor([row], device=last.device))
                logits.append(self.model.lm_head(hidden[0, -wanted:]))
        return torch.cat(logits[1:] or logits)
