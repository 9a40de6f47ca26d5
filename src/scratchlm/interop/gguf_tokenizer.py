"""GGUF's tokenizer keys ↔ our byte-level BPE.

A file names its pre-tokenizer by a word, which stands for a pattern and for whether a word that is
a token is left unmerged. Ordinary tokens are written in GPT-2's characters for bytes, special and
added ones as they are. llama.cpp normalises nothing: that Qwen's tokenizer does (NFC) is a key of
our own, and in files by others part of the word `qwen2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scratchlm.interop.gguf_config import Keys, cannot_say
from scratchlm.interop.gguf_types import ARRAY, BOOL, INT32, STRING, UINT32
from scratchlm.tokenizer import Tokenizer
from scratchlm.tokenizer.bytelevel import from_characters, to_characters
from scratchlm.tokenizer.chat_template import ChatTemplate
from scratchlm.tokenizer.merging import Merger
from scratchlm.tokenizer.vocabulary import check_merges, check_vocab
from scratchlm.untrusted import shown

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
_PREFIX = "tokenizer.ggml."
_NORMALIZATION = "scratchlm.tokenizer.normalization"
_TEMPLATE, _TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"


@dataclass(frozen=True)
class _Pre:
    """What a pre-tokenizer's word stands for."""

    pattern: str
    ignore_merges: bool = False
    normalization: str | None = None  # of the models that have it
    adds_bos: bool = False  # where the file does not say


# The first of a kind is the one we write.
_PRES = {
    "gpt-2": _Pre("gpt2"),
    "llama-bpe": _Pre("llama3", ignore_merges=True, adds_bos=True),
    "smaug-bpe": _Pre("llama3"),
    "qwen2": _Pre("qwen2", normalization="NFC"),
    **dict.fromkeys(("phi-2", "jina-es", "jina-de", "mpt", "olmo", "gigachat"), _Pre("gpt2")),
    **dict.fromkeys(("llama3", "llama-v3"), _Pre("llama3", ignore_merges=True, adds_bos=True)),
    "dbrx": _Pre("llama3"),
}
_MAX_TEMPLATE = 1 << 20
# The kinds of token that end a text, of which llama.cpp has three.
_ENDS = ("eos", "eot", "eom")


@dataclass(frozen=True)
class FoundTokenizer:
    """The tokenizer of a file, or why there is none; the tokens that end a text; the template."""

    tokenizer: Tokenizer | None
    problem: str
    eos_token_ids: tuple[int, ...]
    chat_template: ChatTemplate | None


# Writing


def tokenizer_keys(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    chat_template: ChatTemplate | None = None,
) -> Keys:
    """Write a tokenizer, padded to the rows of the model's embedding; refuse what GGUF lacks."""
    if tokenizer is None:
        return {_PREFIX + "model": (STRING, "no_vocab")}
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model only {vocab_size}"
        )
    tokens, types = _tokens(tokenizer, vocab_size)
    merges = [f"{to_characters(left)} {to_characters(right)}" for left, right in tokenizer.merges]
    keys: Keys = {
        _PREFIX + "model": (STRING, "gpt2"),
        _PREFIX + "pre": (STRING, _pre_word(tokenizer)),
        _PREFIX + "tokens": (ARRAY, (STRING, tokens)),
        _PREFIX + "token_type": (ARRAY, (INT32, types)),
        _PREFIX + "merges": (ARRAY, (STRING, merges)),
        **_end_keys(tokenizer, eos_token_ids),
        _NORMALIZATION: (STRING, tokenizer.normalization or "none"),
    }
    return keys | ({} if chat_template is None else _template_keys(chat_template))


def _template_keys(chat_template: ChatTemplate) -> Keys:
    named = dict(chat_template.templates)
    default = {_TEMPLATE: (STRING, named.pop("default"))} if "default" in named else {}
    if not named:
        return default
    others = {f"{_TEMPLATE}.{name}": (STRING, text) for name, text in named.items()}
    return {_TEMPLATES: (ARRAY, (STRING, list(named))), **others, **default}


