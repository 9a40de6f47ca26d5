"""Heads worth looking at, found on sequences of random tokens that are repeated.

With a block of n random tokens said twice, a head that mostly looks from position i to

    i − 1        is a previous-token head,
    i − n        is a duplicate-token head: the same token, one block before,
    i − n + 1    is an induction head: what came after the same token (arXiv:2209.11895).

The score of a head is the mean weight it puts there, over the positions at which there is such a
key: the whole sequence for the first, the second block for the other two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inspect.look import inspect
from scratchlm.model import Transformer


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
    most = model.config.context_length // 2
    block = min(most, 50) if block is None else block
    if not 2 <= block <= most:
        raise ValueError(f"block must lie in [2, {most}], half the context; got {block}")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (rows, block), generator=generator)
    ids = ids.repeat(1, 2).to(model.token_embeddings.weight.device)
    found: list[list[Tensor]] = [[], [], []]
    with inspect(model) as look:
        for i in range(len(model.layers)):  # one layer's weights at a time
            look.clear()
            look.keep(f"layers.{i}.attn.weights")
            model.hidden(ids)
            weights = look.cache[f"layers.{i}.attn.weights"].mean(dim=0)  # (heads, query, key)
            for scores, back, first in zip(
                found, (1, block, block - 1), (1, block, block), strict=True
            ):
                at = weights.diagonal(-back, -2, -1)[:, first - back :]
                scores.append(at.mean(dim=-1))
    return HeadScores(*(torch.stack(scores) for scores in found))
