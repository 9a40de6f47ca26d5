"""Streams: ids out of pieces of text, wherever they are cut; text out of ids as they come."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from scratchlm.tokenizer.specials import check_text, settled_specials, split_at_specials

PIECE = 1 << 16  # characters gathered before they are encoded


class StreamDecoder:
    """Decode ids one at a time; what is given out, joined, equals decoding them at once."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        # Holds back an unfinished character; what can no longer become one is U+FFFD, as in
        # bytes.decode(errors="replace").
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Take one id and return the text that is now certain, possibly none."""
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """Return what was held back, an unfinished character as U+FFFD, and start afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def encode_stream(
    pieces: Iterable[str],
    specials: frozenset[str],
    last_cut: Callable[[str, int, int], int],
    encode_parts: Callable[[list[str]], np.ndarray],
) -> Iterator[int]:
    """Encode pieces of a text as if they were joined, holding only what may still change.

    `encode_parts` takes texts with special tokens between them (the odd entries); `last_cut`
    finds the last place in a range where a text may be cut without changing its ids.
    """
    margin = max(map(len, specials), default=0)
    held: list[str] = []
    size, enough = 0, PIECE
    before = 0  # characters of all earlier pieces
    for piece in pieces:
        check_text(piece, before)
        before += len(piece)
        held.append(piece)
        size += len(piece)
        if size < enough:
            continue
        parts, rest = settled_specials("".join(held), specials)
        cut = last_cut(rest, 0, max(len(rest) - margin, 0))
        if parts or cut:
            yield from encode_parts([*parts, rest[:cut]]).tolist()
        held, size = [rest[cut:]], len(rest) - cut
        # A text that cannot be cut is looked at again only once it has doubled: linear in all.
        enough = max(PIECE, 2 * size)
    yield from encode_parts(split_at_specials("".join(held), specials)).tolist()
