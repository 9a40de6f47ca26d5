"""Causal multi-head self-attention.

    Q, K, V = W_Q x, W_K x, W_V x, cut into heads
    head    = softmax(RoPE(Q) RoPE(K)ᵀ / √d_head) V       a token sees itself and what came before
    output  = W_O [head₁; head₂; …]

With `num_kv_heads < num_heads`, each key-value head serves a group of query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Unpack

from jaxtyping import Float, Int
from torch import Tensor, nn

from scratchlm.model.cache import KVCache
from scratchlm.model.layers import FactoryKwargs, Linear, RMSNorm, check_width
from scratchlm.model.rotary import RotaryEmbedding
from scratchlm.ops import CausalMask, Routed, get_ops


@dataclass(frozen=True)
class ForwardContext:
    """What all layers of one forward share."""

    mask: CausalMask = CausalMask()
    positions: Tensor | range = range(0)  # (seq,), (batch, seq), or consecutive ones
    cache: KVCache | None = None
    routes: list[Routed] | None = None  # filled by mixtures of experts
    derived: dict[Any, Any] = field(default_factory=dict)  # what layers compute once for all
    layer: int = 0  # where the cache keeps the keys and values of the layer that runs

    def of_layer(self, layer: int) -> ForwardContext:
        """Return it for one of the layers: what only a cache asks for."""
        return self if self.cache is None else replace(self, layer=layer)


class MultiHeadSelfAttention(nn.Module):
    """Causal self-attention over (…, seq, d_model)."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        d_head: int | None = None,
        *,
        rope: RotaryEmbedding | None = None,
        qk_norm: bool = False,
        qk_norm_eps: float = 1e-6,
        sliding_window: int | None = None,
        bias: Literal["none", "qkv", "all"] = "none",
        layer: int = 0,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if d_head is None and d_model % num_heads:
            raise ValueError(
                "d_model must be divisible by num_heads; got "
                f"d_model={d_model}, num_heads={num_heads}"
            )
        if num_heads % num_kv_heads:
            raise ValueError(
                "num_heads must be divisible by num_kv_heads; got "
                f"num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        d_head = d_model // num_heads if d_head is None else d_head
        if rope is not None and rope.d_k != d_head:
            raise ValueError(f"RoPE's width must be d_head={d_head}; got d_k={rope.d_k}")
        self.ops = get_ops(factory.get("ops", "fast"))
        self.d_model, self.d_head = d_model, d_head
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.sliding_window, self.layer = sliding_window, layer
        self.rope = rope

        self.q_proj = Linear(d_model, num_heads * d_head, bias != "none", **factory)
        self.k_proj = Linear(d_model, num_kv_heads * d_head, bias != "none", **factory)
        self.v_proj = Linear(d_model, num_kv_heads * d_head, bias != "none", **factory)
        self.output_proj = Linear(num_heads * d_head, d_model, bias == "all", **factory)
        self.q_norm = self.k_norm = None
        if qk_norm:
            self.q_norm = RMSNorm(d_head, qk_norm_eps, **factory)
            self.k_norm = RMSNorm(d_head, qk_norm_eps, **factory)

    def forward(
        self,
        x: Float[Tensor, "*batch seq d_model"],
        token_positions: Int[Tensor, "*positions seq"] | None = None,
        *,
        context: ForwardContext | None = None,
    ) -> Float[Tensor, "*batch seq d_model"]:
        """Let every token gather from those before it."""
        check_width(x, self.d_model, "attention")
        context = self.own_context(x.shape[-2], token_positions) if context is None else context
        return self.output_proj(self.attend(x, context))

    def attend(self, x: Tensor, context: ForwardContext) -> Float[Tensor, "*batch seq heads_d"]:
        """Return softmax(Q Kᵀ / √d_head) V of all heads, side by side."""
        q, k, v = self.project(x, context)  # each (*batch, its heads, seq, d_head)
        if context.cache is not None:
            k, v = context.cache.update(context.layer, k, v)
        attn_out = self.ops.attention(q, k, v, self.mask(context))
        return attn_out.transpose(-3, -2).flatten(-2)

    def project(self, x: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values; the first two normed and rotated as the model has it."""
        q, k, v = (self.split_heads(y) for y in self.qkv(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            positions = over_heads(context.positions)
            q, k = self.rope(q, positions), self.rope(k, positions)
        return q, k, v

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return W_Q x, W_K x and W_V x."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def split_heads(self, x: Tensor) -> Float[Tensor, "*batch heads seq d_head"]:
        """Cut the last dimension into heads."""
        return x.unflatten(-1, (-1, self.d_head)).transpose(-3, -2)

    def mask(self, context: ForwardContext) -> CausalMask:
        """Return who sees whom, within this layer's window."""
        if self.sliding_window is None:
            return context.mask
        return replace(context.mask, window=self.sliding_window)

    def own_context(self, seq: int, token_positions: Tensor | None) -> ForwardContext:
        """Return the context of a layer that is called by itself."""
        if token_positions is not None:
            return ForwardContext(positions=token_positions)
        if self.rope is not None and seq > self.rope.max_seq_len:
            raise ValueError(
                f"the sequence must not exceed {self.rope.max_seq_len} tokens; got {seq}"
            )
        return ForwardContext(positions=range(seq))


def over_heads(positions: Tensor | range) -> Tensor | range:
    """Return positions (…, seq) that broadcast over the heads of each row."""
    if isinstance(positions, range) or positions.ndim == 1:
        return positions
    return positions.unsqueeze(-2)
