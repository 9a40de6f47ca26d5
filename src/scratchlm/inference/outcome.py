"""What a step chose, on its way from the device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scratchlm.inference.device_sampling import Logprobs
from scratchlm.inference.rows import TokenLogprob


class Outcome:
    """Copies of a step's tokens and log-probabilities; `read` waits for them."""

    def __init__(self, tokens: Tensor, logprobs: list[Logprobs]) -> None:
        self._is_there = None
        parts = [
            tokens,
            *(t for found in logprobs for t in (found.chosen, found.ids, found.values)),
        ]
        if tokens.is_cuda:
            parts = [part.to("cpu", non_blocking=True) for part in parts]
            self._is_there = torch.cuda.Event()
            self._is_there.record()
        self._rows = [found.rows for found in logprobs]
        self._parts = parts

    def lists(self) -> list[Any]:
        """Return every row's token; then, of each part, log-probabilities, best ids, and theirs."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return [part.tolist() for part in self._parts]

    def read(self) -> tuple[list[int], dict[int, TokenLogprob]]:
        """Return every row's token, and by row the log-probabilities of those that wanted them."""
        tokens, *parts = self.lists()
        found = {}
        for at, rows in enumerate(self._rows):
            chosen, ids, values = parts[3 * at : 3 * at + 3]
            for row, logprob, row_ids, row_values in zip(rows, chosen, ids, values, strict=True):
                best = tuple(zip(row_ids, row_values, strict=True))
                found[row] = TokenLogprob(tokens[row], logprob, best)
        return tokens, found
