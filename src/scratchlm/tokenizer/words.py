"""Map the words of a text to numbers, vectorised: the same word, the same number.

A word of up to 15 bytes packs into two 64-bit integers (its bytes, and its length in the last
one), so a whole array of words is looked up in an open-addressing hash table with a few array
operations, and comparing the integers compares the words exactly. Longer words, which are rare,
go through a dict. Training counts these numbers; encoding maps each to the ids of its word.
"""

from __future__ import annotations

import sys

import numpy as np

from scratchlm.tokenizer.hashing import PairTable, hash_pairs
from scratchlm.tokenizer.patterns import split_words
from scratchlm.tokenizer.splitting import (
    RULES,
    SEPARATOR,
    SEPARATOR_BYTE,
    ascii_word_starts,
    word_starts,
)

PACKED = 15  # bytes
_MASKS = np.array([(1 << (8 * k)) - 1 for k in range(9)], dtype=np.uint64)  # the low k bytes

assert sys.byteorder == "little", "words are packed as little-endian integers"


def split_bytes(texts: list[str], pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Split texts into words: UTF-8 bytes, and the byte offsets of all borders, first and last too.

    Between two texts stands one word that is the byte 0xFF, which is no UTF-8.
    """
    if pattern not in RULES:
        return _split_by_regex(texts, pattern)
    text = SEPARATOR.join(texts)
    data = text.encode("utf-8", errors="surrogateescape")
    if len(data) == len(text):  # ASCII: a character is a byte
        borders = np.flatnonzero(ascii_word_starts(data, pattern))
    else:
        encoded = text.encode("utf-32-le", errors="surrogatepass")
        codes = np.frombuffer(encoded, dtype=np.uint32)
        width = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        width[codes == ord(SEPARATOR)] = 1
        borders = (np.cumsum(width) - width)[word_starts(codes, pattern)]
    return np.frombuffer(data, dtype=np.uint8), np.append(borders, len(data))


def _split_by_regex(texts: list[str], pattern: str) -> tuple[np.ndarray, np.ndarray]:
    words: list[bytes] = []
    for text in texts:
        words += [word.encode("utf-8") for word in split_words(text, pattern)]
        words.append(bytes([SEPARATOR_BYTE]))
    words.pop()
    borders = np.concatenate([[0], np.cumsum([len(word) for word in words], dtype=np.int64)])
    return np.frombuffer(b"".join(words), dtype=np.uint8), borders


class WordIndex:
    """Number words in the order they are first seen."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all words."""
        self.words: list[bytes] = []
        self._long: dict[bytes, int] = {}
        self._table = PairTable()

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, data: np.ndarray, borders: np.ndarray) -> np.ndarray:
        """Number the words of `data` between `borders`; unseen ones get the next numbers."""
        starts, lengths = borders[:-1], np.diff(borders)
        short = lengths <= PACKED
        if short.all():
            return self._packed_numbers(data, starts, lengths)
        numbers = np.empty(len(starts), dtype=np.int64)
        numbers[short] = self._packed_numbers(data, starts[short], lengths[short])
        raw = data.tobytes()
        long = np.flatnonzero(~short)
        spans = zip(starts[long].tolist(), lengths[long].tolist(), strict=True)
        numbers[long] = [self._long_number(raw[at : at + n]) for at, n in spans]
        return numbers

    def _long_number(self, word: bytes) -> int:
        number = self._long.get(word)
        if number is None:
            number = self._long[word] = len(self.words)
            self.words.append(word)
        return number

    def _packed_numbers(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        low, high = _pack(data, starts, lengths)
        numbers = self._table.find(low, high)
        missing = np.flatnonzero(numbers < 0)
        while len(missing):
            # One of each unseen word. Of two words that share a hash, one is inserted now; the
            # other is still missing and is inserted in the next round.
            _, first = np.unique(hash_pairs(low[missing], high[missing]), return_index=True)
            first.sort()
            new = missing[first]
            raw = data.tobytes()
            spans = zip(starts[new].tolist(), lengths[new].tolist(), strict=True)
            fresh = np.arange(len(self.words), len(self.words) + len(new))
            self.words += [raw[at : at + n] for at, n in spans]
            self._table.insert(low[new], high[new], fresh)
            numbers[missing] = self._table.find(low[missing], high[missing])
            missing = missing[numbers[missing] < 0]
        return numbers


def _pack(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pack words of at most 15 bytes into two integers each."""
    padded = np.zeros((len(data) + 31) // 8 * 8, dtype=np.uint8)
    padded[: len(data)] = data
    eights = padded.view(np.uint64)
    at = starts >> 3
    shift = ((starts & 7) << 3).astype(np.uint64)
    back = np.uint64(63) - shift  # shift left by 1 + this: 64 at once would be undefined
    one, two, three = eights[at], eights[at + 1], eights[at + 2]
    low = (one >> shift) | ((two << np.uint64(1)) << back)
    high = (two >> shift) | ((three << np.uint64(1)) << back)
    low &= _MASKS[np.minimum(lengths, 8)]
    high &= _MASKS[np.maximum(lengths - 8, 0)]
    high |= lengths.astype(np.uint64) << np.uint64(56)
    return low, high
