"""Read Hugging Face's `tokenizer.json` as our Tokenizer.

Supports the files of GPT-2, Llama 3, Qwen2 and Qwen3. Any other option that would change ids is
refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.tokenizer.bytelevel import from_characters
from scratchlm.tokenizer.patterns import PATTERNS, pattern_name
from scratchlm.tokenizer.vocabulary import check_id

# The known fields of the file, section by section.
_TOP = {
    "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
    "post_processor", "decoder", "model",
}  # fmt: skip
_MODEL = {
    "type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
    "byte_fallback", "ignore_merges", "vocab", "merges",
}  # fmt: skip

_ADDED_TOKEN = {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"}


def from_json(data: Any) -> Tokenizer:
    """Build a tokenizer from the parsed content of a `tokenizer.json`."""
    top = _table(data, "tokenizer.json")
    _check_known_fields(top, _TOP, "tokenizer.json")
    for field in ("truncation", "padding"):
        if top.get(field) is not None:
            raise ValueError(f"{field} in tokenizer.json is not supported; it must be null")
    model = _model(top.get("model"))
    vocab_of = {token: check_id(i, repr(token)) for token, i in model["vocab"].items()}
    specials, added = _added_tokens(top.get("added_tokens"), vocab_of)
    _check_normalized_tokens(top)
    vocab: dict[int, bytes] = {}
    for token, i in vocab_of.items():
        whole = token in specials or token in added
        piece = token.encode("utf-8", "surrogatepass") if whole else from_characters(token)
        if i in vocab:
            raise ValueError(f"id {i} is given to both {vocab[i]!r:.60} and {piece!r:.60}")
        vocab[i] = piece
    return Tokenizer(
        vocab,
        [_merge(entry, n) for n, entry in enumerate(model["merges"])],
        specials,
        _pattern(top.get("pre_tokenizer")),
        added_tokens=added,
        normalization=_normalization(top.get("normalizer")),
        ignore_merges=model["ignore_merges"],
        template=_template(top, {**specials, **added}),
    )


def _model(data: Any) -> dict[str, Any]:
    model = _table(data, "model")
    kind = model.get("type", "BPE")
    if kind != "BPE":
        raise ValueError(f"model type {kind!r:.60} is not supported; only BPE is")
    _check_known_fields(model, _MODEL, "model")
    for field in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(field):
            raise ValueError(f"model.{field} = {model[field]!r:.60} is not supported")
    ignore = model.get("ignore_merges", False)
    if not isinstance(ignore, bool):
        raise TypeError(f"model.ignore_merges must be true or false; got {ignore!r:.60}")
    if not isinstance(model.get("merges"), list):
        raise TypeError("model.merges must be a list")
    vocab = _table(model.get("vocab"), "model.vocab")
    return {"vocab": vocab, "merges": model["merges"], "ignore_merges": ignore}


def _merge(entry: Any, n: int) -> tuple[bytes, bytes]:
    parts = entry.split(" ") if isinstance(entry, str) else entry
    if (
        not isinstance(parts, list)
        or len(parts) != 2
        or not all(isinstance(part, str) and part for part in parts)
    ):
        raise ValueError(f"merge {n} must be two tokens; got {entry!r:.60}")
    return from_characters(parts[0]), from_characters(parts[1])


def _added_tokens(data: Any, vocab: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Read the added tokens: the special ones, and the others."""
    specials: dict[str, int] = {}
    added: dict[str, int] = {}
    taken = set(vocab.values())
    following = len(vocab)
    for entry in _list(data, "added_tokens"):
        token = _table(entry, "an added token")
        _check_known_fields(token, _ADDED_TOKEN, "an added token")
        content = token.get("content")
        if not isinstance(content, str) or not content:
            raise ValueError(f"an added token's content must be a string; got {content!r:.60}")
        for flag in ("single_word", "lstrip", "rstrip"):
            if token.get(flag, False) is not False:
                raise ValueError(f"added token {content!r:.60} has {flag}, which is not supported")
        i = check_id(token.get("id"), repr(content))
        if content in specials or content in added:
            raise ValueError(f"added token {content!r:.60} is there twice")
        if content in vocab:
            if vocab[content] != i:
                raise ValueError(
                    f"added token {content!r:.60} has id {i}, in vocab {vocab[content]}"
                )
        elif i in taken:
            raise ValueError(f"added token {content!r:.60} has id {i}, which another token has")
        elif i != following:  # `tokenizers` ignores the id in the file and numbers on
            raise ValueError(
                f"added token {content!r:.60} has id {i}, but is not in vocab, where the next is "
                f"{following}"
            )
        taken.add(i)
        following = max(following, i + 1)
        special = token.get("special", False)
        if not isinstance(special, bool):
            raise TypeError(f"added token {content!r:.60}: special must be true or false")
        (specials if special else added)[content] = i
    return specials, added


