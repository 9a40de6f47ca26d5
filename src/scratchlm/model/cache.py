"""The key-value cache: what was computed for earlier tokens, kept.

Memory for `capacity` tokens is taken once. A key lies in the slot of its own position, so rows of
different lengths need no padding and a row is stored as it would be alone. One forward does

    cache.reserve(seq)                                    choose the slots (once)
    keys, values = cache.update(layer, keys, values)      write, and get all so far (each layer)
    cache.advance()                                       move on (once)
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scratchlm.config import ModelConfig
from scratchlm.ops import CausalMask


class KVCache:
    """Keys and values of every layer, for `batch_size` rows of up to `capacity` tokens."""

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        capacity: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        capacity = config.context_length if capacity is None else capacity
        if batch_size < 1 or capacity < 1:
            got = f"batch_size={batch_size}, capacity={capacity}"
            raise ValueError(f"batch_size and capacity must be at least 1; got {got}")
        shape = (config.num_layers, batch_size, config.num_kv_heads, capacity, config.d_head)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.batch_size, self.capacity = batch_size, capacity
        self.length = 0  # of the longest row: known without asking the device
        self._row_lengths: Tensor | None = None  # once rows differ
        self._next_length = 0
        self._next_row_lengths: Tensor | None = None
        self._slots: Tensor | None = None  # (batch, seq), −1 where there is no token
        self._real: tuple[Tensor, Tensor] | None = None  # row and column of the real tokens

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """How many tokens each row holds."""
        if self._row_lengths is not None:
            return self._row_lengths
        return torch.full((self.batch_size,), self.length, device=self.keys.device)

    def reset(self) -> None:
        """Forget everything; the memory stays."""
        self.length, self._row_lengths = 0, None

    def reserve(self, seq: int, valid: Bool[Tensor, "batch seq"] | None = None) -> None:
        """Choose the slots of the next `seq` tokens; those not `valid` are padding and get none."""
        self._real = None
        if valid is None:
            self._next_length = self.length + seq
            self._next_row_lengths = None
            self._slots = None
            if self._row_lengths is not None:
                step = torch.arange(seq, device=self.keys.device)
                self._slots = self._row_lengths[:, None] + step
                self._next_row_lengths = self._row_lengths + seq
        else:
            lengths = self.lengths
            slots = lengths[:, None] + valid.cumsum(dim=-1) - 1
            self._slots = slots.masked_fill(~valid, -1)
            row, column = valid.nonzero(as_tuple=True)
            self._real = (row, column)
            self._next_row_lengths = lengths + valid.sum(dim=-1)
            self._next_length = int(self._next_row_lengths.max())  # padding: prefill, not decode
        if self._next_length > self.capacity:
            raise ValueError(
                f"the cache has room for {self.capacity} tokens; got {self.length} kept and "
                f"{self._next_length - self.length} new"
            )

    @property
    def reserved_length(self) -> int:
        """How many tokens the longest row will hold after this forward."""
        return self._next_length

    @property
    def mask(self) -> CausalMask:
        """Who sees whom among the reserved tokens and those kept."""
        return CausalMask(self.length, self._slots, slots_are_real=self._real is None)

    def update(
        self,
        layer: int,
        keys: Float[Tensor, "batch kv_heads seq d"],
        values: Float[Tensor, "batch kv_heads seq d"],
    ) -> tuple[Float[Tensor, "batch kv_heads all d"], Float[Tensor, "batch kv_heads all d"]]:
        """Write the new keys and values of one layer; return all of that layer, old and new."""
        every = self.keys[layer], self.values[layer]  # (batch, kv_heads, capacity, d)
        for kept, new in zip(every, (keys, values), strict=True):
            new = new.to(kept.dtype)
            if self._slots is None:
                kept.narrow(2, self.length, new.shape[2]).copy_(new)
            elif self._real is None:
                index = self._slots[:, None, :, None].expand_as(new)
                kept.scatter_(2, index, new)
            else:
                row, column = self._real
                kept[row, :, self._slots[row, column]] = new[row, :, column]
        return every[0].narrow(2, 0, self._next_length), every[1].narrow(2, 0, self._next_length)

    def advance(self) -> None:
        """Count the reserved tokens as kept."""
        self.length, self._row_lengths = self._next_length, self._next_row_lengths

    def apart(self) -> list[KVCache]:
        """Lend every row as a cache of its own, over the same memory; `rejoin` takes them back."""
        rows = []
        for i, length in enumerate(self.lengths.tolist()):
            row = copy.copy(self)
            row.keys, row.values = self.keys[:, i : i + 1], self.values[:, i : i + 1]
            row.batch_size, row.length, row._row_lengths = 1, length, None
            rows.append(row)
        return rows

    def rejoin(self, rows: list[KVCache]) -> None:
        """Count as kept what was written to the rows one by one."""
        lengths = [row.length for row in rows]
        self.length, self._row_lengths = max(lengths), None
        if min(lengths) < self.length:
            self._row_lengths = torch.tensor(lengths, device=self.keys.device)

    def select_rows(self, rows: Int[Tensor, " new_batch"]) -> None:
        """Keep these rows, in this order, repeats allowed: what beam search needs."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.batch_size = len(rows)
        if self._row_lengths is not None:
            self._row_lengths = self._row_lengths[rows]
            self.length = int(self._row_lengths.max())  # the longest row may be among those gone
