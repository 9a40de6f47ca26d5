"""What autograd keeps of a forward pass until the backward pass needs it, tensor by tensor.

Derived from `accelerate/` as it runs on a GPU (and checked against it by a test that counts every
saved tensor): a matrix product keeps its input, RMSNorm its input as it is (a layer's second, which
one kernel makes together with the sum before it, that sum), LayerNorm its input in float32 and its
statistics, SwiGLU's gate both its inputs, fused attention Q, K, V, its output and a log-sum per
row. Under autocast every product keeps the cast copies of its input and of its weight. Products of
one input (Q, K, V; W1, W3) are one product: one copy of the input, and a joined copy of the weights
in any precision.

The fused loss (`accelerate/lm_head_loss.py`) forms n_s rows of logits at a time, of V_p columns,

    V_p = V, or the next multiple of 128 where V is no multiple of 8
    n_s = min(B·S, 128·⌈B·S / (128·⌈B·S·V_p / 2²⁸⌉)⌉)       equal slices of whole tiles

and keeps no logits but the two gradients it has taken from them: of its input and, in float32, of
the LM head.

Checkpointing keeps less and computes it again:

    none       nothing is recomputed
    attention  attention, from its input; the norm before it stays
    ffn        the feed-forward layer, from its input; the norm before it stays
    block      whole blocks, from their input
"""

from __future__ import annotations

from dataclasses import replace

from scratchlm.accounting.expr import Expr, ceil_div, least, total
from scratchlm.accounting.flops import Execution
from scratchlm.accounting.items import Node, group, leaf
from scratchlm.accounting.symbols import (
    B,
    E,
    G_t,
    H,
    H_kv,
    L,
    S,
    S_r,
    V,
    V_p,
    b_a,
    b_c,
    b_g,
    b_r,
    b_s,
    d,
    d_ff,
    d_h,
    k,
    n_s,
)
from scratchlm.config import MLP, ModelConfig, MoE, NoNorm, RMSNorm, Rotary

UNIT = "bytes"
TOKENS = B * S
STREAM = B * S_r  # tokens whose norms and residuals are on this GPU
# Logits a fused loss holds at a time on a GPU, and the tile its slices are made of.
SLICE_ELEMENTS = 2**28
TILE = 128
PADDED_VOCABULARY = V + least(1, 8 * ceil_div(V, 8) - V) * (TILE * ceil_div(V, TILE) - V)


def slice_rows(elements: int) -> Expr:
    """Return how many rows of logits are held at a time, at most `elements` logits."""
    slices = ceil_div(TOKENS * V_p, elements)
    return least(TOKENS, TILE * ceil_div(TOKENS, TILE * slices))


SLICE_ROWS = slice_rows(SLICE_ELEMENTS)
# Bytes of a 16-bit number, and 0 where numbers are float32: what only 16-bit arithmetic copies.
_low_a, _low_g = least(b_a, 4 - b_a), least(b_g, 4 - b_g)


def saved_tree(config: ModelConfig, execution: Execution) -> Node:
    """Return what is kept at the end of a forward pass and its loss."""
    return group("activations", [*kept_layers(config, execution), *_ends(config, execution)], UNIT)


def kept_layers(config: ModelConfig, execution: Execution, times: Expr = L) -> list[Node]:
    """Return what the layers keep under a checkpointing policy."""
    policy = execution.checkpointing
    if policy == "block":
        return [group("layers", [leaf("block input", b_r * STREAM * d)], times=times)]
    parts = [*_norm("norm 1", config)]
    if policy == "attention":
        parts.append(leaf("attention input", b_r * STREAM * d))
    else:
        parts.append(group("attention", _attention(config, execution)))
    parts += _norm("norm 2", config)
    if policy == "ffn":
        width = b_a if adds_and_norms(config) else b_r
        parts.append(leaf("feed-forward input", width * STREAM * d))
    else:
        parts.append(group("feed-forward", _ffn(config, execution)))
    return [group("layers", parts, times=times)]


def one_layer(config: ModelConfig, execution: Execution) -> Node:
    """Return what one layer keeps when nothing is dropped: what a recomputed layer holds."""
    kept = replace(execution, checkpointing="none")
    whole = kept_layers(config, kept)[0]
    return group("one layer, recomputed", whole.parts, UNIT)


