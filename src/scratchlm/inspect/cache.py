"""What was kept of a run: a tensor for each point, by its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scratchlm.inspect.attribution import Attribution, attribute
from scratchlm.inspect.edits import pad_keys
from scratchlm.inspect.points import resolve
from scratchlm.inspect.selection import Selection
from scratchlm.model import Transformer

# The positions of columns: of all rows alike, by row (−1 is padding), or not known
Placed = range | tuple[int, ...] | Tensor | None


@dataclass
class _Kept:
    """One point of a run: a piece for each forward, in order."""

    selection: Selection
    pieces: list[Tensor] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)


class Cache:
    """The kept points of one run: `cache["layers.3.attn.q"]`.

    A forward that goes on from a key-value cache is joined to the one before, position by position.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self._kept: dict[str, _Kept] = {}
        self.edited: frozenset[str] = frozenset()  # points that were edited in this run

    def add(self, selection: Selection, piece: Tensor, placed: Placed) -> None:
        """Take a point of one more forward in."""
        kept = self._kept.setdefault(selection.point.name, _Kept(selection))
        kept.pieces.append(piece)
        kept.versions.append(None if piece.is_inference() else piece._version)
        kept.placed.append(placed)

    def __getitem__(self, name: str) -> Tensor:
        (point,) = resolve(self.model, name)
        kept = self.kept(point.name)
        for piece, version in zip(kept.pieces, kept.versions, strict=True):
            if version is not None and piece._version != version:
                raise ValueError(f"{name} was changed in place after it was kept")
        pieces = kept.pieces
        if len({len(piece) for piece in pieces}) > 1:
            rows = " and ".join(str(len(piece)) for piece in pieces[:2])
            raise ValueError(f"{name} was kept of forwards of {rows} rows, which do not join")
        if len(pieces) > 1:
            if point.axes[-1] == "key":
                keys = max(piece.shape[-1] for piece in pieces)
                pieces = [pad_keys(piece, keys, point) for piece in pieces]
            kept.pieces = [torch.cat(pieces, dim=point.position_axis)]
            kept.versions = [None]
            pieces = kept.pieces
        found = pieces[0]
        if found.is_inference() and not torch.is_inference_mode_enabled():
            found = found.clone()  # autograd takes no inference tensors
        return found

    def kept(self, name: str) -> _Kept:
        """Return what was kept of a point."""
        if name not in self._kept:
            names = ", ".join(self._kept) or "nothing"
            raise ValueError(f"{name} was not kept; kept: {names}")
        return self._kept[name]

    def positions(self, name: str) -> Int[Tensor, "rows n"]:
        """Return the positions of a point's columns: one row for all, or by row; −1 is padding."""
        pieces = []
        for placed in self.kept(name).placed:
            if placed is None:
                raise ValueError(f"{name} was kept of vectors whose positions are not known")
            pieces.append(placed if isinstance(placed, Tensor) else torch.tensor([[*placed]]))
        rows = max(len(piece) for piece in pieces)
        return torch.cat([piece.cpu().expand(rows, -1) for piece in pieces], dim=-1)

    def selection(self, name: str) -> Selection:
        """Return which part of a point was kept."""
        return self.kept(name).selection

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """The bytes of everything that is kept."""
        return sum(piece.nbytes for kept in self._kept.values() for piece in kept.pieces)

    # What goes into another run

    def patch_value(self, wanted: Selection) -> tuple[Tensor, range | tuple[int, ...]]:
        """Return what was kept where it is wanted, and the positions it is for."""
        name = wanted.point.name
        value, placed = self[name], self.positions(name)
        if bool((placed != placed[:1]).any()) or int(placed.min()) < 0:
            raise ValueError(f"{wanted}: the rows of `from_` stand at different positions")
        there = placed[0].tolist()
        chosen = tuple(there) if wanted.positions is None else wanted.positions
        if wanted.is_open:
            chosen = tuple(p for p in there if p in chosen)
        absent = [p for p in chosen if p not in there]
        if absent:
            raise ValueError(f"{wanted}: position {absent[0]} was not kept in `from_`")
        columns = torch.tensor([there.index(p) for p in chosen], device=value.device)
        value = value.index_select(wanted.point.position_axis, columns)
        return self._chosen(wanted, value), chosen

    def mean_value(self, wanted: Selection) -> Tensor:
        """Return the mean over rows and positions, padding left out; all axes stay."""
        name, axis = wanted.point.name, wanted.point.position_axis
        x, placed = self[name], self.positions(name)
        real = (placed >= 0).to(x.device).expand(len(x), -1)
        real = real.reshape(len(x), *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1))
        total = x.masked_fill(~real, 0.0).sum(dim=(0, axis), keepdim=True)
        return self._chosen(wanted, total / real.sum())

    def _chosen(self, wanted: Selection, value: Tensor) -> Tensor:
        kept = self.selection(wanted.point.name)
        if kept.heads is not None or kept.units is not None:
            raise ValueError(f"{wanted}: `from_` kept only some of its heads or units")
        return wanted.take_heads_and_units(value)

    # What is read off it

    @torch.no_grad()
    def lens(self) -> Float[Tensor, "layers batch position vocab"]:
        """Return the logits after the embedding and after every layer: head and final norm on each.

        It reads `embed` and `layers.*.out`, at the positions at which they were kept.
        """
        return torch.stack([logits for _, logits in self.lens_by_layer()])

    @torch.no_grad()
    def lens_by_layer(self) -> Iterator[tuple[str, Float[Tensor, "batch position vocab"]]]:
        """Give the lens out point by point: all of it at once may be large."""
        model: Any = self.model
        for name in ("embed", *(f"layers.{i}.out" for i in range(len(model.layers)))):
            yield name, model.lm_head.forward(model.ln_final.forward(self[name]))

    def attribute(
        self, token: int, against: int | None = None, position: int | None = None
    ) -> Attribution:
        """Return each part's share of a token's logit, or of its lead over another token's.

        The final norm's scale is held fixed; the shares add up to the logit. `position`: the last
        one that was kept, where none is named.
        """
        return attribute(self, token, against, position)
