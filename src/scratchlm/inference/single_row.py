"""One row on a CPU by a whole-step decoder, over keys in one piece of memory.

Serves where `acceleration.make_runner` has nothing and `make_decoder` has: to be deleted when every
model that a decoder takes has a runner.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm import acceleration
from scratchlm.inference.plain_runner import PlainRunner
from scratchlm.model import TransformerLM
from scratchlm.paged import PagedCache, Runner, Step


def single_row_runner(model: TransformerLM, cache: PagedCache) -> Runner:
    """Return the fastest runner for an engine of one row."""
    found = acceleration.make_runner(model, cache, max_rows=1, exact=False)
    if found is not None:
        return found
    if cache.keys.device.type == "cpu":
        return SingleRowRunner(model, cache)
    return PlainRunner(model, cache)


class SingleRowRunner:
    """Reads prompts by the model, and steps by a decoder where there is one."""

    def __init__(self, model: TransformerLM, cache: PagedCache) -> None:
        self.model = model
        capacity = min(cache.num_pages * cache.page_size, model.config.context_length)
        with torch.inference_mode():
            self._cache = model.new_cache(1, capacity)
            self._decoder = acceleration.make_decoder(model, self._cache)

    def run(
        self, step: Step, tables: Int[Tensor, "slots max_pages"], last: Int[Tensor, " slots"]
    ) -> Float[Tensor, "choosing vocab"]:
        """Write the keys and values of the new tokens; return the logits after them."""
        [start], [chooses] = step.starts, step.chooses
        if start == 0:
            self._cache.reset()
        tokens = step.tokens if step.tokens[0] >= 0 else last.tolist()
        if len(tokens) == 1 and start and self._decoder is not None:
            return self._decoder.step(tokens)
        hidden = self.model.hidden(torch.tensor([tokens]), cache=self._cache)
        return self.model.lm_head(hidden[:, -1:][:, : int(chooses)].flatten(0, 1))
