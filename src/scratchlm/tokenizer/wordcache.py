"""Encode many words at once: each distinct word is merged once, then looked up.

The words of a text are numbered (`words.py`); each number has its ids in one pool, at an offset,
so the ids of a whole text are gathered with array operations. The cache is bounded: past the
limit it is cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from scratchlm.tokenizer.splitting import RULES, SEPARATOR_BYTE, last_cut, next_cut
from scratchlm.tokenizer.words import WordIndex, split_bytes

BLOCK = 1 << 17  # characters encoded at a time: their arrays stay in the processor's cache
GROUP = 16  # blocks whose new words are merged together
MAX_WORDS = 1 << 18
MAX_BYTES = 1 << 25


class WordCache:
    """The ids of the words seen so far."""

    def __init__(
        self, merge: Callable[[list[bytes]], tuple[np.ndarray, np.ndarray]], pattern: str
    ) -> None:
        """`merge` returns the ids of all words, concatenated, and how many each has."""
        self._pattern = pattern
        self._merge = merge
        self._index = WordIndex()
        self._clear()

    def _clear(self) -> None:
        self._index.clear()
        self._bytes = 0
        self._known = 0  # words that have their ids
        self._pool = np.empty(1 << 12, dtype=np.uint32)
        self._used = 0  # of the pool
        self._offset = np.empty(1 << 12, dtype=np.int64)
        self._count = np.empty(1 << 12, dtype=np.int64)

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts: all their ids, concatenated, and where each text's ids end."""
        ids, ends = [], []
        total = 0
        pending = blocks(texts, cuttable=self._pattern in RULES)
        # Blocks stay small for the processor's cache, but merging new words pays by the thousand:
        # number the words of several blocks, merge the new ones, then gather all ids.
        while group := list(islice(pending, GROUP)):
            if self._known > MAX_WORDS or self._bytes > MAX_BYTES:
                self._clear()
            numbered = [self._number(block) for block, _ in group]
            self._merge_new()
            for (numbers, separators), (_, closes) in zip(numbered, group, strict=True):
                block_ids, block_ends = self._gather(numbers, separators)
                ids.append(block_ids)
                ends.append(total + (block_ends if closes else block_ends[:-1]))
                total += len(block_ids)
        if len(ids) == 1:
            return ids[0], ends[0]
        empty = np.empty(0, dtype=np.int64)
        return np.concatenate([empty.astype(np.uint32), *ids]), np.concatenate([empty, *ends])

    def _number(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Number the words of texts, and say which of them are separators."""
        data, borders = split_bytes(texts, self._pattern)
        separators = np.empty(0, dtype=np.int64)
        if len(texts) > 1:
            separators = np.flatnonzero(data[borders[:-1]] == SEPARATOR_BYTE)
        return self._index.numbers(data, borders), separators

    def _gather(self, numbers: np.ndarray, separators: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gather the ids of numbered words, and where each text's ids end."""
        counts = self._count[numbers]
        counts[separators] = 0
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        positions = np.repeat(self._offset[numbers] - (ends - counts), counts)
        positions += np.arange(total)
        return self._pool[positions], np.append(ends[separators], total)

    def _merge_new(self) -> None:
        """Merge the words numbered since the last time."""
        words = self._index.words[self._known :]
        if not words:
            return
        ids, counts = self._merge(words)
        new = slice(self._known, self._known + len(words))
        self._pool = _grow(self._pool, self._used + len(ids))
        self._offset = _grow(self._offset, new.stop)
        self._count = _grow(self._count, new.stop)
        self._pool[self._used : self._used + len(ids)] = ids
        self._count[new] = counts
        self._offset[new] = self._used + np.cumsum(counts) - counts
        self._used += len(ids)
        self._known = new.stop
        self._bytes += sum(map(len, words))


def blocks(texts: list[str], cuttable: bool) -> Iterator[tuple[list[str], bool]]:
    """Group texts, and cut long ones, into blocks; with each, whether its last text ends there."""
    block: list[str] = []
    size = 0
    for text in texts:
        start = 0
        while cuttable and size + len(text) - start > BLOCK:
            cut = last_cut(text, start, start + BLOCK - size)
            if cut == start:  # no cut in range: take the texts so far, or cut at the next one
                if block:
                    yield block, True
                    block, size = [], 0
                    continue
                cut = next_cut(text, start + BLOCK)
            if cut == len(text):
                break
            yield [*block, text[start:cut]], False
            block, size, start = [], 0, cut
        block.append(text[start:] if start else text)
        size += len(block[-1]) + 1
        if size >= BLOCK:
            yield block, True
            block, size = [], 0
    if block:
        yield block, True


def _grow(array: np.ndarray, size: int) -> np.ndarray:
    if size <= len(array):
        return array
    grown = np.empty(max(size, 2 * len(array)), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
