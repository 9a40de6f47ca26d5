"""The pool of page numbers: who holds which page, and which pages hold what tokens.

A page is held by any number of requests. One that nobody holds is free; it keeps its content until
it is taken for something else, the one free for longest first, so that a later request with the
same beginning finds it. Full pages are found by a key that chains what they hold to all before:

    key_i = hash(key_{i−1}, tokens of page i),    key_{−1} = hash(salt)

Callers with different salts never see each other's pages.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Key = bytes


class PageUse(NamedTuple):
    """How many requests hold a page, and whether a later one can find what it contains."""

    holders: int
    is_found: bool


def page_keys(tokens: Sequence[int], page_size: int, salt: str = "") -> list[Key]:
    """Return the keys of the full pages of a row of tokens."""
    key = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    keys = []
    for end in range(page_size, len(tokens) + 1, page_size):
        page = array("q", tokens[end - page_size : end]).tobytes()
        key = hashlib.blake2b(key + page, digest_size=16).digest()
        keys.append(key)
    return keys


class PagePool:
    """The numbers 0 … num_pages − 1, each free or held by one or more."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1; got num_pages={num_pages}")
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._key_of: dict[int, Key] = {}
        self._page_of: dict[Key, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))  # next first

    @property
    def num_free(self) -> int:
        """How many pages nobody holds."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """How many pages somebody holds."""
        return self.num_pages - len(self._free)

    def pages(self) -> list[PageUse]:
        """Return how every page is used now."""
        return [
            PageUse(holders, page in self._key_of) for page, holders in enumerate(self._holders)
        ]

    def find(self, keys: Iterable[Key]) -> list[int]:
        """Return the pages of the longest beginning of `keys` that is there."""
        found = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def num_free_among(self, pages: Iterable[int]) -> int:
        """Count those of `pages` that nobody holds."""
        return sum(not self._holders[page] for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """Hold pages that are there, with their content."""
        for page in pages:
            if not self._holders[page]:
                del self._free[page]
            self._holders[page] += 1

    def take(self, count: int) -> list[int]:
        """Hold `count` free pages, whatever they contained."""
        assert count <= self.num_free, "more pages than are free"
        taken = []
        for _ in range(count):
            page, _none = self._free.popitem(last=False)
            self._forget(page)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages; those of a row's end are taken again first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a page was released twice"
            if not self._holders[page]:
                self._free[page] = None
                if page not in self._key_of:
                    self._free.move_to_end(page, last=False)

    def register(self, page: int, key: Key) -> None:
        """Let a held page be found by `key`, unless another already is."""
        if key not in self._page_of:
            self._forget(page)
            self._key_of[page], self._page_of[key] = key, page

    def forget_all(self) -> None:
        """Let no page be found any more: what they hold belongs to other weights."""
        self._key_of.clear()
        self._page_of.clear()

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page, None)
        if key is not None:
            del self._page_of[key]
