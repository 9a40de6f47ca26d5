"""Texts for task heads as ids: a text to be classified; a question and the text it is about.

A head reads what its token has seen, which is what stands before it: the question comes first.

    classification   [begin-of-text] text
    qa               [begin-of-text] question \\n context
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scratchlm.tokenizer.bpe import Tokenizer


@dataclass(frozen=True)
class QuestionInput:
    """The ids of a question and its context, and the bytes of the context each token stands for."""

    ids: list[int]
    first: int  # the context's first token
    ends: list[int]  # after each of the context's tokens, in bytes
    context: bytes

    def tokens_of(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and the last token that hold bytes of the context's [start, end)."""
        begins = [0, *self.ends[:-1]]
        first = next(i for i, token_end in enumerate(self.ends) if token_end > start)
        last = max(i for i, begin in enumerate(begins) if begin < end)
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
    ids, ends, at = tokenizer.encode(context, allowed_special=()), [], 0
    if not ids:
        raise ValueError("a context must hold at least one token; got an empty one")
    for token in ids:
        at += len(tokenizer.decode_bytes([token]))
        ends.append(at)
    return QuestionInput([*asked, *ids], len(asked), ends, context.encode())
