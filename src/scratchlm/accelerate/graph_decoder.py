"""Decoding on a GPU: a whole step of the model recorded once, replayed for every token.

    decoder = GraphDecoder(model, cache)      after the prompt is in the cache
    logits  = decoder.step(tokens)            one token of every row, as `decode_one_token` does

The host only says "again": the tokens, the lengths of the rows and the logits stay where they are
in device memory. Short rows are attended another way than long ones, so there is a recording for
each. The decoder keeps the cache's own counts right, so the model may read into the cache between
steps; when the cache's memory or the model's weights have moved, it records anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.accelerate.decoding import Unchanged, model_step
from scratchlm.accelerate.gpu_decode import GPUStep, KVSplits, Tile
from scratchlm.model import KVCache, TransformerLM


class GraphDecoder:
    """Decode one token of every row of `cache` at a time.

    `graph=False` launches the kernels one by one: the same results, for tests and for profiles.
    `pdl` lets a kernel start while the one before it ends (Hopper and later); None: where possible.
    `greedy` chooses the largest logit on the device; `step(None)` then reads that token.
    """

    def __init__(
        self,
        model: TransformerLM,
        cache: KVCache,
        *,
        graph: bool = True,
        pdl: bool | None = None,
        greedy: bool = False,
        tiles: Mapping[str, Tile] | None = None,
        kv_splits: KVSplits | None = None,
    ) -> None:
        self.model, self.cache = model, cache
        self.graph, self.greedy = graph, greedy
        self.tiles, self.kv_splits = tiles, kv_splits
        if pdl is None:
            device = model.token_embeddings.weight.device
            pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self.pdl = pdl
        self._unchanged = Unchanged(model)
        self.gpu_step: GPUStep
        self._recorded: dict[int, torch.cuda.CUDAGraph]  # for rows of up to so many keys
        self.max_kv_len: int  # which of them the last step was
        self._bound: tuple[int, ...]  # addresses the recording holds for true
        # What the cache counted when the device's lengths were last right.
        self._length: int
        self._row_lengths: Tensor | None
        self._bind()

    @property
    def ids(self) -> Tensor:
        """The tokens the next step reads; with `greedy`, a step leaves the chosen ones here."""
        return self.gpu_step.ids

    @torch.inference_mode()
    def step(self, tokens: Tensor | Sequence[int] | None) -> Float[Tensor, "batch vocab"]:
        """Read one more token of every row (None: those in `ids`); return the logits after it.

        The logits are float32, in memory that the next step writes again.
        """
        cache, moved = self.cache, self._addresses() != self._bound
        # A look at the model costs some microseconds: it is taken while the device works, unless
        # that work would have to be prepared first.
        look_first = moved or not self._recorded
        if look_first and not self._unchanged:
            return self._step_by_model(self.gpu_step.ids if tokens is None else tokens)
        if moved:
            if tokens is None:
                tokens = self.gpu_step.ids.clone()
            self._bind()
        gpu_step = self.gpu_step
        synchronous = cache.length == self._length and cache.row_lengths is self._row_lengths
        cache.reserve(1)
        self.model.check_length(cache.reserved_length)
        if not synchronous:
            gpu_step.lengths.copy_(cache.lengths)
        if tokens is not None:
            if not isinstance(tokens, Tensor):
                tokens = torch.tensor(tokens)
            if tokens.shape != gpu_step.ids.shape:
                raise ValueError(
                    f"a step takes one token of each of {gpu_step.rows} rows; "
                    f"got shape {tuple(tokens.shape)}"
                )
            gpu_step.ids.copy_(tokens, non_blocking=True)
        self.max_kv_len = min(
            r for r in self._recorded or gpu_step.all_kv_splits if r >= cache.reserved_length
        )
        if self._recorded:
            self._recorded[self.max_kv_len].replay()
        else:
            gpu_step.run(self.max_kv_len)
        if not look_first and not self._unchanged:
            read = gpu_step.previous_ids if self.greedy else gpu_step.ids
            return self._step_by_model(read if tokens is None else tokens)
        cache.advance()
        self._length, self._row_lengths = cache.length, cache.row_lengths
        return gpu_step.logits

    def _step_by_model(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Read these tokens by a model that is no longer the one this decoder was made for."""
        self._length = -1  # the device's lengths are not right
        logits = model_step(self.model, torch.as_tensor(tokens), self.cache)
        if self.greedy:
            self.gpu_step.ids.copy_(logits.argmax(dim=-1))
        return logits

    def _addresses(self) -> tuple[int, ...]:
        cache = self.cache
        addresses = cache.keys.data_ptr(), cache.values.data_ptr(), cache.batch_size
        return (*addresses, *self.gpu_step.weight_addresses())

    @torch.inference_mode()
    def _bind(self) -> None:
        """Make the buffers for the cache as it is now, and record a step."""
        self._recorded, self._length, self._row_lengths = {}, -1, None
        self.gpu_step = self._make(self.pdl)
        if self.graph:
            try:
                self._record()
            except RuntimeError as error:
                if not self.gpu_step.pdl:
                    raise
                warnings.warn(
                    f"recording without programmatic dependent launch: {error}", stacklevel=3
                )
                torch.cuda.synchronize()
                self.gpu_step = self._make(pdl=False)
                self._record()
        self._bound = self._addresses()

    def _make(self, pdl: bool) -> GPUStep:
        return GPUStep(
            self.model,
            self.cache,
            pdl=pdl,
            greedy=self.greedy,
            tiles=self.tiles,
            kv_splits=self.kv_splits,
        )

    def _record(self) -> None:
        """Run a step once to compile what it needs, then record it: for all lengths to come.

        The trial reads token 0 into slot 0 of every row, so what stands there is put back.
        """
        gpu_step, cache = self.gpu_step, self.cache
        lengths = [
            max_kv_len for max_kv_len in gpu_step.all_kv_splits if max_kv_len > cache.length
        ] or [cache.capacity]
        slot = (cache.keys[:, :, :, :1].clone(), cache.values[:, :, :, :1].clone())
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        recorded = {}
        with torch.cuda.stream(stream):
            for max_kv_len in lengths:
                gpu_step.lengths.zero_()
                gpu_step.run(max_kv_len)
                stream.synchronize()
                recorded[max_kv_len] = graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    gpu_step.run(max_kv_len)
                finally:
                    graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        for kept, before in zip((cache.keys, cache.values), slot, strict=True):
            kept[:, :, :, :1] = before
        gpu_step.lengths.zero_()
        gpu_step.ids.zero_()
        self._recorded = recorded
