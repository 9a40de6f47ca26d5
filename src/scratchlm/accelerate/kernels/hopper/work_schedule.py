"""A static schedule of work items of unequal cost over a persistent kernel's programs."""

# mypy: disallow_untyped_defs=False, disallow_any_decorated=False
# Arguments of a kernel are device values: Python has no types for them.

from __future__ import annotations

import functools
import heapq

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@functools.cache
def make_schedule(
    units: int, costs: tuple[int, ...], programs: int, device: torch.device, whole: bool = False
) -> Tensor:
    """Return a row per program: how many items it takes, and which, in order.

    Item u · len(costs) + j is the j-th of unit u and costs costs[j]. The next item goes to the
    program that is free first; if units stay `whole`, all of the next unit's items do. Cached by
    size: call it once before recording a CUDA graph, which cannot record the copy to the device.
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
def num_items(schedule, stride):
    """Return how many items this program takes, where rows of the schedule are `stride` long."""
    return gl.load(schedule + gl.program_id(0) * stride)


@gluon.jit
def load_item(schedule, stride, r, parts):
    """Return the unit, and which of its parts, of this program's r-th item."""
    item = gl.load(schedule + gl.program_id(0) * stride + 1 + r)
    return item // parts, item % parts
