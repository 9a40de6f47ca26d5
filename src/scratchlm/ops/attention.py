"""Attention at speed: which kernel for which device, dtype and mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from scratchlm.ops import native, short_attention
from scratchlm.ops.masks import CausalMask, Mask, are_groups
from scratchlm.ops.ranges import constant_in_graphs, goes_forward, is_transformed

# Queries handled at a time when the mask is not plain causal: the (query, key) table is formed
# for one chunk only, so memory grows linearly with the sequence.
QUERY_CHUNK = 512
# Our CPU kernel pays from so many tokens on, and has been measured up to so many channels a head.
TOKENS_FROM, CHANNELS_UP_TO = 48, 128


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, grouped: bool = False) -> Tensor:
    """softmax(Q Kᵀ / √d_k) V; `grouped`: with fewer heads of keys and values than of queries."""
    if mask is None:
        return _by_torch(q, k, v, enable_gqa=grouped)
    if not isinstance(mask, CausalMask):
        return _attend_with_table(q, k, v, mask, grouped, may_blind=True)
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    if mask.is_plain and mask.start == 0 and num_queries == num_keys:
        return _attend_causal(q, k, v, grouped)
    if mask.is_plain and num_queries == 1 and num_keys == mask.start + 1:
        return _by_torch(q, k, v, enable_gqa=grouped)
    if num_queries <= QUERY_CHUNK:
        return _attend_chunk(q, k, v, mask, range(num_queries), grouped)
    parts = []
    for start in range(0, num_queries, QUERY_CHUNK):
        queries = range(start, min(start + QUERY_CHUNK, num_queries))
        # Autograd would keep every chunk's table; recomputing it keeps none.
        part = checkpoint(_attend_chunk, q, k, v, mask, queries, grouped, use_reentrant=False)
        parts.append(part)
    return torch.cat(parts, dim=-2)


# In the order of their speed on Hopper; each is passed over where it does not apply.
_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
    if _supports_cpu_kernel(q, k, v) and _has_cpu_kernel():
        from scratchlm.ops.cpu_attention import causal_attention

        attn_out: Tensor = causal_attention(q, k, v)[0]
        return attn_out
    if not grouped and short_attention.is_short(q, k, v):
        return short_attention.attend(q, k, v)
    # cuDNN plans anew for every length: that pays in training, where lengths do not change.
    if not (q.is_cuda and torch.is_grad_enabled()):
        return _by_torch(q, k, v, is_causal=True, enable_gqa=grouped)
    with sdpa_kernel(_KERNELS, set_priority=True):
        return _by_torch(q, k, v, is_causal=True, enable_gqa=grouped)


def _by_torch(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    """Torch's attention; of its kernels one alone has derivatives going forward."""
    if goes_forward():
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, **how)
    return F.scaled_dot_product_attention(q, k, v, **how)


def _supports_cpu_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether our own kernel is for these: on a CPU, in float32, neither short nor wide."""
    return (
        q.is_cpu
        and are_groups(q, k, v)
        and q.shape[-2] >= TOKENS_FROM
        and q.shape[-1] <= CHANNELS_UP_TO
        and q.dtype == k.dtype == v.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not is_transformed()
    )


@constant_in_graphs
def _has_cpu_kernel() -> bool:
    """Whether our own kernel can be had; at the first call it is compiled."""
    if native.library() is None:
        return False
    import scratchlm.ops.cpu_attention  # noqa: F401  # before a compiler looks on

    return True


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, mask: CausalMask, queries: range, grouped: bool
) -> Tensor:
    keys = mask.visible_keys(queries, k.shape[-2])
    q = q[..., queries.start : queries.stop, :]
    k, v = k[..., keys.start : keys.stop, :], v[..., keys.start : keys.stop, :]
    table = mask.table(queries, keys, q.device)
    return _attend_with_table(q, k, v, table, grouped, mask.may_blind)


def _attend_with_table(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, grouped: bool, may_blind: bool
) -> Tensor:
    attn_out = _by_torch(q, k, v, attn_mask=table, enable_gqa=grouped)
    if not may_blind:
        return attn_out
    # Some of torch's GPU kernels average over all keys where a query sees none.
    return attn_out.masked_fill(~table.any(dim=-1, keepdim=True), 0.0)
