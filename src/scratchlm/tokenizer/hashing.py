"""A vectorised hash table from pairs of 64-bit integers to numbers.

Open addressing: a key sits in the first free slot from its hash on, so a lookup ends at it or at
a free slot. Keys are compared in full; a number, once given, stays.
"""

from __future__ import annotations

import numpy as np

_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))


class PairTable:
    """Numbers, each under a key of two uint64."""

    def __init__(self, slots_per_key: int = 2) -> None:
        """Start empty; use more slots per key where most lookups miss."""
        self._slots_per_key = slots_per_key
        self._resize(1 << 12)

    def find(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Look keys up; −1 where there is none."""
        slots = (hash_pairs(low, high) >> self._shift).astype(np.int64)
        numbers = self._number[slots]
        taken = np.flatnonzero(numbers >= 0)
        while len(taken):
            at = slots[taken]
            same = (self._low[at] == low[taken]) & (self._high[at] == high[taken])
            taken = taken[~same]  # another key sits there: look further
            slots[taken] = (slots[taken] + 1) & self._mask
            numbers[taken] = self._number[slots[taken]]
            taken = taken[numbers[taken] >= 0]
        return numbers

    def insert(self, low: np.ndarray, high: np.ndarray, numbers: np.ndarray) -> None:
        """Put keys, all different and none in the table, into it."""
        if self._slots_per_key * (self._used + len(low)) > self._mask:
            kept = self._number >= 0
            old = self._low[kept], self._high[kept], self._number[kept]
            size = self._mask + 1
            while size < 2 * self._slots_per_key * (self._used + len(low)):
                size *= 2
            self._resize(size)
            self._insert_new(*old)
        self._insert_new(low, high, numbers)

    def _insert_new(self, low: np.ndarray, high: np.ndarray, numbers: np.ndarray) -> None:
        self._used += len(low)
        slots = (hash_pairs(low, high) >> self._shift).astype(np.int64)
        todo = np.arange(len(low))
        while len(todo):
            free = todo[self._number[slots[todo]] < 0]
            at = slots[free]
            self._number[at] = numbers[free]  # on a collision the last one wins
            won = free[self._number[at] == numbers[free]]
            self._low[slots[won]] = low[won]
            self._high[slots[won]] = high[won]
            todo = todo[self._number[slots[todo]] != numbers[todo]]
            slots[todo] = (slots[todo] + 1) & self._mask

    def _resize(self, size: int) -> None:
        self._mask = size - 1
        self._shift = np.uint64(64 - self._mask.bit_length())
        self._low = np.zeros(size, dtype=np.uint64)
        self._high = np.zeros(size, dtype=np.uint64)
        self._number = np.full(size, -1, dtype=np.int64)  # −1: free
        self._used = 0


def hash_pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Mix two integers into one whose high bits depend on all of theirs."""
    mixed = low * _ODD[0] ^ high * _ODD[1]
    mixed ^= mixed >> np.uint64(29)
    return mixed * _ODD[0]
