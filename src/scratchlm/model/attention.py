"""Causal multi-head self-attention.

    Q, K, V = W_Q x, W_K x, W_V x, cut into heads
    head    = softmax(RoPE(Q) RoPE(K)ᵀ / √d_head) V       a token sees itself and what came before
    output  = W_O [head₁; head₂; …]

With `num_kv_heads < num_heads`, each key-value head serves a group of query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scratchlm.model.cache import KVCache
from scratchlm.model.layers import Linear, RMSNorm, _check_width, is_plain, linear_together
from scratchlm.model.rotary import RotaryEmbedding, Rotation
from scratchlm.ops import CausalMask, Ops, get_ops
from scratchlm.ops.qkv import Turn

# Weights, biases, (heads, key-value heads), what turns them
Parts = tuple[list[Tensor], list[Tensor | None], tuple[int, int], Turn]


@dataclass(frozen=True)
class Scene:
    """What all layers of one forward share: who sees whom, where tokens stand, what was kept."""

    mask: CausalMask = CausalMask()
    rotation: Rotation | None = None
    cache: KVCache | None = None


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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: str | Ops = "fast",
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
        self.ops = get_ops(ops)
        self.d_model, self.d_head = d_model, d_head
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.sliding_window, self.layer = sliding_window, layer
        self.rope = rope

        def project(d_in: int, d_out: int, with_bias: bool) -> Linear:
            return Linear(d_in, d_out, with_bias, device=device, dtype=dtype, ops=ops)

        self.q_proj = project(d_model, num_heads * d_head, bias != "none")
        self.k_proj = project(d_model, num_kv_heads * d_head, bias != "none")
        self.v_proj = project(d_model, num_kv_heads * d_head, bias != "none")
        self.output_proj = project(num_heads * d_head, d_model, bias == "all")
        self.q_norm = self.k_norm = None
        if qk_norm:
            self.q_norm = RMSNorm(d_head, qk_norm_eps, device=device, dtype=dtype, ops=ops)
            self.k_norm = RMSNorm(d_head, qk_norm_eps, device=device, dtype=dtype, ops=ops)

    def forward(
        self,
        x: Float[Tensor, "*batch seq d_model"],
        token_positions: Int[Tensor, "*positions seq"] | None = None,
        *,
        scene: Scene | None = None,
    ) -> Float[Tensor, "*batch seq d_model"]:
        """Let every token gather from those before it."""
        _check_width(x, self.d_model, "attention")
        scene = self._own_scene(x.shape[-2], token_positions) if scene is None else scene
        mask = scene.mask
        if self.sliding_window is not None:
            mask = replace(mask, window=self.sliding_window)
        parts = self._parts(scene.rotation)
        if parts is not None and scene.cache is None and self.q_norm is None:
            # All of what follows by one operation, where a GPU has it
            at_once = self.ops.attended(x, *parts, mask)
            if at_once is not None:
                return self.output_proj(at_once)
        q, k, v = self._project(x, scene.rotation, parts)  # each (*batch, its heads, seq, d_head)
        if scene.cache is not None:
            k, v = scene.cache.update(self.layer, k, v)
        mixed = self.ops.attention(q, k, v, mask)
        return self.output_proj(mixed.transpose(-3, -2).flatten(-2))

    def _parts(self, by: Rotation | None) -> Parts | None:
        """Return what a kernel needs to project and turn, where all of it is plain."""
        maps, norms = (self.q_proj, self.k_proj, self.v_proj), (self.q_norm, self.k_norm)
        plain = all(is_plain(m) for m in (*maps, *norms) if m is not None)
        if not plain or by is None or type(self.rope) is not RotaryEmbedding:
            return None
        return (
            [m.weight for m in maps],
            [m.bias for m in maps],
            (self.num_heads, self.num_kv_heads),
            (by.cos, by.sin, self.rope.layout, by.lines),
        )

    def _project(
        self, x: Tensor, by: Rotation | None, parts: Parts | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, the first two normed and turned as the model has it."""
        maps = (self.q_proj, self.k_proj, self.v_proj)
        if parts is not None:
            at_once = self.ops.turned_heads(x, *parts, _gains(self.q_norm, self.k_norm))
            if at_once is not None:
                return at_once
        q, k, v = map(self._cut_into_heads, linear_together(x, maps, self.ops))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None and by is not None:
            q, k = self.rope.rotate_both(q, k, by)
        return q, k, v

    def _cut_into_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.d_head)).transpose(-3, -2)

    def _own_scene(self, seq: int, token_positions: Tensor | None) -> Scene:
        if self.rope is None:
            return Scene()
        if token_positions is not None:
            return Scene(rotation=self.rope.at(token_positions))
        if seq > self.rope.max_seq_len:
            raise ValueError(
                f"the sequence must not exceed {self.rope.max_seq_len} tokens; got {seq}"
            )
        return Scene(rotation=self.rope.at(slice(0, seq)))


def _gains(q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> tuple[Tensor, Tensor, float] | None:
    """Return the gains of the norms on queries and keys, and their ε, where there are norms."""
    if q_norm is None or k_norm is None:
        return None
    return q_norm.weight, k_norm.weight, q_norm.eps
