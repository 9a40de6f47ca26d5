r"""Split a text into words with array operations: the named patterns without a regex engine.

A pattern's words begin where the *kind* of character changes (letter, number, whitespace, other),
with a few corrections that look one or two characters around. So a text becomes an array of kinds,
and the corrections become masks on it. `patterns.split_words` is the definition; the tests compare
the two on all of Unicode.

For GPT-2, with a run of whitespace [s, e) before another kind of character:
- the run's last character begins a word (`\s+(?!\S)` leaves it over);
- if it is a space, what follows at e belongs to it;
- `'s`, `'re`, … at a word's beginning end that word after the letter(s).
GPT-4, Llama 3 and Qwen2 add: any one character but a line end may lead a run of letters;
punctuation takes the line ends that follow it; a run of whitespace is cut after its last line end;
numbers fall into groups.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import regex

LETTER, NUMBER, OTHER, SPACE = range(4)
TAKEN = 4  # a line end that belongs to the punctuation before it
BORDER = 5  # between two texts

# Stands between texts that are split together. No text holds it: lone surrogates are refused.
SEPARATOR = "\udcff"
SEPARATOR_BYTE = 0xFF  # what it becomes in UTF-8 with `surrogateescape`; UTF-8 has no such byte

Mask = np.ndarray  # of bool, one per character


@dataclass(frozen=True)
class Rules:
    """What distinguishes one named pattern from another."""

    digits: int | None  # how many numbers stay together; None: all
    modern: bool = True  # the rules that came with GPT-4
    whole_tail: bool = False  # whitespace at the text's end is one word, line ends or not


RULES = {
    "gpt2": Rules(digits=None, modern=False),
    "gpt4": Rules(digits=3, whole_tail=True),
    "llama3": Rules(digits=3),
    "qwen2": Rules(digits=1),
}

# A position where every named pattern begins a word, whatever comes before and after it, and where
# NFC does not join the two sides: a space after a word, or ASCII punctuation or a digit (or CJK
# punctuation) after a letter.
_CUT = r"(?<=\S) |(?<=\p{L})[!-@\[-`{-~、。，！？]"
_LAST_CUT = regex.compile(f"(?r){_CUT}")
_NEXT_CUT = regex.compile(_CUT)


@functools.cache
def kinds_of_characters() -> np.ndarray:
    """Build the table from code point to kind, for all of Unicode, as `regex` sees it."""
    codes = np.arange(0x110000, dtype=np.uint32)
    codes[0xD800:0xE000] = 0xFFFD  # surrogates are no characters
    everything = codes.astype("<u4").tobytes().decode("utf-32-le")
    table = np.full(0x110000, OTHER, dtype=np.uint8)
    for kind, members in ((LETTER, r"\p{L}+"), (NUMBER, r"\p{N}+"), (SPACE, r"\s+")):
        for match in regex.finditer(members, everything):
            table[match.start() : match.end()] = kind
    table[ord(SEPARATOR)] = BORDER
    return table


@functools.cache
def _ascii_kinds() -> bytes:
    return kinds_of_characters()[:128].tobytes() + bytes([OTHER]) * 127 + bytes([BORDER])


def ascii_word_starts(data: bytes, pattern: str) -> Mask:
    """Mark the characters at which words begin, in texts of ASCII with bytes 0xFF between them."""
    kinds = np.frombuffer(data.translate(_ascii_kinds()), dtype=np.uint8)
    return _word_starts(np.frombuffer(data, dtype=np.uint8), kinds, RULES[pattern])


def word_starts(codes: np.ndarray, pattern: str) -> Mask:
    """Mark the characters at which words begin, in texts given as code points, with separators."""
    return _word_starts(codes, kinds_of_characters()[codes], RULES[pattern])


def last_cut(text: str, low: int, high: int) -> int:
    """Find the last position in (low, high) where a text may be cut without changing its words.

    Returns `low` where there is none.
    """
    match = _LAST_CUT.search(text, low, high)
    return match.start() if match and match.start() > low else low


def next_cut(text: str, low: int) -> int:
    """Find the first position after `low` where a text may be cut; its end, where there is none."""
    match = _NEXT_CUT.search(text, low)
    return match.start() if match else len(text)


def _word_starts(codes: np.ndarray, kinds: np.ndarray, rules: Rules) -> Mask:
    n = len(codes)
    starts = np.ones(n, dtype=bool)
    if n == 0:
        return starts
    if rules.modern:
        kinds = _give_line_ends_to_punctuation(codes, kinds)
    is_space = kinds == SPACE
    np.not_equal(kinds[1:], kinds[:-1], out=starts[1:])
    border = kinds == BORDER
    starts |= border

    # Whitespace leaves its last character to what follows ...
    before_word = is_space[:-1] & ~(is_space | border)[1:]  # the last of a run, not of a text
    plain = codes[:-1] == 0x20
    if not rules.modern:
        starts[:-1] |= before_word
        starts[1:] &= ~(before_word & plain)
    else:
        # ... which takes it along only if the pattern says so.
        before_word &= ~_is_line_end(codes[:-1])
        starts[:-1] |= before_word
        leads = (kinds[1:] == LETTER) | ((kinds[1:] == OTHER) & plain)
        starts[1:] &= ~(before_word & leads)
        _join_taken_line_ends(starts, kinds)
        _cut_after_last_line_end(starts, codes, kinds, rules)
        # One other character, at a word's beginning, leads the letters after it.
        leads = starts[:-1] & (kinds[:-1] == OTHER) & (kinds[1:] == LETTER)
        starts[1:] &= ~leads
        _group_numbers(starts, kinds, rules)
    _end_contractions(starts, codes, fold=rules.modern)
    return starts


def _is_line_end(codes: np.ndarray) -> Mask:
    return (codes == 0x0A) | (codes == 0x0D)


def _give_line_ends_to_punctuation(codes: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Mark the line ends that directly follow punctuation: ` ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*`."""
    line_ends = np.flatnonzero(_is_line_end(codes))
    if len(line_ends) == 0:
        return kinds
    # Runs of line ends: a run is taken if the character before it is punctuation.
    first = np.ones(len(line_ends), dtype=bool)
    first[1:] = np.diff(line_ends) != 1
    heads = line_ends[first]
    taken = (heads > 0) & (kinds[np.maximum(heads, 1) - 1] == OTHER)
    taken_each = taken[np.cumsum(first) - 1]
    kinds = kinds.copy()
    kinds[line_ends[taken_each]] = TAKEN
    return kinds


