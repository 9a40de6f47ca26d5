"""The tensors of a config: name -> shape, under the names of our state dict.

The same list as a model's state dict, without building the model: what a file must hold is known
before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from scratchlm.config import MLP, LayerNorm, Learned, ModelConfig, MoE, NoNorm, RMSNorm, SwiGLU

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield every tensor of the state dict, in the order of the forward."""
    yield "token_embeddings.weight", (config.vocab_size, config.d_model)
    if isinstance(config.positions, Learned):
        yield "position_embeddings.weight", (config.context_length, config.d_model)
    layer = list(layer_shapes(config))
    for i in range(config.num_layers):
        for name, shape in layer:
            yield f"layers.{i}.{name}", shape
    if config.norm_placement == "pre":
        yield from _norm("ln_final", config)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.d_model)


def layer_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of one block."""
    queries, keys = config.num_heads * config.d_head, config.num_kv_heads * config.d_head
    bias = config.attention.bias
    yield from _norm("ln1", config)
    yield from _linear("attn.q_proj", queries, config.d_model, bias != "none")
    yield from _linear("attn.k_proj", keys, config.d_model, bias != "none")
    yield from _linear("attn.v_proj", keys, config.d_model, bias != "none")
    if config.attention.qk_norm:
        yield "attn.q_norm.weight", (config.d_head,)
        yield "attn.k_norm.weight", (config.d_head,)
    yield from _linear("attn.output_proj", config.d_model, queries, bias == "all")
    yield from _norm("ln2", config)
    yield from _feed_forward(config)


def _feed_forward(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    d_model, d_ff = config.d_model, config.d_ff
    match config.ffn:
        case MoE(num_experts=experts):
            yield "ffn.router.weight", (experts, d_model)
            yield "ffn.w1.weight", (experts, d_ff, d_model)
            yield "ffn.w2.weight", (experts, d_model, d_ff)
            yield "ffn.w3.weight", (experts, d_ff, d_model)
        case SwiGLU(bias=bias):
            yield from _linear("ffn.w1", d_ff, d_model, bias)
            yield from _linear("ffn.w2", d_model, d_ff, bias)
            yield from _linear("ffn.w3", d_ff, d_model, bias)
        case MLP(bias=bias):
            yield from _linear("ffn.w1", d_ff, d_model, bias)
            yield from _linear("ffn.w2", d_model, d_ff, bias)
        case _:
            assert_never(config.ffn)


def _linear(name: str, d_out: int, d_in: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (d_out, d_in)
    if bias:
        yield f"{name}.bias", (d_out,)


def _norm(name: str, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    match config.norm:
        case NoNorm():
            return
        case RMSNorm():
            yield f"{name}.weight", (config.d_model,)
        case LayerNorm(bias=bias):
            yield f"{name}.weight", (config.d_model,)
            if bias:
                yield f"{name}.bias", (config.d_model,)
        case _:
            assert_never(config.norm)
