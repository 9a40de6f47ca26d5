"""The story source: samples stories and gives the exact probability of every word.

The states of the grammar are hidden (an HMM). The belief after a prefix is the distribution over
the states that may have emitted it:

    P(w | prefix) = Σ_s b(s) Σ_{s →w→ s'} p        b'(s') ∝ Σ_s b(s) p(s →w→ s')

This is the forward algorithm on a finite set: next-word probabilities are exact. States forget what
can no longer matter, so beliefs recur, and the entropy of a story is a finite recursion over them:

    H(b) = Σ_w P(w | b) · (−ln P(w | b) + H(b_w))

A model's loss is counted per token. A tokenizer that first cuts a text into words gives each word
the same tokens wherever it stands, so a token sequence is as probable as its words, and

    floor of a text = −Σ ln P(word | the words before it in its story) / number of tokens

is the loss of the true distribution on that text. END counts: a model must learn it too.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from scratchlm.data.stories.grammar import END, START, Grammar, State
from scratchlm.data.stories.world import STORIES

Belief = tuple[tuple[State, float], ...]
INITIAL_BELIEF: Belief = ((START, 1.0),)

_PUNCTUATION = frozenset(".,")
_WORD = re.compile(rf"{re.escape(END)}|[A-Za-z]+|[.,]")


class StorySource:
    """An endless source of stories with exactly known probabilities."""

    def __init__(self, grammar: Grammar = STORIES) -> None:
        self.grammar = grammar
        self._successors: dict[Belief, dict[str, tuple[float, Belief]]] = {}

    def story(self, rng: random.Random) -> list[str]:
        """Draw the words of one story, END last."""
        words: list[str] = []
        state = START
        while not words or words[-1] != END:
            pick = rng.random()
            for transition in self.grammar.transitions(state):
                pick -= transition.probability
                if pick < 0:
                    break
            if transition.word is not None:
                words.append(transition.word)
            state = transition.to
        return words

    def stories(self, seed: int | str, sentences: int) -> list[list[str]]:
        """Draw stories until they hold at least so many sentences."""
        rng = random.Random(f"stories {seed}")
        drawn: list[list[str]] = []
        while sentences > 0:
            drawn.append(self.story(rng))
            sentences -= drawn[-1].count(".")
        return drawn

    def successors(self, belief: Belief) -> dict[str, tuple[float, Belief]]:
        """Return each possible next word, with its probability and the belief after it."""
        if belief not in self._successors:
            found: dict[str, dict[State, float]] = {}
            for state, weight in belief:
                self._follow(state, weight, found)
            self._successors[belief] = {word: _normalised(after) for word, after in found.items()}
        return self._successors[belief]

    def _follow(self, state: State, weight: float, found: dict[str, dict[State, float]]) -> None:
        for transition in self.grammar.transitions(state):
            p = weight * transition.probability
            if transition.word is None:
                self._follow(transition.to, p, found)
            else:
                after = found.setdefault(transition.word, {})
                after[transition.to] = after.get(transition.to, 0.0) + p

    def surprisals(self, words: Sequence[str]) -> list[float]:
        """Return −ln P(word | the words before it) for every word, from a story's beginning."""
        return [-math.log(p) for p, _ in self._read(words)]

    def next_words(self, text: str) -> dict[str, float]:
        """Return the probabilities of the word after a text, the most probable first."""
        belief = [INITIAL_BELIEF, *(after for _, after in self._read(to_words(text)))][-1]
        options = {word: p for word, (p, _) in self.successors(belief).items()}
        return dict(sorted(options.items(), key=lambda option: (-option[1], option[0])))

    def _read(self, words: Sequence[str]) -> Iterator[tuple[float, Belief]]:
        belief = INITIAL_BELIEF
        for i, word in enumerate(words):
            options = self.successors(belief)
            if word not in options:
                raise ValueError(
                    f"no story goes on with {word!r} after {to_text(words[:i])[-60:]!r}; "
                    f"it may go on with {', '.join(sorted(options)[:8])}"
                )
            probability, belief = options[word]
            yield probability, belief

    def entropy(self, num_tokens: Callable[[str], int] = lambda spelled: 1) -> Entropy:
        """Compute the entropy of a story by recursion over beliefs.

        `num_tokens` counts the tokens of a word as it is spelled in a text; by default, one.
        """
        known: dict[Belief, tuple[float, float, float, int]] = {}
        tokens: dict[str, int] = {}

        def visit(belief: Belief, first: bool = False) -> tuple[float, float, float, int]:
            nats = words = pieces = 0.0
            longest = 0
            for word, (p, after) in self.successors(belief).items():
                text = word if first else _spell(word)
                if text not in tokens:
                    tokens[text] = num_tokens(text)
                rest = (0.0, 0.0, 0.0, 0) if word == END else known.get(after) or visit(after)
                nats += p * (rest[0] - math.log(p))
                words += p * (rest[1] + 1)
                pieces += p * (rest[2] + tokens[text])
                longest = max(longest, rest[3] + tokens[text])
            known[belief] = nats, words, pieces, longest
            return known[belief]

        return Entropy(*visit(INITIAL_BELIEF, first=True))


@dataclass(frozen=True)
class Entropy:
    """Of one story, END included: what is expected over all stories, and the longest."""

    nats: float
    words: float
    tokens: float
    longest: int  # in tokens

    @property
    def per_word(self) -> float:
        """Nats per word."""
        return self.nats / self.words

    @property
    def per_token(self) -> float:
        """Nats per token: the loss that no model can beat on average."""
        return self.nats / self.tokens


def _normalised(after: dict[State, float]) -> tuple[float, Belief]:
    total = math.fsum(after.values())
    if len(after) == 1:
        return total, ((next(iter(after)), 1.0),)
    # Rounded and in order: beliefs that differ only by how they were summed are one and the same.
    return total, tuple((state, round(after[state] / total, 15)) for state in sorted(after))


def _spell(word: str) -> str:
    return word if word in _PUNCTUATION or word == END else f" {word}"


def spelled(words: Iterable[str]) -> list[str]:
    """Write each word as it stands in a text: after a space, but not where a story begins."""
    found: list[str] = []
    before = END
    for word in words:
        found.append(word if before == END else _spell(word))
        before = word
    return found


def to_text(words: Iterable[str]) -> str:
    """Write words as a text; END is written out."""
    return "".join(spelled(words))


def to_words(text: str) -> list[str]:
    """Read a text, or its beginning, as words; anything but a text of words is refused."""
    words = _WORD.findall(text)
    if to_text(words) != text.strip():
        raise ValueError(f"not written as stories are (words, '.', ','): {text[:60]!r}")
    return words
