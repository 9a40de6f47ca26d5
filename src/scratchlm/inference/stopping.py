"""Stop strings in streamed text: the output ends before the first, and never shows part of one.

A suffix of the text that could still become a stop string is held back until that is decided.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Pass text through until one of the strings appears in it."""

    def __init__(self, strings: Sequence[str] = ()) -> None:
        if isinstance(strings, str):
            strings = [strings]
        for string in strings:
            if not isinstance(string, str) or not string:
                raise ValueError(f"a stop string must be a text that is not empty; got {string!r}")
        self.strings = tuple(strings)
        self.found: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Take new text and return what may be shown; after a stop string, nothing more."""
        if not self.strings:
            return text
        if self.found is not None:
            return ""
        self._held += text
        hits = [(self._held.find(s), s) for s in self.strings if s in self._held]
        if hits:
            # The first to complete, so that the result does not depend on how the text is chunked.
            at, self.found = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((_overlap(self._held, s) for s in self.strings), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """Return what was held back: the text has ended, nothing can complete any more."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `string`."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
