"""Parameter counts, matrix by matrix.

attention   d·d_h·(2·H + 2·H_kv)
SwiGLU      3·d·d_ff              MLP  2·d·d_ff              MoE  E·3·d·d_ff + E·d
ends        V·d (embedding) + V·d (LM head, unless tied)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from scratchlm.accounting.expr import Expr, Number
from scratchlm.accounting.items import Item, Node, evaluate, group, leaf
from scratchlm.accounting.symbols import (
    E,
    H,
    H_kv,
    L,
    N_ctx,
    V,
    d,
    d_ff,
    d_h,
    k,
    model_symbols,
)
from scratchlm.config import MLP, LayerNorm, Learned, ModelConfig, MoE, NoNorm, SwiGLU

UNIT = "parameters"


@dataclass(frozen=True)
class Parameters:
    """Counts of one model; `tree` holds every matrix."""

    tree: Item  # every parameter the optimizer sees: tied weights once
    total: int  # with a tied LM head counted separately
    unique: int  # tied weights once: what `numel()` sums to
    embedding: int  # token and position vectors
    non_embedding: int
    active: int  # what one token uses: with experts, the chosen ones only
    matmul: int  # of active: in matmuls, without embeddings, biases and norms


def parameter_tree(config: ModelConfig) -> Node:
    """Return the formulas of every parameter, tied weights once."""
    parts = [leaf("token embeddings", V * d)]
    if isinstance(config.positions, Learned):
        parts.append(leaf("position embeddings", N_ctx * d))
    parts.append(group("layers", layer_parts(config), times=L))
    if not isinstance(config.norm, NoNorm) and config.norm_placement == "pre":
        parts.append(_norm("final norm", config))
    if config.tie_embeddings:
        parts.append(leaf("LM head", 0, note="tied: the token embeddings, counted there"))
    else:
        parts.append(leaf("LM head", V * d))
    return group("parameters", parts, UNIT)


def layer_parts(config: ModelConfig) -> list[Node]:
    """Return the formulas of one layer's parameters."""
    names = () if isinstance(config.norm, NoNorm) else ("norm 1", "norm 2")
    norms = [_norm(name, config) for name in names]
    return [group("attention", _attention(config)), group("feed-forward", _ffn(config)), *norms]


def active_parameters(config: ModelConfig) -> Expr:
    """Return the formula of N: every parameter a token uses, embeddings and all."""
    idle = L * (E - k) * 3 * d * d_ff  # experts a token does not visit
    everything = parameter_tree(config).expr
    return everything - idle if isinstance(config.ffn, MoE) else everything


def _norm(name: str, config: ModelConfig) -> Node:
    bias = isinstance(config.norm, LayerNorm) and config.norm.bias
    return leaf(name, 2 * d if bias else d, note="weight and bias" if bias else "")


def _attention(config: ModelConfig) -> list[Node]:
    bias = config.attention.bias
    parts = [
        leaf("Q projection", d * H * d_h),
        leaf("K projection", d * H_kv * d_h),
        leaf("V projection", d * H_kv * d_h),
        leaf("output projection", H * d_h * d),
    ]
    if bias != "none":
        parts.append(leaf("Q, K, V biases", (H + 2 * H_kv) * d_h))
    if bias == "all":
        parts.append(leaf("output bias", d))
    if config.attention.qk_norm:
        parts.append(leaf("query and key norms", 2 * d_h))
    return parts


def _ffn(config: ModelConfig) -> list[Node]:
    match config.ffn:
        case MoE():
            return [
                leaf("router", E * d),
                leaf("experts W1", E * d * d_ff),
                leaf("experts W3", E * d * d_ff),
                leaf("experts W2", E * d_ff * d),
            ]
        case SwiGLU(bias=bias):
            parts = [leaf("W1", d * d_ff), leaf("W3", d * d_ff), leaf("W2", d_ff * d)]
            return [*parts, leaf("biases", 2 * d_ff + d)] if bias else parts
        case MLP(bias=bias):
            parts = [leaf("W1", d * d_ff), leaf("W2", d_ff * d)]
            return [*parts, leaf("biases", d_ff + d)] if bias else parts
        case _:
            assert_never(config.ffn)


def count_parameters(config: ModelConfig) -> Parameters:
    """Count a model's parameters."""
    env = model_symbols(config)
    tree = evaluate(parameter_tree(config), env)
    unique = _whole(tree.value)
    head = _whole((V * d).value(env)) if config.tie_embeddings else 0
    embedding = sum(_whole(item.value) for item in tree.children if "embeddings" in item.name)
    return Parameters(
        tree=tree,
        total=unique + head,
        unique=unique,
        embedding=embedding,
        non_embedding=unique - embedding,
        active=_whole(active_parameters(config).value(env)),
        matmul=_whole(matmul_parameters(config).value(env)),
    )


def matmul_parameters(config: ModelConfig) -> Node:
    """Return the formulas of the weights used in matmuls per token, the LM head tied or not."""
    match config.ffn:
        case MoE():
            ffn = [leaf("router", E * d), leaf("chosen experts", k * 3 * d * d_ff)]
        case SwiGLU():
            ffn = [leaf("feed-forward", 3 * d * d_ff)]
        case MLP():
            ffn = [leaf("feed-forward", 2 * d * d_ff)]
        case _:
            assert_never(config.ffn)
    layer = [leaf("attention", d * d_h * (2 * H + 2 * H_kv)), *ffn]
    return group("N_matmul", [group("layers", layer, times=L), leaf("LM head", V * d)], UNIT)


def _whole(value: Number) -> int:
    assert isinstance(value, int), value
    return value
