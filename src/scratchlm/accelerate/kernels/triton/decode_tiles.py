"""Tile sizes of the decode kernels: measured for known shapes, else chosen by a rule.

To saturate the memory bandwidth, an SM needs about 30 KB of loads in flight (latency × bandwidth),
and more than twice that to prefetch the next kernel's weights while this one drains. The rule aims
at 8 to 16 loads of 16 bytes per thread and at least two programs on each of about 130 SMs.
`python bench/decode.py --tune` times candidates inside whole steps and prints lines for
`MEASURED_TILES`.
"""

from __future__ import annotations

from typing import NamedTuple

BYTES_PER_LOAD = 16
TARGET_PROGRAMS = 264
MAX_ROWS = 4  # larger batches use cuBLAS GEMMs
MAX_DEFERRED_SPLITS = 8  # KV splits that the output projection combines as it reads them
MAX_DEFERRED_WIDTH = 2048  # of all heads: each of its programs reads all splits of them
SHORT_KV_LEN = 256  # rows of up to this length are not split
# Limits of the Hopper kernel `decode_qkv_attention`: the head dimension, the keys that a cluster
# can hold, d_model, and the heads. A head takes a cluster of 8 SMs: 132 SMs have room for 15
# clusters alone, or 30 with two per SM.
CLUSTER_HEAD, CLUSTER_KEYS, CLUSTER_WIDTH, MAX_CLUSTERS = 64, 1024, 1024, 16


class Tile(NamedTuple):
    """One program: `rows` matrix rows at a time, `tiles` such blocks one after another.

    `quarters` is how much of the width's next power of two is held, in quarters; 4: all, in one
    piece.
    """

    rows: int
    warps: int
    tiles: int = 1
    quarters: int = 4

    def k_chunks(self, width: int) -> tuple[int, int]:
        """Return how many chunks a row is split into, and the width of each."""
        padded = power_of_two(width)
        if self.quarters == 4:
            return 1, padded
        if 4 * width > self.quarters * padded:
            raise ValueError(f"{self.quarters} quarters of {padded} do not hold a width of {width}")
        return self.quarters, padded // 4


class KVSplits(NamedTuple):
    """Attention with KV splits: `num_splits` programs per head, `block_keys` keys at a time."""

    block_keys: int
    warps: int
    num_splits: int
    deferred_combine: bool = False  # the output projection combines the splits

    @property
    def deferred_splits(self) -> int:
        """How many splits the output projection combines; 1: they are combined already."""
        return self.num_splits if self.deferred_combine else 1


# (kernel, rows of all its matrices, width, bytes per element) -> Tile; on an H200
MEASURED_TILES: dict[tuple[str, int, int, int], Tile] = {
    # GPT-2 XL of the course
    ("gate", 6400, 1600, 2): Tile(2, 4, 2),
    ("qkv", 4800, 1600, 2): Tile(2, 2, 2),
    ("down", 1600, 6400, 2): Tile(1, 4, 4),
    ("out", 1600, 1600, 2): Tile(8, 8, 1),
    ("head", 50257, 1600, 2): Tile(2, 4, 2),
    # GPT-2 medium with SwiGLU
    ("gate", 2752, 1024, 2): Tile(2, 1, 1),
    ("qkv", 3072, 1024, 2): Tile(2, 2, 2),
    ("down", 1024, 2752, 2): Tile(1, 4, 1, quarters=3),
    ("out", 1024, 1024, 2): Tile(1, 4, 1),
    ("head", 50304, 1024, 2): Tile(4, 4, 2),
    # Qwen3-0.6B
    ("gate", 3072, 1024, 2): Tile(4, 4, 1),
    ("qkv", 4096, 1024, 2): Tile(4, 2, 2),
    ("down", 1024, 3072, 2): Tile(2, 4, 1),
    ("out", 1024, 2048, 2): Tile(2, 4, 1),
    ("head", 151936, 1024, 2): Tile(4, 4, 2),
}
# (d_head, block_keys by the rule) -> KVSplits, for one row and a cache of up to three blocks
MEASURED_KV_SPLITS: dict[tuple[int, int], KVSplits] = {(128, 128): KVSplits(64, 2, 4)}


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def choose_tile(kernel: str, rows: int, width: int, element_size: int) -> Tile:
    """Return the tile for matrices of `rows` rows in all (W1 and W3 count as one)."""
    measured = MEASURED_TILES.get((kernel, rows, width, element_size))
    if measured is not None:
        return measured
    row_bytes = power_of_two(width) * element_size
    warps = 4 if row_bytes <= 8192 else 8
    matrices = 2 if kernel == "gate" else 1
    loads = matrices * max(row_bytes // (warps * 32 * BYTES_PER_LOAD), 1)
    block = 1
    while block < 16 and 2 * block * loads <= 8 and rows // (2 * block) >= TARGET_PROGRAMS:
        block *= 2
    return Tile(block, warps)


def kv_splits_for(max_kv_len: int, heads: int, rows: int, d_head: int) -> KVSplits:
    """Return how attention over up to `max_kv_len` keys is split.

    A program loads its first block of keys and values into registers before the query is known;
    each further block adds a memory latency. So past one block a small batch takes as many splits
    as hold all keys at once, and the output projection combines them (deferred combine). If those
    are too many, the last program to finish combines them, at the cost of a round trip to memory:
    so up to three blocks are not split. Large batches fill the GPU with small programs, which hide
    each other's latency.
    """
    width, longest = power_of_two(d_head), power_of_two(max_kv_len)
    keys = max(16, min(256, 16_384 // width, longest))
    warps, splits = 8 if keys * width >= 8192 else 4, -(-max_kv_len // keys)
    is_small = rows <= MAX_ROWS and heads * rows * splits <= TARGET_PROGRAMS
    can_defer = is_small and splits <= MAX_DEFERRED_SPLITS and width == d_head
    if max_kv_len > SHORT_KV_LEN and can_defer:
        return KVSplits(keys, warps, splits, heads * d_head <= MAX_DEFERRED_WIDTH)
    if max_kv_len <= 3 * keys and heads * rows < TARGET_PROGRAMS:
        if rows == 1 and (d_head, keys) in MEASURED_KV_SPLITS:
            return MEASURED_KV_SPLITS[d_head, keys]
        return KVSplits(keys, warps, 1)
    keys = max(16, min(4096 // width, longest))
    wanted = power_of_two(max(1, 4 * TARGET_PROGRAMS // (heads * rows)))
    return KVSplits(keys, 4, min(-(-max_kv_len // keys), wanted, 64))
