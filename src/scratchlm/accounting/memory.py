"""Memory of a training step and of serving, byte by byte.

A training step is largest at one of a few moments; the peak is the largest of them:

    forward    everything kept, and a slice of logits (unfused: all, as computed and in float32)
    loss       everything kept, and going back: nothing new (unfused: the gradient of the logits)
    backward   what the layers keep, the last one being rebuilt and taken back
    attention  the same where attention alone is rebuilt: its feed-forward layer is gone by then
    end        nearly all gradients are there, the first layer still being taken back
    embedding  all gradients; of a tied table the head's, the embedding's and their sum
    update     weights, gradients, optimizer state

Gradients are freed after the update (`set_to_none`), so they grow while activations shrink;
with several micro-batches they are there all the time. `ranks.py` says what of all this one of
several GPUs has.
"""

from __future__ import annotations

from dataclasses import dataclass

from scratchlm.accounting.activations import (
    PADDED_VOCABULARY,
    STREAM,
    TOKENS,
    UNIT,
    dropped_casts,
    forward_loss,
    kept_layers,
    loss_temporaries,
    one_layer,
    recomputed_part,
    saved_tree,
)
from scratchlm.accounting.expr import Expr, Num, Number, total
from scratchlm.accounting.items import Item, Node, evaluate, group, leaf
from scratchlm.accounting.parameters import layer_parts, parameter_tree
from scratchlm.accounting.ranks import (
    DIVIDED,
    RANK_SHARE,
    as_executed,
    parallel_buffers,
    split,
    weights,
)
from scratchlm.accounting.setup import Setup, bindings
from scratchlm.accounting.symbols import (
    B,
    C,
    H_kv,
    L,
    N_all,
    N_ctx,
    N_layer,
    N_matrices,
    N_tied,
    R,
    V,
    b_a,
    b_g,
    b_kv,
    b_m,
    b_r,
    d,
    d_ff,
    d_h,
    k,
)
from scratchlm.config import MLP, ModelConfig, MoE, Rotary
from scratchlm.quantization.rule import BLOCKS, Choice, choose

# What the matmul library takes for itself on a GPU (32 MiB on Hopper), through torch's allocator.
WORKSPACE = 32 * 2**20
_TIED = "a tied head's waits for the embedding's"


@dataclass(frozen=True)
class Memory:
    """Peak memory of one GPU."""

    training: Item  # the moment of a training step at which most is held
    moments: dict[str, int]  # every candidate moment and its bytes
    serving: Item
    kv_cache: int  # bytes of the whole cache
    kv_cache_per_token: int  # of one sequence


def memory(config: ModelConfig, setup: Setup) -> Memory:
    """Predict the peak memory of one GPU."""
    env = memory_bindings(config, setup)
    moments = training_trees(config, setup)
    values = {name: round(tree.value(env)) for name, tree in moments.items()}
    peak = max(values, key=lambda name: values[name])
    serving = serving_tree(config, setup)
    per_token = {**env, "B": 1, "C": 0}
    return Memory(
        training=evaluate(moments[peak], env),
        moments=values,
        serving=evaluate(serving, env),
        kv_cache=round(kv_cache_bytes().value(env)),
        kv_cache_per_token=round(kv_cache_bytes().value(per_token)),
    )


def memory_bindings(config: ModelConfig, setup: Setup) -> dict[str, Number]:
    """Bind every symbol for one rank; under TP the rank's share of heads, width and vocabulary."""
    env = bindings(config, setup)
    for name, field in DIVIDED.items():
        if env[name] % env["G_t"]:
            raise ValueError(
                f"tensor parallelism needs {field} divisible by tp; "
                f"got {field}={env[name]}, tp={env['G_t']}"
            )
    env |= {name: share.value(env) for name, share in RANK_SHARE.items()}
    env |= {name: formula.value(env) for name, formula in derived(config).items()}
    return env


