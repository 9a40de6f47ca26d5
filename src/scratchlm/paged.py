"""Keys and values in pages of one pool, and one step over new tokens of several requests.

A request's keys lie in pages of `page_size` positions: position p in page `table[p // page_size]`,
at offset p % page_size. Pages belong to nobody in particular, so that requests come and go without
moving a key, and requests that begin alike share pages.

A step lays the new tokens of its requests end to end:

    tokens      t0 t1 t2 t3 | u7 | v9                   one chunk of a prompt, two decoding rows
    counts      4             1    1
    starts      0             7    9                    position of each row's first new token

A row that decodes may have proposals behind its newest token (`inference/speculation.py`): it is
then asked for logits after that token and after every proposal. A row that is scored
(`inference/scoring.py`) is asked for logits after each of its last tokens.

What reads a step is a `Runner`: the model itself, row by row (`inference/`), or one forward over
all tokens (`accelerate/`). Slots are rows of the tables, a request keeps its slot while it runs.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.config import ModelConfig
from scratchlm.ops.quantized_cache import DTYPES, KVDtype, dequantize_rows, quantize_rows

LAST = -1  # in place of a token: the one chosen for this slot last, known to the device alone


class PagedCache:
    """The memory of a pool: keys and values of every layer, page by page.

    With `kv_dtype` they are codes of 8 bits, with a scale for every token and head
    (`ops/quantized_cache.py`).
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kv_dtype: KVDtype | None = None,
    ) -> None:
        shape = (config.num_layers, num_pages, config.num_kv_heads, page_size, config.d_head)
        self.kv_dtype, self.dtype = kv_dtype, dtype or torch.get_default_dtype()
        stored = self.dtype if kv_dtype is None else DTYPES[kv_dtype]
        self.keys, self.values = (_zeros(shape, stored, device) for _ in range(2))
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None
        if kv_dtype is not None:
            scales = (_zeros(shape[:-1], torch.float32, device) for _ in range(2))
            self.key_scales, self.value_scales = scales
        self.num_pages, self.page_size = num_pages, page_size

    def encode(self, x: Float[Tensor, "*rows d"]) -> tuple[Tensor, Tensor]:
        """Return codes of keys or values, as bytes, and their scales."""
        codes, scales = quantize_rows(x, self.keys.dtype)
        return codes.view(torch.uint8), scales

    def decode(self, codes: Tensor, scales: Tensor) -> Float[Tensor, "*rows d"]:
        """Return the keys or values that codes and scales stand for."""
        return dequantize_rows(codes.view(self.keys.dtype), scales).to(self.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of all pages."""
        kept = (self.keys, self.values, self.key_scales, self.value_scales)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return zeros, on a CPU in memory that is taken where it is written.

    A pool has room for the longest contexts, gigabytes of which most requests need little.
    """
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device or "cpu").type != "cpu" or not size:
        return torch.zeros(shape, device=device, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)


@dataclass(frozen=True)
class Step:
    """New tokens of several rows, one forward."""

    tokens: list[int]  # of all rows, end to end; `LAST` for a row that goes on decoding
    counts: list[int]  # new tokens of each row
    starts: list[int]  # position of each row's first new token
    slots: list[int]  # each row's line of the page table
    chooses: list[bool]  # whether a row's next token is chosen after this step
    # Of each row's tokens the last so many; empty: none
    num_proposed: list[int] = field(default_factory=list)
    num_scored: list[int] = field(default_factory=list)  # of rows that do not choose

    @property
    def num_logits(self) -> list[int]:
        """After how many of each row's tokens, its newest ones, logits are asked for."""
        found = list(map(int, self.chooses))
        if self.num_proposed:
            found = [n * (1 + more) for n, more in zip(found, self.num_proposed, strict=True)]
        if self.num_scored:
            found = [n or scored for n, scored in zip(found, self.num_scored, strict=True)]
        return found

    @property
    def logit_indices(self) -> list[int]:
        """After which of the tokens, counted over all rows."""
        found: list[int] = []
        end = 0
        for count, wanted in zip(self.counts, self.num_logits, strict=True):
            end += count
            found += range(end - wanted, end)
        return found


@dataclass(frozen=True)
class Choice:
    """How rows choose by temperature, top-k and top-p alone; one number for each row that chooses.

    A temperature of 0 is greedy. `top_k` is at most `acceleration.MAX_FUSED_K`, or the vocabulary's
    size with a `top_p` of 1. `numbers` in [0, 1) are the rows' draws.
    """

    temperature: Sequence[float]
    top_k: Sequence[int]
    top_p: Sequence[float]
    numbers: Sequence[float]

    @property
    def draws(self) -> bool:
        """Whether any row draws."""
        return any(self.temperature)


class Runner(Protocol):
    """Reads steps of one model into one paged cache.

    A runner that does not call the model's modules has an attribute `unchanged`, which is false
    once they are not those it was made for: the engine then reads steps by the model itself. One
    whose numbers depend on where a prompt is cut has a `chunk`: pieces end at its multiples. One
    that reads proposals one by one, so that nothing is gained by them, has `verifies` false. One
    that also chooses where a `Choice` says how has `chooses` true, and
    `run_and_choose(step, tables, last, choice)`, which returns tokens and writes them to `last`;
    with `draws` false, only greedily.
    """

    def run(
        self,
        step: Step,
        tables: Int[Tensor, "slots max_pages"],
        last: Int[Tensor, " slots"],
    ) -> Float[Tensor, "choosing vocab"]:
        """Write the keys and values of the new tokens; return logits at `step.logit_indices`.

        `tables` is int32, on the host, and may change once this returns. `last` is int64, on the
        model's device: each slot's token chosen last. The logits may lie in memory that the next
        step writes again; on a GPU they need not be there yet when this returns.
        """
