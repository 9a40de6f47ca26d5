"""Which part of a point is meant: positions, heads, units; and where a forward stands.

A position is a token's place in its row, padding not counted, whatever is kept in a cache: the
prompt's tokens stand at 0, 1, 2, … and a generated one stands where a full forward would have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from scratchlm.inspect.points import Point

Indices = int | slice | range | Iterable[int] | None


@dataclass(frozen=True)
class Run:
    """Where the tokens of one forward stand."""

    batch: int
    seq: int
    # of each column; by row, −1 at padding, where rows differ; None: not known
    positions: range | Int[Tensor, "batch seq"] | None
    cached: bool = False  # whether it goes on from, or fills, a key-value cache

    @classmethod
    def of(cls, x: Tensor, context: Any) -> Run:
        """Read the positions off what the layers of a forward share."""
        batch, seq = x.shape[0], x.shape[1]
        if context is None:
            return cls(batch, seq, range(seq))
        mask, cached = context.mask, context.cache is not None
        if mask.slots is not None:
            return cls(batch, seq, mask.slots.expand(batch, seq), cached)
        if mask.key_valid is not None:
            placed = (mask.key_valid.cumsum(dim=-1) - 1).masked_fill(~mask.key_valid, -1)
            return cls(batch, seq, placed, cached)
        return cls(batch, seq, range(mask.start, mask.start + seq), cached)

    @property
    def begins(self) -> bool:
        """Whether some row stands at its first token."""
        if isinstance(self.positions, Tensor):
            return bool((self.positions == 0).any())
        return self.positions is None or self.positions.start == 0

    def last(self) -> Run:
        """Return the run of the last column alone."""
        placed = self.positions
        if placed is not None:
            placed = placed[-1:] if isinstance(placed, range) else placed[:, -1:]
        return Run(self.batch, 1, placed, self.cached)


@dataclass(eq=False)
class Selection:
    """The part of a point that is meant, and what of it has come by so far."""

    point: Point
    what: str  # as an error calls it: `zero`, `keep`, …
    positions: range | tuple[int, ...] | None = None  # None: all
    heads: tuple[int, ...] | None = None
    units: tuple[int, ...] | None = None  # of the last axis
    rows: tuple[int, ...] | None = None
    is_open: bool = False  # positions go on for as long as there are some
    met: bool = field(default=False, init=False)
    missed: set[int] = field(default_factory=set, init=False)

    @classmethod
    def of(
        cls,
        point: Point,
        what: str,
        context_length: int,
        positions: Indices = None,
        heads: Indices = None,
        units: Indices = None,
        rows: tuple[int, ...] | None = None,
    ) -> Selection:
        """Check what a user named against the point's sizes."""
        where = f"{what}({point.name!r})"
        if heads is not None and not point.has_heads:
            raise ValueError(f"{where}: this point has no heads, its axes are {point.axes}")
        if units is not None and point.axes[-1] == "key":
            raise ValueError(f"{where}: keys are no units; choose positions and heads")
        placed = _indices(f"{where}: positions", positions, context_length, point.axes)
        is_open = isinstance(positions, slice) and positions.stop is None
        chosen_heads = _indices(f"{where}: heads", heads, point.sizes[1], point.axes)
        chosen_units = _indices(f"{where}: units", units, point.sizes[-1], point.axes)
        made = cls(
            point,
            what,
            placed,
            None if chosen_heads is None else tuple(chosen_heads),
            None if chosen_units is None else tuple(chosen_units),
            rows,
            is_open,
        )
        if placed is not None and not is_open:
            made.missed = set(placed)
        return made

    # What has come by

    def meet(self, run: Run) -> None:
        """Take note of a forward; refuse one that does not have what is meant."""
        if self.positions is None:
            self.met = True
            return
        if run.positions is None:
            raise ValueError(
                f"{self}: the head was called on chosen vectors, whose positions are not known"
            )
        present = self._present(run)
        if not run.cached:
            absent = sorted(set(self.positions) - present) if not self.is_open else []
            if absent or not present:
                raise ValueError(
                    f"{self}: position {(absent or list(self.positions))[0]} is not in this "
                    f"forward, whose shortest row has {self._shortest(run)} tokens"
                )
        self.met = self.met or bool(present)
        self.missed -= present

    def _present(self, run: Run) -> set[int]:
        """Return the positions meant that are here: without a cache, those all rows have."""
        assert self.positions is not None
        if isinstance(run.positions, range):
            return {p for p in run.positions if p in self.positions}
        assert run.positions is not None
        rows = [set(row) for row in run.positions.tolist()]
        have = set.union(*rows) if run.cached else set.intersection(*rows)
        return have & set(self.positions)

    @staticmethod
    def _shortest(run: Run) -> int:
        if isinstance(run.positions, Tensor):
            return int(run.positions.amax(dim=-1).min()) + 1
        return run.seq

    def check_met(self) -> None:
        """Refuse to end before everything that is meant has come by."""
        if self.missed:
            raise ValueError(
                f"{self} was never applied at position {min(self.missed)}: "
                "no forward inside the context had it"
            )
        if not self.met:
            raise ValueError(
                f"{self} was never applied: the model did not run through it inside the context"
            )

    def __str__(self) -> str:
        return f"{self.what}({self.point.name!r})"

    # On a tensor

    def ranks(self, run: Run, device: torch.device) -> Int[Tensor, "rows seq"]:
        """Return which of the positions meant each column is, −1 where none; (1, seq) or by row."""
        assert self.positions is not None
        assert run.positions is not None
        if isinstance(run.positions, range):
            rank = {position: i for i, position in enumerate(self.positions)}
            return torch.tensor([[rank.get(p, -1) for p in run.positions]], device=device)
        longest = max(int(run.positions.max()), *self.positions) + 1
        table = torch.full((longest,), -1, device=device)
        table[list(self.positions)] = torch.arange(len(self.positions), device=device)
        return table[run.positions.clamp(min=0)].masked_fill(run.positions < 0, -1)

    def columns(self, run: Run, device: torch.device) -> Int[Tensor, "rows chosen"] | None:
        """Return the columns of the positions meant, (1, chosen) or by row; None: all."""
        if self.positions is None:
            return None
        ranks = self.ranks(run, device)
        counts = (ranks >= 0).sum(dim=-1)
        if int(counts.min()) != int(counts.max()):
            raise ValueError(f"{self}: rows stand at different positions; keep all, or run one row")
        order = ranks.masked_fill(ranks < 0, torch.iinfo(torch.int64).max).argsort(dim=-1)
        return order[:, : int(counts[0])]

    def placed(self, run: Run, device: torch.device) -> range | tuple[int, ...] | Tensor | None:
        """Return the positions of the columns that are meant."""
        columns = self.columns(run, device)
        if columns is None or run.positions is None:
            return run.positions
        if isinstance(run.positions, range):
            return tuple(run.positions[column] for column in columns[0].tolist())
        return run.positions.gather(1, columns)

    def take(self, x: Tensor, run: Run) -> Tensor:
        """Return the part of a tensor that is meant; the tensor itself if that is all of it."""
        columns, axis = self.columns(run, x.device), self.point.position_axis
        if columns is not None:
            x = take_columns(x, columns, axis)
        return self.take_heads_and_units(x)

    def take_heads_and_units(self, x: Tensor) -> Tensor:
        """Return the heads and units that are meant."""
        for axis, chosen in ((1, self.heads), (x.ndim - 1, self.units)):
            if chosen is not None:
                x = x.index_select(axis, torch.tensor(chosen, device=x.device))
        return x

    def spread(self, value: Tensor, x: Tensor, run: Run) -> tuple[Tensor, Tensor | None]:
        """Lay a value for the part that is meant out over a tensor; return it, and who is meant."""
        mask: Tensor | None = None
        axes = ((0, self.rows), (1, self.heads), (x.ndim - 1, self.units))
        for axis, chosen in axes:
            if chosen is not None:
                rank = torch.full((x.shape[axis],), -1, device=x.device)
                rank[list(chosen)] = torch.arange(len(chosen), device=x.device)
                if value.shape[axis] > 1:
                    value = value.index_select(axis, rank.clamp(min=0))
                mask = _both(mask, _along(rank >= 0, axis, x.ndim))
        if self.positions is None:
            return value, mask
        axis, ranks = self.point.position_axis, self.ranks(run, x.device)
        if value.shape[axis] > 1:
            value = take_columns(value, ranks.clamp(min=0), axis)
        chosen_here = (ranks >= 0).reshape(
            len(ranks), *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1)
        )
        return value, _both(mask, chosen_here)


