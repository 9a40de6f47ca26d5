"""Embedding lookup and the gradient of its table; the backward reads every gradient once.

    y[i] = E[id[i]],    ∂E[v] = Σ ∂y[i] over the positions i where id[i] = v

The backward sorts the ids (stably), so that equal ids form a run. One program sums a run in
float32 and writes the row. A run can be as long as the batch, so the sorted ids are cut into
chunks, and a program sums only the part of its run inside one chunk. A second kernel adds up the
partial sums of the runs that cross chunks. There are no atomics: the ids alone fix the order of
all sums, so results are bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 32  # sorted ids
ROWS = 4  # gradients that a program loads at once
BLOCK, VECTOR = 1024, 8  # columns per program; contiguous columns per thread
# Of the second kernel: partial sums that it loads at once, and columns per program.
COMBINE_ROWS, COMBINE_BLOCK = 32, 128


@triton.jit
def _embedding_kernel(  # type: ignore[no-untyped-def]
    ids, table, out, vocab, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    token = tl.load(ids + position).to(tl.int64)
    is_valid = (token >= 0) & (token < vocab)
    value = tl.load(table + token * WIDTH + column, mask=mask & is_valid, other=float("nan"))
    tl.store(out + position * WIDTH + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _has_key(keys, index, count, key):  # type: ignore[no-untyped-def]
    """Whether the sorted keys hold this key at an index, which may be out of range."""
    in_range = (index >= 0) & (index < count)
    return in_range & (tl.load(keys + index, mask=in_range, other=0) == key)


@triton.jit
def _row_of_key(key, vocab, padding):  # type: ignore[no-untyped-def]
    """Return the table's row of a key, and whether it takes a gradient."""
    row = key.to(tl.int64)
    if key.dtype == tl.int16:
        row &= 0xFFFF  # ids past 2¹⁵ were stored as negative numbers
    return row, (row >= 0) & (row < vocab) & (row != padding)


