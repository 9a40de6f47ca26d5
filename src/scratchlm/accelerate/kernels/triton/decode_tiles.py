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
SHORT = 256  # keys up to which a step is recorded by itself
# `project_attend`: channels of a head, keys that its cluster holds, the widest row, and the most
# heads, a cluster of eight multiprocessors each: 132 have room for 15 alone, 30 two by two
CLUSTER_HEAD, CLUSTER_KEYS, CLUSTER_WIDTH, MAX_CLUSTERS = 64, 1024, 1024, 16


class Tile(NamedTuple):
    """One program: `rows` matrix rows at a time, `tiles` such blocks one after another.

    `fourths`: of the power of two above a row's width, so many fourths are held, 4 if undivided.
    """

    rows: int
    warps: int
    tiles: int = 1
    fourths: int = 4

    def parts(self, width: int) -> tuple[int, int]:
        """Return how many parts a row is taken in, and how wide each is."""
        whole = power_of_two(width)
        if self.fourths == 4:
            return 1, whole
        if 4 * width > self.fourths * whole:
            raise ValueError(f"{self.fourths} fourths of {whole} do not hold a width of {width}")
        return self.fourths, whole // 4


class Spread(NamedTuple):
    """Attention: the keys of a row go to `splits` programs, `keys` at a time."""

    keys: int
    warps: int
    splits: int
    handed_on: bool = False  # the shares: to the output projection, which adds them up

    @property
    def shares(self) -> int:
        """How many shares the output projection reads."""
        return self.splits if self.handed_on else 1


# (kernel, rows of all its matrices, width, bytes per element) -> Tile; on an H200
MEASURED: dict[tuple[str, int, int, int], Tile] = {
    # GPT-2 XL of the course
    ("gate", 6400, 1600, 2): Tile(2, 4, 2),
    ("qkv", 4800, 1600, 2): Tile(2, 2, 2),
    ("down", 1600, 6400, 2): Tile(1, 4, 4),
    ("out", 1600, 1600, 2): Tile(8, 8, 1),
    ("head", 50257, 1600, 2): Tile(2, 4, 2),
    # GPT-2 medium with SwiGLU
    ("gate", 2752, 1024, 2): Tile(2, 1, 1),
    ("qkv", 3072, 1024, 2): Tile(2, 2, 2),
    ("down", 1024, 2752, 2): Tile(1, 4, 1, fourths=3),
    ("out", 1024, 1024, 2): Tile(1, 4, 1),
    ("head", 50304, 1024, 2): Tile(4, 4, 2),
    # Qwen3-0.6B
    ("gate", 3072, 1024, 2): Tile(4, 4, 1),
    ("qkv", 4096, 1024, 2): Tile(4, 2, 2),
    ("down", 1024, 3072, 2): Tile(2, 4, 1),
    ("out", 1024, 2048, 2): Tile(2, 4, 1),
    ("head", 151936, 1024, 2): Tile(4, 4, 2),
}
# (d_head, keys the rule would take) -> Spread, for one row and a cache of up to three blocks
MEASURED_SPREADS: dict[tuple[int, int], Spread] = {(128, 128): Spread(64, 2, 4)}


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


def choose_spreads(capacity: int, heads: int, rows: int, d_head: int) -> dict[int, Spread]:
    """Return how attention is shared out while no row has more keys than so many, for each.

    While a few rows are short, one program holds all of a head's keys, or little has to be added
    up; a long cache is a reason to do otherwise only when it fills.
    """
    reaches = {min(SHORT, capacity), capacity} if rows <= MAX_ROWS else {capacity}
    return {reach: choose_spread(reach, heads, rows, d_head) for reach in sorted(reaches)}


def choose_spread(reach: int, heads: int, rows: int, d_head: int) -> Spread:
    """Return how attention over up to `reach` keys is shared out.

    A program holds its first block of keys and values in registers before the query is known, and
    every further block costs a wait of its own. So past one block a few rows take as many programs
    as hold all keys at once, and the kernel that reads their shares adds them up. Where that would
    be too many, adding up costs a trip to memory and back, so up to three blocks are not split.
    Many rows fill the chip with small programs that wait for memory in turn.
    """
    width, longest = power_of_two(d_head), power_of_two(reach)
    keys = max(16, min(256, 16_384 // width, longest))
    warps, splits = 8 if keys * width >= 8192 else 4, -(-reach // keys)
    few = rows <= MAX_ROWS and heads * rows * splits <= PROGRAMS_WANTED
    if reach > SHORT and few and splits <= MAX_SHARES and width == d_head:
        return Spread(keys, warps, splits, handed_on=True)
    if reach <= 3 * keys and heads * rows < PROGRAMS_WANTED:
        if rows == 1 and (d_head, keys) in MEASURED_SPREADS:
            return MEASURED_SPREADS[d_head, keys]
        return Spread(keys, warps, 1)
    keys = max(16, min(4096 // width, longest))
    wanted = power_of_two(max(1, 4 * PROGRAMS_WANTED // (heads * rows)))
    return Spread(keys, 4, min(-(-reach // keys), wanted, 64))