def recomputed_part(config: ModelConfig, execution: Execution) -> Node | None:
    """Return what is rebuilt at a time during the backward pass, if anything is."""
    if execution.checkpointing == "block":
        return one_layer(config, execution)
    if execution.checkpointing == "attention":
        return group("one attention, recomputed", _attention(config, execution), UNIT)
    if execution.checkpointing == "ffn":
        return group("one feed-forward, recomputed", _ffn(config, execution), UNIT)
    return None


def adds_and_norms(config: ModelConfig) -> bool:
    """Whether one kernel makes the sum between a layer's halves and its norm, as products want it.

    It keeps the sum, in the residual stream's own precision, and no statistics.
    """
    plain = config.norm_placement == "pre" and not isinstance(config.ffn, MoE)
    return plain and isinstance(config.norm, RMSNorm)


def _norm(name: str, config: ModelConfig) -> list[Node]:
    if isinstance(config.norm, NoNorm):
        return []
    if isinstance(config.norm, RMSNorm):
        return [leaf(f"{name} input", b_r * STREAM * d)]
    return [
        leaf(f"{name} input", 4 * STREAM * d, note="float32"),
        leaf(f"{name} statistics", 8 * STREAM, note="mean and 1/σ"),
    ]


def _attention(config: ModelConfig, execution: Execution) -> list[Node]:
    fused = execution.attention == "fused"
    parts = [leaf("Q, K, V input", b_a * TOKENS * d), *_projected(config, execution)]
    if fused:
        parts += [
            leaf("Q, K, V", b_a * TOKENS * (H + 2 * H_kv) * d_h),
            leaf("attention output", b_a * TOKENS * H * d_h),
            leaf("log-sums", 4 * TOKENS * H),
        ]
        if config.attention.qk_norm and not isinstance(config.positions, Rotary):
            # RoPE writes Q by token, a norm by head; attention in 16 bits (cuDNN's) writes its
            # output as Q lies, and the output projection wants it by token.
            copied = _low_a * TOKENS * H * d_h
            parts.append(leaf("attention output by token", copied, note="16 bits only"))
    else:
        parts.append(leaf("Q, K, V", b_s * TOKENS * 3 * H * d_h, note="K, V repeated per head"))
        parts += _scores()
        parts.append(leaf("attention output", b_a * TOKENS * H * d_h))
    joined = d * d_h * (H + 2 * H_kv)
    return [*parts, *_weights(execution, d * d_h * H, joined, "Q, K, V as one matrix")]


def _weights(execution: Execution, alone: Expr, joined: Expr | None, note: str = "") -> list[Node]:
    """Return the copies of weights that products keep: cast, and joined to one matrix.

    Weights that multiply one input are joined however they are stored; the others are not copied
    where they are kept in the matmuls' dtype, or gathered in it.
    """
    nodes = [] if joined is None else [leaf("joined weights", b_a * joined, note=note)]
    if execution.weights == "cast":
        nodes.append(leaf("cast weights", b_c * alone))
    return nodes


def _projected(config: ModelConfig, execution: Execution) -> list[Node]:
    """Return what is kept of Q, K and V as projected: one product, kept whole or not at all.

    Fused attention keeps V, a view of it, and so keeps it beside the Q and K that RoPE and norms
    make of it, unless RoPE is the product's epilogue; unfused attention copies V.
    A norm keeps its input: with RoPE, in one kernel, the view; by itself, the view in float32 and a
    float32 copy of it in 16 bits.
    """
    rotary, normed = isinstance(config.positions, Rotary), config.attention.qk_norm
    fused, heads = execution.attention == "fused", H + H_kv
    if fused and rotary and execution.rope_epilogue and not normed:
        return []
    if rotary and (fused or normed):
        held = heads if fused else H + 2 * H_kv  # fused: V's part is counted with Q, K, V
        return [leaf("Q, K as projected", b_a * TOKENS * held * d_h, note="one piece with V")]
    if not normed:
        return []
    statistics = leaf("query and key norms", 4 * TOKENS * heads * d_h + 4 * TOKENS * heads)
    if fused:
        beside = _low_a * TOKENS * heads * d_h
    else:
        beside = (b_a - _low_a) * TOKENS * H_kv * d_h
    return [statistics, leaf("as projected, beside them", beside, note="one piece with V")]


def _scores() -> list[Node]:
    return [
        leaf("exp of the scores", 4 * B * H * S**2, note="float32"),
        leaf("attention weights", b_s * B * H * S**2),
        leaf("mask and row sums", S**2 + 6 * TOKENS * H),
    ]


