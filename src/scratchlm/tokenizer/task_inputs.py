"""Texts for task heads as ids: a text to be classified; a question and the text it is about.

A head reads what its token has seen, which is what stands before it: the question comes first.

    classification   [begin-of-text] text
    qa               [begin-of-text] question \\n context
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unicodedata import combining, is_normalized, normalize

from scratchlm.tokenizer.bpe import Tokenizer

Span = tuple[int, int]


@dataclass(frozen=True)
class QuestionInput:
    """The ids of a question and its context, and the characters each token of the context holds.

    A token that holds a part of a character's bytes counts as holding it, as for Hugging Face's
    tokenizers: an answer is whole characters.
    """

    ids: list[int]
    first: int  # the context's first token
    spans: list[Span]  # of each of the context's tokens
    context: str

    def tokens_of(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and the last token that hold some of the context's [start, end)."""
        first = next(i for i, span in enumerate(self.spans) if span[1] > start)
        last = max(i for i, span in enumerate(self.spans) if span[0] < end)
        return self.first + first, self.first + last


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Encode a text to be classified."""
    before = tokenizer.template[0] if isinstance(tokenizer, Tokenizer) else ()
    ids = [*before, *tokenizer.encode(text, allowed_special=())]
    if len(ids) == len(before):
        raise ValueError("a text must hold at least one token; got an empty one")
    return ids


def question_ids(tokenizer: Any, question: str, context: str) -> QuestionInput:
    """Encode a question and the text that holds its answer."""
    asked = text_ids(tokenizer, question + "\n")
    ids, spans, at = tokenizer.encode(context, allowed_special=()), list[Span](), 0
    if not ids:
        raise ValueError("a context must hold at least one token; got an empty one")
    held = [span for char, span in _characters(tokenizer, context) for _ in char.encode()]
    for token in ids:
        size = len(tokenizer.decode_bytes([token]))
        spans.append((held[at][0], held[at + size - 1][1]))
        at += size
    return QuestionInput([*asked, *ids], len(asked), spans, context)


def _characters(tokenizer: Any, text: str) -> Iterator[tuple[str, Span]]:
    """Yield the characters a tokenizer encodes, and those of the text each came from."""
    if not getattr(tokenizer, "normalization", None) or is_normalized("NFC", text):
        yield from ((char, (at, at + 1)) for at, char in enumerate(text))
        return
    begin = 0
    for end in range(1, len(text) + 1):
        if end == len(text) or _begins_anew(text[end], text[begin:end]):
            yield from ((char, (begin, end)) for char in normalize("NFC", text[begin:end]))
            begin = end


def _begins_anew(char: str, before: str) -> bool:
    """Say whether a character is composed with nothing that stands before it."""
    if combining(char):
        return False
    apart = normalize("NFC", before) + normalize("NFC", char)
    return normalize("NFC", before + char) == apart
