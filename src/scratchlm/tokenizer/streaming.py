"""Text out of a stream of ids, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable


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
