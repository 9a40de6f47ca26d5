"""Queries, keys and values where a GPU trains: kernels that stand for several ops (`Ops` asks)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from scratchlm.accelerate import hopper
from scratchlm.ops import fast

Turn = tuple[Tensor, Tensor, str, Tensor | None]  # cos, sin, layout, both tables in lines


def turn_lines(cos: Tensor, sin: Tensor, layout: str) -> Tensor | None:
    """Return the tables as the product that turns on its way out reads them, where one does."""
    if not (fast.trains_by_kernel(cos) and hopper.takes_tables(cos)):
        return None
    from scratchlm.accelerate.kernels.hopper.qkv_rope import in_lines

    return in_lines(cos, sin, layout == "interleaved")


def projected(
    x: Tensor, weights: Sequence[Tensor], heads: tuple[int, int], turn: Turn
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Project x and turn queries and keys on the way out, where a Hopper GPU trains."""
    low, (cos, sin, layout, lines) = fast.low_dtype(x), turn
    if lines is None or not hopper.takes_heads(x, low):
        return None
    from scratchlm.accelerate.kernels.hopper.qkv_rope import projected as by_kernel

    tables = (cos, sin, lines)
    return by_kernel(x.to(low), fast.in_one(weights, low), tables, heads, layout == "interleaved")


def attended(
    x: Tensor, weights: Sequence[Tensor], heads: tuple[int, int], turn: Turn
) -> Tensor | None:
    """Project x and let every token gather from those before it, where a Hopper GPU trains."""
    low, (_, _, layout, lines) = fast.low_dtype(x), turn
    if lines is None or not (hopper.takes_heads(x, low) and hopper.takes_attention(x, heads)):
        return None
    from scratchlm.accelerate.kernels.hopper.qkv_rope import attended as by_kernel

    return by_kernel(x.to(low), fast.in_one(weights, low), lines, heads[0], layout == "interleaved")


def turned(
    joined: Tensor,
    heads: tuple[int, int],
    turn: Turn,
    norm: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut [Q; K; V] (batch, seq, all heads · d) into heads; norm and turn queries and keys."""
    from scratchlm.accelerate.kernels.triton.qkv_norm_rope import cut_and_turn

    cos, sin, layout, _ = turn
    return cut_and_turn(joined, cos, sin, norm, heads, layout == "interleaved")
