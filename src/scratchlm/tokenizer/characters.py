"""A character-level tokenizer: one id per character.

On disk it is a `tokenizer.json` of its own kind:
`{"type": "characters", "version": 1, "characters": [...], "special_tokens": [...]}`;
ids count through the characters in order, then through the special tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scratchlm.tokenizer.specials import Allowed, check_text, choose_allowed, split_at_specials
from scratchlm.tokenizer.streaming import StreamDecoder, encode_stream
from scratchlm.tokenizer.vocabulary import check_special_tokens

TYPE = "characters"


class CharTokenizer:
    """One id per character of a given alphabet; other characters are refused."""

    def __init__(
        self, characters: Sequence[str], special_tokens: Sequence[str] | None = None
    ) -> None:
        self.characters = list(characters)
        seen: set[str] = set()
        for character in self.characters:
            if not isinstance(character, str) or len(character) != 1:
                raise ValueError(f"a character must be a string of length 1; got {character!r:.60}")
            check_text(character)
            if character in seen:
                raise ValueError(f"character {character!r} is there twice")
            seen.add(character)
        tokens = check_special_tokens(special_tokens or ())
        for token in seen.intersection(tokens):
            raise ValueError(f"special token {token!r} is also a character")
        if not self.characters and not tokens:
            raise ValueError("a character tokenizer needs at least one character")
        n = len(self.characters)
        self.special_tokens = {token: n + i for i, token in enumerate(tokens)}
        self._text = [*self.characters, *tokens]
        codes = np.array([ord(c) for c in self.characters], dtype=np.int64)
        self._ids = np.full(int(codes.max(initial=0)) + 2, -1, dtype=np.int64)  # last: unknown
        self._ids[codes] = np.arange(n)

    @classmethod
    def of_text(
        cls, texts: Iterable[str], special_tokens: Sequence[str] | None = None
    ) -> CharTokenizer:
        """Build the alphabet from the characters that occur in texts, sorted."""
        seen: set[str] = set()
        tokens = frozenset(check_special_tokens(special_tokens or ()))
        for text in texts:
            check_text(text)
            for part in split_at_specials(text, tokens)[::2]:
                seen.update(part)
        return cls(sorted(seen), special_tokens)

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return len(self._text)

    @property
    def vocab(self) -> dict[int, bytes]:
        """The bytes of each id."""
        return {i: text.encode("utf-8") for i, text in enumerate(self._text)}

    def encode(self, text: str, *, allowed_special: Allowed = "all") -> list[int]:
        """Encode a text to ids; a character outside the alphabet is refused."""
        return self.encode_array(text, allowed_special=allowed_special).tolist()

    def encode_array(self, text: str, *, allowed_special: Allowed = ()) -> np.ndarray:
        """Encode a text to an array of uint32 ids."""
        check_text(text)
        tokens = choose_allowed(allowed_special, self.special_tokens)
        return self._encode_parts(split_at_specials(text, tokens))

    def encode_batch(
        self, texts: Sequence[str], *, allowed_special: Allowed = ()
    ) -> list[np.ndarray]:
        """Encode each of many texts."""
        return [self.encode_array(text, allowed_special=allowed_special) for text in texts]

    def encode_iterable(
        self, pieces: Iterable[str], *, allowed_special: Allowed = "all"
    ) -> Iterator[int]:
        """Yield the ids of the pieces joined, wherever they are cut, in constant memory."""
        tokens = choose_allowed(allowed_special, self.special_tokens)
        return encode_stream(pieces, tokens, lambda text, low, high: high, self._encode_parts)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text."""
        return "".join(map(self._text_of, ids))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decode ids to the bytes of their text."""
        return self.decode(ids).encode("utf-8")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id."""
        return self._text_of(token).encode("utf-8")

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder for ids as they arrive."""
        return StreamDecoder(self.token_bytes)

    def fingerprint(self) -> str:
        """Return a SHA-256 over everything that determines the ids."""
        return hashlib.sha256(json.dumps(to_json(self), sort_keys=True).encode()).hexdigest()

    def save(self, directory: str | Path) -> Path:
        """Write `tokenizer.json` into a directory, whole or not at all; return its path."""
        from scratchlm.tokenizer.files import write_tokenizer_json

        return write_tokenizer_json(directory, to_json(self))

    def _text_of(self, token: int) -> str:
        is_id = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not is_id or not 0 <= token < len(self._text):
            raise ValueError(f"token id must be from 0 to {len(self._text) - 1}; got {token!r}")
        return self._text[token]

    def _encode_parts(self, parts: list[str]) -> np.ndarray:
        ids = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(np.array([self.special_tokens[part]], dtype=np.uint32))
            else:
                ids.append(self._encode_text(part))
        return np.concatenate(ids)

    def _encode_text(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = self._ids[np.minimum(codes, len(self._ids) - 1)]
        unknown = np.flatnonzero(ids < 0)
        if len(unknown):
            raise ValueError(
                f"character {text[unknown[0]]!r} is not among the tokenizer's "
                f"{len(self.characters)} characters"
            )
        return ids.astype(np.uint32)


def to_json(tokenizer: CharTokenizer) -> dict[str, Any]:
    """Write a character tokenizer as plain values."""
    return {
        "type": TYPE,
        "version": 1,
        "characters": tokenizer.characters,
        "special_tokens": list(tokenizer.special_tokens),
    }


def from_json(data: dict[str, Any]) -> CharTokenizer:
    """Read what `to_json` wrote."""
    unknown = sorted(set(data) - {"type", "version", "characters", "special_tokens"})
    if unknown:
        raise ValueError(f"a character tokenizer has no field {unknown[0]!r:.60}")
    if data.get("version") != 1:
        raise ValueError(f"version must be 1; got {data.get('version')!r:.60}")
    for field in ("characters", "special_tokens"):
        if not isinstance(data.get(field), list):
            raise TypeError(f"{field} must be a list; got {data.get(field)!r:.60}")
    return CharTokenizer(data["characters"], data["special_tokens"])
