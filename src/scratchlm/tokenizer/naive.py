"""Byte-level BPE as it is defined. Read this; run `training.py` and `bpe.py`, tested equal to it.

Training (arXiv:1508.07909 §3.2, on bytes): a text is a multiset of words, a word a sequence of
byte strings, at first its single bytes. Count the adjacent pairs; merge the most frequent one
everywhere; repeat. Ties go to the lexicographically greater pair. A word of more than MAX_WORD
bytes, which is no word of any language, counts as several of at most that many.

Encoding: a word starts as its bytes. While any adjacent pair is in the list of merges, merge the
one that stands earliest in that list (the leftmost, if it occurs twice).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import regex

from scratchlm.tokenizer.patterns import split_words

Pair = tuple[bytes, bytes]
MAX_WORD = 1 << 14  # bytes


def split_specials(text: str, special_tokens: Sequence[str]) -> list[str]:
    """Split a text at its special tokens, longest first; the odd entries are the tokens."""
    if not special_tokens:
        return [text]
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return regex.split("(" + "|".join(map(regex.escape, longest_first)) + ")", text)


def train_bpe_naive(
    text: str, vocab_size: int, special_tokens: Sequence[str] = (), pattern: str = "gpt2"
) -> tuple[dict[int, bytes], list[Pair]]:
    """Learn a vocabulary from one text, by the definition."""
    counts = Counter(
        piece
        for part in split_specials(text, special_tokens)[::2]
        for word in split_words(part, pattern)
        for piece in cut_word(word.encode("utf-8"))
    )
    words = {word: [bytes([byte]) for byte in word] for word in counts}
    merges: list[Pair] = []
    while 256 + len(merges) + len(special_tokens) < vocab_size:
        pairs: Counter[Pair] = Counter()
        for word, pieces in words.items():
            for pair in pairwise(pieces):
                pairs[pair] += counts[word]
        if not pairs:
            break  # every word is one token
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = {word: merge(pieces, best) for word, pieces in words.items()}
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [left + right for left, right in merges]
    tokens += [token.encode("utf-8") for token in special_tokens]
    return dict(enumerate(tokens)), merges


def cut_word(word: bytes) -> list[bytes]:
    """Cut a word that is too long at multiples of MAX_WORD bytes."""
    return [word[at : at + MAX_WORD] for at in range(0, len(word), MAX_WORD)]


def merge(pieces: list[bytes], pair: Pair) -> list[bytes]:
    """Replace each occurrence of a pair by its two byte strings joined, from the left."""
    merged: list[bytes] = []
    i = 0
    while i < len(pieces):
        if tuple(pieces[i : i + 2]) == pair:
            merged.append(pieces[i] + pieces[i + 1])
            i += 2
        else:
            merged.append(pieces[i])
            i += 1
    return merged


def encode_word_naive(word: bytes, merges: Sequence[Pair]) -> list[bytes]:
    """Merge one word's bytes, by the definition."""
    rank = {pair: i for i, pair in enumerate(merges)}
    pieces = [bytes([byte]) for byte in word]
    while True:
        known = [(rank[pair], i) for i, pair in enumerate(pairwise(pieces)) if pair in rank]
        if not known:
            return pieces
        _, i = min(known)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
