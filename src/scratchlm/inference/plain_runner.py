"""The model itself as a runner: every row of a step alone, its keys gathered from its pages.

For models that no runner of `accelerate/` takes: hooked, replaced, with user-provided ops, mixtures
of experts, sliding windows. A row's numbers cannot depend on its neighbours, as they are not in the
same forward; and a prompt is read in pieces that end at multiples of `chunk`, however much of it a
step holds, so that neither the scheduling nor pages found from another request change a bit.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.model import KVCache, TransformerLM
from scratchlm.paged import LAST, PagedCache, Step

CHUNK_CPU, CHUNK_GPU = 64, 512  # tokens for which reading the weights once more hardly counts


class _PagedRow(KVCache):
    """One row's pages, as the cache that a model's forward takes."""

    def __init__(
        self, cache: PagedCache, pages: Int[Tensor, " pages"], newest: int, length: int
    ) -> None:
        """Take the row's pages on the device, the last of them also as a number."""
        self.pool, self.pages, self.newest, self.length = cache, pages, newest, length
        self.batch_size, self.capacity = 1, len(pages) * cache.page_size
        self._slots = self._real = None

    def reserve(self, seq: int, valid: Tensor | None = None) -> None:
        assert valid is None, "a row of pages has no padding"
        self._next_length = self.length + seq
        self._page: Tensor | int = self.newest
        self._offset: Tensor | int = self.length % self.pool.page_size
        if seq > 1:
            at = torch.arange(self.length, self._next_length, device=self.pages.device)
            self._page = self.pages[at // self.pool.page_size]
            self._offset = at % self.pool.page_size

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        every = []
        for kept, new in ((self.pool.keys[layer], keys), (self.pool.values[layer], values)):
            # (pages, kv_heads, page_size, d) at (seq,) pages and offsets: (seq, kv_heads, d)
            kept[self._page, :, self._offset] = new[0].transpose(0, 1).squeeze(0).to(kept.dtype)
            rows = kept.transpose(0, 1).index_select(1, self.pages)  # (kv_heads, pages, size, d)
            every.append(rows.flatten(1, 2)[None, :, : self._next_length])
        return every[0], every[1]

    def advance(self) -> None:
        self.length = self._next_length


class PlainRunner:
    """Reads steps by the model's own forward."""

    def __init__(self, model: TransformerLM, cache: PagedCache, chunk: int | None = None) -> None:
        self.model, self.cache = model, cache
        on_cpu = cache.keys.device.type == "cpu"
        self.chunk = chunk or (CHUNK_CPU if on_cpu else CHUNK_GPU)

    def run(
        self, step: Step, tables: Int[Tensor, "slots max_pages"], last: Int[Tensor, " slots"]
    ) -> Float[Tensor, "choosing vocab"]:
        """Write the keys and values of the new tokens; return logits of the rows that choose."""
        logits, at = [], 0
        for count, start, slot, chooses in zip(
            step.counts, step.starts, step.slots, step.chooses, strict=True
        ):
            tokens = step.tokens[at : at + count]
            at += count
            hidden = self._read(tokens, start, tables[slot], last[slot : slot + 1])
            if chooses:
                logits.append(self.model.lm_head(hidden[:, -1]))
        if not logits:
            return last.new_empty((0, self.model.config.vocab_size), dtype=self.cache.keys.dtype)
        return torch.cat(logits)

    def _read(
        self, tokens: list[int], start: int, table: Int[Tensor, " max_pages"], last: Tensor
    ) -> Float[Tensor, "1 piece d_model"]:
        """Read one row's new tokens, piece by piece; return the hidden states of the last piece."""
        device, size = last.device, self.cache.page_size
        ids = last if tokens == [LAST] else torch.tensor(tokens, device=device)
        num_pages = -(-(start + len(tokens)) // size)
        pages = table[:num_pages].to(device, torch.long)
        done = 0
        while True:
            end = min((start // self.chunk + 1) * self.chunk - start, len(tokens) - done)
            needed = -(-(start + end) // size)
            row = _PagedRow(self.cache, pages[:needed], int(table[needed - 1]), start)
            hidden = self.model.hidden(ids[None, done : done + end], cache=row)
            start, done = start + end, done + end
            if done == len(tokens):
                return hidden
