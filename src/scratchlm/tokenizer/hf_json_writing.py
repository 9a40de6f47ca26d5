"""Write our Tokenizer as a `tokenizer.json` that Hugging Face's `tokenizers` reads alike."""

from __future__ import annotations

from typing import Any

from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.tokenizer.bytelevel import to_characters
from scratchlm.tokenizer.patterns import PATTERNS


def to_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """Write a tokenizer as the content of a `tokenizer.json` that `tokenizers` reads alike."""
    whole = sorted(
        {**tokenizer.special_tokens, **tokenizer.added_tokens}.items(), key=lambda t: t[1]
    )
    whole_ids = {i for _, i in whole}
    vocab = {
        to_characters(piece): i
        for i, piece in sorted(tokenizer.vocab.items())
        if i not in whole_ids
    }
    # `tokenizers` numbers added tokens on from the model's vocabulary, unless it holds them.
    if [i for _, i in whole] != list(range(len(vocab), len(vocab) + len(whole))):
        for token, i in whole:
            if token in vocab:
                raise ValueError(
                    f"special token {token!r} cannot be written to tokenizer.json: ordinary token "
                    f"{vocab[token]} is written the same way"
                )
            vocab[token] = i
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if tokenizer.pattern == "gpt2":
        pre: dict[str, Any] = {**level, "use_regex": True}
    else:
        text = PATTERNS.get(tokenizer.pattern, tokenizer.pattern)
        split = {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated"}
        steps = [{**split, "invert": False}, {**level, "use_regex": False}]
        pre = {"type": "Sequence", "pretokenizers": steps}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": token in tokenizer.special_tokens}
            for token, i in whole
        ],
        "normalizer": {"type": "NFC"} if tokenizer.normalization else None,
        "pre_tokenizer": pre,
        "post_processor": _template_json(tokenizer, {**level, "use_regex": True}),
        "decoder": {**level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": tokenizer.ignore_merges,
            "vocab": vocab,
            "merges": [[to_characters(a), to_characters(b)] for a, b in tokenizer.merges],
        },
    }


def _template_json(tokenizer: Tokenizer, level: dict[str, Any]) -> dict[str, Any]:
    before, after = tokenizer.template
    if not before and not after:
        return level
    name = {i: token for token, i in {**tokenizer.special_tokens, **tokenizer.added_tokens}.items()}
    special = {name[i]: {"id": name[i], "ids": [i], "tokens": [name[i]]} for i in (*before, *after)}

    def side(ids: tuple[int, ...], type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": name[i], "type_id": type_id}} for i in ids]

    def text(which: str, type_id: int) -> list[dict[str, Any]]:
        return [{"Sequence": {"id": which, "type_id": type_id}}]

    single = [*side(before, 0), *text("A", 0), *side(after, 0)]
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *side(before, 1), *text("B", 1), *side(after, 1)],
        "special_tokens": special,
    }
    return {"type": "Sequence", "processors": [level, template]}
