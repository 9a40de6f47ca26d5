"""Steps of many requests on a GPU, recorded as CUDA graphs.

    runner = GPURunner(model, cache, max_rows=256)
    logits = runner.run(step, tables, last)
    tokens = runner.run_and_choose(step, tables, last, choice)

A step in which every row decodes one token is recorded at its first use for a bucket of rows and of
keys, and kept: rows come and go by what the host writes into the graph's one input, slots,
positions and page tables. Few rows go through a few kernels per layer (`gpu_decode.py`,
`gpu_decode_batch.py`, `gpu_decode_quantized.py`); more, layer by layer (`flat_forward.py`). A step
with parts of prompts is launched kernel by kernel at its first use for a bucket of tokens and of
keys, and recorded at its second. Choosing the tokens is part of the recording. The host never waits
for the device here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scratchlm.accelerate.decoding import Unchanged, is_quantized
from scratchlm.accelerate.flat_forward import FlatForward, FlatTokens, block_keys
from scratchlm.accelerate.gpu_decode import GPUStep
from scratchlm.accelerate.gpu_decode_batch import GPUBatchStep
from scratchlm.accelerate.gpu_decode_quantized import GPUQuantizedStep, why_not_quantized
from scratchlm.accelerate.kernels import launches_for
from scratchlm.accelerate.kernels.triton.decode_tiles import power_of_two
from scratchlm.accelerate.recorded_step import Field, RecordedStep, StepInput
from scratchlm.model import TransformerLM
from scratchlm.paged import LAST, Choice, PagedCache, Step
from scratchlm.quantization.layers import QuantizedWeight

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # then by 64
TOKEN_BUCKETS = (*(n << i for i in range(6) for n in (128, 192)), 8192)
SHORTEST = 256  # keys of the first bucket; each further one has twice as many


def why_not_pages(cache: PagedCache) -> str | None:
    """Return why kernels cannot read pages of this cache, or None."""
    if cache.kv_dtype is not None:
        return f"keys and values in {cache.kv_dtype}"
    return None if block_keys(cache.page_size) >= 16 else "pages of no multiple of 16 tokens"


@dataclass(frozen=True)
class _Sizes:
    """The most that a step with parts of prompts may have of each."""

    tokens: int
    rows: int
    prompt_tiles: int
    decoding: int  # rows
    choosing: int  # rows
    max_kv_len: int


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
        self.graph, self.is_quantized = graph, is_quantized(model)
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
        self.chooses = launches_for(weight)
        self._bound: tuple[int, ...] = ()
        self._forward: FlatForward
        self._recorded: dict[Any, RecordedStep | None]  # None: seen once
        self._pool: Any  # of the graphs' memory
        self._bind()

    @property
    def unchanged(self) -> bool:
        """Whether the model's modules are still those this runner was made for."""
        return bool(self._unchanged)

    def _addresses(self) -> tuple[int, ...]:
        return (self.cache.keys.data_ptr(), *(_address(m.weight) for m in self._watched))

    @torch.no_grad()  # a view of a parameter would keep autograd's hold on it, and on its stream
    def _bind(self) -> None:
        """Take note of where weights and pages lie; what was recorded for other places goes."""
        self._bound, self._recorded, self._pool = self._addresses(), {}, None
        self._forward = FlatForward(self.model, self.cache, exact=self.exact)
        config, rows = self.model.config, self.max_rows
        self._logits = torch.empty(
            rows, config.vocab_size, dtype=self._forward.dtype, device=self.device
        )

    def run(self, step: Step, tables: Tensor, last: Tensor) -> Tensor:
        """Write keys and values of the new tokens; return the logits that are asked for."""
        return self._run(step, tables, last, None).logits[: sum(step.num_logits)]

    def run_and_choose(self, step: Step, tables: Tensor, last: Tensor, choice: Choice) -> Tensor:
        """Do the same, and choose: return the tokens, which `last` has then too."""
        assert not step.num_proposed, "what follows proposals is chosen from logits"
        tokens = self._run(step, tables, last, choice).tokens
        assert tokens is not None
        return tokens[: sum(step.chooses)]

    @torch.inference_mode()
    def _run(self, step: Step, tables: Tensor, last: Tensor, choice: Choice | None) -> RecordedStep:
        if self._addresses() != self._bound:
            self._bind()
        arrays = {} if choice is None else _choice_arrays(step, choice)
        count = len(step.slots)
        if len(step.tokens) == count and all(step.chooses) and set(step.tokens) == {LAST}:
            return self._decode(step, tables, last, arrays)
        return self._read(step, tables, last, arrays)

    # Decoding

    def _decode(
        self, step: Step, tables: Tensor, last: Tensor, choice: dict[str, Any]
    ) -> RecordedStep:
        count, longest = len(step.slots), max(step.starts) + 1
        rows = row_bucket(count, self.max_rows)
        max_kv_len = length_bucket(longest, self.model.config.context_length)
        key = rows, max_kv_len, bool(choice)
        found = self._recorded.get(key)
        if found is None:
            found = self._recorded[key] = self._record(*key, last)
        table = tables.numpy()[step.slots, : self._pages(max_kv_len)]
        found.given.send(slots=step.slots, positions=step.starts, tables=table, **choice)
        found.run()
        return found

    def _record(self, rows: int, max_kv_len: int, chooses: bool, last: Tensor) -> RecordedStep:
        if rows <= self._most_fused_rows():
            try:
                return self._capture(self._few_rows(rows, max_kv_len, chooses, last, self.pdl))
            except RuntimeError as error:
                if not self.pdl:
                    raise
                warnings.warn(
                    f"recording without programmatic dependent launch: {error}", stacklevel=3
                )
                torch.cuda.synchronize()
                self.pdl = False
                return self._capture(self._few_rows(rows, max_kv_len, chooses, last, pdl=False))
        return self._capture(self._many_rows(rows, max_kv_len, chooses, last))

    def _most_fused_rows(self) -> int:
        """Up to how many rows a step goes through the kernels of `gpu_decode*.py`."""
        if self.is_quantized:
            return 1 if not self.exact and why_not_quantized(self.model) is None else 0
        if self.exact:
            return 0
        return GPUBatchStep.max_rows if self._forward.dtype.itemsize == 2 else GPUStep.max_rows

    def _pages(self, max_kv_len: int) -> int:
        return -(-max_kv_len // self.cache.page_size)

    def _decode_input(self, rows: int, max_kv_len: int, chooses: bool) -> StepInput:
        fields = {
            "slots": Field((rows,)),
            "positions": Field((rows,), neutral=-1),  # no row is there
            "tables": Field((rows, self._pages(max_kv_len))),
            **(_choice_fields(rows) if chooses else {}),
        }
        return StepInput(fields, self.device)

    def _few_rows(
        self, rows: int, max_kv_len: int, chooses: bool, last: Tensor, pdl: bool
    ) -> RecordedStep:
        """Return a step by a few kernels per layer."""
        step: GPUStep
        if self.is_quantized:
            step = GPUQuantizedStep(self.model, self.cache, max_kv_len=max_kv_len, pdl=pdl)
        else:
            kind = GPUBatchStep if rows > GPUStep.max_rows else GPUStep
            step = kind(self.model, self.cache, rows=rows, max_kv_len=max_kv_len, pdl=pdl)
        given = self._decode_input(rows, max_kv_len, chooses)
        step.lengths, step.tables = given["positions"], given["tables"]

        def work() -> None:
            torch.index_select(last, 0, given["slots"], out=step.ids)
            step.run()

        return self._then_choose(RecordedStep(given, work, step.logits), last)

    def _many_rows(self, rows: int, max_kv_len: int, chooses: bool, last: Tensor) -> RecordedStep:
        """Return a step by matrix products."""
        given = self._decode_input(rows, max_kv_len, chooses)
        line = torch.arange(rows, dtype=torch.int32, device=self.device)
        tiles = torch.stack((line, line, torch.ones_like(line)))
        tokens = FlatTokens(
            ids=torch.zeros(rows, dtype=torch.int64, device=self.device),
            positions=given["positions"],
            rows=line,
            tables=given["tables"],
            tiles=[self._forward.decoding_tiles(tiles, max_kv_len)],
        )
        logits, forward = self._logits[:rows], self._forward

        def work() -> None:
            torch.index_select(last, 0, given["slots"], out=tokens.ids)
            forward.run(tokens, logits)

        return self._then_choose(RecordedStep(given, work, logits), last)

    def _then_choose(self, step: RecordedStep, last: Tensor) -> RecordedStep:
        """Let a step whose input says how also choose its tokens."""
        if "temperature" not in step.given.arrays:
            return step
        from scratchlm.accelerate.kernels.triton.choose_token import ChooseBuffers, choose_tokens

        read, given, logits = step.work, step.given, step.logits
        buffers = ChooseBuffers.of(len(logits), self.device)

        def work() -> None:
            read()
            choose_tokens(
                *(logits, given["temperature"], given["top_k"], given["top_p"], given["numbers"]),
                *(given["of_slots"], last, buffers),
            )

        step.work, step.tokens = work, buffers.tokens
        return step

    def _capture(self, step: RecordedStep) -> RecordedStep:
        if not self.graph or self.device.type != "cuda":
            return step
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            return step.record(self._pool)
        except RuntimeError as error:
            if not self.is_quantized:
                raise
            warnings.warn(f"quantised steps run kernel by kernel: {error}", stacklevel=4)
            torch.cuda.synchronize()
            self.graph = False
            return step

    # Prompts

    def _read(
        self, step: Step, tables: Tensor, last: Tensor, choice: dict[str, Any]
    ) -> RecordedStep:
        counts, starts, slots = map(np.array, (step.counts, step.starts, step.slots))
        rows = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts  # of each row's new tokens
        decoding = (counts == 1) & (not self.exact)
        single = np.flatnonzero(decoding)
        longest = int((starts + counts).max())
        block = self._forward.block_q(_token_bucket(len(rows)) or len(rows))
        prompt_tiles = _cut(np.flatnonzero(~decoding), counts, first, block)
        choosing = np.array(step.logit_indices)
        found = self._prompt_step(
            _Sizes(
                *(len(rows), len(counts), prompt_tiles.shape[1], len(single), len(choosing)),
                length_bucket(longest, self.model.config.context_length),
            ),
            bool(choice),
            last,
        )
        found.given.send(
            ids=step.tokens,
            slots=slots[rows],
            positions=np.arange(len(rows)) - first[rows] + starts[rows],
            lines=rows,
            tables=tables.numpy()[slots, : self._pages(longest)],
            prompt_tiles=prompt_tiles,
            decode_tiles=np.stack((single, first[single], np.ones_like(single))),
            choosing=choosing,
            **choice,
        )
        found.run()
        return found

    def _prompt_step(self, sizes: _Sizes, chooses: bool, last: Tensor) -> RecordedStep:
        """Return a step of these sizes, or the recorded one of their bucket, where it has room.

        Scored tokens and proposals may ask for more logits than there are requests.
        """
        bucket = _token_bucket(sizes.tokens)
        if bucket is None or max(sizes.rows, sizes.choosing) > self.max_rows:
            return self._mixed(sizes, chooses, last)
        block_q = self._forward.block_q(bucket)
        # A tile that is not there still costs its programs a start.
        tiles = min(power_of_two(max(8, sizes.prompt_tiles)), bucket // block_q + self.max_rows)
        key = "prompts", bucket, tiles, sizes.max_kv_len, chooses
        if key not in self._recorded:
            self._recorded[key] = None
            return self._mixed(sizes, chooses, last)
        found = self._recorded[key]
        if found is None:
            rows = self.max_rows
            decoding = 0 if self.exact else rows  # all, where the host knows some of their tokens
            most = _Sizes(
                *(bucket, rows, tiles, decoding, rows),
                sizes.max_kv_len,
            )
            found = self._recorded[key] = self._capture(self._mixed(most, chooses, last))
        return found

    def _mixed(self, sizes: _Sizes, chooses: bool, last: Tensor) -> RecordedStep:
        """Return a step with parts of prompts, and decoding rows beside them."""
        tokens, forward = sizes.tokens, self._forward
        fields = {
            "ids": Field((tokens,)),
            "slots": Field((tokens,)),
            "positions": Field((tokens,), neutral=-1),
            "lines": Field((tokens,)),
            "tables": Field((sizes.rows, self._pages(sizes.max_kv_len))),
            "prompt_tiles": Field((3, -(-sizes.prompt_tiles // 4) * 4)),  # lines are aligned too
            "decode_tiles": Field((3, -(-sizes.decoding // 4) * 4)),
            "choosing": Field((sizes.choosing,)),
            **(_choice_fields(sizes.choosing) if chooses else {}),
        }
        given = StepInput(fields, self.device)
        tiles = []
        if sizes.prompt_tiles:
            tiles.append(forward.prompt_tiles(given["prompt_tiles"], tokens, sizes.max_kv_len))
        if sizes.decoding:
            tiles.append(forward.decoding_tiles(given["decode_tiles"], sizes.max_kv_len))
        ids = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        flat = FlatTokens(
            *(ids, given["positions"], given["lines"], given["tables"], tiles, given["choosing"])
        )
        logits = self._logits[: sizes.choosing]
        if len(logits) < sizes.choosing:
            logits = logits.new_empty(sizes.choosing, logits.shape[1])

        def work() -> None:
            torch.where(given["ids"] == LAST, last[given["slots"]], given["ids"], out=ids)
            forward.run(flat, logits)

        return self._then_choose(RecordedStep(given, work, logits), last)


def _address(weight: Tensor) -> int:
    return (weight.layer.stored if isinstance(weight, QuantizedWeight) else weight).data_ptr()


def _choice_fields(rows: int) -> dict[str, Field]:
    return {
        "temperature": Field((rows,), wide=True),
        "top_p": Field((rows,), wide=True),
        "numbers": Field((rows,), wide=True),
        "top_k": Field((rows,)),
        "of_slots": Field((rows,), neutral=-1),  # no row is there
    }


def _choice_arrays(step: Step, choice: Choice) -> dict[str, Any]:
    of_slots = [slot for slot, does in zip(step.slots, step.chooses, strict=True) if does]
    return {
        "temperature": choice.temperature,
        "top_p": choice.top_p,
        "top_k": choice.top_k,
        "numbers": choice.numbers,
        "of_slots": of_slots,
    }


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


def _token_bucket(tokens: int) -> int | None:
    """Return how many tokens a recorded step with so many has; None: it is not recorded."""
    return next((size for size in TOKEN_BUCKETS if size >= tokens), None)


def _cut(rows: Any, counts: Any, first: Any, block: int) -> Any:
    """Cut rows' new tokens into tiles: (3, tiles) of row, first token, how many."""
    pieces = -(-counts[rows] // block)
    row = np.repeat(rows, pieces)
    begin = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * block
    return np.stack((row, first[row] + begin, np.minimum(counts[row] - begin, block)))
