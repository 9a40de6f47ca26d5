"""How much of a matrix one program of a decoding kernel takes: measured, or by a rule.

In flight at once on a multiprocessor must be about 30 KB (latency × bandwidth) to read at full
speed, and more than twice that for the next kernel's weights to arrive while this one drains. A
thread that holds 8 to 16 loads of 16 bytes, with at least two programs on each of about 130
multiprocessors, gives that; the rule aims there. `python bench/decode.py --tune` measures
candidates inside whole steps and prints lines for `MEASURED`.
"""

from __future__ import annotations

from typing import NamedTuple

BYTES_PER_LOAD = 16
PROGRAMS_WANTED = 264
MAX_ROWS = 4  # more rows are multiplied by the library's products
MAX_SHARES = 8  # of attention, that the output projection adds up as it reads them


class Tile(NamedTuple):
    """One program: `rows` matrix rows at a time, `tiles` such blocks one after another."""

    rows: int
    warps: int
    tiles: int = 1


class Spread(NamedTuple):
    """Attention: the keys of a row go to `splits` programs, `keys` at a time."""

    keys: int
    warps: int
    splits: int

    def shares(self, rows: int, d_head: int) -> int:
        """Return how many shares the output projection is to add up; 1: attention does it."""
        few = rows <= MAX_ROWS and self.splits <= MAX_SHARES
        return self.splits if few and d_head == power_of_two(d_head) else 1


# (kernel, rows of all its matrices, width, bytes per element) -> Tile; on an H200
MEASURED: dict[tuple[str, int, int, int], Tile] = {
    # GPT-2 XL of the course
    ("gate", 6400, 1600, 2): Tile(2, 4, 2),
    ("qkv", 4800, 1600, 2): Tile(2, 2, 2),
    ("down", 1600, 6400, 2): Tile(1, 4, 4),
    ("out", 1600, 1600, 2): Tile(8, 8, 1),
    ("head", 50257, 1600, 2): Tile(2, 4, 2),
    # GPT-2 medium with SwiGLU
    ("gate", 2752, 1024, 2): Tile(2, 2, 1),
    ("qkv", 3072, 1024, 2): Tile(2, 2, 2),
    ("down", 1024, 2752, 2): Tile(2, 4, 1),
    ("out", 1024, 1024, 2): Tile(2, 4, 1),
    ("head", 50304, 1024, 2): Tile(4, 4, 2),
    # Qwen3-0.6B
    ("gate", 3072, 1024, 2): Tile(4, 4, 1),
    ("qkv", 4096, 1024, 2): Tile(4, 2, 2),
    ("down", 1024, 3072, 2): Tile(2, 4, 1),
    ("out", 1024, 2048, 2): Tile(2, 4, 1),
    ("head", 151936, 1024, 2): Tile(4, 4, 2),
}


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def choose_tile(kernel: str, rows: int, width: int, element_size: int) -> Tile:
    """Return the tile for matrices of `rows` rows in all (W1 and W3 count as one)."""
    known = MEASURED.get((kernel, rows, width, element_size))
    if known is not None:
        return known
    row_bytes = power_of_two(width) * element_size
    warps = 4 if row_bytes <= 8192 else 8
    matrices = 2 if kernel == "gate" else 1
    loads = matrices * max(row_bytes // (warps * 32 * BYTES_PER_LOAD), 1)
    block = 1
    while block < 16 and 2 * block * loads <= 8 and rows // (2 * block) >= PROGRAMS_WANTED:
        block *= 2
    return Tile(block, warps)


def choose_spread(capacity: int, heads: int, rows: int, d_head: int) -> Spread:
    """Return how attention over up to `capacity` keys is shared out.

    A program holds its first block of keys and values in registers before the query is known, and
    every further block costs a wait of its own. So a few rows take as many programs as hold all
    keys at once, each small enough to start beside the kernel before it; their shares are added up
    by the kernel after. Where that would be too many, adding up costs a trip to memory and back,
    and a cache of up to three blocks is not split. Many rows fill the chip with small programs that
    wait for memory in turn.
    """
    width, longest = power_of_two(d_head), power_of_two(capacity)
    keys = max(16, min(256, 8192 // width, longest))
    held = Spread(keys, 4, -(-capacity // keys))
    if held.shares(rows, d_head) == held.splits and heads * rows * held.splits <= PROGRAMS_WANTED:
        return held
    keys = max(16, min(256, 16_384 // width, longest))
    if capacity <= 3 * keys and heads * rows < PROGRAMS_WANTED:
        return Spread(keys, 8 if keys * width >= 8192 else 4, 1)
    keys = max(16, min(4096 // width, longest))
    wanted = power_of_two(max(1, 4 * PROGRAMS_WANTED // (heads * rows)))
    return Spread(keys, 4, min(-(-capacity // keys), wanted, 64))