def derived(config: ModelConfig) -> dict[str, Expr]:
    """Return the formulas of counts that other formulas name."""
    per_layer = total([part.expr for part in layer_parts(config)])
    matrices = [
        leaf.expr for part in layer_parts(config) for leaf in part.parts if not _is_wide(leaf)
    ]
    return {
        "N_all": parameter_tree(config).expr,
        "N_layer": per_layer,
        "N_matrices": total(matrices),
        "N_wide": _wide(parameter_tree(config)),
        "N_tied": V * d if config.tie_embeddings else Num(0),
        "V_p": PADDED_VOCABULARY,
    }


def _is_wide(node: Node) -> bool:
    return any(word in node.name for word in ("bias", "norm", "embeddings"))


def _wide(node: Node) -> Expr:
    """Return how many of a tree's parameters are norms, biases and embeddings."""
    if not node.parts:
        return node.expr if _is_wide(node) else Num(0)
    return node.times * total([_wide(part) for part in node.parts])


def kv_cache_bytes() -> Expr:
    """Return the bytes of a cache with room for C + 1 tokens per sequence."""
    return 2 * L * B * H_kv * d_h * (C + 1) * b_kv


def optimizer_state(optimizer: str) -> Node:
    """Return the optimizer's own numbers, in the weights' dtype."""
    if optimizer == "sgd":
        return leaf("optimizer state", 0, note="SGD keeps none")
    if optimizer == "sgd-momentum":
        return leaf("optimizer state", b_m * N_all / R, note="momentum")
    if optimizer == "muon":
        return group(
            "optimizer state",
            [
                leaf("Muon momentum", b_m * L * N_matrices / R, note="the layers' matrices"),
                leaf("AdamW moments", 2 * b_m * (N_all - L * N_matrices) / R, note="all else"),
            ],
        )
    return leaf("optimizer state", 2 * b_m * N_all / R, note="AdamW: mean and mean square")


def training_trees(config: ModelConfig, setup: Setup) -> dict[str, Node]:
    """Return the candidate moments of a training step, each as a tree of formulas."""
    setup = as_executed(setup)
    execution = setup.execution
    always = [
        weights(setup),
        optimizer_state(setup.optimizer),
        *rope_tables(config),
        *parallel_buffers(setup),
        leaf("workspace", WORKSPACE, note="the matmul library's"),
    ]
    gradients = leaf("gradients", b_g * N_all / split(setup))
    early = [gradients] if setup.accumulates else []
    reduced = leaf("gradients, reduced", b_g * N_all / R, note="this rank's share")
    saved = saved_tree(config, execution)
    before = [*always, *early, saved, *dropped_casts(config, execution), *forward_loss(execution)]
    return {
        "forward": group("at the loss, going forward", before, UNIT),
        "loss": group("at the loss", [*always, *early, saved, *loss_temporaries(execution)], UNIT),
        "backward": group("in the last layer's backward", _backward(config, setup, always), UNIT),
        **_in_attention(config, setup, always),
        "end": group("at the end of backward", _end(config, setup, always), UNIT),
        "embedding": group("at the embedding, going back", _embedding(setup, always), UNIT),
        "update": group(
            "at the update",
            [*always, gradients, *([reduced] if setup.exchange == "zero1" else [])],
            UNIT,
        ),
    }


def _backward(config: ModelConfig, setup: Setup, always: list[Node]) -> list[Node]:
    """All layers' activations but not the loss's; the LM head has its gradient."""
    execution = setup.execution
    rebuilt = recomputed_part(config, execution) if execution.checkpointing != "attention" else None
    return [
        *always,
        _first_gradients(setup),
        group("activations", kept_layers(config, execution)),
        *([rebuilt] if rebuilt is not None else []),
        _in_flight(config),
    ]


def _first_gradients(setup: Setup) -> Node:
    if setup.accumulates:
        return leaf("gradients", b_g * (N_all + N_tied) / split(setup), note=_TIED)
    return leaf("gradient of the LM head", b_g * V * d / split(setup))


