"""How a tensor is cut into rows, and rows are shared out over ranks.

A parameter is taken as rows (its last dimension; of a vector, its elements), and rows are cut into
units of about UNIT elements. Ranks own whole units: so the norm of a gradient can be the norm of
its units' norms, which is the same to the bit however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

UNIT = 1 << 16  # elements


@dataclass(frozen=True)
class Rows:
    """Rows `start` … `stop` − 1 of a parameter."""

    name: str
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return these rows of a tensor of the parameter's shape: a view."""
        return as_rows(tensor)[self.start : self.stop]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that torch has cut (a DTensor); others as they are."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def as_rows(tensor: Tensor) -> Tensor:
    """Lay all dimensions but the last together: (rows, row), or a vector as it is."""
    return tensor if tensor.ndim < 2 else tensor.view(-1, tensor.shape[-1])


def unit_rows(shape: Sequence[int]) -> int:
    """Return how many rows of a tensor of this shape make a unit."""
    row = shape[-1] if len(shape) > 1 else 1
    return max(1, UNIT // max(1, row))


def units_of(tensor: Tensor) -> list[Tensor]:
    """Cut a tensor, or rows of one that begin with a unit, into units."""
    rows = tensor.flatten(0, -2) if tensor.ndim > 1 else tensor.reshape(-1)
    return list(rows.split(unit_rows(tensor.shape)))


def num_rows(shape: Sequence[int]) -> int:
    """Count a tensor's rows."""
    count = 1
    for side in shape[: max(1, len(shape) - 1)]:
        count *= side
    return count


def share_out(tensors: dict[str, Tensor], ranks: int, whole: frozenset[str]) -> list[list[Rows]]:
    """Give every rank about as many elements, in units one after the other.

    Tensors in `whole` are not cut: what moves them needs all of their rows.
    """
    units: list[tuple[Rows, int]] = []
    for name, tensor in tensors.items():
        rows = num_rows(tensor.shape)
        step = rows if name in whole else unit_rows(tensor.shape)
        each = tensor.numel() // max(1, rows)
        for start in range(0, rows, max(1, step)):
            stop = min(rows, start + step)
            units.append((Rows(name, start, stop), (stop - start) * each))
    total, before = sum(size for _, size in units), 0
    shares: list[list[Rows]] = [[] for _ in range(ranks)]
    for unit, size in units:
        share = shares[min(ranks - 1, (2 * before + size) * ranks // max(1, 2 * total))]
        before += size
        if share and share[-1].name == unit.name:
            unit = Rows(unit.name, share.pop().start, unit.stop)
        share.append(unit)
    return shares


def boxes(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple[int, ...], int]]:
    """Cut rows `start` … `stop` − 1 into boxes: where each begins, and how many rows it has.

    Rows of a matrix are one box; rows of a stack of matrices are one for each matrix they touch.
    """
    if len(shape) <= 2:
        return [((start, *(0 for _ in shape[1:])), stop - start)] if stop > start else []
    inner, found = num_rows(shape[1:]), []
    for index in range(start // inner, -(-stop // inner)):
        low, high = max(start - index * inner, 0), min(stop - index * inner, inner)
        found += [((index, *offsets), rows) for offsets, rows in boxes(shape[1:], low, high)]
    return found
