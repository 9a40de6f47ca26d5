"""Steps of many requests on a GPU: decoding rows from recordings, prompts as they come.

    runner = GPURunner(model, cache, max_rows=256)
    logits = runner.run(step, tables, last)

A step in which every row decodes one token is a CUDA graph, recorded at its first use for a bucket
of rows and of keys, and kept: rows come and go by what the host writes into the graph's one input,
slots, positions and page tables. Few rows go through the matrix-vector kernels (`gpu_decode.py`),
more through matrix products (`flat_forward.py`). A step with parts of prompts is launched kernel by
kernel: its products are large. The host never waits for the device here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scratchlm.accelerate.decoding import Unchanged
from scratchlm.accelerate.flat_forward import FlatForward, FlatTokens, Tiles, block_keys
from scratchlm.accelerate.gpu_decode import GPUStep
from scratchlm.accelerate.kernels.triton.decode_tiles import MAX_ROWS
from scratchlm.model import TransformerLM
from scratchlm.paged import LAST, PagedCache, Step

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # then by 64
SHORTEST = 256  # keys of the first bucket; each further one has twice as many


def why_not_pages(cache: PagedCache) -> str | None:
    """Return why kernels cannot read pages of this size, or None."""
    return None if block_keys(cache.page_size) >= 16 else "pages of no multiple of 16 tokens"


@dataclass
class _Recording:
    """A graph, its input (slots, positions, page tables) and its output."""

    input: Tensor  # int32
    rows: int
    pages: int
    logits: Tensor
    work: Callable[[], None]
    graph: torch.cuda.CUDAGraph | None = None

    def replay(self) -> None:
        """Do it again, or for the first time where nothing is recorded."""
        if self.graph is None:
            self.work()
        else:
            self.graph.replay()


class GPURunner:
    """Reads steps of one model into the pages of one cache.

    `graph=False` launches the kernels one by one: the same results, for tests and for profiles.
    `pdl` lets a kernel start while the one before it ends (Hopper and later); None: where possible.
    """

    def __init__(
        self,
        model: TransformerLM,
        cache: PagedCache,
        *,
        max_rows: int,
        exact: bool = False,
        graph: bool = True,
        pdl: bool | None = None,
    ) -> None:
        self.model, self.cache, self.max_rows, self.exact = model, cache, max_rows, exact
        self.graph = graph
        weight = model.token_embeddings.weight
        self.device = weight.device
        if pdl is None:
            pdl = weight.is_cuda and torch.cuda.get_device_capability(self.device) >= (9, 0)
        self.pdl = pdl
        self._unchanged = Unchanged(model)
        self._watched: Any = (
            *(model.token_embeddings, model.layers[0].attn.q_proj),  # type: ignore[union-attr]
            *(model.layers[-1].ffn.w2, model.lm_head),  # type: ignore[union-attr]
        )
        self._bound: tuple[int, ...] = ()
        self._forward: FlatForward
        self._recorded: dict[tuple[int, int], _Recording]
        self._pool: Any  # of the graphs' memory
        self._bind()

    @property
    def unchanged(self) -> bool:
        """Whether the model's modules are still those this runner was made for."""
        return bool(self._unchanged)

    def _addresses(self) -> tuple[int, ...]:
        return (self.cache.keys.data_ptr(), *(m.weight.data_ptr() for m in self._watched))

    def _bind(self) -> None:
        """Take note of where weights and pages lie; what was recorded for other places goes."""
        self._bound, self._recorded, self._pool = self._addresses(), {}, None
        self._forward = FlatForward(self.model, self.cache, exact=self.exact)
        config, rows = self.model.config, self.max_rows
        self._logits = torch.empty(
            rows, config.vocab_size, dtype=self._forward.dtype, device=self.device
        )

    @torch.inference_mode()
    def run(self, step: Step, tables: Tensor, last: Tensor) -> Tensor:
        """Write keys and values of the new tokens; return logits of the rows that choose."""
        if self._addresses() != self._bound:
            self._bind()
        count = len(step.slots)
        if len(step.tokens) == count and all(step.chooses) and set(step.tokens) == {LAST}:
            return self._decode(step, tables, last)
        return self._read(step, tables, last)

    # Decoding

    def _decode(self, step: Step, tables: Tensor, last: Tensor) -> Tensor:
        count, longest = len(step.slots), max(step.starts) + 1
        recording = self._recording(count, longest, last)
        rows, pages = recording.rows, recording.pages
        host = _host_buffer(recording.input.numel(), self.device)
        view = host.numpy()
        view[:count], view[count:rows] = step.slots, 0
        view[rows : rows + count], view[rows + count : 2 * rows] = step.starts, -1
        known = min(pages, tables.shape[1])
        table = view[2 * rows :].reshape(rows, pages)
        table[:count, :known] = tables.numpy()[step.slots, :known]
        recording.input.copy_(host, non_blocking=True)
        recording.replay()
        return recording.logits[:count]

    def _recording(self, count: int, longest: int, last: Tensor) -> _Recording:
        rows = row_bucket(count, self.max_rows)
        max_kv_len = length_bucket(longest, self.model.config.context_length)
        found = self._recorded.get((rows, max_kv_len))
        if found is None:
            found = self._recorded[rows, max_kv_len] = self._record(rows, max_kv_len, last)
        return found

    def _record(self, rows: int, max_kv_len: int, last: Tensor) -> _Recording:
        if rows <= MAX_ROWS and not self.exact:
            try:
                return self._capture(self._few_rows(rows, max_kv_len, last, self.pdl))
            except RuntimeError as error:
                if not self.pdl:
                    raise
                warnings.warn(
                    f"recording without programmatic dependent launch: {error}", stacklevel=3
                )
                torch.cuda.synchronize()
                self.pdl = False
                return self._capture(self._few_rows(rows, max_kv_len, last, pdl=False))
        return self._capture(self._many_rows(rows, max_kv_len, last))

    def _new_input(self, rows: int, max_kv_len: int) -> tuple[Tensor, int]:
        pages = -(-max_kv_len // self.cache.page_size)
        made = torch.zeros(rows * (2 + pages), dtype=torch.int32, device=self.device)
        made[rows : 2 * rows] = -1  # no row is there
        return made, pages

    def _few_rows(self, rows: int, max_kv_len: int, last: Tensor, pdl: bool) -> _Recording:
        """Return a step by the matrix-vector kernels."""
        step = GPUStep(self.model, self.cache, rows=rows, max_kv_len=max_kv_len, pdl=pdl)
        given, pages = self._new_input(rows, max_kv_len)
        step.lengths = given[rows : 2 * rows]
        step.tables = given[2 * rows :].view(rows, pages)

        def work() -> None:
            torch.index_select(last, 0, given[:rows], out=step.ids)
            step.run()

        return _Recording(given, rows, pages, step.logits, work)

    def _many_rows(self, rows: int, max_kv_len: int, last: Tensor) -> _Recording:
        """Return a step by matrix products."""
        given, pages = self._new_input(rows, max_kv_len)
        line = torch.arange(rows, dtype=torch.int32, device=self.device)
        tiles = torch.stack((line, line, torch.ones_like(line)))
        tokens = FlatTokens(
            ids=torch.zeros(rows, dtype=torch.int64, device=self.device),
            positions=given[rows : 2 * rows],
            rows=line,
            tables=given[2 * rows :].view(rows, pages),
            tiles=[self._forward.decoding_tiles(tiles, max_kv_len)],
        )
        logits, forward = self._logits[:rows], self._forward

        def work() -> None:
            torch.index_select(last, 0, given[:rows], out=tokens.ids)
            forward.run(tokens, logits)

        return _Recording(given, rows, pages, logits, work)

    def _capture(self, recording: _Recording) -> _Recording:
        """Run once to compile what it needs, with no row there, then record."""
        if not self.graph or self.device.type != "cuda":
            return recording
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            recording.work()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                recording.work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        recording.graph = graph
        return recording

    # Prompts

    def _read(self, step: Step, tables: Tensor, last: Tensor) -> Tensor:
        counts, starts = np.array(step.counts), np.array(step.starts)
        rows = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts  # of each row's new tokens
        positions = np.arange(len(rows)) - first[rows] + starts[rows]
        slots = np.array(step.slots)
        pages = -(-int((starts + counts).max()) // self.cache.page_size)
        decoding = counts == 1
        if self.exact:
            decoding[:] = False
        prompts = _cut(np.flatnonzero(~decoding), counts, first, self._forward.block_q)
        single = np.flatnonzero(decoding)
        decode = np.stack((single, first[single], np.ones_like(single)))
        chooses = np.array(step.chooses)
        choosing = (first + counts - 1)[chooses]
        sent = [step.tokens, slots[rows], positions, rows, tables.numpy()[slots, :pages]]
        ids, of_slot, at, line, table, prompt_tiles, decode_tiles, chosen = _send(
            [*map(np.asarray, sent), prompts, decode, choosing], self.device
        )
        is_last = ids == LAST
        ids = torch.where(is_last, last[of_slot].to(torch.int32), ids)
        tiles = []
        if prompts.size:
            tiles.append(Tiles(prompt_tiles, self._forward.block_q))
        if decode.size:
            longest = length_bucket(int(starts[single].max()) + 1, self.model.config.context_length)
            tiles.append(self._forward.decoding_tiles(decode_tiles, longest))
        tokens = FlatTokens(ids, at, line, table, tiles, chosen)
        return self._forward.run(tokens)


def row_bucket(rows: int, max_rows: int) -> int:
    """Return how many rows a recording for this many has."""
    fitting = [bucket for bucket in ROW_BUCKETS if bucket >= rows]
    return min(fitting[0] if fitting else -(-rows // 64) * 64, max(max_rows, rows))


def length_bucket(keys: int, context_length: int) -> int:
    """Return how many keys a row may have in a recording for rows of this many."""
    bucket = SHORTEST
    while bucket < keys:
        bucket *= 2
    return max(keys, min(bucket, context_length))


def _cut(rows: Any, counts: Any, first: Any, block: int) -> Any:
    """Cut rows' new tokens into tiles: (3, tiles) of row, first token, how many."""
    pieces = -(-counts[rows] // block)
    row = np.repeat(rows, pieces)
    begin = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * block
    return np.stack((row, first[row] + begin, np.minimum(counts[row] - begin, block)))


def _send(arrays: list[Any], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device as int32, all at once, without waiting."""
    host = _host_buffer(sum(array.size for array in arrays), device)
    view, at, pieces = host.numpy(), 0, []
    for array in arrays:
        view[at : at + array.size] = array.ravel()
        pieces.append((at, array.shape))
        at += array.size
    there = host.to(device, non_blocking=True)
    return [there[at : at + int(np.prod(shape))].view(*shape) for at, shape in pieces]


def _host_buffer(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
