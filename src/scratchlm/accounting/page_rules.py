"""Validation rules of the page: sizes that must divide, or not exceed, one another.

`ModelConfig` and `memory` check the same when they are built; the page shows the
same messages. A test compares them.
"""

from __future__ import annotations

from typing import Any

from scratchlm.accounting.expr import Expr, Num
from scratchlm.accounting.page_formulas import Formulas
from scratchlm.accounting.symbols import E, G, G_t, H, H_kv, d, d_ff, d_h, k
from scratchlm.config import ModelConfig, Rotary, Sinusoidal


def rules(config: ModelConfig, table: Formulas) -> list[dict[str, Any]]:
    """Return what must divide what, or not exceed it, in the order it is checked."""
    found = [
        _rule(
            table,
            "at most",
            k,
            E,
            "experts_per_token must not exceed num_experts; got "
            "experts_per_token={k}, num_experts={E}",
            {"ffn": ["moe"]},
        ),
        _rule(
            table,
            "divisible",
            d,
            H,
            "d_model must be divisible by num_heads; got d_model={d}, num_heads={H}",
            {"d_head": [None]},
        ),
        _rule(
            table,
            "divisible",
            H,
            H_kv,
            "num_heads must be divisible by num_kv_heads; got num_heads={H}, num_kv_heads={H_kv}",
        ),
    ]
    if isinstance(config.positions, Rotary):
        says = "d_head must be even to rotate pairs of channels; got d_head={d_h}"
        found.append(_rule(table, "divisible", d_h, Num(2), says))
    if isinstance(config.positions, Sinusoidal):
        says = "d_model must be even for sinusoidal positions; got d_model={d}"
        found.append(_rule(table, "divisible", d, Num(2), says))
    says = "gpus must be divisible by tp; got gpus={G}, tp={G_t}"
    found.append(_rule(table, "divisible", G, G_t, says))
    for symbol, key, kinds in (
        (H, "num_heads", {}),
        (H_kv, "num_kv_heads", {}),
        (d_ff, "d_ff", {"ffn": ["dense"]}),
        (E, "num_experts", {"ffn": ["moe"]}),
    ):
        says = f"tensor parallelism needs {key} divisible by tp; got {key}={{{symbol.name}}}"
        found.append(_rule(table, "divisible", symbol, G_t, says + ", tp={G_t}", kinds))
    return found


def _rule(
    table: Formulas,
    kind: str,
    left: Expr,
    right: Expr,
    says: str,
    when: dict[str, list[Any]] | None = None,
) -> dict[str, Any]:
    return {
        "kind": kind,
        "left": table.expr(left),
        "right": table.expr(right),
        "says": says,
        "when": when or {},
    }
