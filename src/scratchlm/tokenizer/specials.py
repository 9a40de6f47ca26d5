"""Input checks (no lone surrogates) and splitting at special tokens, longest first."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import Literal

Allowed = Literal["all"] | Collection[str]


def check_text(text: str, before: int = 0) -> None:
    """Refuse anything but valid text; `before` characters of it came earlier."""
    if not isinstance(text, str):
        raise TypeError(f"text must be str; got {type(text).__name__}")
    if text.isascii():
        return
    try:
        for start in range(0, len(text), 1 << 20):  # in steps, to hold no second copy of it all
            text[start : start + (1 << 20)].encode("utf-8")
    except UnicodeEncodeError as error:
        at = start + error.start
        raise ValueError(
            f"text must hold no lone surrogate; got U+{ord(text[at]):04X} "
            f"at character {before + at}"
        ) from None


def choose_allowed(allowed_special: Allowed, known: Collection[str]) -> frozenset[str]:
    """Check which special tokens a caller allows."""
    if isinstance(allowed_special, str):
        if allowed_special != "all":
            raise ValueError(
                f'allowed_special must be "all" or a collection of tokens; got {allowed_special!r}'
            )
        return frozenset(known)
    allowed = frozenset(allowed_special)
    for token in allowed - frozenset(known):
        raise ValueError(f"allowed_special names {token!r}, which is no special token here")
    return allowed


def split_at_specials(text: str, tokens: frozenset[str]) -> list[str]:
    """Split a text at its special tokens; the odd entries of the result are the tokens."""
    return _pattern(tokens).split(text) if tokens else [text]


def settled_specials(text: str, tokens: frozenset[str]) -> tuple[list[str], str]:
    """Split off what later text cannot change: whole parts and tokens, and the text still open.

    A token is settled when even the longest one beginning there would have ended by now.
    """
    if not tokens:
        return [], text
    horizon = len(text) - max(map(len, tokens))
    parts = []
    end = 0
    for match in _pattern(tokens).finditer(text):
        if match.start() > horizon:
            break
        parts += [text[end : match.start()], match.group()]
        end = match.end()
    return parts, text[end:]


@functools.lru_cache(maxsize=32)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    # Longest first: of several alternatives the expression takes the first that matches.
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
