"""Work of unequal size, shared out over a kernel's programs before it starts."""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are numbers of the device: Python has no types for them.

from __future__ import annotations

import functools
import heapq

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@functools.cache
def shared_out(
    units: int, costs: tuple[int, ...], programs: int, device: torch.device, whole: bool = False
) -> Tensor:
    """Return a row for each program: how many items it takes, and which, in that order.

    Item u · len(costs) + j is the j-th of unit u. Who is free first takes the next one; if units
    are to be `whole`, all of the next unit's. Kept for the next call of that size: one before a
    CUDA graph is recorded, which takes no copies from here.
    """
    parts = len(costs)
    step = parts if whole else 1
    free = [(0, program) for program in range(programs)]
    rows: list[list[int]] = [[] for _ in free]
    for first in range(0, units * parts, step):
        busy, program = heapq.heappop(free)
        rows[program] += range(first, first + step)
        cost = sum(costs) if whole else costs[first % parts]
        heapq.heappush(free, (busy + cost, program))
    longest = max(map(len, rows))
    padded = [[len(row), *row, *[0] * (longest - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device=device)


@gluon.jit
def how_many(plan, stride):
    """Return how many items this program takes, where rows of the plan are `stride` long."""
    return gl.load(plan + gl.program_id(0) * stride)


@gluon.jit
def taken(plan, stride, r, parts):
    """Return the unit, and which of its parts, of this program's r-th item."""
    item = gl.load(plan + gl.program_id(0) * stride + 1 + r)
    return item // parts, item % parts
