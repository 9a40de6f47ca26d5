"""Merge the bytes of words, in O(n log n) also where a word is a megabyte of one letter.

The definition is in `naive.py`: while some adjacent pair is known, merge the leftmost one of the
lowest rank. Three equivalent implementations: a short word rescans its pairs after each
merge; a long one keeps them in a heap ordered by (rank, position), over a linked list of symbols;
many short words at once are the rows of a matrix, and each round merges one pair in every row.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import chain, pairwise

import numpy as np

from scratchlm.tokenizer.hashing import PairTable

# (left id, right id) -> (rank, id of the two joined)
MergeTable = Mapping[tuple[int, int], tuple[int, int]]

SHORT = 32  # bytes; up to here rescanning all pairs is faster
MANY = 64  # words; from here on the matrix is faster
WIDTHS = (8, 16, SHORT)  # of the matrices, to limit padding
NO_RANK = np.iinfo(np.int32).max  # the rank of a pair that does not merge


class Merger:
    """The merges of one vocabulary, applied to words."""

    def __init__(self, id_of: Mapping[bytes, int], table: MergeTable, ignore_merges: bool) -> None:
        """Take the tokens, the merges, and whether a word that is a token stays whole."""
        self._whole = dict(id_of) if ignore_merges else {}
        self._byte_ids = [id_of[bytes([byte])] for byte in range(256)]
        self._byte_array = np.array(self._byte_ids, dtype=np.int64)
        self._table = table
        self._pairs: PairTable | None = None  # the same as arrays, built lazily

    def merge(self, word: bytes) -> list[int]:
        """Merge one word."""
        whole = self._whole.get(word)
        if whole is not None:
            return [whole]
        ids = [self._byte_ids[byte] for byte in word]
        return (merge_short if len(ids) <= SHORT else merge_long)(ids, self._table)

    def merge_many(self, words: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Merge words: all their ids, concatenated, and how many each has."""
        if len(words) < MANY:
            merged = [self.merge(word) for word in words]
            ids = np.fromiter(chain.from_iterable(merged), dtype=np.uint32)
            return ids, np.fromiter(map(len, merged), dtype=np.int64, count=len(words))
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        whole = np.array([word in self._whole for word in words]) if self._whole else lengths < 0
        # Each group's ids and the positions of its words; the original order is restored below.
        positions: list[np.ndarray] = []
        counts = np.empty(len(words), dtype=np.int64)
        rows: list[np.ndarray] = []
        narrower = 0
        for width in WIDTHS:
            group = np.flatnonzero((lengths > narrower) & (lengths <= width) & ~whole)
            narrower = width
            if len(group):
                matrix = self._merge_matrix([words[i] for i in group.tolist()], width)
                counts[group] = (matrix >= 0).sum(axis=1)
                rows.append(matrix[matrix >= 0])
                positions.append(group)
        rest = np.flatnonzero((lengths > SHORT) | whole)
        if len(rest):
            merged = [self.merge(words[i]) for i in rest.tolist()]
            counts[rest] = [len(ids) for ids in merged]
            rows.append(np.fromiter(chain.from_iterable(merged), dtype=np.int64))
            positions.append(rest)
        return _restore_order(np.concatenate(rows), np.concatenate(positions), counts), counts

    def _merge_matrix(self, words: list[bytes], width: int) -> np.ndarray:
        """Merge words of at most `width` bytes: a row of ids each, −1 after its end."""
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        column = np.arange(width + 1)
        filled = column < lengths[:, None]
        letters = np.zeros((len(words), width + 1), dtype=np.int64)
        letters[filled] = np.frombuffer(b"".join(words), dtype=np.uint8)
        ids = np.where(filled, self._byte_array[letters], -1).astype(np.int32)
        # The rank of the pair (position, position + 1); the last column has no right neighbour.
        ranks = np.full((len(words), width + 1), NO_RANK, dtype=np.int32)
        of_bytes = self._ranks_of_bytes()[letters[:, :-1] << 8 | letters[:, 1:]]
        ranks[:, :-1] = np.where(filled[:, 1:], of_bytes, NO_RANK)
        done = np.full_like(ids, -1)
        row = np.arange(len(words))  # the row of `done`, for each row not yet finished
        while True:
            at = ranks.argmin(axis=1)
            best = ranks[np.arange(len(ranks)), at]
            busy = best != NO_RANK
            if not busy.all():
                done[row[~busy], : ids.shape[1]] = ids[~busy]
                row, ids, ranks, at, best = row[busy], ids[busy], ranks[busy], at[busy], best[busy]
            if len(row) == 0:
                return done
            every = np.arange(len(row))
            ids[every, at] = self._joined[best]
            # Close the gap: everything right of the pair moves one position to the left, and as
            # every row has become shorter by one, the matrix loses a column.
            stays = column[: ids.shape[1] - 1] <= at[:, None]
            ids = np.where(stays, ids[:, :-1], ids[:, 1:])
            ranks = np.where(stays, ranks[:, :-1], ranks[:, 1:])
            ranks[every, at] = NO_RANK
            inner = np.flatnonzero(at + 1 < ids.shape[1])
            position = at[inner]
            ranks[inner, position] = self._ranks(ids[inner, position], ids[inner, position + 1])
            inner = np.flatnonzero(at > 0)
            position = at[inner] - 1
            ranks[inner, position] = self._ranks(ids[inner, position], ids[inner, position + 1])

    def _ranks_of_bytes(self) -> np.ndarray:
        """Return the ranks of all pairs of bytes, at 256 · left + right."""
        if self._pairs is None:
            left, right = np.divmod(np.arange(1 << 16), 256)
            self._byte_ranks = self._ranks(self._byte_array[left], self._byte_array[right])
        return self._byte_ranks

    def _ranks(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Look up the ranks of pairs of ids; −1, which is no id, makes no pair."""
        if self._pairs is None:
            pairs = np.array(list(self._table), dtype=np.int64).reshape(-1, 2).astype(np.uint64)
            values = np.array(list(self._table.values()), dtype=np.int64).reshape(-1, 2)
            self._joined = np.zeros(len(values), dtype=np.int32)
            self._joined[values[:, 0]] = values[:, 1]
            self._pairs = PairTable(slots_per_key=8)
            self._pairs.insert(pairs[:, 0].copy(), pairs[:, 1].copy(), values[:, 0].copy())
        found = self._pairs.find(left.astype(np.uint64), right.astype(np.uint64))
        return np.where(found < 0, NO_RANK, found).astype(np.int32)


def merge_short(ids: list[int], table: MergeTable) -> list[int]:
    """Merge a word given as the ids of its bytes, in O(n²); modifies the list."""
    get = table.get
    pairs = [get(pair) for pair in pairwise(ids)]
    while True:
        best = None
        at = -1
        for i, found in enumerate(pairs):
            if found is not None and (best is None or found < best):
                best = found
                at = i
        if best is None:
            return ids
        ids[at] = best[1]
        del ids[at + 1]
        del pairs[at]
        if at > 0:
            pairs[at - 1] = get((ids[at - 1], ids[at]))
        if at < len(pairs):
            pairs[at] = get((ids[at], ids[at + 1]))


def merge_long(ids: list[int], table: MergeTable) -> list[int]:
    """Merge a word given as the ids of its bytes, in O(n log n); modifies the list."""
    n = len(ids)
    get = table.get
    after = list(range(1, n + 1))  # the next position; n: none
    before = list(range(-1, n - 1))
    heap = []
    for i, pair in enumerate(pairwise(ids)):
        found = get(pair)
        if found is not None:
            heap.append((found[0], i, found[1]))
    heapq.heapify(heap)
    while heap:
        rank, i, joined = heapq.heappop(heap)
        right = after[i]
        # An entry is stale when either side was merged since: then its pair is another one, or
        # its position is gone (id −1).
        if right >= n or get((ids[i], ids[right])) != (rank, joined):
            continue
        ids[i] = joined
        ids[right] = -1
        following = after[i] = after[right]
        if following < n:
            before[following] = i
            found = get((joined, ids[following]))
            if found is not None:
                heapq.heappush(heap, (found[0], i, found[1]))
        left = before[i]
        if left >= 0:
            found = get((ids[left], joined))
            if found is not None:
                heapq.heappush(heap, (found[0], left, found[1]))
    return [token for token in ids if token >= 0]


def _restore_order(ids: np.ndarray, positions: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Reorder the ids of words, given in the order `positions`, to the words' original order."""
    grouped_counts = counts[positions]
    ends = np.cumsum(counts)
    target = np.repeat(
        (ends - counts)[positions] - (np.cumsum(grouped_counts) - grouped_counts), grouped_counts
    )
    target += np.arange(len(ids))
    ordered = np.empty(len(ids), dtype=np.uint32)
    ordered[target] = ids
    return ordered
