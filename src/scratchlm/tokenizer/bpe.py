"""The byte-level BPE tokenizer: text to ids and back.

encode: text → (special tokens | text between them) → words (`patterns.py`) → merged bytes → ids.
decode: ids → bytes, joined → text. Every byte is in the vocabulary, so every text has ids and
`decode(encode(text)) == text`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import regex

from scratchlm.tokenizer.merging import merge_word
from scratchlm.tokenizer.patterns import PATTERNS, compile_pattern, pattern_name, split_words
from scratchlm.tokenizer.streaming import StreamDecoder

Allowed = Literal["all"] | Collection[str]


class Tokenizer:
    """Byte-level BPE over a vocabulary, a list of merges, special tokens and a pattern."""

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str] | None = None,
        pattern: str = "gpt2",
    ) -> None:
        compile_pattern(pattern)
        self.pattern = pattern_name(pattern) or pattern
        self.vocab = dict(vocab)
        self.merges = [(left, right) for left, right in merges]
        self.special_tokens: dict[str, int] = {}
        id_of = {token: i for i, token in self.vocab.items()}
        for token in special_tokens or ():
            if token.encode() not in id_of:
                new = max(self.vocab) + 1
                self.vocab[new] = token.encode()
                id_of[token.encode()] = new
            self.special_tokens[token] = id_of[token.encode()]
        self._byte_ids = [id_of[bytes([byte])] for byte in range(256)]
        self._table = {
            (id_of[left], id_of[right]): (rank, id_of[left + right])
            for rank, (left, right) in enumerate(self.merges)
        }

    @property
    def vocab_size(self) -> int:
        """The number of ids: the greatest one plus one."""
        return max(self.vocab) + 1

    def encode(self, text: str, *, allowed_special: Allowed = "all") -> list[int]:
        """Turn a text into ids; only the special tokens in `allowed_special` count as such."""
        ids: list[int] = []
        allowed = self._allowed(allowed_special)
        parts = [text]
        if allowed:
            longest = sorted(allowed, key=len, reverse=True)
            parts = regex.split("(" + "|".join(map(regex.escape, longest)) + ")", text)
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self.special_tokens[part])
                continue
            for word in split_words(part, self.pattern):
                ids += merge_word([self._byte_ids[b] for b in word.encode("utf-8")], self._table)
        return ids

    def encode_array(self, text: str, *, allowed_special: Allowed = ()) -> np.ndarray:
        """Turn a text into ids, as an array: the fast entry for much text."""
        return np.asarray(self.encode(text, allowed_special=allowed_special), dtype=np.uint32)

    def encode_iterable(
        self, pieces: Iterable[str], *, allowed_special: Allowed = "all"
    ) -> Iterator[int]:
        """Yield the ids of the pieces joined, wherever they are cut."""
        yield from self.encode("".join(pieces), allowed_special=allowed_special)

    def decode(self, ids: Iterable[int]) -> str:
        """Turn ids into text; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Turn ids into bytes."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, token: int) -> bytes:
        """Give the bytes of one id."""
        found = self.vocab.get(token)
        if found is None:
            raise ValueError(f"token id must be in the vocabulary of {self.vocab_size}; got {token}")
        return found

    def stream_decoder(self) -> StreamDecoder:
        """Decode ids as they come, never half a character."""
        return StreamDecoder(self.token_bytes)

    def fingerprint(self) -> str:
        """Name this tokenizer by a SHA-256 over all that decides its ids."""
        identity = [
            [[i, self.vocab[i].hex()] for i in sorted(self.vocab)],
            [[left.hex(), right.hex()] for left, right in self.merges],
            PATTERNS.get(self.pattern, self.pattern),
            sorted(self.special_tokens.items()),
        ]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def _allowed(self, allowed_special: Allowed) -> list[str]:
        if allowed_special == "all":
            return list(self.special_tokens)
        unknown = [token for token in allowed_special if token not in self.special_tokens]
        if unknown:
            raise ValueError(f"allowed_special names {unknown[0]!r}, which is no special token here")
        return list(allowed_special)
