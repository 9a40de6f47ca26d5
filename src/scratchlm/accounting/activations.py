"""What autograd keeps of a forward pass until the backward pass needs it, tensor by tensor.

Derived from `ops/fast.py` as it runs on a GPU (and checked against it by a test that counts every
saved tensor): a matrix product keeps its input, a norm its float32 input, SiLU its input, a product
both factors, fused attention Q, K, V, its output and a log-sum per row. Under autocast every
product casts its own copy of its input and keeps that, and keeps the cast copy of its weight.

Checkpointing keeps less and computes it again:

    none       nothing is recomputed
    attention  attention, from its input; the norm before it stays
    ffn        the feed-forward layer, from its input; the norm before it stays
    block      whole blocks, from their input
"""

from __future__ import annotations

from scratchlm.accounting.expr import Number, total
from scratchlm.accounting.flops import Execution
from scratchlm.accounting.items import Node, group, leaf
from scratchlm.accounting.symbols import (
    B,
    E,
    H,
    H_kv,
    L,
    S,
    V,
    b_a,
    b_c,
    b_r,
    b_s,
    d,
    d_ff,
    d_h,
    k,
)
from scratchlm.config import MLP, LayerNorm, ModelConfig, MoE, NoNorm

UNIT = "bytes"
TOKENS = B * S
LOSS_ROWS = 2_048  # rows of logits a fused loss holds at a time


def saved_tree(config: ModelConfig, execution: Execution) -> Node:
    """Return what is kept at the end of a forward pass and its loss."""
    return group("activations", [*kept_layers(config, execution), *_ends(config, execution)], UNIT)


def kept_layers(config: ModelConfig, execution: Execution) -> list[Node]:
    """Return what the layers keep under a checkpointing policy."""
    policy = execution.checkpointing
    if policy == "block":
        return [group("layers", [leaf("block input", b_r * TOKENS * d)], times=L)]
    parts = [*_norm("norm 1", config)]
    if policy == "attention":
        parts.append(leaf("attention input", b_r * TOKENS * d))
    else:
        parts.append(group("attention", _attention(config, execution)))
    parts += _norm("norm 2", config)
    if policy == "ffn":
        parts.append(leaf("feed-forward input", b_r * TOKENS * d))
    else:
        parts.append(group("feed-forward", _ffn(config)))
    return [group("layers", parts, times=L)]


def one_layer(config: ModelConfig, execution: Execution) -> Node:
    """Return what one layer keeps when nothing is dropped: what a recomputed layer holds."""
    whole = kept_layers(config, Execution(execution.attention))[0]
    return group("one layer, recomputed", whole.parts, UNIT)


def recomputed_part(config: ModelConfig, execution: Execution) -> Node | None:
    """Return what is rebuilt at a time during the backward pass, if anything is."""
    if execution.checkpointing == "block":
        return one_layer(config, execution)
    if execution.checkpointing == "attention":
        return group("one attention, recomputed", _attention(config, execution), UNIT)
    if execution.checkpointing == "ffn":
        return group("one feed-forward, recomputed", _ffn(config), UNIT)
    return None


def _norm(name: str, config: ModelConfig) -> list[Node]:
    if isinstance(config.norm, NoNorm):
        return []
    per_row = 8 if isinstance(config.norm, LayerNorm) else 4  # mean and 1/σ, or 1/rms
    return [
        leaf(f"{name} input", 4 * TOKENS * d, note="float32"),
        leaf(f"{name} statistics", per_row * TOKENS),
    ]


def _attention(config: ModelConfig, execution: Execution) -> list[Node]:
    parts = [leaf("Q, K, V inputs", (b_a + 2 * b_c) * TOKENS * d)]
    if config.attention.qk_norm:
        heads = H + H_kv
        parts.append(leaf("query and key norms", 4 * TOKENS * heads * d_h + 4 * TOKENS * heads))
    if execution.attention == "fused":
        parts += [
            leaf("Q, K, V", b_a * TOKENS * (H + 2 * H_kv) * d_h),
            leaf("attention output", b_a * TOKENS * H * d_h),
            leaf("log-sums", 4 * TOKENS * H),
        ]
    else:
        parts.append(leaf("Q, K, V", b_s * TOKENS * 3 * H * d_h, note="K, V repeated per head"))
        parts += _scores()
        parts.append(leaf("attention output", b_a * TOKENS * H * d_h))
    copies = b_c * d * d_h * (2 * H + 2 * H_kv)
    return [*parts, leaf("cast weights", copies)]


