"""Known mistakes in BPE training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from scratchlm.check.mistakes.table import Table
from scratchlm.tokenizer.naive import Pair, merge, split_specials
from scratchlm.tokenizer.patterns import split_words

BPE_TRAINING = Table()


def wrong_training(**knobs: Any) -> Callable[..., tuple[dict[int, bytes], list[Pair]]]:
    """Make BPE training with something wrong in it."""

    def train(path: str, size: int, specials: list[str]) -> tuple[dict[int, bytes], list[Pair]]:
        counts = _count_words(Path(path).read_bytes().decode("utf-8"), specials, knobs)
        words = {word: [bytes([b]) for b in word] for word in counts}
        if knobs.get("characters"):
            words = {word: [c.encode() for c in word.decode()] for word in counts}
        ids: dict[bytes, int] = {bytes([i]): i for i in range(256)}
        merges: list[Pair] = []
        most = size - 256 - len(specials) + knobs.get("more", lambda n: 0)(len(specials))
        while len(merges) < most:
            pairs = _count_pairs(words, counts, knobs)
            if not pairs or max(pairs.values()) < knobs.get("least", 1):
                break
            merges.append(_choose(pairs, ids, knobs))
            ids[b"".join(merges[-1])] = len(ids)
            words = {word: merge(pieces, merges[-1]) for word, pieces in words.items()}
        tokens = [bytes([b]) for b in range(256)] + [a + b for a, b in merges]
        if not knobs.get("no_specials"):
            tokens += [token.encode() for token in specials]
        return dict(enumerate(tokens)), merges

    return train


def _count_words(text: str, specials: list[str], knobs: dict[str, Any]) -> Counter[bytes]:
    split = knobs.get("words", lambda part: split_words(part, "gpt2"))
    parts = split_specials(text, specials)
    match knobs.get("specials"):
        case "kept":
            parts = [text]
        case "removed":
            parts = ["".join(parts[::2])]
        case "counted":
            return Counter(
                w.encode()
                for i, part in enumerate(parts)
                for w in ([part] if i % 2 else split(part))
            )
    return Counter(word.encode() for part in parts[::2] for word in split(part))


def _count_pairs(
    words: dict[bytes, list[bytes]], counts: Counter[bytes], knobs: dict[str, Any]
) -> Counter[Pair]:
    pairs: Counter[Pair] = Counter()
    for word, pieces in words.items():
        found: Iterable[Pair] = pairwise(pieces)
        if knobs.get("once_a_word"):
            found = dict.fromkeys(found)
        for pair in found:
            pairs[pair] += 1 if knobs.get("unweighted") else counts[word]
    return pairs


def _choose(pairs: Counter[Pair], ids: dict[bytes, int], knobs: dict[str, Any]) -> Pair:
    match knobs.get("tie"):
        case "smaller":
            return min(pairs, key=lambda p: (-pairs[p], p))
        case "first":
            return max(pairs, key=lambda p: pairs[p])
        case "last":
            return max(reversed(pairs), key=lambda p: pairs[p])
        case "ids":
            return max(pairs, key=lambda p: (pairs[p], (ids[p[0]], ids[p[1]])))
        case "small ids":
            return min(pairs, key=lambda p: (-pairs[p], (ids[p[0]], ids[p[1]])))
        case "joined":
            return max(pairs, key=lambda p: (pairs[p], p[0] + p[1]))
        case "length":
            return max(pairs, key=lambda p: (pairs[p], len(p[0]) + len(p[1]), p))
    return max(pairs, key=lambda p: (pairs[p], p))


def _train(name: str, hints: tuple[str, str, str], *knobs: dict[str, Any]) -> None:
    BPE_TRAINING.add("run_train_bpe", name, hints, *(wrong_training(**one) for one in knobs))


_TIE = "max(counts, key=lambda pair: (counts[pair], pair))"
_train(
    "a tie is broken the wrong way",
    (
        "Two pairs are equally frequent: which one is merged?",
        "The greater of the two pairs of bytes.",
        _TIE,
    ),
    *({"tie": tie} for tie in ("smaller", "first", "last", "joined", "length")),
)
_train(
    "a tie is broken by ids, not by bytes",
    (
        "What is compared where two pairs are equally frequent?",
        "The bytes themselves: an id says only when a token was made.",
        _TIE,
    ),
    {"tie": "ids"},
    {"tie": "small ids"},
)
_train(
    "a word's pairs are counted once, however often it occurs",
    (
        "What is a word that occurs five times worth?",
        "Every pair counts as often as its word occurs.",
        "counts[pair] += word_counts[word]",
    ),
    {"unweighted": True},
)
_train(
    "a pair counts once in a word",
    (
        "How often does 'aa' stand in 'aaaa'?",
        "Every adjacent pair counts: three times.",
        "for pair in zip(word, word[1:]): counts[pair] += n",
    ),
    {"once_a_word": True},
)
_train(
    "the text is not cut into words: merges cross them",
    (
        "Can a merge hold the end of one word and the start of the next?",
        "Cut the text by PATTERN first; pairs are counted within words.",
        "regex.findall(PATTERN, text)",
    ),
    {"words": lambda part: [part] if part else []},
)
_train(
    "words are cut at white space, which is lost",
    (
        "Where is the space before a word?",
        "PATTERN keeps it as the word's first byte.",
        "regex.findall(PATTERN, text), not text.split()",
    ),
    {"words": str.split},
)
_train(
    "special tokens are not cut out",
    (
        "Do pieces of a special token turn up in your merges?",
        "Cut the text at the special tokens before anything is counted.",
        "regex.split('|'.join(map(regex.escape, special_tokens)), text)",
    ),
    {"specials": "kept"},
    {"specials": "counted"},
)
_train(
    "special tokens are removed, and their neighbours join",
    (
        "What stands before and after a special token?",
        "Two texts. They must not become one.",
        "for part in regex.split(…): words of this part",
    ),
    {"specials": "removed"},
)
_train(
    "the vocabulary's size does not count the special tokens",
    (
        "How many tokens does your vocabulary have?",
        "256 bytes + merges + special tokens = vocab_size.",
        "num_merges = vocab_size - 256 - len(special_tokens)",
    ),
    {"more": lambda n: n},
)
_train(
    "the special tokens are not in the vocabulary",
    (
        "Which id does a special token have?",
        "They are part of the vocabulary, as bytes.",
        "vocab[len(vocab)] = token.encode('utf-8')",
    ),
    {"no_specials": True},
)
BPE_TRAINING.add(
    "run_train_bpe",
    "the special tokens are forgotten: not counted, and not in the vocabulary",
    (
        "Where are the special tokens in your vocabulary?",
        "They are part of it, as bytes, and of its size.",
        "num_merges = vocab_size - 256 - len(special_tokens)",
    ),
    wrong_training(no_specials=True, more=lambda n: n),
    double=True,
)
_train(
    "characters are merged, not bytes",
    (
        "How many bytes has é?",
        "A word starts as its single bytes.",
        "[bytes([b]) for b in word.encode('utf-8')]",
    ),
    {"characters": True},
)
_train(
    "pairs that occur once are not merged",
    (
        "When does training stop?",
        "At vocab_size, or when no pair is left.",
        "while len(vocab) < vocab_size and counts:",
    ),
    {"least": 2},
)
