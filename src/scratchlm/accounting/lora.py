"""Memory of learning an adapter: the base stands still, in the dtype products read.

    parameters   Σ r (d_in + d_out) over the adapted layers: A is (r, d_in), B (d_out, r)
    states       weights, gradients and two moments of the adapter in float32; of the base, weights
    kept         what `activations.py` lists, without the copies of weights that learn, and
                 without the LM head's gradient; and A x, r numbers a token, for each adapted layer

The peak is at the loss, going forward, or in the last layer's backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scratchlm.accounting.activations import TOKENS, UNIT, forward_loss, kept_layers, saved_tree
from scratchlm.accounting.expr import Expr, Number
from scratchlm.accounting.items import Item, Node, evaluate, group, leaf
from scratchlm.accounting.memory import (
    WORKSPACE,
    memory_bindings,
    quantized_weights,
    rope_tables,
)
from scratchlm.accounting.setup import Setup
from scratchlm.accounting.symbols import H, H_kv, L, N_all, N_lora, b_a, b_r, b_w, d, d_ff, d_h, r
from scratchlm.config import MLP, ModelConfig, MoE
from scratchlm.config.lora import LoRA
from scratchlm.quantization.rule import choose_base

_OF_LEARNING = ("joined weights", "cast weights", "gradient of the LM head")


@dataclass(frozen=True)
class LoRAMemory:
    """An adapter's size, and the peak memory of one GPU that learns it."""

    parameters: Item
    training: Item
    moments: dict[str, int]


def adapted_layers(config: ModelConfig, lora: LoRA) -> dict[str, tuple[Expr, Expr]]:
    """Return the layers of a block that are adapted: name -> (d_in, d_out)."""
    sizes: dict[str, tuple[Expr, Expr]] = {
        "attn.q_proj": (d, H * d_h),
        "attn.k_proj": (d, H_kv * d_h),
        "attn.v_proj": (d, H_kv * d_h),
        "attn.output_proj": (H * d_h, d),
    }
    if not isinstance(config.ffn, MoE):
        sizes |= {"ffn.w1": (d, d_ff), "ffn.w2": (d_ff, d)}
        if not isinstance(config.ffn, MLP):
            sizes["ffn.w3"] = (d, d_ff)
    chosen = {name: size for name, size in sizes.items() if lora.matches(f"layers.0.{name}")}
    if not chosen:
        raise ValueError(f"targets name no layer of the first block; got {list(lora.targets)}")
    return chosen


def lora_memory(config: ModelConfig, lora: LoRA, setup: Setup) -> LoRAMemory:
    """Predict what learning an adapter takes; every block is adapted alike.

    With `bf16-mixed` the base is kept in bfloat16, with `quantize` its layers in few bits.
    """
    if setup.parallel != "none":
        raise ValueError(f"an adapter's account is for one GPU; got parallel={setup.parallel!r}")
    low = "bf16" if setup.precision == "bf16-mixed" else setup.precision
    # Beside few bits a compiler rotates Q and K, and keeps neither as projected.
    execution = replace(setup.execution, rope_epilogue=setup.quantize is not None)
    setup = replace(setup, precision=low, execution=execution)
    layers = adapted_layers(config, lora)
    size = group(
        "adapter",
        [
            group(
                "layers",
                [leaf(name, r * (d_in + d_out)) for name, (d_in, d_out) in layers.items()],
                times=L,
            )
        ],
    )
    env: dict[str, Number] = {**memory_bindings(config, setup), "r": lora.rank}
    env["N_lora"] = size.value(env)
    moments = _moments(config, setup, len(layers))
    values = {name: round(tree.value(env)) for name, tree in moments.items()}
    peak = max(values, key=lambda name: values[name])
    return LoRAMemory(evaluate(size, env), evaluate(moments[peak], env), values)


def _moments(config: ModelConfig, setup: Setup, adapted: int) -> dict[str, Node]:
    execution = setup.execution
    always = [
        *_base(config, setup),
        leaf("adapter weights", 4 * N_lora, note="float32"),
        leaf("adapter moments", 8 * N_lora, note="AdamW: mean and mean square"),
        *rope_tables(config),
        leaf("workspace", WORKSPACE, note="the matmul library's"),
    ]
    thin = leaf("A x", b_a * TOKENS * adapted * r * L, note="of every adapted layer")
    kept = [_without_learning(node) for node in kept_layers(config, execution)]
    saved = _without_learning(saved_tree(config, execution))
    gradients = leaf("adapter gradients", 4 * N_lora)
    wide = 1 if isinstance(config.ffn, MLP | MoE) else 2
    flight = leaf("gradients in flight", b_r * TOKENS * d + wide * b_a * TOKENS * d_ff)
    early = [gradients] if setup.accumulate else []
    return {
        "forward": group(
            "at the loss, going forward",
            [*always, *early, saved, thin, *forward_loss(execution)],
            UNIT,
        ),
        "backward": group(
            "in the backward pass",
            [*always, gradients, group("activations", kept), thin, flight, *_made_wide(setup)],
            UNIT,
        ),
    }


def _base(config: ModelConfig, setup: Setup) -> list[Node]:
    if setup.quantize is None:
        return [leaf("base weights", b_w * N_all)]
    held = quantized_weights(choose_base(config, setup.quantize), b_w)
    return [replace(held, name="base weights")]


def _made_wide(setup: Setup) -> list[Node]:
    """Return what the largest matrix takes on its way from few bits to a product."""
    if setup.quantize is None:
        return []
    if setup.quantize == "nf4":
        return [leaf("a matrix made wide", 12 * d * d_ff, note="numbers, table's values, product")]
    return [leaf("a matrix made wide", 4 * d * d_ff + b_a * d * d_ff, note="float32, then cast")]


def _without_learning(node: Node) -> Node:
    """Leave out what only weights that learn, or that are cast, are kept for."""
    parts = tuple(_without_learning(part) for part in node.parts if part.name not in _OF_LEARNING)
    return replace(node, parts=parts)
