"""The byte-level BPE tokenizer: text to ids and back.

encode: text → (special tokens | text between them) → words (`patterns.py`) → merged bytes → ids.
decode: ids → bytes, joined → text. Every byte is in the vocabulary, so every text has ids and
`decode(encode(text)) == text`.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from scratchlm.tokenizer.merging import Merger
from scratchlm.tokenizer.patterns import PATTERNS, compile_pattern, pattern_name
from scratchlm.tokenizer.specials import Allowed, check_text, choose_allowed, split_at_specials
from scratchlm.tokenizer.splitting import RULES, last_cut
from scratchlm.tokenizer.streaming import StreamDecoder, encode_stream
from scratchlm.tokenizer.vocabulary import add_special_tokens, check_merges, check_vocab
from scratchlm.tokenizer.wordcache import WordCache


class Tokenizer:
    """Byte-level BPE over a vocabulary, a list of merges, special tokens and a pattern.

    - `special_tokens`: those missing from `vocab` get new ids at its end; a mapping names the ids.
    - `added_tokens`: whole tokens found in any text, allowed or not (Hugging Face's added tokens
      that are not special).
    - `normalization`: None, or "NFC" as Qwen2 has it.
    - `ignore_merges`: a word that is in the vocabulary is that token, whatever the merges say
      (tiktoken, Llama 3).
    - `template`: ids that `encode(…, add_special_tokens=True)` puts before and after a text.
    """

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str] | Mapping[str, int] | None = None,
        pattern: str = "gpt2",
        *,
        added_tokens: Mapping[str, int] | None = None,
        normalization: str | None = None,
        ignore_merges: bool = False,
        template: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        compile_pattern(pattern)
        self.pattern = pattern_name(pattern) or pattern
        if normalization not in (None, "NFC"):
            raise ValueError(f"normalization must be None or NFC; got {normalization!r}")
        self.normalization = normalization
        self.ignore_merges = ignore_merges
        self.vocab = dict(vocab)
        self.special_tokens = add_special_tokens(self.vocab, special_tokens or ())
        self.added_tokens = add_special_tokens(self.vocab, added_tokens or {})
        whole = {**self.added_tokens, **self.special_tokens}
        if len(whole) < len(self.added_tokens) + len(self.special_tokens):
            twice = next(iter(set(self.added_tokens) & set(self.special_tokens)))
            raise ValueError(f"token {twice!r} must be special or added, not both")
        self._whole = whole
        id_of = check_vocab(self.vocab, whole)
        self.merges, table = check_merges(merges, id_of)
        self.template = (tuple(template[0]), tuple(template[1]))
        for token in chain(*self.template):
            self.token_bytes(token)
        self._merger = Merger(id_of, table, ignore_merges)
        self._cache = WordCache(self._merger.merge_many, self.pattern)
        self._lock = threading.Lock()  # the cache changes while it encodes

    @property
    def vocab_size(self) -> int:
        """The number of ids: the largest one plus one."""
        return max(self.vocab) + 1

    def encode(
        self, text: str, *, allowed_special: Allowed = "all", add_special_tokens: bool = False
    ) -> list[int]:
        """Encode a text to ids.

        Only the special tokens in `allowed_special` count as such; others are ordinary text.
        `add_special_tokens` puts the template's ids around it.
        """
        ids = self.encode_array(text, allowed_special=allowed_special).tolist()
        if add_special_tokens:
            before, after = self.template
            return [*before, *ids, *after]
        return ids

    def encode_array(self, text: str, *, allowed_special: Allowed = ()) -> np.ndarray:
        """Encode a text to an array of uint32 ids: the fast entry point for much text."""
        check_text(text)
        return self._encode_parts(split_at_specials(text, self._found_whole(allowed_special)))

    def encode_batch(
        self, texts: Sequence[str], *, allowed_special: Allowed = ()
    ) -> list[np.ndarray]:
        """Encode each of many texts, faster than one after the other where they are short."""
        if self._found_whole(allowed_special):
            return [self.encode_array(text, allowed_special=allowed_special) for text in texts]
        for text in texts:
            check_text(text)
        ids, ends = self._encode_texts(list(texts))
        return np.split(ids, ends[:-1]) if len(texts) else []

    def encode_bytes(self, data: bytes) -> list[int]:
        """Encode bytes to ids that decode to them; invalid UTF-8 is merged as it is."""
        text = data.decode("utf-8", errors="surrogateescape")
        parts = re.split("([\udc80-\udcff]+)", text)  # the odd ones are invalid UTF-8
        texts = np.split(*self._encode_texts(parts[::2]))
        ids = texts[0].tolist()
        for text_ids, part in zip(texts[1:], parts[1::2], strict=False):
            ids += self._merger.merge(part.encode("utf-8", errors="surrogateescape"))
            ids += text_ids.tolist()
        return ids

    def encode_iterable(
        self, pieces: Iterable[str], *, allowed_special: Allowed = "all"
    ) -> Iterator[int]:
        """Yield the ids of the pieces joined, wherever they are cut, in constant memory.

        The text since the last safe cut is held back. With an unnamed pattern, the only safe cuts
        are special tokens.
        """
        tokens = self._found_whole(allowed_special)
        return encode_stream(pieces, tokens, self._last_cut, self._encode_parts)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to text; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decode ids to bytes."""
        listed = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        try:
            return b"".join([self.vocab[token] for token in listed])
        except (KeyError, TypeError):
            return b"".join(map(self.token_bytes, listed))  # names the one that is wrong

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id."""
        found = self.vocab.get(token) if isinstance(token, int | np.integer) else None
        if found is None:
            raise ValueError(
                f"token id must be one of the vocabulary's {len(self.vocab)}; got {token!r}"
            )
        return found

    def stream_decoder(self) -> StreamDecoder:
        """Return a decoder for ids as they arrive, which never yields half a character."""
        return StreamDecoder(self.token_bytes)

    def fingerprint(self) -> str:
        """Return a SHA-256 over everything that determines the ids."""
        identity = {
            "vocab": [[i, self.vocab[i].hex()] for i in sorted(self.vocab)],
            "merges": [[left.hex(), right.hex()] for left, right in self.merges],
            "pattern": PATTERNS.get(self.pattern, self.pattern),
            "special_tokens": sorted(self.special_tokens.items()),
            "added_tokens": sorted(self.added_tokens.items()),
            "normalization": self.normalization,
            "ignore_merges": self.ignore_merges,
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def save(self, directory: str | Path) -> Path:
        """Write `tokenizer.json` into a directory, whole or not at all; return its path."""
        from scratchlm.tokenizer.files import write_tokenizer_json
        from scratchlm.tokenizer.hf_json_writing import to_json

        return write_tokenizer_json(directory, to_json(self))

    def to_bytes(self) -> bytes:
        """Return what a `tokenizer.json` of this tokenizer holds."""
        from scratchlm.tokenizer.hf_json_writing import to_json

        return (json.dumps(to_json(self), ensure_ascii=False) + "\n").encode()

    def __reduce__(self) -> tuple[object, ...]:
        # Pickle without the cache and its lock.
        options = {
            "added_tokens": self.added_tokens,
            "normalization": self.normalization,
            "ignore_merges": self.ignore_merges,
            "template": self.template,
        }
        return _rebuild, (self.vocab, self.merges, self.special_tokens, self.pattern, options)

    def _found_whole(self, allowed_special: Allowed) -> frozenset[str]:
        return choose_allowed(allowed_special, self.special_tokens) | frozenset(self.added_tokens)

    def _encode_parts(self, parts: list[str]) -> np.ndarray:
        """Encode texts with whole tokens between them: the odd entries."""
        ids, ends = self._encode_texts(parts[::2])
        if len(parts) == 1:
            return ids
        return np.insert(
            ids, ends[: len(parts) // 2], [self._whole[token] for token in parts[1::2]]
        )

    def _encode_texts(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts: all their ids, concatenated, and where each one's end."""
        if self.normalization:
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        with self._lock:
            return self._cache.encode(texts)

    def _last_cut(self, text: str, low: int, high: int) -> int:
        return last_cut(text, low, high) if self.pattern in RULES else low


def _rebuild(
    vocab: dict[int, bytes],
    merges: list[tuple[bytes, bytes]],
    special_tokens: dict[str, int],
    pattern: str,
    options: dict[str, Any],
) -> Tokenizer:
    return Tokenizer(vocab, merges, special_tokens, pattern, **options)
