"""Learn merges from counted words: what `naive.py` defines, with incremental counts.

All words lie in one array of symbols, a gap before and after each, linked both ways so that a
merge only relinks. Three facts keep the work small:
- merging (a, b) → c changes only the pairs beside each occurrence, and every pair with c in it is
  new: it has all its occurrences at once, and from then on can only lose some;
- so a pair rarer than some floor stays below it, and need not be tracked until the best pair has
  come down there: then all pairs are recounted, with a lower floor;
- counts only fall, so the heap may hold stale ones: an entry is checked when it is popped.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

GAP = -1  # the symbol between words
DEAD = -2  # a symbol that was merged into the one before it
FLOOR = 8  # a recount tracks the pairs at least 1/FLOOR as frequent as the best one

_INVERTED = [chr(255 - byte) for byte in range(256)]


class MergeLearner:
    """The symbols of all words, and the tracked pairs."""

    def __init__(self, words: Sequence[bytes], counts: Sequence[int] | np.ndarray) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)]
        self._order = [_descending(token) for token in self.tokens]
        joined = np.frombuffer(b"".join(words), dtype=np.uint8).astype(np.int32)
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        # word 0, gap, word 1, gap, ...: and a gap before all
        word = np.repeat(np.arange(len(words)), lengths)
        self._symbol = np.full(len(joined) + len(words) + 1, GAP, dtype=np.int32)
        at = np.arange(len(joined)) + word + 1
        self._symbol[at] = joined
        self._weight = np.zeros(len(self._symbol), dtype=np.int64)
        self._weight[at] = np.asarray(counts, dtype=np.int64)[word]
        self._recount()

    def best(self) -> tuple[int, int] | None:
        """Find the most frequent pair, on ties the largest byte strings; None: no pair left."""
        while True:
            while self._heap:
                negative, _, _, left, right = self._heap[0]
                count = self._counts.get((left, right), 0)
                if count == -negative:
                    return left, right
                heapq.heappop(self._heap)
                if count >= self._floor:
                    self._push((left, right), count)
            if self._floor <= 1:
                return None
            self._recount()

    def merge(self, pair: tuple[int, int]) -> int:
        """Merge a pair everywhere into a new symbol, and return it."""
        a, b = pair
        new = len(self.tokens)
        self.tokens.append(self.tokens[a] + self.tokens[b])
        self._order.append(_descending(self.tokens[new]))
        symbol, after, before = self._symbol, self._after, self._before

        first = self._positions.pop(pair)
        first = first[symbol[first] == a]
        second = after[first]
        valid = symbol[second] == b
        first, second = first[valid], second[valid]
        if a == b:
            first, second = _every_other(first, second)
        left, right = before[first], after[second]
        left_symbol, old_right = symbol[left], symbol[right]
        symbol[first] = new
        symbol[second] = DEAD
        after[first] = right
        before[right] = first
        new_right = symbol[right]  # the new symbol itself, where an occurrence follows another

        weight = self._weight[first]
        # Where an occurrence follows another, the pair between them is the other's right one.
        has_left_pair = (left_symbol >= 0) & (symbol[left] != DEAD)
        for neighbour, total, where in self._groups(left_symbol, left, weight, has_left_pair):
            self._lower((neighbour, a), total)
            self._track((neighbour, new), total, where)
        for neighbour, total, where in self._groups(new_right, first, weight, old_right >= 0):
            self._lower((b, a if neighbour == new else neighbour), total)
            self._track((new, neighbour), total, where)
        self._counts.pop(pair, None)
        return new

    def _groups(
        self, neighbours: np.ndarray, positions: np.ndarray, weight: np.ndarray, chosen: np.ndarray
    ) -> list[tuple[int, int, np.ndarray]]:
        """Group occurrences by their neighbour: (neighbour, summed weight, positions)."""
        if not chosen.all():
            neighbours, positions, weight = neighbours[chosen], positions[chosen], weight[chosen]
        if len(neighbours) == 0:
            return []
        order = neighbours.argsort(kind="stable")
        neighbours, positions, weight = neighbours[order], positions[order], weight[order]
        starts = np.flatnonzero(neighbours[1:] != neighbours[:-1]) + 1
        starts = np.concatenate([[0], starts])
        totals = np.add.reduceat(weight, starts).tolist()
        names = neighbours[starts].tolist()
        ends = [*starts[1:].tolist(), len(positions)]
        return [
            (name, total, positions[low:high])
            for name, total, low, high in zip(names, totals, starts.tolist(), ends, strict=True)
        ]

    def _lower(self, pair: tuple[int, int], by: int) -> None:
        if pair in self._counts:
            self._counts[pair] -= by

    def _track(self, pair: tuple[int, int], count: int, positions: np.ndarray) -> None:
        if count >= self._floor:
            self._counts[pair] = count
            self._positions[pair] = positions
            self._push(pair, count)

    def _push(self, pair: tuple[int, int], count: int) -> None:
        left, right = pair
        heapq.heappush(self._heap, (-count, self._order[left], self._order[right], left, right))

    def _recount(self) -> None:
        """Drop dead symbols, count all pairs, and track those above a new floor."""
        alive = self._symbol != DEAD
        self._symbol, self._weight = self._symbol[alive], self._weight[alive]
        n = len(self._symbol)
        self._after = np.minimum(np.arange(1, n + 1), n - 1)
        self._before = np.maximum(np.arange(-1, n - 1), 0)
        self._counts: dict[tuple[int, int], int] = {}
        self._positions: dict[tuple[int, int], np.ndarray] = {}
        self._heap: list[tuple[int, str, str, int, int]] = []
        self._floor = 1

        left, right = self._symbol[:-1], self._symbol[1:]
        positions = np.flatnonzero((left >= 0) & (right >= 0))
        if len(positions) == 0:
            return
        size = len(self.tokens)
        key = left[positions].astype(np.int64) * size + right[positions]
        order = key.argsort(kind="stable")
        key, positions = key[order], positions[order]
        starts = np.concatenate([[0], np.flatnonzero(key[1:] != key[:-1]) + 1])
        totals = np.add.reduceat(self._weight[positions], starts)
        self._floor = max(1, int(totals.max()) // FLOOR)
        ends = np.append(starts[1:], len(positions))
        for i in np.flatnonzero(totals >= self._floor).tolist():
            pair = divmod(int(key[starts[i]]), size)
            self._track(pair, int(totals[i]), positions[starts[i] : ends[i]])


def learn_merges(
    words: Sequence[bytes],
    counts: Sequence[int] | np.ndarray,
    limit: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[bytes, bytes]]:
    """Learn at most `limit` merges; fewer, if every word has become one token."""
    learner = MergeLearner(words, counts)
    merges: list[tuple[bytes, bytes]] = []
    while len(merges) < limit:
        pair = learner.best()
        if pair is None:
            break
        learner.merge(pair)
        merges.append((learner.tokens[pair[0]], learner.tokens[pair[1]]))
        if progress is not None:
            progress(len(merges), limit)
    return merges


def _descending(token: bytes) -> str:
    """Return a key that sorts byte strings in descending order."""
    return "".join([_INVERTED[byte] for byte in token]) + "\u0100"  # longer before its prefix


def _every_other(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of overlapping occurrences of (a, a), keep those that merging from the left takes."""
    order = first.argsort()
    first, second = first[order], second[order]
    if len(first) == 0:
        return first, second
    chained = np.zeros(len(first), dtype=bool)
    chained[1:] = first[1:] == second[:-1]
    run = np.flatnonzero(~chained)  # where each chain begins
    index = np.arange(len(first)) - run[np.cumsum(~chained) - 1]
    keep = index % 2 == 0
    return first[keep], second[keep]
