"""The same names and signatures as `ops/reference.py`, as fast as the machine allows.

An op stands here only where it is faster than its reference; the others are the reference's own.
`tests/ops/test_fast_matches_reference.py` holds every one of them to the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scratchlm.ops.masks import CausalMask, Mask, check_attention
from scratchlm.ops.ranges import can_look, counted_targets
from scratchlm.ops.reference import route
from scratchlm.ops.routing import Routed

# Queries handled at a time when the mask is not plain causal: the (query, key) table is formed
# for one chunk only, so memory grows linearly with the sequence.
QUERY_CHUNK = 512


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = W x (+ b)."""
    return F.linear(x, weight, bias)


def embedding(ids: Tensor, weight: Tensor, padding_id: int | None = None) -> Tensor:
    """Row `id` of the table, for every id."""
    return F.embedding(ids, weight, padding_idx=padding_id)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x²) + ε) · g."""
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x − mean) / sqrt(var + ε) · g + b."""
    if x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    wide_bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
}


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Mean of log Σ exp(logits) − logits[target] over the targets that count."""
    index, counts, wrong = counted_targets(logits, targets, ignore_index)
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    rows, counts = wide.reshape(-1, wide.shape[-1]), counts.reshape(-1)
    labels = index.reshape(-1).masked_fill(~counts, -100)
    total = F.cross_entropy(rows, labels, ignore_index=-100, reduction="sum")
    if z_loss:
        total = total + z_loss * rows.logsumexp(-1).masked_fill(~counts, 0.0).pow(2).sum()
    if wrong is not None:
        total = total.masked_fill(wrong.any(), torch.nan)
    return total if reduction == "sum" else total / counts.sum().clamp(min=1)


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    layout: Literal["interleaved", "half"] = "interleaved",
) -> Tensor:
    """Turn each pair of channels by its angle."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    if layout == "interleaved":
        a, b = wide.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)
    a, b = wide.chunk(2, dim=-1)
    parts = (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin))
    return torch.cat(parts, dim=-1).to(x.dtype)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask = None
) -> Tensor:
    """softmax(Q Kᵀ / √d_k) V."""
    check_attention(query, key, value, mask)
    return _attend(query, key, value, mask)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Mask = None) -> Tensor:
    """Attention over heads; with fewer key heads, each serves a group of query heads."""
    return _attend(query, key, value, mask, grouped=query.shape[-3] != key.shape[-3])


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, grouped: bool = False) -> Tensor:
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    if not isinstance(mask, CausalMask):
        return _attend_by_table(q, k, v, mask, grouped, may_hide_all=True)
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    if mask.is_plain and mask.start == 0 and num_queries == num_keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if mask.is_plain and num_queries == 1 and num_keys == mask.start + 1:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    if num_queries <= QUERY_CHUNK:
        return _attend_chunk(q, k, v, mask, range(num_queries), grouped)
    parts = []
    for start in range(0, num_queries, QUERY_CHUNK):
        queries = range(start, min(start + QUERY_CHUNK, num_queries))
        # Autograd would keep every chunk's table; recomputing it keeps none.
        part = checkpoint(_attend_chunk, q, k, v, mask, queries, grouped, use_reentrant=False)
        parts.append(part)
    return torch.cat(parts, dim=-2)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, queries: range, grouped: bool
) -> Tensor:
    keys = mask.visible_keys(queries, k.shape[-2])
    q = q[..., queries.start : queries.stop, :]
    k, v = k[..., keys.start : keys.stop, :], v[..., keys.start : keys.stop, :]
    table = mask.table(queries, keys, q.device)
    may_hide_all = mask.key_valid is not None or mask.slots is not None
    return _attend_by_table(q, k, v, table, grouped, may_hide_all)


def _attend_by_table(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, grouped: bool, may_hide_all: bool
) -> Tensor:
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=table, enable_gqa=grouped)
    if not may_hide_all:
        return mixed
    # Some of torch's GPU kernels average over all keys where a query sees none.
    return mixed.masked_fill(~table.any(dim=-1, keepdim=True), 0.0)


def swiglu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
) -> Tensor:
    """W2(SiLU(W1 x) ⊙ W3 x)."""
    return F.linear(F.silu(F.linear(x, w1, b1)) * F.linear(x, w3, b3), w2, b2)


def mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "gelu_tanh",
) -> Tensor:
    """W2 act(W1 x)."""
    return F.linear(ACTIVATIONS[activation](F.linear(x, w1, b1)), w2, b2)


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