def _join_taken_line_ends(starts: Mask, kinds: np.ndarray) -> None:
    taken = np.flatnonzero(kinds == TAKEN)
    starts[taken] = False  # each follows punctuation or another one taken


def _cut_after_last_line_end(
    starts: Mask, codes: np.ndarray, kinds: np.ndarray, rules: Rules
) -> None:
    """Cut a run of whitespace after its last line end: `\\s*[\\r\\n]+`."""
    n = len(codes)
    is_space = kinds == SPACE
    line_ends = np.flatnonzero(_is_line_end(codes) & is_space)
    if len(line_ends) == 0:
        return
    run_ends = np.flatnonzero(is_space[:-1] & ~is_space[1:]) + 1
    run_ends = np.append(run_ends, n)
    end_of_run = run_ends[np.searchsorted(run_ends, line_ends, side="right")]
    following = np.append(line_ends[1:], n)
    last = following >= end_of_run
    if rules.whole_tail:
        ends_text = (end_of_run == n) | (kinds[np.minimum(end_of_run, n - 1)] == BORDER)
        last &= ~ends_text
    cut = line_ends[last] + 1
    starts[cut[cut < n]] = True


def _group_numbers(starts: Mask, kinds: np.ndarray, rules: Rules) -> None:
    is_number = kinds == NUMBER
    if rules.digits == 1:
        starts |= is_number
        return
    numbers = np.flatnonzero(is_number)
    if rules.digits is None or len(numbers) == 0:
        return
    first = np.ones(len(numbers), dtype=bool)
    first[1:] = np.diff(numbers) != 1
    heads = numbers[first]
    index = numbers - heads[np.cumsum(first) - 1]  # within the run
    starts[numbers[index % rules.digits == 0]] = True


def _end_contractions(starts: Mask, codes: np.ndarray, fold: bool) -> None:
    """End a word after `'s 't 'm 'd 'll 've 're` where it begins with them."""
    n = len(codes)
    at = np.flatnonzero(codes == 0x27)
    at = at[starts[at] & (at + 1 < n)]
    if len(at) == 0:
        return
    one = _lower(codes[at + 1], fold)
    two = _lower(codes[np.minimum(at + 2, n - 1)], fold)
    two = np.where(at + 2 < n, two, 0)
    d, e, ell, m, r, s, t, v = (ord(c) for c in "delmrstv")
    short = (one == s) | (one == t) | (one == m) | (one == d)
    long = ((one == ell) & (two == ell)) | (((one == v) | (one == r)) & (two == e))
    starts[at[short | long] + 1] = False
    starts[at[long] + 2] = False
    end = np.concatenate([at[short] + 2, at[long] + 3])
    starts[end[end < n]] = True


def _lower(codes: np.ndarray, fold: bool) -> np.ndarray:
    codes = codes.astype(np.uint32)
    if not fold:
        return codes
    codes = np.where((codes >= 0x41) & (codes <= 0x5A), codes + 0x20, codes)
    return np.where(codes == 0x17F, ord("s"), codes)  # ſ folds to s
