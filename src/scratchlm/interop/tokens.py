"""The end-of-text tokens of a tokenizer.json, for tools that generate elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scratchlm.untrusted import MAX_TOKENIZER_BYTES, read_json

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class EndTokens:
    """The tokens that end a text, the text of the first, and whose format the tokenizer has."""

    ids: tuple[int, ...]
    text: str | None
    is_hugging_face: bool


def end_tokens(tokenizer_file: str | os.PathLike[str] | None, ids: Sequence[int] = ()) -> EndTokens:
    """Find the end-of-text token: the ids given, else the one named `<|endoftext|>`."""
    if tokenizer_file is None:
        return EndTokens(tuple(ids), None, False)
    table = read_json(Path(tokenizer_file), MAX_TOKENIZER_BYTES)
    added = table.get("added_tokens")
    by_text = {
        token["content"]: token["id"]
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and type(token.get("id")) is int
    }
    if not ids and END_OF_TEXT in by_text:
        ids = (by_text[END_OF_TEXT],)
    text = next((text for text, token in by_text.items() if ids and token == ids[0]), None)
    return EndTokens(tuple(ids), text, "model" in table)


def tokenizer_config(end: EndTokens, context_length: int) -> dict[str, Any]:
    """Write the tokenizer_config.json that lets transformers load a bare tokenizer.json."""
    table = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context_length}
    return table if end.text is None else {**table, "eos_token": end.text}
