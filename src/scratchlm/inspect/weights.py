"""Scores and weights of attention, which its fast kernels never form.

While they are only looked at, the layer's own op computes what goes on, and the formula computes
scores and weights beside it, for the heads and positions that are kept. Where they are edited, the
result comes from the formula for every query whose weights changed; all others keep the bits of the
layer's own op.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from scratchlm.inspect.selection import Run, Selection, take_columns
from scratchlm.ops import CausalMask, Ops


class Looker(Protocol):
    """What a look offers to the attention op of a layer."""

    run: Run

    def wanted(self, name: str) -> Selection | None:
        """Return what is kept of a point, if it is kept and nothing more."""

    def is_changed(self, *names: str) -> bool:
        """Whether one of these points is edited, or its gradient kept."""

    def visit(self, name: str, x: Tensor) -> Tensor:
        """Edit a point, keep it, and return what goes on."""

    def record(self, selection: Selection, part: Tensor) -> None:
        """Keep the part of a point that is meant."""


def attention_op(look: Looker, at: str, ops: Ops) -> Callable[..., Tensor]:
    """Make the attention op of a layer whose scores or weights are looked at."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        attn_out: Tensor = ops.attention(q, k, v, mask)
        if look.is_changed(at + "scores", at + "weights"):
            return _edited(look, at, ops, q, k, v, mask, attn_out)
        for name in (at + "scores", at + "weights"):
            selection = look.wanted(name)
            if selection is not None:
                scores = _scores(q, k, mask, selection, look.run)
                part = scores if name.endswith("scores") else ops.softmax(scores)
                look.record(selection, part)
        return attn_out

    return attention


def _scores(
    q: Float[Tensor, "batch heads query d"],
    k: Float[Tensor, "batch kv_heads key d"],
    mask: Any,
    selection: Selection | None = None,
    run: Run | None = None,
) -> Float[Tensor, "batch chosen query key"]:
    """Return Q Kᵀ / √d of the heads and positions that are meant, −∞ at hidden keys."""
    group, heads = q.shape[-3] // k.shape[-3], range(q.shape[-3])
    table = mask
    if isinstance(mask, CausalMask):
        table = mask.table(range(q.shape[-2]), range(k.shape[-2]), q.device)
    if selection is not None and run is not None:
        columns = selection.columns(run, q.device)
        if columns is not None:
            q = take_columns(q, columns, 2)
            if table is not None:
                shape = (*[1] * (4 - table.ndim), *table.shape)
                table = take_columns(table.reshape(shape), columns, 2)
        if selection.heads is not None:
            heads = selection.heads  # type: ignore[assignment]
            q = q.index_select(1, torch.tensor(heads, device=q.device))
    served = torch.tensor([head // group for head in heads], device=k.device)
    k = k.index_select(1, served) if group > 1 or len(heads) < k.shape[1] else k
    scores = _wide(q) @ _wide(k).transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores if table is None else scores.masked_fill(~table, -math.inf)


def _edited(
    look: Looker, at: str, ops: Ops, q: Tensor, k: Tensor, v: Tensor, mask: Any, own: Tensor
) -> Tensor:
    """Return attention's result with edited scores and weights."""
    scores = _scores(q, k, mask)
    unedited = ops.softmax(scores)
    new_scores = look.visit(at + "scores", scores)
    weights = unedited if new_scores is scores else ops.softmax(new_scores)
    weights = look.visit(at + "weights", weights)
    values = _wide(v).repeat_interleave(q.shape[-3] // v.shape[-3], dim=-3)
    by_formula = (weights @ values).to(own.dtype)
    if by_formula.requires_grad:  # own values, with the gradients of the formula
        own = own.detach() + (by_formula - by_formula.detach())
    changed = (weights != unedited).any(dim=-1, keepdim=True)
    return torch.where(changed, by_formula, own)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
