"""Keys and values in pages of one pool, and one step over new tokens of several requests.

A request's keys lie in pages of `page_size` positions: position p in page `table[p // page_size]`,
at offset p % page_size. Pages belong to nobody in particular, so that requests come and go without
moving a key, and requests that begin alike share pages.

A step lays the new tokens of its requests end to end:

    tokens      t0 t1 t2 t3 | u7 | v9                   one chunk of a prompt, two decoding rows
    counts      4             1    1
    starts      0             7    9                    position of each row's first new token

What reads a step is a `Runner`: the model itself, row by row (`inference/`), or one forward over
all tokens (`accelerate/`). Slots are rows of the tables, a request keeps its slot while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.config import ModelConfig

LAST = -1  # in place of a token: the one chosen for this slot last, known to the device alone


class PagedCache:
    """The memory of a pool: keys and values of every layer, page by page."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (config.num_layers, num_pages, config.num_kv_heads, page_size, config.d_head)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.num_pages, self.page_size = num_pages, page_size


@dataclass(frozen=True)
class Step:
    """New tokens of several rows, one forward."""

    tokens: list[int]  # of all rows, end to end; `LAST` for a row that goes on decoding
    counts: list[int]  # new tokens of each row
    starts: list[int]  # position of each row's first new token
    slots: list[int]  # each row's line of the page table
    chooses: list[bool]  # whether a row's next token is chosen after this step


class Runner(Protocol):
    """Reads steps of one model into one paged cache.

    A runner that does not call the model's modules has an attribute `unchanged`, which is false
    once they are not those it was made for: the engine then reads steps by the model itself. One
    whose numbers depend on where a prompt is cut has a `chunk`: pieces end at its multiples.
    """

    def run(
        self,
        step: Step,
        tables: Int[Tensor, "slots max_pages"],
        last: Int[Tensor, " slots"],
    ) -> Float[Tensor, "choosing vocab"]:
        """Write the keys and values of the new tokens; return logits of the rows that choose.

        `tables` is int32, on the host, and may change once this returns. `last` is int64, on the
        model's device: each slot's token chosen last. The logits may lie in memory that the next
        step writes again; on a GPU they need not be there yet when this returns.
        """