def _tokens(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[str], list[int]]:
    whole = {i: text for text, i in tokenizer.added_tokens.items()}
    special = {i: text for text, i in tokenizer.special_tokens.items()}
    tokens, types = [], []
    for i in range(vocab_size):
        if i in special:
            text, kind = special[i], CONTROL
        elif i in whole:
            text, kind = whole[i], USER_DEFINED
        elif i in tokenizer.vocab:
            text, kind = to_characters(tokenizer.vocab[i]), NORMAL
        else:
            text, kind = f"[PAD{i}]", UNUSED
        tokens.append(text)
        types.append(kind)
    if len(set(tokens)) != len(tokens):
        twice = next(text for n, text in enumerate(tokens) if text in tokens[:n])
        raise cannot_say(f"two tokens that are both written {shown(twice)}")
    return tokens, types


def _pre_word(tokenizer: Tokenizer) -> str:
    """Return the word for the tokenizer's pattern and its use of merges."""
    words = [word for word, pre in _PRES.items() if pre.pattern == tokenizer.pattern]
    for word in words:
        if _PRES[word].ignore_merges == tokenizer.ignore_merges:
            return word
    if words and _merges_make_every_token(tokenizer):
        return words[0]
    also = " and ignore_merges" if tokenizer.ignore_merges else ""
    raise cannot_say(f"pre-tokenizer with the pattern {shown(tokenizer.pattern)}{also}")


def _merges_make_every_token(tokenizer: Tokenizer) -> bool:
    """Whether `ignore_merges` makes no difference: each token's bytes merge to that token."""
    whole = {**tokenizer.added_tokens, **tokenizer.special_tokens}
    id_of = check_vocab(tokenizer.vocab, whole)
    merger = Merger(id_of, check_merges(tokenizer.merges, id_of)[1], ignore_merges=False)
    return all(merger.merge(piece) == [i] for piece, i in id_of.items())


