"""One Transformer block, and the parts of it that a config names.

pre-norm    y = x + Attn(Norm(x));  z = y + FFN(Norm(y))
post-norm   y = Norm(x + Attn(x));  z = Norm(y + FFN(y))
"""

from __future__ import annotations

from typing import Unpack, assert_never

from jaxtyping import Float, Int
from torch import Tensor, nn

from scratchlm import config as kinds
from scratchlm.config import ModelConfig
from scratchlm.model.attention import ForwardContext, MultiHeadSelfAttention
from scratchlm.model.layers import MLP, FactoryKwargs, LayerNorm, RMSNorm, SwiGLU
from scratchlm.model.moe import MoE
from scratchlm.model.rotary import RotaryEmbedding


def make_norm(config: ModelConfig, **factory: Unpack[FactoryKwargs]) -> nn.Module:
    """Build the norm a config names; no norm is the identity."""
    match config.norm:
        case kinds.RMSNorm(eps=eps):
            return RMSNorm(config.d_model, eps, **factory)
        case kinds.LayerNorm(eps=eps, bias=bias):
            return LayerNorm(config.d_model, eps, bias, **factory)
        case kinds.NoNorm():
            return nn.Identity()
        case _:
            assert_never(config.norm)


def make_ffn(config: ModelConfig, **factory: Unpack[FactoryKwargs]) -> SwiGLU | MLP | MoE:
    """Build the feed-forward layer a config names."""
    d_model, d_ff = config.d_model, config.d_ff
    match config.ffn:
        case kinds.MoE() as moe:
            routing = moe.num_experts, moe.experts_per_token, moe.renormalize
            return MoE(d_model, d_ff, *routing, **factory)
        case kinds.MLP(activation=activation, bias=bias):
            return MLP(d_model, d_ff, activation, bias, **factory)
        case kinds.SwiGLU(bias=bias):
            return SwiGLU(d_model, d_ff, bias, **factory)
        case _:
            assert_never(config.ffn)


class TransformerBlock(nn.Module):
    """Pre-norm: y = x + Attn(Norm(x)); z = y + FFN(Norm(y)). Post-norm: the norm after the sum."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int = 0,
        rope: RotaryEmbedding | None = None,
        **factory: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        rope = make_rope(config, **factory) if rope is None else rope
        self.post_norm = config.norm_placement == "post"
        self.ln1 = make_norm(config, **factory)
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
            **factory,
        )
        self.ln2 = make_norm(config, **factory)
        self.ffn = make_ffn(config, **factory)

    def forward(
        self,
        x: Float[Tensor, "*batch seq d_model"],
        token_positions: Int[Tensor, "*positions seq"] | None = None,
        *,
        context: ForwardContext | None = None,
    ) -> Float[Tensor, "*batch seq d_model"]:
        """Apply attention and the feed-forward layer, each beside the residual stream."""
        if self.post_norm:
            x = self.ln1(x + self.attn(x, token_positions, context=context))
            return self.ln2(x + self.feed_forward(x, context))
        x = x + self.attn(self.ln1(x), token_positions, context=context)
        return x + self.feed_forward(self.ln2(x), context)

    def feed_forward(self, x: Tensor, context: ForwardContext | None) -> Tensor:
        """Apply the feed-forward layer; a mixture of experts also notes its routing."""
        routes = None if context is None else context.routes
        if routes is not None and any(isinstance(part, MoE) for part in self.ffn.modules()):
            return self.ffn(x, routes)  # a wrapper around experts hands them on
        return self.ffn(x)


def make_rope(config: ModelConfig, **factory: Unpack[FactoryKwargs]) -> RotaryEmbedding | None:
    """Build the rotary tables a config names, if it names any."""
    match config.positions:
        case kinds.Rotary(theta=theta, layout=layout, scaling=scaling):
            size = config.d_head, config.context_length
            return RotaryEmbedding(theta, *size, layout, scaling, **factory)
        case kinds.Learned() | kinds.Sinusoidal() | kinds.NoPositions():
            return None
        case _:
            assert_never(config.positions)
