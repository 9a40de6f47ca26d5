"""Rows of a table by their ids, and the gradient of the table: every gradient is read once.

    y[i] = E[id[i]],    ∂E[v] = Σ ∂y[i] over the places i where id[i] = v

Going backward the ids are sorted, stably, so that equal ones are neighbours: a run. One program
sums a run, in float32, and writes the row. A run can be as long as the batch, so what is sorted is
cut into chunks, and a program sums only what of its run lies in one chunk. A run inside a chunk is
finished then; the shares of one that crosses a border are added up by a second kernel. All sums
are taken in an order that the ids alone decide: the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 32  # sorted places
ROWS = 4  # gradients that a program asks for at once
BLOCK, LANE = 1024, 8  # columns of a program; neighbours in a row that one thread takes
SHARES, SHARE_BLOCK = 32, 128  # of the second kernel: shares it asks for at once, and columns


@triton.jit
def _look_up(  # type: ignore[no-untyped-def]
    ids, table, out, vocab, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    line = tl.load(ids + row).to(tl.int64)
    known = (line >= 0) & (line < vocab)
    value = tl.load(table + line * WIDTH + column, mask=inside & known, other=float("nan"))
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _is_there(keys, place, count, key):  # type: ignore[no-untyped-def]
    """Whether a sorted place, which need not exist, holds this key."""
    exists = (place >= 0) & (place < count)
    return exists & (tl.load(keys + place, mask=exists, other=0) == key)


@triton.jit
def _line(key, vocab, padding):  # type: ignore[no-untyped-def]
    """Return the table's row of a key, and whether it takes a gradient."""
    line = key.to(tl.int64)
    if key.dtype == tl.int16:
        line &= 0xFFFF  # an id past 2¹⁵ was stored as a negative number
    return line, (line >= 0) & (line < vocab) & (line != padding)


@triton.jit
def _sum_in_chunk(  # type: ignore[no-untyped-def]
    above,
    keys,
    order,
    out,
    shares,
    count,
    vocab,
    padding,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    place = tl.program_id(0)
    chunk = place // CHUNK
    at_border = place == chunk * CHUNK
    rest = (chunk + 1) * CHUNK - place  # places of the chunk from here on
    ahead, step = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    # Whatever the loads below may depend on is asked for at once.
    coming = tl.load(order + place + step, mask=place + step < count, other=0)
    key = tl.load(keys + place)
    same = _is_there(keys, place + ahead, count, key) & (ahead < rest)
    goes_on = _is_there(keys, place - 1, count, key)  # a run that began before this place
    leaves = _is_there(keys, place + rest, count, key)
    line, learns = _line(key, vocab, padding)
    if learns & (at_border | (goes_on == 0)):
        length = tl.sum(same.to(tl.int32), axis=0)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, length, ROWS):
            row, now = coming, first + step
            later = now + ROWS
            coming = tl.load(order + place + later, mask=later < length, other=0)
            wanted = (now < length)[:, None] & inside[None, :]
            value = tl.load(above + row[:, None] * WIDTH + column[None, :], mask=wanted, other=0.0)
            total += tl.sum(value.to(tl.float32), axis=0)
        crosses = goes_on | leaves
        if crosses:
            share = 2 * chunk.to(tl.int64) + (at_border == 0)
            tl.store(shares + share * WIDTH + column, total, mask=inside)
        else:
            tl.store(out + line * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _join_shares(  # type: ignore[no-untyped-def]
    keys,
    out,
    shares,
    count,
    vocab,
    padding,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Finish the run that begins in this chunk and ends in a later one, if there is such a one."""
    chunk = tl.program_id(0)
    start = chunk * CHUNK
    key = tl.load(keys + start + CHUNK)  # of the next chunk, which exists
    line, learns = _line(key, vocab, padding)
    crosses = _is_there(keys, start + CHUNK - 1, count, key)
    at_border = _is_there(keys, start, count, key)
    if learns & crosses & (_is_there(keys, start - 1, count, key) == 0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        total = tl.zeros((SHARES, BLOCK), tl.float32)
        first, found = chunk, SHARES
        while found == SHARES:
            among = first + tl.arange(0, SHARES)
            here = (among == chunk) | _is_there(keys, among * CHUNK, count, key)
            share = 2 * among.to(tl.int64) + ((among == chunk) & (at_border == 0))
            wanted = here[:, None] & inside[None, :]
            place = shares + share[:, None] * WIDTH + column[None, :]
            total += tl.load(place, mask=wanted, other=0.0)
            found = tl.sum(here.to(tl.int32), axis=0)
            first += SHARES
        row = tl.sum(total, axis=0).to(out.dtype.element_ty)
        tl.store(out + line * WIDTH + column, row, mask=inside)


def embedding_forward(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows in `dtype`; that of an id outside the table is NaN."""
    width = weight.shape[1]
    out = weight.new_empty(*ids.shape, width, dtype=dtype)
    block = min(BLOCK, triton.next_power_of_2(width))
    _look_up[(ids.numel(), triton.cdiv(width, block))](
        *(ids.contiguous(), weight, out, len(weight)),
        WIDTH=width,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out


def embedding_backward(
    above: Tensor, ids: Tensor, vocab: int, padding_id: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of a table of `vocab` rows; the row `padding_id` has none.

    What comes for an id outside the table is dropped or, cut to 16 bits, goes to another row; never
    past the table. What was looked up for it was NaN.
    """
    count, width = ids.numel(), above.shape[-1]
    out = above.new_zeros(vocab, width, dtype=dtype)
    # The sort takes a pass for every byte. What order it is in does not matter, so 2¹⁶ ids fit
    # into 16 bits, those past 2¹⁵ as negative numbers.
    narrow = torch.int16 if vocab <= 1 << 16 else torch.int32
    keys, order = torch.sort(ids.flatten().to(narrow), stable=True)
    num_chunks = triton.cdiv(count, CHUNK)
    # Two for each chunk: of the run that stands at its beginning, and of one that begins later.
    shares = torch.empty(2 * num_chunks, width, dtype=torch.float32, device=above.device)
    sizes = (count, vocab, -1 if padding_id is None else padding_id)
    block = min(BLOCK, triton.next_power_of_2(width))
    _sum_in_chunk[(count, triton.cdiv(width, block))](
        *(above.contiguous(), keys, order, out, shares, *sizes),
        WIDTH=width,
        BLOCK=block,
        CHUNK=CHUNK,
        ROWS=ROWS,
        num_warps=_warps(block),
    )
    if num_chunks > 1:
        _join_shares[(num_chunks - 1, triton.cdiv(width, SHARE_BLOCK))](
            *(keys, out, shares, *sizes),
            WIDTH=width,
            BLOCK=SHARE_BLOCK,
            CHUNK=CHUNK,
            SHARES=SHARES,
        )
    return out


def _warps(block: int) -> int:
    return max(1, block // (32 * LANE))


class Lookup(torch.autograd.Function):
    """E[id] in a dtype of choice, E contiguous; for code that is not compiled."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_id: int | None, dtype: torch.dtype
    ) -> Tensor:
        """Keep the ids alone."""
        ctx.vocab, ctx.padding_id, ctx.dtype = len(weight), padding_id, weight.dtype
        ctx.save_for_backward(ids)
        return embedding_forward(ids, weight, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[None, Tensor, None, None]:
        """Return the gradient of the table, in the table's dtype."""
        (ids,) = ctx.saved_tensors
        of_table = embedding_backward(above, ids, ctx.vocab, ctx.padding_id, ctx.dtype)
        return None, of_table, None, None
