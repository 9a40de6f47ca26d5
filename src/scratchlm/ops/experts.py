"""A mixture of experts at speed: tokens sorted by expert, one grouped product for all of them.

The definition is `moe` of `ops/reference.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from scratchlm.ops.ranges import can_look
from scratchlm.ops.reference import route
from scratchlm.ops.routing import Routed


def moe(
    x: Tensor,
    router: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    experts_per_token: int,
    renormalize: bool = True,
) -> Routed:
    """Sort the tokens by expert and send each expert its block in one grouped product."""
    tokens = x.reshape(-1, x.shape[-1])
    probabilities, weights, experts = route(tokens, router, experts_per_token, renormalize)
    order = experts.flatten().argsort(stable=True)  # (tokens · chosen)
    token = order // experts_per_token
    load = torch.zeros(len(w1), dtype=torch.int32, device=x.device)
    load = load.index_add(0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
    ends = load.cumsum(0, dtype=torch.int32)
    block = tokens[token]  # each expert's tokens, one expert after the other
    hidden = F.silu(_per_expert(block, w1, ends)) * _per_expert(block, w3, ends)
    answer = _per_expert(hidden, w2, ends) * weights.flatten()[order, None]
    output = torch.zeros_like(tokens).index_add(0, token, answer)
    return Routed(output.view_as(x), probabilities, experts)


def _per_expert(block: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    device = block.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        block, weight = block.to(low), weight.to(low)
    if _can_group(block, weight):
        return F.grouped_mm(block, weight.transpose(-2, -1), offs=ends)
    if can_look(ends):
        parts = block.tensor_split(ends[:-1].long())
        return torch.cat(
            [F.linear(part, matrix) for part, matrix in zip(parts, weight, strict=True)]
        )
    # Nobody to ask how long the parts are: each expert sees the whole block, and keeps its rows.
    row = torch.arange(len(block), device=block.device)[:, None]
    out = block.new_zeros(len(block), weight.shape[1])
    for end, matrix in zip(reversed(ends.unbind()), reversed(weight.unbind()), strict=True):
        out = torch.where(row < end, F.linear(block, matrix), out)
    return out


def _can_group(block: Tensor, weight: Tensor) -> bool:
    """Whether the grouped product takes this dtype, with rows that start on 16 bytes."""
    kinds = {torch.bfloat16}
    if can_look(block):  # neither traced nor on another device, where it takes bfloat16 alone
        kinds |= {torch.float32, torch.float16}
    aligned = all(width * weight.element_size() % 16 == 0 for width in weight.shape[-2:])
    return block.dtype in kinds and aligned
