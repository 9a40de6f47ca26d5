"""Sums of ∂Q that many programs have added to (`attend_back.py`), turned back and written out."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WIDTH = 64  # of a head


@triton.jit
def _turn_sums(  # type: ignore[no-untyped-def]
    sums, lines, grad, tiles, columns, places, step, INTERLEAVED: tl.constexpr
):
    """Scale a tile of 64 queries and turn it back.

    Sums and tables lie as threads held them: row 16w + 8j + q and column 8g + 2p + e are with warp
    w, thread 4q + p, 16 bytes of each thread's in turn.
    """
    tile, head, row_of_batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    unit = row_of_batch * tl.num_programs(1) + head
    row, pair = tl.arange(0, 64)[:, None], tl.arange(0, 32)[None, :]
    thread, j = row // 16 * 32 + row % 8 * 4, row // 8 % 2
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
        at = (pair // 8 * 128 + thread + pair % 4) * 4 + pair // 4 % 2 * 2 + j
    else:
        first, second = pair, pair + 32
        at = (pair // 8 * 128 + thread + pair // 2 % 4) * 4 + j * 2 + pair % 2
    base = sums + (unit * tiles + tile).to(tl.int64) * 4096
    a = tl.load(base + (first // 8 * 128 + thread + first // 2 % 4) * 4 + j * 2 + first % 2)
    b = tl.load(base + (second // 8 * 128 + thread + second // 2 % 4) * 4 + j * 2 + second % 2)
    place = row_of_batch * step + tile
    c = tl.load(lines + place * 2048 + at)
    s = tl.load(lines + (places + place) * 2048 + at)
    out = grad + ((row_of_batch * tiles + tile) * 64 + row).to(tl.int64) * columns + head * 64
    tl.store(out + first, (0.125 * (a * c + b * s)).to(grad.dtype.element_ty))
    tl.store(out + second, (0.125 * (b * c - a * s)).to(grad.dtype.element_ty))


def where_tables_lie(lines: Tensor, tiles: int) -> tuple[int, int]:
    """Return how many tiles of 64 places both tables have, and how many a row of the batch goes on.

    They serve each sequence of so many tiles, or are as long as all of them together.
    """
    places = lines.numel() // (2 * 64 * WIDTH // 2)
    return places, 0 if places == tiles else tiles


def turn_sums(sums: Tensor, lines: Tensor, grad: Tensor, interleaved: bool) -> None:
    """Write ∂Q, summed (batch · heads, seq, 64), into the first columns of `grad`."""
    batch, seq, columns = grad.shape
    tiles = seq // 64
    _turn_sums[(tiles, len(sums) // batch, batch)](
        *(sums, lines, grad, tiles, columns, *where_tables_lie(lines, tiles)),
        INTERLEAVED=interleaved,
        num_warps=4,
    )
