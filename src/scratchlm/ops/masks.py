"""Who may look at whom: the rule of visibility, written as a rule and as a table.

Keys lie in slots 0, 1, 2, … in the order in which they were written. A query that stands at slot s
sees the key in slot j when

    j ≤ s                       the future is hidden
    s − j < window              with a sliding window; padding between them does not count
    key_valid[j]                not padding
    document[j] = document[s]   packed documents do not see each other

`CausalMask` keeps the rule. The reference writes the table out; a fast implementation reads the
rule and need not form a (query, key) table at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class CausalMask:
    """The rule above. Query i stands at slot `start + i`, or at `slots[:, i]` where rows differ."""

    start: int = 0
    slots: Int[Tensor, "batch query"] | None = None  # −1: padding, which sees nothing
    window: int | None = None
    key_valid: Bool[Tensor, "batch key"] | None = None
    documents: Int[Tensor, "batch key"] | None = None
    slots_are_real: bool = False  # no −1 among them: known without asking the device

    @property
    def is_plain(self) -> bool:
        """Whether only the future is hidden, at the same slots in every row."""
        return all(
            part is None for part in (self.slots, self.window, self.key_valid, self.documents)
        )

    @property
    def may_blind(self) -> bool:
        """Whether a query may be left that sees no key at all."""
        return self.key_valid is not None or (self.slots is not None and not self.slots_are_real)

    def positions(self, num_queries: int) -> Int[Tensor, "batch query"] | range:
        """Return the queries' positions: consecutive ones as a range.

        Padding has none and gets 0; packed documents count from 0 each.
        """
        if self.slots is not None:
            return self.slots.clamp(min=0)
        if self.key_valid is not None:
            return (self.key_valid.cumsum(dim=-1) - 1).clamp(min=0)
        if self.documents is not None:
            return _positions_in_document(self.documents)
        return range(self.start, self.start + num_queries)

    def table(
        self, queries: range, keys: range, device: torch.device
    ) -> Bool[Tensor, "*batch query key"]:
        """Write the rule out for some queries and keys: True where the query sees the key.

        The result is (query, key) when all rows agree, else (batch, 1, query, key).
        """
        if torch.compiler.is_compiling():
            return self._write(queries, keys, device)
        wanted = (queries, keys, device)
        # All layers of a forward ask for the same table: the one written last is kept.
        last, table = self.__dict__.get("_written", (None, None))
        if last != wanted:
            table = self._write(queries, keys, device)
            self.__dict__["_written"] = (wanted, table)
        return table

    def _write(self, queries: range, keys: range, device: torch.device) -> Tensor:
        key_slot = torch.arange(keys.start, keys.stop, device=device)
        if self.slots is None:
            first = self.start + queries.start
            slot = torch.arange(first, first + len(queries), device=device)[:, None]
        else:
            slot = self.slots[:, None, queries.start : queries.stop, None]
        visible = key_slot <= slot
        if self.window is not None:
            distance = slot - key_slot
            if self.key_valid is not None and self.slots is None:  # counted in real tokens
                rank, first = self.key_valid.cumsum(dim=-1), self.start + queries.start
                of_query = rank[:, None, first : first + len(queries), None]
                distance = of_query - rank[:, None, None, keys.start : keys.stop]
            visible = visible & (distance < self.window)
        if self.key_valid is not None:
            visible = visible & self.key_valid[:, None, None, keys.start : keys.stop]
        if self.documents is not None:
            first = self.start + queries.start
            of_query = self.documents[:, None, first : first + len(queries), None]
            of_key = self.documents[:, None, None, keys.start : keys.stop]
            visible = visible & (of_query == of_key)
        return visible

    def visible_keys(self, queries: range, num_keys: int) -> range:
        """Return the smallest range that holds every key these queries may see."""
        if self.slots is not None:
            return range(num_keys)
        stop = min(num_keys, self.start + queries.stop)
        windowed = self.window is not None and self.key_valid is None  # padding stretches a window
        first = self.start + queries.start - (self.window or 0) + 1 if windowed else 0
        return range(min(max(first, 0), stop), stop)


def _positions_in_document(documents: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Count from 0 anew wherever the document changes."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - index.masked_fill(~begins, 0).cummax(dim=-1).values


Mask = CausalMask | Tensor | None


def check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> None:
    """Refuse shapes that do not belong together, in one line."""
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have one width; got {query.shape[-1]} and {key.shape[-1]}"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key and value must have one length; got {key.shape[-2]} and {value.shape[-2]}"
        )
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise ValueError(
            "query, key and value must have the same leading dimensions; got "
            f"{tuple(query.shape[:-2])}, {tuple(key.shape[:-2])}, {tuple(value.shape[:-2])}"
        )
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean (True = attend); got {mask.dtype}")


def are_groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these are (batch, heads, seq, width), a group of query heads for each key head."""
    if not query.ndim == key.ndim == 4 or key.shape != value.shape:
        return False
    alike = query.shape[0] == key.shape[0] and query.shape[2:] == key.shape[2:]
    return alike and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0
