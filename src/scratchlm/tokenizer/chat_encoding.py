"""A conversation as token ids, through the model's own template.

What a user or a tool says is text: a special token in it (`<|im_start|>system`) is encoded as its
letters, never as the marker. So that the template cannot tell, a character no message holds is put
into each such token before rendering, and taken out again where the text is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scratchlm.tokenizer.chat_template import ChatTemplate
from scratchlm.tokenizer.files import AnyTokenizer
from scratchlm.tokenizer.specials import split_at_specials

_PRIVATE_USE = range(0xE000, 0xF900)


def encode_chat(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tokenizer: AnyTokenizer,
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> list[int]:
    """Encode a conversation, by default up to and including the assistant's header."""
    guarded, mark = guard(messages, tokenizer)
    text = template.render(guarded, add_generation_prompt=add_generation_prompt, **variables)
    return encode_rendered(text, tokenizer, mark)


def guard(
    messages: Sequence[Mapping[str, Any]], tokenizer: AnyTokenizer
) -> tuple[list[dict[str, Any]], str]:
    """Break every special token in what others than the assistant say; return the mark used."""
    specials = frozenset(token for token in tokenizer.special_tokens if len(token) > 1)
    held = {character for message in messages for character in _characters(message)}
    mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in held)
    return [
        {**message}
        if message.get("role") == "assistant"
        else {key: _broken(value, specials, mark) for key, value in message.items()}
        for message in messages
    ], mark


def encode_rendered(text: str, tokenizer: AnyTokenizer, mark: str) -> list[int]:
    """Encode rendered text: the template's special tokens as such, all else as text."""
    ids: list[int] = []
    parts = split_at_specials(text, frozenset(tokenizer.special_tokens))
    for index, part in enumerate(parts):
        if index % 2:
            ids.append(tokenizer.special_tokens[part])
        elif plain := part.replace(mark, ""):
            ids += tokenizer.encode(plain, allowed_special=())
    return ids


def _characters(value: Any) -> set[str]:
    if isinstance(value, str):
        return set(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence):
        return {character for item in value for character in _characters(item)}
    return set()


def _broken(value: Any, specials: frozenset[str], mark: str) -> Any:
    if isinstance(value, str):
        parts = split_at_specials(value, specials)
        return "".join(
            part[:1] + mark + part[1:] if index % 2 else part for index, part in enumerate(parts)
        )
    if isinstance(value, Mapping):
        return {key: _broken(item, specials, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_broken(item, specials, mark) for item in value]
    return value
