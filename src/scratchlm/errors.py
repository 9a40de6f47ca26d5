"""The one error class of our own, and what is said of a misspelt name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ScratchLMError(Exception):
    """Something a user can cause and repair; its message is one line, fit for a terminal."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message that suggests the nearest name; nothing where none is near."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_keys(keys: Iterable[str], known: Iterable[str], prefix: str = "") -> None:
    """Refuse keys that a table of a config does not have."""
    known = list(known)
    unknown = sorted(set(keys) - set(known))
    if unknown:
        names = ", ".join(prefix + key for key in unknown)
        raise ValueError(f"unknown config key: {names}{did_you_mean(unknown[0], known)}")
