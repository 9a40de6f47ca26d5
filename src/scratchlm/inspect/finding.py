"""Where heads look: in one sequence; and heads worth looking at, found on repeated random tokens.

With a block of n random tokens said twice, a head that mostly looks from position i to

    i − 1        is a previous-token head,
    i − n        is a duplicate-token head: the same token, one block before,
    i − n + 1    is an induction head: what came after the same token (arXiv:2209.11895).

The score of a head is the mean weight it puts there, over the positions at which there is such a
key: the whole sequence for the first, the second block for the other two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.inspect.look import inspect
from scratchlm.model import Transformer, TransformerLM

CELLS = 1 << 26  # attention weights that are held at once


@torch.no_grad()
def attention_weights(
    model: TransformerLM, token_ids: Sequence[int]
) -> Float[Tensor, "layers heads query key"]:
    """Return the weights of every layer and head for one sequence."""
    ids = torch.tensor([list(token_ids)], device=model.token_embeddings.weight.device)
    with inspect(model) as look:
        look.keep("layers.*.attn.weights")
        model(ids)
    every = [look.cache[f"layers.{i}.attn.weights"][0] for i in range(len(model.layers))]
    return torch.stack(every)


@dataclass(frozen=True)
class HeadScores:
    """Mean weights by layer and head."""

    previous_token: Float[Tensor, "layers heads"]
    duplicate_token: Float[Tensor, "layers heads"]
    induction: Float[Tensor, "layers heads"]

    def top(self, kind: str, count: int = 5) -> list[tuple[int, int, float]]:
        """Return layer, head and score of the heads that score highest."""
        scores: Tensor = getattr(self, kind)
        best = scores.flatten().topk(min(count, scores.numel()))
        heads = scores.shape[1]
        return [
            (i // heads, i % heads, s)
            for s, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]


@torch.no_grad()
def head_scores(
    model: Transformer, *, block: int | None = None, rows: int = 8, seed: int = 0
) -> HeadScores:
    """Score every head on `rows` sequences of a random block of tokens, said twice."""
    ids = repeated_tokens(model, block=block, rows=rows, seed=seed)
    block = ids.shape[1] // 2
    found: list[list[Tensor]] = [[], [], []]
    names = [f"layers.{i}.attn.weights" for i in range(len(model.layers))]
    group = max(1, CELLS // (model.config.num_heads * ids.shape[1] * ids.numel()))
    with inspect(model) as look:
        for first in range(0, len(names), group):
            look.clear()
            look.keep(names[first : first + group])
            model.hidden(ids)
            for name in names[first : first + group]:
                weights = look.cache[name].mean(dim=0)  # (heads, query, key)
                for scores, kind in zip(found, KEYS, strict=True):
                    scores.append(looked_at(weights, kind).mean(dim=-1))
    return HeadScores(*(torch.stack(scores) for scores in found))


def repeated_tokens(
    model: Transformer, *, block: int | None = None, rows: int = 8, seed: int = 0
) -> Int[Tensor, "rows seq"]:
    """Return what heads are scored on: rows of a random block of tokens, said twice."""
    most = model.config.context_length // 2
    block = min(most, 50) if block is None else block
    if not 2 <= block <= most:
        raise ValueError(f"block must lie in [2, {most}], half the context; got {block}")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (rows, block), generator=generator)
    return ids.repeat(1, 2).to(model.token_embeddings.weight.device)


# From a block's length: how far back a head of a kind looks, and from which position on.
KEYS: dict[str, Callable[[int], tuple[int, int]]] = {
    "previous_token": lambda block: (1, 1),
    "duplicate_token": lambda block: (block, block),
    "induction": lambda block: (block - 1, block),
}


def looked_at(
    weights: Float[Tensor, "*some query key"], kind: str
) -> Float[Tensor, "*some positions"]:
    """Return the weights that a score of this kind is the mean of."""
    back, first = KEYS[kind](weights.shape[-1] // 2)
    return weights.diagonal(-back, -2, -1)[..., first - back :]
