"""The greatest logit of every row, found on the device: greedy decoding reads nothing back."""

# mypy: disallow_untyped_defs=False
# Arguments of a kernel are pointers and numbers of the device: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

from scratchlm.accelerate.kernels.triton.decode import _ready


@triton.jit
def greatest(
    logits,
    best,
    tickets,
    ids,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ids[row] = the index of the row's greatest logit, the first among equals.

    Grid: (PARTS, rows). Each program finds its part's; the last to finish (a ticket per row)
    chooses among them. An index is exact in float32 up to 2²⁴, the largest vocabulary.
    """
    part, row = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    place = part * PART + i
    _ready(PDL)
    inside = (i < PART) & (place < VOCAB)
    value = tl.load(logits + row.to(tl.int64) * VOCAB + place, mask=inside, other=float("-inf"))
    top, at = tl.max(value, 0, return_indices=True)
    mine = best + (row * PARTS + part) * 2
    tl.store(mine, top)
    tl.store(mine + 1, (part * PART + at).to(tl.float32))
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + row, 1, sem="acq_rel")
    if ticket == PARTS - 1:
        p = tl.arange(0, PARTS)
        tops = tl.load(best + (row * PARTS + p) * 2, cache_modifier=".cg")
        _, winner = tl.max(tops, 0, return_indices=True)
        index = tl.load(best + (row * PARTS + winner) * 2 + 1, cache_modifier=".cg")
        tl.store(ids + row, index.to(tl.int64))
        tl.store(tickets + row, 0)
