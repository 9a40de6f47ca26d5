"""The model's next-word probabilities, beside the true ones.

A word is spelled in one or more tokens, and ends where the next token begins another word:

    P(word | prompt) = Π_i P(token_i | prompt, token_<i) · Σ_{t begins a word} P(t | prompt, word)

Prompts are as a user would type them, without END before them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from scratchlm.cli.demo.corpus import World
from scratchlm.data.stories import END, spelled, to_text, to_words
from scratchlm.model import TransformerLM
from scratchlm.tokenizer import Tokenizer

_APPLES = (
    "It was a cold Monday. Nora took her green apples to the park. In the park she met Oscar. "
    "Oscar was tired. Nora gave Oscar the apples. Then they walked home, and"
)
_LOST = (
    "The cat sat on the mat. {} Anna came back from the park. She wanted to find her red keys. "
    "She looked near the mat, but they were not there. The cat"
)
PROMPTS = {  # what it shows, and the text
    "a law of this world": "The cat sat on the",
    "another animal, another law": "The dog sat on the",
    "the place named before": "One evening Tom took his red kite to the market. In the",
    "who has the apples now": _APPLES,
    "apples are many": f"{_APPLES} Oscar put",
    "where the marbles were hidden": "Tom and Mia were in the village. They had the white marbles "
    "with them. Tom hid them behind the stairs, and Mia looked for them. She went to the",
    "a mood never said: awake": _LOST.format("It watched a bird."),
    "a mood never said: asleep": _LOST.format("Its eyes were closed."),
    "how it may end": "Tom and Mia were in the village. They had the white marbles with them. Tom "
    "hid them behind the stairs, and Mia looked for them. She went to the stairs, and there they "
    "were. Tom was",
}


@dataclass(frozen=True)
class Comparison:
    """One prompt: the truth and the model, word by word."""

    title: str
    prompt: str
    truth: dict[str, float]
    model: dict[str, float]

    @property
    def rows(self) -> list[tuple[str, float, float]]:
        """Word, truth, model; and last all other words together, whose true probability is 0."""
        rows = [(word, p, self.model[word]) for word, p in self.truth.items()]
        return [*rows, ("any other", 0.0, max(0.0, 1.0 - math.fsum(self.model.values())))]

    @property
    def worst(self) -> float:
        """The largest absolute difference between model and truth."""
        return max(abs(truth - model) for _, truth, model in self.rows)


def compare_next_words(model: TransformerLM, world: World) -> list[Comparison]:
    """Ask for the next word after each prompt."""
    found = []
    for title, prompt in PROMPTS.items():
        truth = world.source.next_words(prompt)
        guessed = next_word_probabilities(model, world.tokenizer, prompt, list(truth))
        found.append(Comparison(title, prompt, truth, guessed))
    return found


@torch.no_grad()
def next_word_probabilities(
    model: TransformerLM, tokenizer: Tokenizer, prompt: str, words: list[str]
) -> dict[str, float]:
    """Return the model's probability that each word comes next, and ends there."""
    begin = tokenizer.encode(prompt)
    spellings = [tokenizer.encode(spelled([*to_words(prompt), word])[-1]) for word in words]
    width = max(map(len, spellings))
    rows = [[*begin, *ids, *[0] * (width - len(ids))] for ids in spellings]
    inputs = torch.tensor(rows, device=next(model.parameters()).device)
    log_p = model(inputs).double().log_softmax(dim=-1).cpu()  # right padding: masked by causality
    border = torch.tensor([begins_a_word(tokenizer, i) for i in range(log_p.shape[-1])])
    found = {}
    for row, (word, ids) in enumerate(zip(words, spellings, strict=True)):
        at = len(begin) - 1
        chain = math.fsum(float(log_p[row, at + i, token]) for i, token in enumerate(ids))
        ends = 1.0 if word == END else float(log_p[row, at + len(ids)][border].exp().sum())
        found[word] = math.exp(chain) * ends
    return found


def begins_a_word(tokenizer: Tokenizer, token: int) -> bool:
    """Return whether a token cannot continue the previous word."""
    text = tokenizer.token_bytes(token)
    return token in tokenizer.special_tokens.values() or not chr(text[0]).isalpha()


@dataclass(frozen=True)
class GeneratedStory:
    """A story the model wrote, and where it is betrayed: at a word that could not follow."""

    text: str
    wrong: int | None = None  # of its words and END; −1: it is not written in words at all

    @property
    def possible(self) -> bool:
        """Whether it has non-zero true probability."""
        return self.wrong is None

    def cut(self) -> tuple[str, str, str]:
        """Return the text before the word that betrays it, that word, and the text after it."""
        if self.wrong is None:
            return self.text, "", ""
        if self.wrong < 0:
            return self.text, "(not in words of this world)", ""
        words = to_words(self.text + END)
        word = words[self.wrong]
        before = to_text(words[: self.wrong])
        if word == END:
            return before, "(the end)", ""
        return before, word, self.text[len(to_text(words[: self.wrong + 1])) :]


def write_stories(model: TransformerLM, world: World) -> list[GeneratedStory]:
    """Sample 20 stories at temperature 1, and check which are possible under the grammar."""
    from scratchlm.inference import Sampling, generate

    end = world.tokenizer.special_tokens[END]
    stories = generate(
        model,
        [[end]] * 20,
        tokenizer=world.tokenizer,
        max_new_tokens=model.config.context_length - 1,
        sampling=Sampling(temperature=1.0),
        seed=world.plan.train.seed,
    )
    return [GeneratedStory(story.text, first_wrong(world, story.text)) for story in stories]


def first_wrong(world: World, text: str) -> int | None:
    """Return the first word of a story that the source could not have written there."""
    try:
        words = to_words(text + END)
    except ValueError:
        return -1
    try:
        world.source.surprisals(words)
        return None
    except ValueError:
        pass
    low, high = 0, len(words)  # the first `low` words are possible, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        try:
            world.source.surprisals(words[:middle])
            low = middle
        except ValueError:
            high = middle
    return low