@triton.jit
def _embedding_backward_kernel(  # type: ignore[no-untyped-def]
    grad_output,
    keys,
    order,
    out,
    partial,
    count,
    vocab,
    padding,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum the part of a run inside one chunk. Grid: (sorted ids, blocks of columns).

    Only the program at the first id of a run, or of a chunk, has work.
    """
    index = tl.program_id(0)
    chunk = index // CHUNK
    starts_chunk = index == chunk * CHUNK
    remaining = (chunk + 1) * CHUNK - index  # ids of the chunk from here on
    ahead, step = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    # Issue all loads that the loop depends on at once.
    next_rows = tl.load(order + index + step, mask=index + step < count, other=0)
    key = tl.load(keys + index)
    is_same = _has_key(keys, index + ahead, count, key) & (ahead < remaining)
    continues = _has_key(keys, index - 1, count, key)  # a run that began before this id
    leaves_chunk = _has_key(keys, index + remaining, count, key)
    table_row, takes_grad = _row_of_key(key, vocab, padding)
    if takes_grad & (starts_chunk | (continues == 0)):
        length = tl.sum(is_same.to(tl.int32), axis=0)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, length, ROWS):
            row, now = next_rows, first + step
            later = now + ROWS
            next_rows = tl.load(order + index + later, mask=later < length, other=0)
            tile_mask = (now < length)[:, None] & mask[None, :]
            tile = grad_output + row[:, None] * WIDTH + column[None, :]
            value = tl.load(tile, mask=tile_mask, other=0.0)
            total += tl.sum(value.to(tl.float32), axis=0)
        crosses = continues | leaves_chunk
        if crosses:
            slot = 2 * chunk.to(tl.int64) + (starts_chunk == 0)
            tl.store(partial + slot * WIDTH + column, total, mask=mask)
        else:
            tl.store(out + table_row * WIDTH + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _embedding_combine_kernel(  # type: ignore[no-untyped-def]
    keys,
    out,
    partial,
    count,
    vocab,
    padding,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
):
    """Add up the partial sums of the run that begins in this chunk and ends in a later one."""
    chunk = tl.program_id(0)
    start = chunk * CHUNK
    key = tl.load(keys + start + CHUNK)  # of the next chunk, which exists
    table_row, takes_grad = _row_of_key(key, vocab, padding)
    crosses = _has_key(keys, start + CHUNK - 1, count, key)
    starts_chunk = _has_key(keys, start, count, key)
    if takes_grad & crosses & (_has_key(keys, start - 1, count, key) == 0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        total = tl.zeros((COMBINE_ROWS, BLOCK), tl.float32)
        first, found = chunk, COMBINE_ROWS
        while found == COMBINE_ROWS:
            chunks = first + tl.arange(0, COMBINE_ROWS)
            is_in_run = (chunks == chunk) | _has_key(keys, chunks * CHUNK, count, key)
            slot = 2 * chunks.to(tl.int64) + ((chunks == chunk) & (starts_chunk == 0))
            tile_mask = is_in_run[:, None] & mask[None, :]
            tile = partial + slot[:, None] * WIDTH + column[None, :]
            total += tl.load(tile, mask=tile_mask, other=0.0)
            found = tl.sum(is_in_run.to(tl.int32), axis=0)
            first += COMBINE_ROWS
        row_sum = tl.sum(total, axis=0).to(out.dtype.element_ty)
        tl.store(out + table_row * WIDTH + column, row_sum, mask=mask)


def embedding_forward(ids: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return the rows in `out_dtype`; NaN for an id outside the table."""
    width = weight.shape[1]
    out = weight.new_empty(*ids.shape, width, dtype=out_dtype)
    block = min(BLOCK, triton.next_power_of_2(width))
    _embedding_kernel[(ids.numel(), triton.cdiv(width, block))](
        *(ids.contiguous(), weight, out, len(weight)),
        WIDTH=width,
        BLOCK=block,
        num_warps=_num_warps(block),
    )
    return out


def embedding_backward(
    grad_output: Tensor, ids: Tensor, vocab: int, padding_id: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of a table of `vocab` rows; that of row `padding_id` is zero.

    Gradients of an id outside the table are dropped or, if its low 16 bits are a valid id, added to
    that row; memory outside the table is never written. The forward returned NaN for such an id.
    """
    count, width = ids.numel(), grad_output.shape[-1]
    out = grad_output.new_zeros(vocab, width, dtype=dtype)
    # Radix sort takes one pass per byte. Any order will do, so up to 2¹⁶ ids fit into 16 bits,
    # those past 2¹⁵ as negative numbers.
    key_dtype = torch.int16 if vocab <= 1 << 16 else torch.int32
    keys, order = torch.sort(ids.flatten().to(key_dtype), stable=True)
    num_chunks = triton.cdiv(count, CHUNK)
    # Two slots per chunk: for the run at its start, and for one that begins later.
    partial = torch.empty(2 * num_chunks, width, dtype=torch.float32, device=grad_output.device)
    sizes = (count, vocab, -1 if padding_id is None else padding_id)
    block = min(BLOCK, triton.next_power_of_2(width))
    _embedding_backward_kernel[(count, triton.cdiv(width, block))](
        *(grad_output.contiguous(), keys, order, out, partial, *sizes),
        WIDTH=width,
        BLOCK=block,
        CHUNK=CHUNK,
        ROWS=ROWS,
        num_warps=_num_warps(block),
    )
    if num_chunks > 1:
        _embedding_combine_kernel[(num_chunks - 1, triton.cdiv(width, COMBINE_BLOCK))](
            *(keys, out, partial, *sizes),
            WIDTH=width,
            BLOCK=COMBINE_BLOCK,
            CHUNK=CHUNK,
            COMBINE_ROWS=COMBINE_ROWS,
        )
    return out


def _num_warps(block: int) -> int:
    return max(1, block // (32 * VECTOR))


class _EmbeddingKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_id: int | None, out_dtype: torch.dtype
    ) -> Tensor:
        ctx.vocab, ctx.padding_id, ctx.dtype = len(weight), padding_id, weight.dtype
        ctx.save_for_backward(ids)
        return embedding_forward(ids, weight, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        grad = embedding_backward(grad_output, ids, ctx.vocab, ctx.padding_id, ctx.dtype)
        return None, grad, None, None


def embedding(
    ids: Tensor, weight: Tensor, padding_id: int | None, out_dtype: torch.dtype
) -> Tensor:
    """Return E[id] in `out_dtype`, for a contiguous table and eager code."""
    rows: Tensor = _EmbeddingKernel.apply(ids, weight, padding_id, out_dtype)
    return rows
