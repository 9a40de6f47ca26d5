"""Prompts (texts, ids, tensors) converted to rows of token ids."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.tokenizer.files import AnyTokenizer

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor

END_OF_TEXT = "<|endoftext|>"


def prompt_rows(
    prompts: Prompts, tokenizer: AnyTokenizer | None, vocab_size: int
) -> list[list[int]]:
    """Return one list of ids per prompt: a text, texts, ids, or rows of ids of any lengths."""
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    items = [prompts] if isinstance(prompts, str) else list(prompts)
    if items and not any(isinstance(item, str | Sequence | Tensor) for item in items):
        items = [items]  # one prompt, as ids
    if not items:
        raise ValueError("prompts must hold at least one prompt; got none")
    rows = [_row(item, tokenizer) for item in items]
    for row in rows:
        if set(map(type, row)) == {int} and min(row) >= 0 and max(row) < vocab_size:
            continue  # as below, at the speed of C
        for token in row:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"a prompt must be text or token ids; got {token!r:.60}")
            if not 0 <= token < vocab_size:
                raise ValueError(f"token id must lie in [0, {vocab_size}); got {token}")
    return rows


def _row(item: object, tokenizer: AnyTokenizer | None) -> list[int]:
    if isinstance(item, str):
        if tokenizer is None:
            raise ValueError("a prompt of text needs a tokenizer; got none")
        return encode_prompt(tokenizer, item)
    if isinstance(item, Tensor):
        item = item.tolist()
    if not isinstance(item, Sequence):
        raise TypeError(f"a prompt must be text or token ids; got {item!r:.60}")
    if not item:
        raise ValueError("a prompt must hold at least one token; got an empty one")
    return list(item)


def encode_prompt(tokenizer: AnyTokenizer, text: str) -> list[int]:
    """Encode a text to be continued.

    The prefix of the tokenizer's template (Llama's begin-of-text) is prepended. A text that
    encodes to no ids starts from end-of-text, as a new document does in training.
    """
    before = tokenizer.template[0] if isinstance(tokenizer, Tokenizer) else ()
    ids = [*before, *tokenizer.encode(text)]
    if not ids and END_OF_TEXT in tokenizer.special_tokens:
        ids = [tokenizer.special_tokens[END_OF_TEXT]]
    if not ids:
        raise ValueError("a prompt must hold at least one token; got an empty text")
    return ids


def default_eos_ids(tokenizer: AnyTokenizer | None) -> tuple[int, ...]:
    """Return the id of `<|endoftext|>`, where the tokenizer has it."""
    if tokenizer is None or END_OF_TEXT not in tokenizer.special_tokens:
        return ()
    return (tokenizer.special_tokens[END_OF_TEXT],)