def _check_normalized_tokens(top: Mapping[str, Any]) -> None:
    if top.get("normalizer") is None:
        return
    for token in top.get("added_tokens") or []:
        if token.get("normalized", False) is not False:
            raise ValueError(
                f"added token {token['content']!r:.60} is normalized, which beside a normalizer "
                "is not supported"
            )


def _normalization(data: Any) -> str | None:
    if data is None:
        return None
    kind = _table(data, "normalizer").get("type")
    if kind == "Sequence" and len(steps := _list(data.get("normalizers"), "normalizers")) <= 1:
        return _normalization(steps[0]) if steps else None
    if kind != "NFC":
        raise ValueError(f"normalizer {kind!r:.60} is not supported; only NFC is")
    return "NFC"


def _pattern(data: Any) -> str:
    """Read the pre-tokenizer: ByteLevel, or a Split by a regular expression and then ByteLevel."""
    pre = _table(data, "pre_tokenizer")
    if pre.get("type") == "ByteLevel":
        if not _byte_level(pre):
            raise ValueError("pre_tokenizer ByteLevel without use_regex is not supported alone")
        return "gpt2"
    steps = (
        _list(pre.get("pretokenizers"), "pretokenizers") if pre.get("type") == "Sequence" else []
    )
    kinds = [_table(step, "a pre-tokenizer").get("type") for step in steps]
    if kinds != ["Split", "ByteLevel"] or _byte_level(steps[1]):
        named = kinds if pre.get("type") == "Sequence" else pre.get("type")
        raise ValueError(
            f"pre_tokenizer {named!r:.60} is not supported; only ByteLevel, or Split and then "
            "ByteLevel with use_regex false"
        )
    split = steps[0]
    if split.get("behavior") != "Isolated" or split.get("invert", False) is not False:
        raise ValueError("pre_tokenizer Split must be Isolated and not inverted")
    text = _table(split.get("pattern"), "pre_tokenizer Split's pattern").get("Regex")
    if not isinstance(text, str) or not text:
        raise ValueError("pre_tokenizer Split's pattern must be a Regex")
    if pattern_name(text) is None and "}+" in text:
        raise ValueError("pre_tokenizer Split's pattern repeats a counted repeat ('}+')")
    return PATTERNS.get(text, text)


def _byte_level(step: Mapping[str, Any]) -> bool:
    """Check a ByteLevel step and return whether it splits by GPT-2's pattern."""
    if step.get("add_prefix_space", True) is not False:
        raise ValueError("pre_tokenizer ByteLevel with add_prefix_space is not supported")
    return step.get("use_regex", True) is True


def _template(top: Mapping[str, Any], whole: Mapping[str, int]) -> tuple[list[int], list[int]]:
    """Read which tokens the post-processor puts around a text."""
    decoder = top.get("decoder")
    if decoder is not None and _table(decoder, "decoder").get("type") != "ByteLevel":
        raise ValueError(f"decoder {decoder.get('type')!r:.60} is not supported; only ByteLevel is")
    data = top.get("post_processor")
    steps = [] if data is None else [_table(data, "post_processor")]
    if steps and steps[0].get("type") == "Sequence":
        steps = [
            _table(s, "a post-processor") for s in _list(steps[0].get("processors"), "processors")
        ]
    before: list[int] = []
    after: list[int] = []
    for step in steps:
        if step.get("type") == "ByteLevel":
            continue  # changes offsets into the text, no ids
        if step.get("type") != "TemplateProcessing" or before or after:
            raise ValueError(f"post_processor {step.get('type')!r:.60} is not supported")
        side = 0
        for item in _list(step.get("single"), "post_processor.single"):
            entry = _table(item, "an entry of post_processor.single")
            if "Sequence" in entry:
                side += 1
                continue
            token = _table(entry.get("SpecialToken"), "SpecialToken").get("id")
            if not isinstance(token, str) or token not in whole:
                raise ValueError(f"post_processor names {token!r:.60}, which is no added token")
            (after if side else before).append(whole[token])
        if side != 1:
            raise ValueError("post_processor.single must hold the text once")
    return before, after


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{what} must be a table; got {value!r:.60}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError(f"{what} must be a list; got {value!r:.60}")
    return value


def _check_known_fields(table: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise ValueError(f"{what} has an unknown field {unknown[0]!r:.60}")
