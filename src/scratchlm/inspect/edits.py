"""An edit: part of a point is set, added to or scaled while the model runs.

    set     x ← v           add     x ← x + v           scale   x ← x · v

A value has the point's axes, right-aligned, as NumPy broadcasts: of size 1, or one entry for each
position, head or unit that is chosen. What is not chosen keeps its bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from scratchlm.inspect.points import Point
from scratchlm.inspect.selection import Run, Selection

Kind = Literal["set", "add", "scale"]


@dataclass(eq=False)
class Edit:
    """What is done to a selection."""

    kind: Kind
    value: Tensor  # with all axes of the point
    selection: Selection

    def apply(self, x: Tensor, run: Run) -> Tensor:
        """Return the tensor with the edit made."""
        self.selection.meet(run)
        value = self.value.to(x)
        if len(value) > 1 and run.cached:
            raise ValueError(
                f"{self.selection}: with a key-value cache rows come and go, so a value must be "
                f"the same for all; got one for {len(value)} rows"
            )
        value = self._fit_keys(value, x)
        value, mask = self.selection.spread(value, x, run)
        self._check_fits(value, x)
        if self.selection.point.kind == "attn.scores":  # an edit opens no hidden key
            visible = x > -math.inf
            mask = visible if mask is None else mask & visible
            edited = self._compute(x.masked_fill(~visible, 0.0), value)
        else:
            edited = self._compute(x, value)
        return edited if mask is None else torch.where(mask, edited, x)

    def _compute(self, x: Tensor, value: Tensor) -> Tensor:
        if self.kind == "add":
            return x + value
        return x * value if self.kind == "scale" else value.expand_as(x)

    def _fit_keys(self, value: Tensor, x: Tensor) -> Tensor:
        """Cut or fill the keys of a value: those past a query's own position are hidden anyway."""
        more = x.shape[-1] - value.shape[-1]
        if self.selection.point.axes[-1] != "key" or value.shape[-1] == 1 or not more:
            return value
        return pad_keys(value, x.shape[-1], self.selection.point)

    def _check_fits(self, value: Tensor, x: Tensor) -> None:
        fits = zip(value.shape, x.shape, strict=True)
        if any(size not in (1, wanted) for size, wanted in fits):
            raise ValueError(
                f"{self.selection}: the value must fit {self.selection.point.axes} = "
                f"{tuple(x.shape)}; got {tuple(self.value.shape)}"
            )


def pad_keys(x: Tensor, num_keys: int, point: Point) -> Tensor:
    """Cut or fill the axis of keys: a hidden key has score −∞ and weight 0."""
    hidden = -math.inf if point.kind == "attn.scores" else 0.0
    x = x[..., :num_keys]
    more = num_keys - x.shape[-1]
    return torch.cat((x, x.new_full((*x.shape[:-1], more), hidden)), dim=-1) if more else x


def make_edit(
    kind: Kind, what: str, point: Point, value: Tensor | float, context_length: int, **part: object
) -> Edit:
    """Check a value against the point, and what is chosen of it."""
    value = torch.as_tensor(value)
    if value.ndim > len(point.axes):
        raise ValueError(
            f"{what}({point.name!r}): the value must have at most the axes {point.axes}; "
            f"got shape {tuple(value.shape)}"
        )
    value = value.reshape(*[1] * (len(point.axes) - value.ndim), *value.shape)
    given = value.shape[point.position_axis]
    if given > 1 and part.get("positions") is None:  # a value by position says which
        part = {**part, "positions": range(given)}
    selection = Selection.of(point, what, context_length, **part)  # type: ignore[arg-type]
    wanted = list(point.sizes)
    if selection.positions is not None and not selection.is_open:
        wanted[point.position_axis] = len(selection.positions)
    if selection.heads is not None:
        wanted[1] = len(selection.heads)
    if selection.units is not None:
        wanted[-1] = len(selection.units)
    for axis, size, most in zip(point.axes, value.shape, wanted, strict=True):
        if most is not None and size not in (1, most):
            raise ValueError(
                f"{selection}: {axis} of the value must be 1 or {most}; "
                f"got shape {tuple(value.shape)}"
            )
    return Edit(kind, value, selection)
