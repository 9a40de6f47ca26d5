"""The model itself as a runner: every row of a step alone, its keys gathered from its pages.

For models that no runner of `accelerate/` takes: hooked, replaced, with user-provided ops or blocks
with post-norms; on a GPU mixtures of experts. A row's numbers cannot depend on its neighbours, as
they are not in the same forward; and a prompt is read in pieces that end at multiples of `chunk`,
however much of it a step holds, so that neither the scheduling nor pages found from another request
change a bit. Where bits count (`one_by_one`), proposals are read one by one, as they would be
without speculation.
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
        pool = self.pool
        new = (x[0].transpose(0, 1).squeeze(0) for x in (keys, values))  # (seq, kv_heads, d)
        kept = (pool.keys[layer], pool.values[layer])
        if pool.key_scales is None or pool.value_scales is None:
            return tuple(map(self._put, kept, new))  # type: ignore[return-value]
        scales = (pool.key_scales[layer], pool.value_scales[layer])
        return tuple(map(self._put_codes, kept, scales, new))  # type: ignore[return-value]

    def _put(self, kept: Tensor, new: Tensor) -> Float[Tensor, "1 kv_heads all *d"]:
        """Write new rows to their pages, and gather all of this row's."""
        # (pages, kv_heads, page_size, d) at (seq,) pages and offsets: (seq, kv_heads, d)
        kept[self._page, :, self._offset] = new.to(kept.dtype)
        # By the first axis: of a transposed pool a CPU would copy all pages before it selects some.
        rows = kept.index_select(0, self.pages).transpose(0, 1)  # (kv_heads, pages, size, d)
        return rows.flatten(1, 2)[None, :, : self._next_length]

    def _put_codes(self, kept: Tensor, scales: Tensor, new: Tensor) -> Tensor:
        """Write new rows as codes; gather all of this row's as numbers."""
        codes, scale = self.pool.encode(new)
        every = self._put(kept.view(torch.uint8), codes)
        return self.pool.decode(every, self._put(scales, scale))

    def advance(self) -> None:
        self.length = self._next_length


class PlainRunner:
    """Reads steps by the model's own forward."""

    def __init__(
        self,
        model: TransformerLM,
        cache: PagedCache,
        chunk: int | None = None,
        *,
        exact: bool = False,
    ) -> None:
        self.model, self.cache = model, cache
        on_cpu = cache.keys.device.type == "cpu"
        self.chunk = chunk or (CHUNK_CPU if on_cpu else CHUNK_GPU)
        self.one_by_one = on_cpu or exact

    @property
    def verifies(self) -> bool:
        """Whether proposals are read all at once."""
        return not self.one_by_one

    def run(
        self, step: Step, tables: Int[Tensor, "slots max_pages"], last: Int[Tensor, " slots"]
    ) -> Float[Tensor, "choosing vocab"]:
        """Write the keys and values of the new tokens; return the logits that are asked for."""
        logits: list[Tensor] = []
        at = 0
        for i, (count, start, slot, wanted) in enumerate(
            zip(step.counts, step.starts, step.slots, step.num_logits, strict=True)
        ):
            tokens, newest = step.tokens[at : at + count], last[slot : slot + 1]
            at += count
            proposed = bool(step.num_proposed and step.num_proposed[i])
            if proposed and self.one_by_one:
                assert wanted == count, "behind the newest token come proposals alone"
                for position, token in enumerate(tokens, start):
                    hidden = self._read([token], position, tables[slot], newest)
                    logits.append(self.model.lm_head(hidden[:, -1]))
                continue
            hidden = self._read(tokens, start, tables[slot], newest, whole=proposed)
            if proposed:
                logits.append(self.model.lm_head(hidden[0, count - wanted :]))
            else:  # Each alone: the sums of a product may depend on how many rows it has.
                logits += [self.model.lm_head(hidden[:, j]) for j in range(count - wanted, count)]
        if not logits:
            return last.new_empty((0, self.model.config.vocab_size), dtype=self.cache.dtype)
        return torch.cat(logits)

    def _read(
        self,
        tokens: list[int],
        start: int,
        table: Int[Tensor, " max_pages"],
        last: Tensor,
        whole: bool = False,
    ) -> Float[Tensor, "1 seq d_model"]:
        """Read one row's new tokens, piece by piece or whole; return their hidden states."""
        device, size = last.device, self.cache.page_size
        ids = last if tokens == [LAST] else torch.tensor(tokens, device=device)
        num_pages = -(-(start + len(tokens)) // size)
        pages = table[:num_pages].to(device, torch.long)
        done, found = 0, []
        while True:
            end = len(tokens) - done
            if not whole:
                end = min((start // self.chunk + 1) * self.chunk - start, end)
            needed = -(-(start + end) // size)
            row = _PagedRow(self.cache, pages[:needed], int(table[needed - 1]), start)
            found.append(self.model.hidden(ids[None, done : done + end], cache=row))
            start, done = start + end, done + end
            if done == len(tokens):
                return found[0] if len(found) == 1 else torch.cat(found, dim=1)
