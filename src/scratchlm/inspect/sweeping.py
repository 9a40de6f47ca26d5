"""Sweeps: the same run again and again, each time with one patch; many rows at once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.inspect.cache import Cache
from scratchlm.inspect.edits import Edit, make_edit
from scratchlm.inspect.points import Point

if TYPE_CHECKING:
    from scratchlm.inspect.look import Look

Metric = Callable[[Float[Tensor, "batch seq vocab"]], Float[Tensor, " batch"]]
EACH = ("point", "position", "head", "position head")


@torch.no_grad()
def sweep(
    look: Look,
    points: list[Point],
    metric: Metric,
    tokens: Int[Tensor, "1 seq"],
    from_: Cache | None,
    each: str,
    batch: int,
) -> Tensor:
    """Run the model once for every patch, `batch` patches at a time; return the metric of each."""
    if tokens.ndim != 2 or len(tokens) != 1:
        raise ValueError(f"sweep: tokens must be one row, (1, seq); got {tuple(tokens.shape)}")
    if batch < 1:
        raise ValueError(f"sweep: batch must be at least 1; got {batch}")
    patches, shape = _patches(points, tokens.shape[1], each)
    found = []
    for start in range(0, len(patches), batch):
        some = patches[start : start + batch]
        edits = [_edit(look, row, point, part, from_) for row, (point, part) in enumerate(some)]
        with look.trying(edits):
            numbers = metric(look.model(tokens.expand(len(some), -1)))
        if numbers.shape != (len(some),):
            raise ValueError(
                f"sweep: the metric must give one number a row, ({len(some)},); "
                f"got {tuple(numbers.shape)}"
            )
        for edit in edits:
            edit.selection.check_met()
        found.append(numbers)
    return torch.cat(found).view(len(points), *shape)


def _patches(
    points: list[Point], seq: int, each: str
) -> tuple[list[tuple[Point, dict[str, Any]]], list[int]]:
    """Return what is patched, one by one, and the axes of the result after that of the points."""
    if each not in EACH:
        raise ValueError(f"sweep: each must be one of {', '.join(EACH)}; got {each!r}")
    choices: dict[str, range] = {"positions": range(seq)} if "position" in each else {}
    if "head" in each:
        counts = {point.sizes[1] if point.has_heads else None for point in points}
        (count, *others) = counts
        if others or count is None:
            raise ValueError("sweep: by head, all points must have the same number of heads")
        choices["heads"] = range(count)
    parts = [dict(zip(choices, chosen, strict=True)) for chosen in product(*choices.values())]
    return [(point, part) for point in points for part in parts], [*map(len, choices.values())]


def _edit(look: Look, row: int, point: Point, part: dict[str, Any], from_: Cache | None) -> Edit:
    length = look.model.config.context_length
    value: Tensor | float = 0.0
    if from_ is not None:
        value, placed = from_.patch_value(look.select(point, "sweep", **part))
        part = {**part, "positions": placed}
        if len(value) != 1:
            raise ValueError(f"sweep: `from_` must hold one row; got {len(value)}")
    return make_edit("set", "sweep", point, value, length, rows=(row,), **part)