def _scores() -> list[Node]:
    return [
        leaf("exp of the scores", 4 * B * H * S**2, note="float32"),
        leaf("attention weights", b_s * B * H * S**2),
        leaf("mask and row sums", S**2 + 6 * TOKENS * H),
    ]


def _ffn(config: ModelConfig) -> list[Node]:
    if isinstance(config.ffn, MoE):
        return _moe(config.ffn)
    if isinstance(config.ffn, MLP):
        # ReLU keeps its output, which is the next product's input; the others keep their input too
        kept = 1 if config.ffn.activation == "relu" else 2
        return [
            leaf("W1 input", b_a * TOKENS * d),
            leaf("hidden", kept * b_a * TOKENS * d_ff),
            leaf("cast weights", b_c * 2 * d * d_ff),
        ]
    return [
        leaf("W1, W3 inputs", (b_a + b_c) * TOKENS * d),
        leaf("hidden", 4 * b_a * TOKENS * d_ff, note="W1 x, SiLU of it, W3 x, their product"),
        leaf("cast weights", b_c * 3 * d * d_ff),
    ]


def _moe(ffn: MoE) -> list[Node]:
    rows = k * TOKENS  # a token visits k experts
    # per token: the softmax over experts and its sums; per visit: whom, in which order, how much
    routing = TOKENS * (4 * E + 6) + 24 * rows + b_r * rows
    if ffn.renormalize:
        routing = routing + 4 * TOKENS + 4 * rows
    return [
        leaf("router input", b_a * TOKENS * d),
        leaf("routing", routing),
        leaf("experts' inputs", (b_a + b_c) * rows * d),
        leaf("hidden", 4 * b_a * rows * d_ff, note="W1 x, SiLU of it, W3 x, their product"),
        leaf("experts' answers", (b_a + b_r) * rows * d, note="before and after weighting"),
        leaf("cast weights", b_c * (E * d + E * 3 * d * d_ff)),
    ]


def _ends(config: ModelConfig, execution: Execution) -> list[Node]:
    parts = []
    if config.norm_placement == "pre":
        parts += _norm("final norm", config)
    parts += [
        leaf("LM head input", b_a * TOKENS * d),
        leaf("LM head, cast", b_c * V * d),
        leaf("token ids", 16 * TOKENS, note="inputs and targets"),
    ]
    if execution.loss == "unfused":
        parts.append(leaf("log-probabilities", 4 * TOKENS * V, note="float32, kept by the loss"))
    return parts


def loss_temporaries(execution: Execution) -> list[Node]:
    """Return what the loss's backward pass holds besides what was saved."""
    if execution.loss == "unfused":
        grads = leaf("gradients of the logits", 8 * TOKENS * V, note="in and out of log-softmax")
        return [grads]
    rows: Number = LOSS_ROWS
    return [
        leaf("a slice of logits", 12 * rows * V, note=f"{LOSS_ROWS:,} rows at a time"),
        leaf("gradient of the LM head input", b_a * TOKENS * d),
    ]


def forward_loss(execution: Execution) -> list[Node]:
    """Return what the loss's forward pass holds: the last hidden state, and logits twice."""
    hidden = leaf("hidden state", b_r * TOKENS * d)
    if execution.loss == "fused":
        return [hidden, *loss_temporaries(execution)]
    return [hidden, leaf("logits", (b_c + 4) * TOKENS * V, note="as computed, and in float32")]


def dropped_casts(config: ModelConfig, execution: Execution) -> list[Node]:
    """Return the cast weights that autocast keeps to the end of the forward pass anyway."""
    dropped = {"block": ("attention", "ffn"), "attention": ("attention",), "ffn": ("ffn",)}
    halves = {"attention": _attention(config, execution), "ffn": _ffn(config)}
    casts = [
        node.expr
        for half in dropped.get(execution.checkpointing, ())
        for node in halves[half]
        if node.name == "cast weights"
    ]
    return [leaf("cast weights, cached", L * total(casts))] if casts else []
