"""What a step chose, on its way from the device to the host."""

from __future__ import annotations

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

    def read(self) -> tuple[list[int], dict[int, TokenLogprob]]:
        """Return every row's token, and by row the log-probabilities of those that wanted them."""
        if self._is_there is not None:
            self._is_there.synchronize()
        tokens: list[int] = self._parts[0].tolist()
        found = {}
        for at, rows in enumerate(self._rows):
            chosen, ids, values = (t.tolist() for t in self._parts[1 + 3 * at : 4 + 3 * at])
            for row, logprob, row_ids, row_values in zip(rows, chosen, ids, values, strict=True):
                best = tuple(zip(row_ids, row_values, strict=True))
                found[row] = TokenLogprob(tokens[row], logprob, best)
        return tokens, found