def _ffn(config: ModelConfig, execution: Execution) -> list[Node]:
    if isinstance(config.ffn, MoE):
        return _moe(config.ffn, execution)
    if isinstance(config.ffn, MLP):
        # ReLU keeps its output, which is the next product's input; the others keep their input too
        kept = 1 if config.ffn.activation == "relu" else 2
        return [
            leaf("W1 input", b_a * TOKENS * d),
            leaf("hidden", kept * b_a * TOKENS * d_ff),
            *_weights(execution, 2 * d * d_ff, None),
        ]
    return [
        leaf("W1, W3 input", b_a * TOKENS * d),
        leaf("hidden", 3 * b_a * TOKENS * d_ff, note="W1 x, W3 x, and what the gate makes of them"),
        *_weights(execution, d * d_ff, 2 * d * d_ff, "W1, W3 as one matrix"),
    ]


def _moe(ffn: MoE, execution: Execution) -> list[Node]:
    rows = k * TOKENS  # a token visits k experts, of which a rank has its share
    # per token: the softmax over experts and its sums; per visit: whom, in which order, how much
    routing = TOKENS * (4 * E + 6) + 24 * rows + b_r * rows
    if ffn.renormalize:
        routing = routing + 4 * TOKENS + 4 * rows
    return [
        leaf("router input", b_a * TOKENS * d),
        leaf("routing", routing),
        leaf("experts' inputs", (b_a + b_c) * rows * d / G_t),
        leaf("hidden", 4 * b_a * rows * d_ff, note="W1 x, SiLU of it, W3 x, their product"),
        leaf("experts' answers", (b_a + b_r) * rows * d / G_t, note="before and after weighting"),
        *_weights(execution, E * d + E * 3 * d * d_ff, None),
    ]


def _ends(config: ModelConfig, execution: Execution) -> list[Node]:
    parts = []
    if config.norm_placement == "pre":
        parts += _norm("final norm", config)
    parts.append(leaf("token ids", 16 * TOKENS, note="inputs and targets"))
    if execution.loss == "fused":
        return [
            *parts,
            leaf("gradient of the LM head's input", b_a * TOKENS * d, note="taken going forward"),
            leaf("gradient of the LM head", 4 * V_p * d, note="float32, taken going forward"),
        ]
    cast = [leaf("LM head, cast", b_c * V * d)] if execution.weights == "cast" else []
    return [
        *parts,
        leaf("LM head input", b_a * TOKENS * d),
        *cast,
        leaf("log-probabilities", 4 * TOKENS * V, note="float32, kept by the loss"),
    ]


def forward_loss(execution: Execution) -> list[Node]:
    """Return what the loss's forward pass holds besides what is kept."""
    hidden = leaf("hidden state", b_r * TOKENS * d)
    if execution.loss == "unfused":
        return [hidden, leaf("logits", (b_c + 4) * TOKENS * V, note="as computed, and in float32")]
    cast = 0 if execution.weights == "kept" else b_c  # gathered with the ends, as it is stored
    copied = least(b_a, cast + b_a * (V_p - V))  # cast, or padded, or neither
    where = (("n_s", SLICE_ROWS),)
    return [
        hidden,
        leaf("hidden state, cast", b_c * TOKENS * d),
        leaf("LM head, cast or padded", copied * V_p * d),
        Node("a slice of logits", b_a * n_s * V_p, note="then its gradient", where=where),
        Node("its rows of the hidden state", b_a * n_s * d, note="scaled", where=where),
    ]


def loss_temporaries(execution: Execution) -> list[Node]:
    """Return what the loss's backward pass holds besides what was saved."""
    if execution.loss == "unfused":
        return [leaf("gradients of the logits", 8 * TOKENS * V, note="in and out of log-softmax")]
    return [leaf("gradient of the LM head, cast", _low_g * V * d, note="where weights are 16-bit")]


def dropped_casts(config: ModelConfig, execution: Execution) -> list[Node]:
    """Return the cast weights that autocast keeps to the end of the forward pass anyway.

    Joined weights are cast by us and not kept so.
    """
    dropped = {"block": ("attention", "ffn"), "attention": ("attention",), "ffn": ("ffn",)}
    halves = {"attention": _attention(config, execution), "ffn": _ffn(config, execution)}
    casts = [
        node.expr
        for half in dropped.get(execution.checkpointing, ())
        for node in halves[half]
        if node.name == "cast weights"
    ]
    return [leaf("cast weights, cached", L * total(casts))] if casts else []