def _in_attention(config: ModelConfig, setup: Setup, always: list[Node]) -> dict[str, Node]:
    """Attention being rebuilt in the last layer, whose feed-forward layer has been taken back."""
    rebuilt = recomputed_part(config, setup.execution)
    if setup.execution.checkpointing != "attention" or rebuilt is None:
        return {}
    last = kept_layers(config, setup.execution, Num(1))[0].parts
    parts = [
        *always,
        _first_gradients(setup),
        group("activations", kept_layers(config, setup.execution, L - 1)),
        group("last layer", [part for part in last if part.name != "feed-forward"]),
        rebuilt,
        leaf("gradients in flight", b_r * STREAM * d),
    ]
    return {"attention": group("in the last layer's attention, backward", parts, UNIT)}


def _end(config: ModelConfig, setup: Setup, always: list[Node]) -> list[Node]:
    """All gradients but the first layer's and the embedding's, and that layer still in flight."""
    there = N_all if setup.accumulates else N_all - N_layer - V * d
    return [
        *always,
        leaf("gradients", b_g * (there + N_tied) / split(setup), note=_TIED),
        group("first layer's activations", one_layer(config, setup.execution).parts),
        _in_flight(config),
    ]


def _embedding(setup: Setup, always: list[Node]) -> list[Node]:
    """The gradient of the embedding, before it is added to what is there."""
    there = N_all + V * d if setup.accumulates else N_all
    tied = "tied: of head, embedding, and sum"
    return [
        *always,
        leaf("gradients", b_g * (there + 2 * N_tied) / split(setup), note=tied),
        leaf("gradient of the hidden state", b_r * STREAM * d),
    ]


def _in_flight(config: ModelConfig) -> Node:
    """The residual stream's gradient, and what a feed-forward layer's backward adds."""
    wide = k * TOKENS * d_ff if isinstance(config.ffn, MoE) else TOKENS * d_ff
    factors = 1 if isinstance(config.ffn, MLP) else 2
    return leaf("gradients in flight", b_r * STREAM * d + factors * b_a * wide)


def rope_tables(config: ModelConfig) -> list[Node]:
    """Return RoPE's tables, where a model has them."""
    if isinstance(config.positions, Rotary):
        return [leaf("RoPE tables", 4 * N_ctx * d_h, note="cos and sin, float32")]
    return []


def serving_tree(config: ModelConfig, setup: Setup) -> Node:
    """Return the memory of decoding: weights in the compute dtype, cache, one step's work."""
    low = b_kv
    wide = k * B * d_ff if isinstance(config.ffn, MoE) else B * d_ff
    parts = [
        *_serving_weights(config, setup),
        leaf("KV cache", kv_cache_bytes(), note="room for C + 1 tokens per sequence"),
        leaf("logits", (low + 4) * B * V, note="as computed, and in float32"),
        leaf("one layer's work", low * (6 * B * d + 3 * wide)),
        *rope_tables(config),
        leaf("workspace", WORKSPACE, note="the matmul library's"),
    ]
    return group("serving", parts, UNIT)


def _serving_weights(config: ModelConfig, setup: Setup) -> list[Node]:
    """Return the weights in the compute dtype, or by the format the rule gives to each."""
    if setup.quantize is None:
        return [leaf("weights", b_kv * N_all / split(setup))]
    return [quantized_weights(choose(config, setup.quantize), b_kv)]


def quantized_weights(choices: list[Choice], wide: Expr) -> Node:
    """Return the weights by format; one that stays wide takes `wide` bytes."""
    nodes = []
    for format in dict.fromkeys(choice.format for choice in choices):
        of = [choice for choice in choices if choice.format == format]
        count = sum(choice.weights for choice in of)
        if format is None:
            nodes.append(leaf("weights that stay wide", wide * Num(count)))
            continue
        size, stored = BLOCKS[format]
        if size:
            note = f"{size} weights in {stored} bytes"
            nodes.append(leaf(f"weights in {format}", Num(count // size) * stored, note=note))
        else:
            rows = sum(choice.weights // choice.shape[-1] for choice in of)
            note = "a byte a weight, and a scale of 4 bytes for each row"
            nodes.append(leaf(f"weights in {format}", Num(count) + Num(rows) * stored, note=note))
    return group("weights", nodes)