def take_columns(x: Tensor, columns: Int[Tensor, "rows chosen"], axis: int) -> Tensor:
    """Take columns of an axis, the same for all rows (one row of `columns`) or by row."""
    if len(columns) == 1:
        return x.index_select(axis, columns[0])
    rows = torch.arange(len(columns), device=x.device)[:, None]
    x = x.expand(len(columns), *x.shape[1:])
    return x.movedim(axis, 1)[rows, columns].movedim(1, axis)


def _along(mask: Tensor, axis: int, ndim: int) -> Tensor:
    return mask.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _both(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one & other


def _indices(
    where: str, given: Indices, size: int | None, axes: tuple[str, ...]
) -> range | tuple[int, ...] | None:
    """Return indices in normal form, each within [0, size)."""
    if given is None:
        return None
    assert size is not None, axes
    chosen: Sequence[Any]
    if isinstance(given, slice):
        if given.step not in (None, 1) or min(given.start or 0, given.stop or 0) < 0:
            raise ValueError(f"{where} must be a slice from ≥ 0 without a step; got {given}")
        chosen = range(given.start or 0, size if given.stop is None else given.stop)
    else:
        chosen = (
            [given] if isinstance(given, int) else given if isinstance(given, range) else [*given]
        )
    for index in chosen:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < size:
            raise ValueError(f"{where} must lie in [0, {size}); got {index!r}")
    if not len(chosen) or len(set(chosen)) < len(chosen):
        raise ValueError(f"{where} must name at least one, and none twice; got {given!r}")
    return chosen if isinstance(chosen, range) else tuple(chosen)
