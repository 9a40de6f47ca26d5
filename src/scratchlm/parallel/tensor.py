"""Tensor parallelism (arXiv:1909.08053): every rank has a part of each layer.

A rank's attention has some of the heads, its feed-forward layer some of the hidden width, its
tables some of the vocabulary: smaller layers of the same classes, so their code and their kernels
are those of one device. What is new lies at their borders, as hooks:

    Attn, FFN    x is gathered on the way in; partial results are added up on the way out
    embedding    ids of other ranks' rows give zeros; the rows are added up
    LM head      logits are joined; the loss is computed without joining them

Between Attn and FFN each rank keeps its part of every sequence (arXiv:2205.05198), so norms and
residual stream are not computed twice; a sequence that does not divide stays whole there.

PLAN is the table: which dimension of which weight is cut. A bias that is added after the ranks'
results belongs to the first rank alone, so that it is added once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scratchlm.config import ModelConfig
from scratchlm.config import MoE as MoEConfig
from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.ops import Routed
from scratchlm.ops.ranges import check_range
from scratchlm.parallel import collectives as c
from scratchlm.parallel.ranks import Ranks
from scratchlm.parallel.rows import local

SLICE_ELEMENTS = 2**25  # logits a rank forms at a time
HEADS, KV_HEADS, WIDTH, VOCAB = "heads", "kv_heads", "width", "vocab"
# name of a weight -> what is cut, and the dimension in which it lies (from the end)
PLAN: dict[str, tuple[str, int]] = {
    r"token_embeddings\.weight": (VOCAB, -2),
    r"lm_head\.weight": (VOCAB, -2),
    r"layers\.\d+\.attn\.q_proj\.weight": (HEADS, -2),
    r"layers\.\d+\.attn\.q_proj\.bias": (HEADS, -1),
    r"layers\.\d+\.attn\.[kv]_proj\.weight": (KV_HEADS, -2),
    r"layers\.\d+\.attn\.[kv]_proj\.bias": (KV_HEADS, -1),
    r"layers\.\d+\.attn\.output_proj\.weight": (HEADS, -1),
    r"layers\.\d+\.ffn\.w[13]\.weight": (WIDTH, -2),
    r"layers\.\d+\.ffn\.w[13]\.bias": (WIDTH, -1),
    r"layers\.\d+\.ffn\.w2\.weight": (WIDTH, -1),
}
FIRST_RANK_ONLY = r"layers\.\d+\.(attn\.output_proj|ffn\.w2)\.bias"
# Whole on every rank, with gradients of what the rank has seen: to be added up.
PARTIAL = r"layers\.\d+\.(attn\.[qk]_norm|ffn\.router)\..*"
PARTIAL_IN_SEQUENCES = r"layers\.\d+\.ln[12]\..*"


@dataclass(frozen=True)
class Box:
    """The part of a tensor that a rank has."""

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Cut it out."""
        for dim, (start, length) in enumerate(zip(self.offsets, self.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def bounds(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return where a rank's part of `count` things begins and ends; parts differ by one at most."""
    return count * rank // size, count * (rank + 1) // size


def box_of(name: str, shape: Sequence[int], config: ModelConfig, rank: int, size: int) -> Box:
    """Return which part of a weight a rank has, by the table; what is not in it is whole."""
    offsets, lengths = [0] * len(shape), list(shape)
    if re.fullmatch(FIRST_RANK_ONLY, name) and rank:
        return Box(tuple(shape), tuple(offsets), (0,) * len(shape))
    for pattern, (what, dim) in PLAN.items():
        if re.fullmatch(pattern, name):
            grain = config.d_head if what in (HEADS, KV_HEADS) else 1
            low, high = bounds(shape[dim] // grain, rank, size)
            offsets[dim], lengths[dim] = low * grain, (high - low) * grain
    return Box(tuple(shape), tuple(offsets), tuple(lengths))


def check_divides(config: ModelConfig, size: int) -> None:
    """Refuse a number of ranks that the heads cannot be shared out over."""
    for name in ("num_heads", "num_kv_heads"):
        count = getattr(config, name)
        if count % size:
            raise ScratchLMError(f"train.tp={size} must divide model.{name}={count}")
    if config.d_ff < size or config.vocab_size < size:
        raise ScratchLMError(f"train.tp={size} is more than the feed-forward width or vocabulary")


class TensorParallel:
    """A model cut over the ranks of the tensor dimension."""

    def __init__(self, model: TransformerLM, ranks: Ranks) -> None:
        self.ranks, self.group, self.config = ranks, ranks.tensor_group, model.config
        self.rank, self.size = ranks.tensor_rank, ranks.tensor_size
        check_divides(model.config, self.size)
        self.boxes = {
            name: box_of(name, p.shape, self.config, self.rank, self.size)
            for name, p in model.named_parameters()
        }
        self.in_sequences = False  # whether sequences are cut between layers, in this forward
        self._cut(model)
        self._hook(model)

    # Weights

    def _cut(self, model: TransformerLM) -> None:
        for name, box in self.boxes.items():
            owner, _, last = name.rpartition(".")
            module, p = model.get_submodule(owner), model.get_parameter(name)
            if 0 in box.lengths:
                setattr(module, last, None)
            elif box.lengths != box.shape:
                setattr(module, last, nn.Parameter(box.of(p.data).clone(), p.requires_grad))
        heads = self.config.num_heads // self.size
        kv_heads = self.config.num_kv_heads // self.size
        low, high = bounds(self.config.d_ff, self.rank, self.size)
        for layer in model.layers:
            layer.attn.num_heads, layer.attn.num_kv_heads = heads, kv_heads  # type: ignore[union-attr]
        # What a cache and an engine's pages are sized by.
        model.config = self.config.replace(
            num_heads=heads, num_kv_heads=kv_heads, d_head=self.config.d_head, d_ff=high - low
        )

    def reduce_gradients(self, parameters: dict[str, nn.Parameter]) -> None:
        """Add up the gradients of what is whole on every rank, but saw a part of the work."""
        for name, p in parameters.items():
            partial = re.fullmatch(PARTIAL, name)
            if self.in_sequences:
                partial = partial or re.fullmatch(PARTIAL_IN_SEQUENCES, name)
            if partial and p.grad is not None:
                dist.all_reduce(local(p.grad), group=self.group)

    def is_cut(self, name: str) -> bool:
        """Whether ranks have different parts of a weight."""
        late = re.fullmatch(FIRST_RANK_ONLY, name) is not None
        return late or self.boxes[name].lengths != self.boxes[name].shape

    # Borders

    def _hook(self, model: TransformerLM) -> None:
        first, last = model.layers[0], model.layers[-1]
        first.register_forward_pre_hook(self._enter)
        last.register_forward_hook(lambda module, inputs, y: self._leave(y))
        for layer in model.layers:
            for part in (layer.attn, layer.ffn):
                part.register_forward_pre_hook(self._gather)  # type: ignore[union-attr]
                part.register_forward_hook(self._reduce)  # type: ignore[union-attr]
        table: Any = model.token_embeddings
        self.first_id = bounds(self.config.vocab_size, self.rank, self.size)[0]
        table.register_forward_pre_hook(self._local_ids)
        table.register_forward_hook(self._add_rows)
        model.lm_head.register_forward_pre_hook(
            lambda module, inputs: (c.copy_in(inputs[0], self.group), *inputs[1:])
        )
        sizes = [high - low for low, high in self._vocab_bounds()]
        model.lm_head.register_forward_hook(
            lambda module, inputs, y: c.join_last(y, sizes, self.group)
        )

        def head_loss(hidden: Tensor, targets: Tensor, **options: Any) -> Tensor:
            return self.head_loss(model, hidden, targets, **options)

        model.head_loss = head_loss  # type: ignore[method-assign]

    def _vocab_bounds(self) -> list[tuple[int, int]]:
        return [bounds(self.config.vocab_size, rank, self.size) for rank in range(self.size)]

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        self.in_sequences = x.shape[c.SEQ] % self.size == 0
        return (c.cut_rows(x, self.group), *inputs[1:]) if self.in_sequences else inputs

    def _leave(self, y: Tensor) -> Tensor:
        return c.join_rows(y, self.group) if self.in_sequences else y

    def _gather(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        enter = c.gather_rows if self.in_sequences else c.copy_in
        return (enter(inputs[0], self.group), *inputs[1:])

    def _reduce(self, module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor:
        routes: list[Routed] | None = inputs[1] if len(inputs) > 1 else None
        if isinstance(self.config.ffn, MoEConfig) and isinstance(routes, list):
            # Every rank computes the balancing term: each takes its part of that gradient.
            last = routes[-1]
            weak = c.weaken_gradient(last.probabilities, 1 / self.size)
            routes[-1] = replace(last, probabilities=weak)
        return c.scatter_rows(y, self.group) if self.in_sequences else c.reduce_out(y, self.group)

    # The vocabulary

    def _local_ids(self, module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        check_range(inputs[0], self.config.vocab_size, "token id")
        ids = inputs[0] - self.first_id
        self._elsewhere = (ids < 0) | (ids >= len(module.weight))
        return (ids.masked_fill(self._elsewhere, 0),)

    def _add_rows(self, module: nn.Module, inputs: Any, rows: Tensor) -> Tensor:
        return c.reduce_out(rows.masked_fill(self._elsewhere[..., None], 0), self.group)

    def head_loss(
        self,
        model: TransformerLM,
        hidden: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Return the mean cross-entropy; each rank has the logits of its part of the vocabulary.

        log Σ exp is taken with the largest logit of all ranks, and its sum over all ranks. Logits
        are formed a slice of rows at a time, and once more going back.
        """
        head: Any = model.lm_head
        x, index = c.copy_in(hidden, self.group).flatten(0, -2), targets.flatten() - self.first_id
        rows = max(1, SLICE_ELEMENTS // len(head.weight))

        def parts(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            return _loss_parts(head.ops.linear(x, head.weight).float(), index)

        slices = zip(x.split(rows), index.split(rows), strict=True)
        if len(x) > rows and torch.is_grad_enabled():
            found = [checkpoint(parts, *piece, use_reentrant=False) for piece in slices]
        else:
            found = [parts(*piece) for piece in slices]
        own_largest, own_total, own_chosen = (torch.cat(each) for each in zip(*found, strict=True))
        largest = own_largest.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        total = c.reduce_out(own_total * (own_largest - largest).exp(), self.group)
        normaliser = (total.log() + largest).view_as(targets)
        losses = normaliser - c.reduce_out(own_chosen, self.group).view_as(targets)
        if z_loss:
            losses = losses + z_loss * normaliser.pow(2)
        counts = targets != ignore_index
        return losses.masked_fill(~counts, 0.0).sum() / counts.sum().clamp(min=1)


def _loss_parts(logits: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Return of each row the largest logit, Σ exp relative to it, and the target's logit, or 0."""
    largest = logits.detach().amax(-1)
    total = (logits - largest[:, None]).exp().sum(-1)
    here = (index >= 0) & (index < logits.shape[-1])
    found = logits.gather(-1, index.where(here, torch.zeros_like(index))[:, None])[:, 0]
    return largest, total, found.where(here, torch.zeros_like(found))