def _end_keys(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> Keys:
    """Write the tokens that begin and end a text, and whether they are put there."""
    before, after = tokenizer.template
    ends = list(dict.fromkeys((*after, *eos_token_ids)))
    if len(before) > 1 or len(after) > 1:
        raise cannot_say("template of more than one token before or after a text")
    if not ends:
        # llama.cpp then takes token 11 for the end of a text
        raise cannot_say("tokenizer without an end-of-text token")
    if len(ends) > len(_ENDS):
        raise cannot_say(f"more than {len(_ENDS)} tokens that end a text; got {ends}")
    ids = {f"{_PREFIX}{end}_token_id": i for end, i in zip(_ENDS, ends, strict=False)}
    ids[f"{_PREFIX}bos_token_id"] = before[0] if before else ends[0]
    return {
        **{key: (UINT32, i) for key, i in ids.items()},
        _PREFIX + "add_bos_token": (BOOL, bool(before)),
        _PREFIX + "add_eos_token": (BOOL, bool(after)),
    }


# Reading


def read_tokenizer(metadata: Mapping[str, Any]) -> FoundTokenizer:
    """Read a file's tokenizer; one that we do not have is a reason, not an error."""
    texts = metadata.get(_PREFIX + "tokens")
    texts = texts if isinstance(texts, list) else []
    ends = tuple(dict.fromkeys(_id(metadata, end, texts) for end in _ENDS if _has(metadata, end)))
    tokenizer, problem = None, "the model came without one"
    if metadata.get(_PREFIX + "model", "no_vocab") not in ("no_vocab", "none"):
        try:
            tokenizer, problem = _read(metadata, texts, ends), ""
        except (ValueError, TypeError, OverflowError) as error:
            problem = " ".join(str(error).split())
    return FoundTokenizer(tokenizer, problem, ends, _read_templates(metadata, texts))


def _read_templates(metadata: Mapping[str, Any], texts: list[str]) -> ChatTemplate | None:
    templates = {
        key.removeprefix(_TEMPLATE).removeprefix(".") or "default": text
        for key, text in metadata.items()
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")
    }
    if any(not isinstance(text, str) or len(text) > _MAX_TEMPLATE for text in templates.values()):
        raise ValueError(f"{_TEMPLATE} must be a text of at most {_MAX_TEMPLATE:,} characters")
    if not templates:
        return None
    tokens = {
        f"{name}_token": texts[_id(metadata, name, texts)]
        for name in ("bos", "eos")
        if _has(metadata, name) and texts
    }
    return ChatTemplate(templates, tokens)


def _has(metadata: Mapping[str, Any], name: str) -> bool:
    return f"{_PREFIX}{name}_token_id" in metadata


def _id(metadata: Mapping[str, Any], name: str, texts: list[str]) -> int:
    value = metadata[f"{_PREFIX}{name}_token_id"]
    if type(value) is not int or not 0 <= value < (len(texts) or 1 << 31):
        raise ValueError(f"{_PREFIX}{name}_token_id must be a token's id; got {shown(value)}")
    return value


def _read(metadata: Mapping[str, Any], texts: list[str], ends: tuple[int, ...]) -> Tokenizer:
    def key(name: str, default: Any = None) -> Any:
        return metadata.get(_PREFIX + name, default)

    if key("model") != "gpt2":
        raise ValueError(f"{_PREFIX}model {shown(key('model'))} is not supported; only gpt2 is")
    pre = _PRES.get(key("pre", "default"))
    if pre is None:
        words = ", ".join(_PRES)
        raise ValueError(f"{_PREFIX}pre must be one of {words}; got {shown(key('pre'))}")
    if not texts or not isinstance(key("merges"), list):
        raise ValueError(f"{_PREFIX}tokens and {_PREFIX}merges must be lists of texts")
    for flag in ("add_space_prefix", "add_sep_token"):
        if key(flag, False) is not False:
            raise ValueError(f"{_PREFIX}{flag} is not supported")
    vocab, special, added = _vocab(texts, key("token_type"))
    before = [_id(metadata, "bos", texts)] if _flag(key("add_bos_token", pre.adds_bos)) else []
    after = list(ends[:1]) if _flag(key("add_eos_token", False)) else []
    normalization = metadata.get(_NORMALIZATION, pre.normalization)
    return Tokenizer(
        vocab,
        [_merge(line) for line in key("merges")],
        special,
        pre.pattern,
        added_tokens=added,
        normalization=None if normalization == "none" else normalization,
        ignore_merges=pre.ignore_merges,
        template=(before, after),
    )


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{_PREFIX}add_bos_token must be true or false; got {shown(value)}")
    return value


def _vocab(texts: list[str], types: Any) -> tuple[dict[int, bytes], dict[str, int], dict[str, int]]:
    """Read the tokens by their types: ordinary, special, added; unused ids are left out."""
    if (
        not isinstance(types, np.ndarray)
        or len(types) != len(texts)
        or types.dtype.kind not in "iu"
    ):
        raise ValueError(f"{_PREFIX}token_type must hold a number for each of {len(texts)} tokens")
    vocab: dict[int, bytes] = {}
    special: dict[str, int] = {}
    added: dict[str, int] = {}
    for i, (text, kind) in enumerate(zip(texts, types.tolist(), strict=True)):
        if kind == UNUSED:
            continue
        if kind == NORMAL:
            vocab[i] = from_characters(text)
        elif kind in (CONTROL, UNKNOWN, USER_DEFINED):
            table = added if kind == USER_DEFINED else special
            if text in table:
                raise ValueError(f"token {shown(text)} is there twice")
            table[text] = i
        else:
            raise ValueError(f"token {i} has the type {kind}, which is not supported")
    return vocab, special, added


def _merge(line: str) -> tuple[bytes, bytes]:
    left, space, right = line.partition(" ")
    if not left or not space or not right or " " in right:
        raise ValueError(f"a merge must be two tokens; got {shown(line)}")
    return from_characters(left), from_characters(right)
