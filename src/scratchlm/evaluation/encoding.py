"""Texts of tasks as token ids, cut to the model's context.

A document begins after a prefix: the tokenizer's begin-of-text, or else the model's end-of-text.
Where there is neither, its first token is not scored. A long document is scored in windows of the
context's length, each of which sees as much of the text before as fits: every token is scored once.
A context that is too long loses its beginning. These are the rules of lm-evaluation-harness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scratchlm.errors import ScratchLMError
from scratchlm.inference import Loaded
from scratchlm.inference.prompts import AnyTokenizer, encode_prompt
from scratchlm.tokenizer import Tokenizer

Pair = tuple[list[int], list[int]]  # a context and its continuation


def template_prefix(tokenizer: AnyTokenizer) -> tuple[int, ...]:
    """Return what the tokenizer puts before every text."""
    return tuple(tokenizer.template[0]) if isinstance(tokenizer, Tokenizer) else ()


def prefix_token(loaded: Loaded) -> int | None:
    """Return the token that stands before a document, if there is one."""
    before = template_prefix(loaded.need_tokenizer())
    ends = loaded.eos_ids
    return before[-1] if before else ends[0] if ends else None


def encode_text(loaded: Loaded, text: str) -> list[int]:
    """Encode a text as the tokenizer does by itself: with its begin-of-text, once."""
    tokenizer = loaded.need_tokenizer()
    before, ids = list(template_prefix(tokenizer)), tokenizer.encode(text)
    return ids if before and ids[: len(before)] == before else [*before, *ids]


def document_windows(loaded: Loaded, text: str) -> tuple[list[Pair], int]:
    """Return the windows of a document, and how many bytes the scored tokens stand for."""
    ids, prefix = encode_text(loaded, text), prefix_token(loaded)
    tokenizer, size = loaded.need_tokenizer(), len(text.encode())
    if template_prefix(tokenizer):  # they come with the text, and are not scored
        ids = ids[len(template_prefix(tokenizer)) :]
    if prefix is None:
        if len(ids) < 2:
            return [], 0
        size -= len(tokenizer.decode_bytes(ids[:1]))
        return [*rolling_windows(ids[1:], ids[0], loaded.config.context_length)], size
    return [*rolling_windows(ids, prefix, loaded.config.context_length)], size


def rolling_windows(ids: Sequence[int], prefix: int, length: int) -> Iterator[Pair]:
    """Cut tokens into windows (what is seen, what is scored), every token scored once.

    What is seen and scored but its last is `length` tokens at most; a later window sees all it can.
    """
    every = [prefix, *ids]
    if ids:
        first = min(length, len(ids))
        yield every[:1], list(ids[:first])
        for at in range(first, len(ids), length):
            end = min(at + length, len(ids))
            yield every[max(0, end - length) : at + 1], list(ids[at:end])


def encode_pair(loaded: Loaded, context: str, continuation: str) -> Pair:
    """Encode a context and its continuation as one text, cut where the context alone ends.

    Spaces at a context's end belong to the continuation: tokens begin with a space.
    """
    kept = context.rstrip()
    context, continuation = kept, context[len(kept) :] + continuation
    if not context:
        prefix = prefix_token(loaded)
        if prefix is None:
            raise ScratchLMError(
                f"{loaded.source}: an empty context needs a begin- or end-of-text token; "
                "the model has none"
            )
        return [prefix], loaded.need_tokenizer().encode(continuation)
    whole, first = encode_text(loaded, context + continuation), encode_text(loaded, context)
    return first, whole[len(first) :]


def fit_pair(pair: Pair, length: int) -> tuple[Pair, bool]:
    """Cut a context's beginning off, so that all but the last token fit; say whether it was."""
    context, continuation = pair
    over = len(context) + len(continuation) - 1 - length
    if over <= 0:
        return pair, False
    if over >= len(context):
        raise ScratchLMError(
            f"a continuation of {len(continuation)} tokens does not fit the context of {length}"
        )
    return (context[over:], continuation), True


def fit_prompt(loaded: Loaded, prompt: str, new_tokens: int) -> tuple[list[int], bool]:
    """Encode a prompt, its beginning cut off so that an answer fits; say whether it was."""
    room = loaded.config.context_length - new_tokens
    if room < 1:
        raise ScratchLMError(
            f"an answer of {new_tokens} tokens does not fit the context of "
            f"{loaded.config.context_length}"
        )
    ids = encode_prompt(loaded.need_tokenizer(), prompt)
    return ids[-room:], len(ids) > room
