"""Argmax over the logits on the device: greedy decoding needs no copy to the host."""

# mypy: disallow_untyped_defs=False
# Kernel arguments are device pointers and scalars: Python has no types for them.

from __future__ import annotations

import triton
import triton.language as tl

from scratchlm.accelerate.kernels.triton.decode import launch_dependents_and_wait


@triton.jit
def argmax(
    logits,
    partial,
    tickets,
    ids,
    previous_ids,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ids[row] = argmax(logits[row]), and what stood there to previous_ids.

    The lowest index wins a tie.

    Grid: (PARTS, rows). Each program reduces one part of the vocabulary. The last one to finish
    (an atomic ticket per row) reduces over the parts. Indices are stored as float32, which is exact
    up to 2²⁴, the largest vocabulary.
    """
    part, row = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    column = part * PART + i
    launch_dependents_and_wait(PDL)
    mask = (i < PART) & (column < VOCAB)
    value = tl.load(logits + row.to(tl.int64) * VOCAB + column, mask=mask, other=float("-inf"))
    amax, index = tl.max(value, 0, return_indices=True)
    slot = partial + (row * PARTS + part) * 2
    tl.store(slot, amax)
    tl.store(slot + 1, (part * PART + index).to(tl.float32))
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + row, 1, sem="acq_rel")
    if ticket == PARTS - 1:
        p = tl.arange(0, PARTS)
        amaxes = tl.load(partial + (row * PARTS + p) * 2, cache_modifier=".cg")
        _, winner = tl.max(amaxes, 0, return_indices=True)
        token = tl.load(partial + (row * PARTS + winner) * 2 + 1, cache_modifier=".cg")
        tl.store(previous_ids + row, tl.load(ids + row))
        tl.store(ids + row, token.to(tl.int64))
        tl.store(tickets + row, 0)
