r"""The pre-tokenisation patterns: how a text is split into words before any merge.

Merges never cross a word's border, so the pattern is part of a tokenizer's identity. All named
patterns share one shape: a contraction, an optional character before a run of letters, a run of
numbers, a run of everything else, and whitespace that leaves its last character to the next word
(`\s+(?!\S)`). They differ in what may stand before the letters, in how many digits stay together,
and in how line ends are handled.
"""

from __future__ import annotations

import functools
from typing import Any

import regex

# GPT-2: one space may lead a word; digits stay together.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3: any one non-letter may lead a word, at most three digits stay together, and punctuation
# takes its line ends along.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# GPT-4 (tiktoken's cl100k_base): the same, and whitespace that ends a text is one word (`\s++$`).
_GPT4 = _LLAMA3.replace(r"|\s*[\r\n]+", r"|\s++$|\s*[\r\n]+")
# Qwen2 and Qwen3: Llama 3's, with every digit alone.
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

PATTERNS = {"gpt2": _GPT2, "gpt4": _GPT4, "llama3": _LLAMA3, "qwen2": _QWEN2}
# Two of them as tiktoken writes them.
TIKTOKEN_SPELLINGS = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s": "gpt4",
}

# A pattern from a file may backtrack catastrophically: matching may take this long, plus what a
# slow but benign pattern needs for a text's length.
MATCH_SECONDS = 10.0
CHARACTERS_PER_SECOND = 100_000
MAX_PATTERN = 10_000  # characters; real ones have a few hundred
# What can take memory without bound, which no time limit stops: a pattern or group that calls
# itself, and approximate matches.
_UNBOUNDED = regex.compile(
    r"\(\?(?:R|[+-]?\d+|&\w*|P>\w*)\)|\{[^{}]*[<>=][^{}]*\}|\{[deis][^{}]*\}|\\L<"
)


def pattern_name(pattern: str) -> str | None:
    """Name a pattern given by name or as its regular expression; None if it is not a named one."""
    if pattern in PATTERNS:
        return pattern
    named = {text: name for name, text in PATTERNS.items()} | TIKTOKEN_SPELLINGS
    return named.get(pattern)


@functools.lru_cache(maxsize=64)
def compile_pattern(pattern: str) -> Any:
    """Compile a pattern given by name or as a regular expression."""
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"pattern must be one of {', '.join(PATTERNS)} or a regular expression")
    text = PATTERNS.get(pattern, pattern)
    if text == pattern and pattern.isalnum():  # a misspelt name, not a regular expression
        raise ValueError(f"pattern must be one of {', '.join(PATTERNS)}; got {pattern!r}")
    if len(text) > MAX_PATTERN:
        raise ValueError(f"pattern must not exceed {MAX_PATTERN:,} characters; got {len(text):,}")
    found = _UNBOUNDED.search(text)
    if found is not None:
        raise ValueError(
            f"pattern {text[:80]!r} has {found[0]!r}: recursion and fuzzy matching take memory "
            "without bound and are not supported"
        )
    try:
        return regex.compile(text)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"pattern {text[:80]!r} is not a regular expression: {error}") from None


def split_words(text: str, pattern: str) -> list[str]:
    """Split a text into words: the definition, which the fast splitter must equal.

    Unmatched text becomes words too, so that the words joined are the
    text. (The named patterns match every character.)
    """
    compiled = compile_pattern(pattern)
    limit = MATCH_SECONDS + len(text) / CHARACTERS_PER_SECOND
    words = []
    end = 0
    try:
        for match in compiled.finditer(text, timeout=limit):
            if match.start() > end:
                words.append(text[end : match.start()])
            if match.end() > match.start():
                words.append(match.group())
            end = max(end, match.end())
    except TimeoutError:
        raise ValueError(
            f"pattern {PATTERNS.get(pattern, pattern)[:80]!r} took longer than "
            f"{limit:.3g} s on {len(text)} characters"
        ) from None
    if end < len(text):
        words.append(text[end:])
    return words
