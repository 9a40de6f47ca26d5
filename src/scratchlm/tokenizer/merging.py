"""Merge the bytes of one word, in O(n log n) also when the word is a megabyte of one letter.

The definition is in `naive.py`: while some adjacent pair is known, merge the leftmost one of the
lowest rank. A short word looks through its pairs anew after each merge; a long one keeps them in
a heap ordered by (rank, place), over a linked list of what is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import pairwise

# (left id, right id) -> (rank, id of the two joined)
MergeTable = Mapping[tuple[int, int], tuple[int, int]]

SHORT = 32  # bytes; below this the quadratic loop is the faster one


def merge_word(ids: list[int], table: MergeTable) -> list[int]:
    """Merge a word given as the ids of its bytes; the list may be used up."""
    if len(ids) <= SHORT:
        return _merge_short(ids, table)
    return _merge_long(ids, table)


def _merge_short(ids: list[int], table: MergeTable) -> list[int]:
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


def _merge_long(ids: list[int], table: MergeTable) -> list[int]:
    n = len(ids)
    get = table.get
    after = list(range(1, n + 1))  # the next live place; n: none
    before = list(range(-1, n - 1))
    heap = []
    for i in range(n - 1):
        found = get((ids[i], ids[i + 1]))
        if found is not None:
            heap.append((found[0], i, found[1]))
    heapq.heapify(heap)
    while heap:
        rank, i, joined = heapq.heappop(heap)
        right = after[i]
        # An entry is stale when either side was merged since; then its pair is another one, or
        # the place is gone (id −1).
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
