"""Streaming: encode text that arrives in pieces, decode ids that arrive one by one."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from scratchlm.tokenizer.specials import check_text, settled_specials, split_at_specials

PIECE = 1 << 16  # characters gathered before they are encoded


class StreamDecoder:
    """Decode ids one at a time; the outputs, joined, equal decoding them at once."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        # Holds back an unfinished character; what can no longer become one is U+FFFD, as in
        # bytes.decode(errors="replace").
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Take one id and return the text that is now certain, possibly none."""
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """Return what was held back, an unfinished character as U+FFFD, and reset."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def settled_parts(
    pieces: Iterable[str],
    specials: frozenset[str],
    last_cut: Callable[[str, int, int], int],
    enough: int = PIECE,
) -> Iterator[list[str]]:
    """Regroup pieces of a text, holding back only what later text may still change.

    Each list holds texts with special tokens between them (the odd entries); one list's last text
    and the next one's first are cut where `last_cut` allows it: it finds the last position in a
    range where a cut changes no ids.
    """
    margin = max(map(len, specials), default=0)
    held: list[str] = []
    size, wanted = 0, enough
    before = 0  # characters of all earlier pieces
    for piece in pieces:
        check_text(piece, before)
        before += len(piece)
        held.append(piece)
        size += len(piece)
        if size < wanted:
            continue
        parts, rest = settled_specials("".join(held), specials)
        cut = last_cut(rest, 0, max(len(rest) - margin, 0))
        if parts or cut:
            yield [*parts, rest[:cut]]
        held, size = [rest[cut:]], len(rest) - cut
        # A text that cannot be cut is scanned again only once it has doubled: linear in total.
        wanted = max(enough, 2 * size)
    yield split_at_specials("".join(held), specials)


def encode_stream(
    pieces: Iterable[str],
    specials: frozenset[str],
    last_cut: Callable[[str, int, int], int],
    encode_parts: Callable[[list[str]], np.ndarray],
) -> Iterator[int]:
    """Encode pieces of a text as if they were joined."""
    for parts in settled_parts(pieces, specials, last_cut):
        yield from encode_parts(parts).tolist()
