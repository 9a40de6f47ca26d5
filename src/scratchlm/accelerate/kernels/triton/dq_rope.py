"""RoPE's backward pass for dQ, after many programs have added to it (`attention_backward.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEAD_DIM = 64


@triton.jit
def _dq_rope_kernel(  # type: ignore[no-untyped-def]
    dq, rope_tables, grad, tiles, columns, table_tiles, batch_step, INTERLEAVED: tl.constexpr
):
    """Scale a tile of 64 queries and rotate it back. Grid: (tiles, heads, batch).

    dQ and the tables lie in thread order (`hopper/attention_tiles.py`): row 16w + 8j + q and column
    8g + 2p + e belong to warp w, thread 4q + p, 16 bytes of each thread in turn.
    """
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    unit = batch * tl.num_programs(1) + head
    row, pair = tl.arange(0, 64)[:, None], tl.arange(0, 32)[None, :]
    thread, j = row // 16 * 32 + row % 8 * 4, row // 8 % 2
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
        at = (pair // 8 * 128 + thread + pair % 4) * 4 + pair // 4 % 2 * 2 + j
    else:
        first, second = pair, pair + 32
        at = (pair // 8 * 128 + thread + pair // 2 % 4) * 4 + j * 2 + pair % 2
    base = dq + (unit * tiles + tile).to(tl.int64) * 4096
    a = tl.load(base + (first // 8 * 128 + thread + first // 2 % 4) * 4 + j * 2 + first % 2)
    b = tl.load(base + (second // 8 * 128 + thread + second // 2 % 4) * 4 + j * 2 + second % 2)
    table = batch * batch_step + tile
    c = tl.load(rope_tables + table * 2048 + at)
    s = tl.load(rope_tables + (table_tiles + table) * 2048 + at)
    out = grad + ((batch * tiles + tile) * 64 + row).to(tl.int64) * columns + head * 64
    tl.store(out + first, (0.125 * (a * c + b * s)).to(grad.dtype.element_ty))
    tl.store(out + second, (0.125 * (b * c - a * s)).to(grad.dtype.element_ty))


def table_steps(rope_tables: Tensor, tiles: int) -> tuple[int, int]:
    """Return the tables' tiles of 64 positions, and the step between two rows of the batch.

    The tables serve each sequence of `tiles` tiles (the step is 0), or are as long as all of them.
    """
    table_tiles = rope_tables.numel() // (2 * 64 * HEAD_DIM // 2)
    return table_tiles, 0 if table_tiles == tiles else tiles


def rotate_dq_back(dq: Tensor, rope_tables: Tensor, grad: Tensor, interleaved: bool) -> None:
    """Write dQ, accumulated in (batch · heads, seq, 64), into the first columns of `grad`."""
    batch, seq, columns = grad.shape
    tiles = seq // 64
    _dq_rope_kernel[(tiles, len(dq) // batch, batch)](
        *(dq, rope_tables, grad, tiles, columns, *table_steps(rope_tables, tiles)),
        INTERLEAVED=interleaved,
        num_warps=4,
    )
