"""Known mistakes in BPE encoding and decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from scratchlm.check.mistakes.table import Table
from scratchlm.tokenizer.naive import Pair, split_specials
from scratchlm.tokenizer.patterns import split_words

BPE_ENCODING = Table()


class _Tokenizer:
    def __init__(
        self,
        vocab: dict[int, bytes],
        merges: Sequence[Pair],
        specials: Sequence[str] | None,
        knobs: dict[str, Any],
    ) -> None:
        self.vocab, self.merges, self.knobs = vocab, list(merges), knobs
        self.ids = {token: i for i, token in vocab.items()}
        self.specials = list(specials or [])

    def encode(self, text: str) -> list[int]:
        mode = self.knobs.get("specials")
        parts = [text] if mode == "plain" else split_specials(text, self.specials)
        if mode == "shortest":
            parts = _split_shortest(text, self.specials)
        ids: list[int] = []
        for index, part in enumerate(parts):
            if index % 2:
                ids += [] if mode == "dropped" else [self.ids[part.encode()]]
                continue
            words = self.knobs.get("words", lambda p: split_words(p, "gpt2"))(part)
            for word in words:
                ids += [self.ids[piece] for piece in self._merge(word.encode())]
        return ids

    def _merge(self, word: bytes) -> list[bytes]:
        pieces = [bytes([b]) for b in word]
        how = self.knobs.get("merging", "by rank")
        if how == "none":
            return pieces
        if how == "longest":
            return _longest(word, set(self.ids))
        if how == "in order once":
            for pair in self.merges:
                for i, found in enumerate(pairwise(pieces)):
                    if found == pair:
                        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
                        break
            return pieces
        rank = {pair: i for i, pair in enumerate(self.merges)}
        while True:
            known = [(rank[p], i) for i, p in enumerate(pairwise(pieces)) if p in rank]
            if not known:
                return pieces
            place = {"leftmost": min(i for _, i in known), "last": max(known)[1]}.get(
                how, min(known)[1]
            )
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[Any]:
        for text in texts:
            if self.knobs.get("stream") == "lists":
                yield self.encode(text)
            else:
                yield from self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        if self.knobs.get("decode") == "each":
            return "".join(self.vocab[i].decode("utf-8", errors="replace") for i in ids)
        errors = self.knobs.get("errors", "replace")
        return b"".join(self.vocab[i] for i in ids).decode("utf-8", errors=errors)


def _longest(word: bytes, known: set[bytes]) -> list[bytes]:
    pieces = []
    while word:
        end = next(n for n in range(len(word), 0, -1) if word[:n] in known)
        pieces.append(word[:end])
        word = word[end:]
    return pieces


def _split_shortest(text: str, specials: list[str]) -> list[str]:
    parts = [text]
    for token in sorted(specials, key=len):
        found: list[str] = []
        for index, part in enumerate(parts):
            if index % 2:
                found.append(part)
                continue
            pieces = part.split(token)
            found += [x for piece in pieces[:-1] for x in (piece, token)] + pieces[-1:]
        parts = found
    return parts


def _encode(name: str, hints: tuple[str, str, str], *knobs: dict[str, Any]) -> None:
    def of(one: dict[str, Any]) -> Callable[..., Any]:
        return lambda vocab, merges, specials=None: _Tokenizer(vocab, merges, specials, one)

    BPE_ENCODING.add("get_tokenizer", name, hints, *map(of, knobs))


_encode(
    "the longest known token is taken, merges are ignored",
    (
        "Which does 'abc' become, with the merges (b, c), (a, b)?",
        "Merges are applied in the order in which they were learnt.",
        "pair = min(pairs, key=rank.get)",
    ),
    {"merging": "longest"},
)
_encode(
    "the leftmost pair is merged, not the one learnt first",
    (
        "Of two pairs that are merges, which comes first?",
        "The one that stands earlier in the list of merges.",
        "pair = min(pairs, key=rank.get)",
    ),
    {"merging": "leftmost"},
    {"merging": "last"},
)
_encode(
    "a merge is applied once, not wherever it occurs",
    (
        "What does 'banana' become?",
        "A merge may occur several times in a word.",
        "while any pair is a merge: merge it",
    ),
    {"merging": "in order once"},
)
_encode(
    "nothing is merged",
    (
        "How many ids has a word you trained on?",
        "Apply the merges.",
        "while pairs: merge the first",
    ),
    {"merging": "none"},
)
_encode(
    "the text is not cut into words: merges cross them",
    (
        "Can a merge hold the end of one word and the start of the next?",
        "Encode word by word, as in training.",
        "for word in regex.findall(PATTERN, part)",
    ),
    {"words": lambda part: [part] if part else []},
)
_encode(
    "words are cut at white space, which is lost",
    ("Does decode(encode(text)) give the text?", "PATTERN keeps spaces.", "regex.findall(PATTERN)"),
    {"words": str.split},
)
_encode(
    "special tokens are encoded as text",
    (
        "How many ids has <|endoftext|>?",
        "Cut the text at the special tokens first; each is one id.",
        "regex.split('(' + '|'.join(map(regex.escape, specials)) + ')', text)",
    ),
    {"specials": "plain"},
)
_encode(
    "special tokens are dropped",
    (
        "Does decode(encode(text)) give the text?",
        "Put parentheses around the pattern, and split keeps what it splits at.",
        "regex.split('(' + pattern + ')', text)",
    ),
    {"specials": "dropped"},
)
_encode(
    "of two special tokens the shorter one wins",
    (
        "One special token begins with another: which is found?",
        "Try the longest first.",
        "sorted(special_tokens, key=len, reverse=True)",
    ),
    {"specials": "shortest"},
)
_encode(
    "tokens are decoded one by one",
    (
        "Does every token hold whole characters?",
        "Join the bytes of all tokens, then decode.",
        "b''.join(vocab[i] for i in ids).decode('utf-8', errors='replace')",
    ),
    {"decode": "each"},
)
_encode(
    "invalid UTF-8 is an error, or lost",
    (
        "What if the ids end in the middle of a character?",
        "Replace what is not UTF-8 by U+FFFD.",
        ".decode('utf-8', errors='replace')",
    ),
    {"errors": "strict"},
    {"errors": "ignore"},
)
_encode(
    "encode_iterable yields lists, not ids",
    ("What does one step of the iterator give?", "One id.", "yield from self.encode(text)"),
    {"stream": "lists"},
)
