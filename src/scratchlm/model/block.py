"""One Transformer block, and the parts of it that a config names.

pre-norm    y = x + Attn(Norm(x));  z = y + FFN(Norm(y))
post-norm   y = Norm(x + Attn(x));  z = Norm(y + FFN(y))
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scratchlm import config as kinds
from scratchlm.config import ModelConfig
from scratchlm.model.attention import MultiHeadSelfAttention, Scene
from scratchlm.model.layers import (
    MLP,
    LayerNorm,
    RMSNorm,
    SwiGLU,
    add_then_norm,
    side_by_side,
)
from scratchlm.model.moe import MoE
from scratchlm.model.rotary import RotaryEmbedding
from scratchlm.ops import Ops, Routed, get_ops


def make_norm(config: ModelConfig, **where: object) -> nn.Module:
    """Build the norm a config names; no norm is the identity."""
    match config.norm:
        case kinds.RMSNorm(eps=eps):
            return RMSNorm(config.d_model, eps, **where)  # type: ignore[arg-type]
        case kinds.LayerNorm(eps=eps, bias=bias):
            return LayerNorm(config.d_model, eps, bias, **where)  # type: ignore[arg-type]
    return nn.Identity()


def make_ffn(config: ModelConfig, **where: object) -> SwiGLU | MLP | MoE:
    """Build the feed-forward layer a config names."""
    d_model, d_ff = config.d_model, config.d_ff
    match config.ffn:
        case kinds.MoE() as moe:
            return MoE(
                d_model,
                d_ff,
                moe.num_experts,
                moe.experts_per_token,
                moe.renormalize,
                **where,  # type: ignore[arg-type]
            )
        case kinds.MLP(activation=activation, bias=bias):
            return MLP(d_model, d_ff, activation, bias, **where)  # type: ignore[arg-type]
        case kinds.SwiGLU(bias=bias):
            return SwiGLU(d_model, d_ff, bias, **where)  # type: ignore[arg-type]


class TransformerBlock(nn.Module):
    """Pre-norm: y = x + Attn(Norm(x)); z = y + FFN(Norm(y)). Post-norm: the norm after the sum."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        rope: RotaryEmbedding | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        ops: str | Ops = "fast",
    ) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype, "ops": get_ops(ops)}
        if rope is None:
            rope = make_rope(config, device=device, ops=ops)
        self.post_norm = config.norm_placement == "post"
        self.ln1 = make_norm(config, **where)
        self.attn = MultiHeadSelfAttention(
            config.d_model,
            config.num_heads,
            config.num_kv_heads,
            config.d_head,
            rope=rope,
            qk_norm=config.attention.qk_norm,
            qk_norm_eps=getattr(config.norm, "eps", 1e-6),
            sliding_window=config.attention.sliding_window,
            bias=config.attention.bias,
            layer=layer,
            device=device,
            dtype=dtype,
            ops=ops,
        )
        self.ln2 = make_norm(config, **where)
        self.ffn = make_ffn(config, **where)

    def forward(
        self,
        x: Float[Tensor, "*batch seq d_model"],
        token_positions: Int[Tensor, "*positions seq"] | None = None,
        *,
        scene: Scene | None = None,
        routes: list[Routed] | None = None,
    ) -> Float[Tensor, "*batch seq d_model"]:
        """Apply attention and the feed-forward layer, each beside a residual path."""
        if self.post_norm:
            y = self.ln1(x + self.attn(x, token_positions, scene=scene))
            return self.ln2(y + self._ffn(y, routes))
        attended = self.attn(self.ln1(x), token_positions, scene=scene)
        if isinstance(self.ffn, MoE):  # its router wants the norm as wide as it is
            y = x + attended
            return y + self.ffn(self.ln2(y), routes)
        y, normed = add_then_norm(x, attended, self.ln2)
        return y + self.ffn(normed)

    def lay_weights_side_by_side(self) -> None:
        """Let weights that multiply one input lie together in memory: decoding reads them so."""
        attn, ffn = self.attn, self.ffn
        side_by_side([attn.q_proj, attn.k_proj, attn.v_proj])
        if isinstance(ffn, SwiGLU):
            side_by_side([ffn.w1, ffn.w3])

    def _ffn(self, x: Tensor, routes: list[Routed] | None) -> Tensor:
        return self.ffn(x, routes) if isinstance(self.ffn, MoE) else self.ffn(x)


def make_rope(
    config: ModelConfig, *, device: torch.device | str | None = None, ops: str | Ops = "fast"
) -> RotaryEmbedding | None:
    """Build the rotary tables a config names, if it names any."""
    match config.positions:
        case kinds.Rotary(theta=theta, layout=layout, scaling=scaling):
            return RotaryEmbedding(
                theta, config.d_head, config.context_length, layout, scaling, device=device, ops=ops
            )
    return None
