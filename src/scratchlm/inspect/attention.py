"""The attention weights of every head, for one sequence: the shortest way to them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inspect.look import inspect
from scratchlm.model import TransformerLM


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
