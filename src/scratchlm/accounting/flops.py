"""FLOPs of a phase, component by component, under named conventions.

A product (m×n)·(n×p) counts 2mnp. Only matmuls are counted: norms, softmax, activations, biases,
RoPE and the loss are a percent or less of the arithmetic, and their cost is memory traffic, which
the roofline counts. The embedding is a lookup: 0.

    full      every matmul as written out; attention S×S
    causal    only what must be done: keys a query may see (causal mask, sliding window, packed
              documents), logits that are used
    6ND       2·N per token forward, 4·N backward; N: active parameters; attention not counted
    hardware  what the machine executes: S×S in unfused attention, masked blocks skipped in fused,
              whose backward computes QKᵀ once more; plus what checkpointing recomputes (a fused
              loss takes its gradients in the forward pass and recomputes nothing)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scratchlm.accounting.expr import Expr, Number
from scratchlm.accounting.items import Node, group, leaf
from scratchlm.accounting.parameters import active_parameters
from scratchlm.accounting.symbols import E, H, H_kv, L, N, V, d, d_ff, d_h, k, model_symbols
from scratchlm.accounting.work import Work, work
from scratchlm.config import MLP, ModelConfig, MoE

UNIT = "FLOP"
CONVENTIONS = ("full", "causal", "6ND", "hardware")
CHECKPOINTING = ("none", "attention", "ffn", "block")


@dataclass(frozen=True)
class Execution:
    """How a step is executed, as far as arithmetic and memory depend on it."""

    attention: str = "fused"  # or "unfused": scores are materialised
    loss: str = "fused"  # head and loss slice by slice; or "unfused": all logits are formed
    checkpointing: str = "none"
    rope_epilogue: bool = False  # RoPE as the QKV product's epilogue, as on Hopper: no copies
    weights: str = "cast"  # for each pass; or "kept" in the matmuls' dtype; or "gathered" for it

    def __post_init__(self) -> None:
        for name in ("attention", "loss"):
            if getattr(self, name) not in ("fused", "unfused"):
                got = getattr(self, name)
                raise ValueError(f"{name} must be one of fused, unfused; got {got!r}")
        if self.checkpointing not in CHECKPOINTING:
            choices = ", ".join(CHECKPOINTING)
            raise ValueError(f"checkpointing must be one of {choices}; got {self.checkpointing!r}")


def flops_tree(
    config: ModelConfig,
    phase: str,
    convention: str = "full",
    execution: Execution | None = None,
    packed: bool = False,
) -> Node:
    """Return the formulas of a phase's FLOPs under a convention."""
    execution = execution or Execution()
    if convention not in CONVENTIONS:
        raise ValueError(f"convention must be one of {', '.join(CONVENTIONS)}; got {convention!r}")
    if convention == "6ND":
        return _six_nd(work(config, phase, causal=True))
    fused = convention == "hardware" and execution.attention == "fused"
    asked = work(config, phase, causal=convention == "causal" or fused, packed=packed)
    if convention == "hardware" and phase not in ("forward", "training"):
        asked = replace(asked, logit_rows=work(config, phase, causal=True).logit_rows)
    forward = _forward(config, asked)
    if phase != "training":
        return forward
    parts = [forward, forward.scaled(2, "backward")]
    if convention == "hardware":
        recomputed = _recomputation(config, asked, execution)
        parts += [recomputed] if recomputed else []
    return group("training", parts, UNIT)


def _forward(config: ModelConfig, asked: Work) -> Node:
    head = leaf("LM head", 2 * asked.logit_rows * d * V)
    layer = [
        _projections(asked.rows),
        _attention(asked.pairs),
        _ffn(config, asked.rows),
    ]
    name = "forward" if asked.phase == "training" else asked.phase
    return group(name, [group("layers", layer, times=L), head], UNIT, where=asked.where)


def _projections(rows: Expr) -> Node:
    parts = [
        leaf("Q projection", 2 * rows * d * H * d_h),
        leaf("K projection", 2 * rows * d * H_kv * d_h),
        leaf("V projection", 2 * rows * d * H_kv * d_h),
        leaf("output projection", 2 * rows * H * d_h * d),
    ]
    return group("projections", parts, closed=4 * rows * d * d_h * (H + H_kv))


def _attention(pairs: Expr) -> Node:
    parts = [leaf("QKᵀ", 2 * pairs * H * d_h), leaf("AV", 2 * pairs * H * d_h)]
    return group("attention", parts, closed=4 * pairs * H * d_h)


def _ffn(config: ModelConfig, rows: Expr) -> Node:
    if isinstance(config.ffn, MoE):
        experts = [leaf(f"experts {w}", 2 * rows * k * d * d_ff) for w in ("W1", "W3", "W2")]
        closed = rows * d * (2 * E + 6 * k * d_ff)
        return group("feed-forward", [leaf("router", 2 * rows * d * E), *experts], closed=closed)
    names = ("W1", "W2") if isinstance(config.ffn, MLP) else ("W1", "W3", "W2")
    matrices = [leaf(name, 2 * rows * d * d_ff) for name in names]
    return group("feed-forward", matrices, closed=2 * len(names) * rows * d * d_ff)


def _recomputation(config: ModelConfig, asked: Work, execution: Execution) -> Node | None:
    """What is computed a second time, because it was not kept or never written to memory."""
    forward = _forward(config, asked)
    projections, attention, ffn = forward.parts[0].parts
    parts: list[Node] = []
    if execution.checkpointing in ("attention", "block"):
        parts += [projections, attention]
    if execution.checkpointing in ("ffn", "block"):
        parts.append(ffn)
    if execution.attention == "fused":
        again = 2 * asked.pairs * H * d_h
        parts.append(leaf("QKᵀ again", again, note="fused attention's backward recomputes scores"))
    if not parts:
        return None
    return group("recomputation", [group("layers", parts, times=L)], UNIT, where=asked.where)


def _six_nd(asked: Work) -> Node:
    tokens = asked.rows
    parts = [leaf("forward 2ND", 2 * N * tokens)]
    if asked.phase == "training":
        parts.append(leaf("backward 4ND", 4 * N * tokens))
    return group(asked.phase, parts, UNIT, where=asked.where)


def training_flops_per_token(config: ModelConfig, seq: int, convention: str = "full") -> Number:
    """Return the FLOPs of a training step divided by its tokens.

    Under `full` this is 6·N_matmul + 12·L·H·d_h·S, the MFU convention of our benchmarks.
    """
    env = {**model_symbols(config), "B": 1, "S": seq}
    env["N"] = active_parameters(config).value(env)
    return flops_tree(config, "training", convention).value(env) / seq
