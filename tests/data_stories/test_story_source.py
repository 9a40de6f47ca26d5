"""The story source: what it claims to know exactly is so, found out in other ways."""

import math
import random
from collections import Counter, defaultdict

import pytest

from scratchlm.data.stories import (
    END,
    STORIES,
    Grammar,
    StorySource,
    Variable,
    spelled,
    to_text,
    to_words,
)
from scratchlm.data.stories.source import INITIAL_BELIEF

SOURCE = StorySource()
SAMPLE = SOURCE.stories("sample", 4_000)


def explain(grammar, words, symbols=("@story",), memory=None):
    """Sum the probabilities of all ways to say `words`: backtracking, nothing forgotten or merged.

    Written from the notation alone, without states, beliefs or caches.
    """
    memory = memory or {}
    if not symbols:
        return 1.0 if words == [END] else 0.0
    head, rest = symbols[0], symbols[1:]

    def say(word, after):
        if not words or words[0] != word:
            return 0.0
        return explain(grammar, words[1:], rest, after)

    def values(name):
        variable = grammar.variables[name]
        distribution = (
            variable.distributions[memory[variable.depends_on]]
            if variable.depends_on
            else variable.distribution
        )
        taken = memory.get(variable.other_than)
        total = sum(p for value, p in distribution.items() if value != taken)
        return [(value, p / total) for value, p in distribution.items() if value != taken]

    if head.startswith("@") and ":" in head:
        name, variable = head[1:].split(":")
        if variable not in memory:
            return sum(
                p * explain(grammar, words, symbols, {**memory, variable: value})
                for value, p in values(variable)
            )
        head = f"@{name}:{memory[variable]}"
    if head.startswith("@"):
        return sum(
            p * explain(grammar, words, (*sentence.split(), *rest), memory)
            for sentence, p in grammar.sentences[head[1:]].items()
        )
    if head.startswith("~"):
        return sum(p * say(word, memory) for word, p in grammar.independent[head[1:]].items())
    if head.startswith("$"):
        name, _, form = head[1:].partition(".")
        options = [(memory[name], 1.0)] if name in memory else values(name)
        return sum(
            p * say(grammar.forms[form][value] if form else value, {**memory, name: value})
            for value, p in options
        )
    return say(head, memory)


def everything(grammar, symbols=("@story",), memory=None, emitted=()):
    """List every way to tell every story of a small world, with its probability."""
    memory = memory or {}
    if not symbols:
        yield (*emitted, END), 1.0
        return
    head, rest = symbols[0], symbols[1:]
    name, _, detail = head[1:].replace(":", ".").partition(".")
    hidden = head[0] == "@" and detail and detail not in memory
    if hidden or (head[0] == "$" and name not in memory):
        new = detail if hidden else name
        distribution = grammar.variables[new].distribution
        taken = memory.get(grammar.variables[new].other_than)
        total = sum(p for value, p in distribution.items() if value != taken)
        ways = [
            (p / total, symbols, {**memory, new: v}, emitted)
            for v, p in distribution.items()
            if v != taken
        ]
    elif head[0] == "@":
        distribution = grammar.sentences[f"{name}:{memory[detail]}" if detail else name]
        ways = [
            (p, (*sentence.split(), *rest), memory, emitted) for sentence, p in distribution.items()
        ]
    elif head[0] == "~":
        ways = [
            (p, rest, memory, (*emitted, word)) for word, p in grammar.independent[name].items()
        ]
    else:
        word = head
        if head[0] == "$":
            word = grammar.forms[detail][memory[name]] if detail else memory[name]
        ways = [(1.0, rest, memory, (*emitted, word))]
    for p, left, known, words in ways:
        for story, q in everything(grammar, left, known, words):
            yield story, p * q


# A hidden mood, a draw that excludes another, forms, and a tail of optional words.
SMALL = Grammar(
    sentences={
        "story": {"$a $b . @act:mood @act:mood": 1.0},
        "act:good": {"$b.s": 0.7, "~w .": 0.3},
        "act:bad": {"$b.s": 0.2, "~w .": 0.8},
    },
    variables={
        "mood": Variable({"good": 0.6, "bad": 0.4}),
        "a": Variable({"x": 0.5, "y": 0.3, "z": 0.2}),
        "b": Variable({"x": 0.5, "y": 0.3, "z": 0.2}, other_than="a"),
    },
    independent={"w": {"x": 0.25, "p": 0.75}},
    forms={"s": {"x": "p", "y": "p", "z": "x"}},
)


def test_after_the_cat_sat_on_the_comes_the_mat():
    words = SOURCE.next_words("The cat sat on the")
    assert words == pytest.approx({"mat": 0.85, "chair": 0.10, "floor": 0.05}, abs=1e-15)


def test_the_cat_law_holds_in_the_middle_of_a_story_too():
    before = "One evening Tom took his red kite to the market. In the market he met Anna. "
    words = SOURCE.next_words(before + "Anna had a big cat. The cat sat on the")
    assert words == pytest.approx({"mat": 0.85, "chair": 0.10, "floor": 0.05}, abs=1e-15)


def test_probabilities_sum_to_one_after_every_prefix():
    for story in SAMPLE[:60]:
        for end in range(len(story)):
            options = SOURCE.next_words(to_text(story[:end]))
            assert math.fsum(options.values()) == pytest.approx(1.0, abs=1e-12)
            assert story[end] in options


def test_the_chain_rule_gives_the_marginal_probability_of_a_story():
    for story in SAMPLE[:150]:
        chain = -math.fsum(SOURCE.surprisals(story))
        assert chain == pytest.approx(math.log(explain(STORIES, story)), abs=1e-9)


def test_story_probabilities_and_entropy_match_exhaustive_enumeration():
    source, all_stories = StorySource(SMALL), Counter()
    for story, p in everything(SMALL):
        all_stories[story] += p
    assert math.fsum(all_stories.values()) == pytest.approx(1.0, abs=1e-12)
    for story, p in all_stories.items():
        assert math.exp(-sum(source.surprisals(story))) == pytest.approx(p, rel=1e-12)
    found = source.entropy(num_tokens=lambda text: len(text))
    assert found.nats == pytest.approx(-sum(p * math.log(p) for p in all_stories.values()))
    assert found.words == pytest.approx(sum(p * len(story) for story, p in all_stories.items()))
    letters = {story: len(to_text(story)) for story in all_stories}
    assert found.tokens == pytest.approx(sum(p * letters[s] for s, p in all_stories.items()))
    assert found.longest == max(letters.values())
    assert found.per_token == pytest.approx(found.nats / found.tokens)


def test_drawn_words_are_as_frequent_as_the_probabilities_say():
    """Pearson's χ², every draw grouped with the others that have the same probabilities."""
    seen = defaultdict(Counter)
    for story in SAMPLE:
        belief = INITIAL_BELIEF
        for word in story:
            options = SOURCE.successors(belief)
            seen[tuple((option, round(p, 12)) for option, (p, _) in options.items())][word] += 1
            belief = options[word][1]
    chi2 = freedom = 0.0
    for distribution, counts in seen.items():
        n = sum(counts.values())
        if len(distribution) > 1 and min(p for _, p in distribution) * n >= 5:
            chi2 += sum((counts[word] - n * p) ** 2 / (n * p) for word, p in distribution)
            freedom += len(distribution) - 1
    assert freedom > 100
    # χ² of k degrees of freedom has mean k and variance 2k; the seed is fixed.
    assert abs(chi2 - freedom) < 3 * math.sqrt(2 * freedom)


def test_the_expected_entropy_is_what_stories_cost_on_average():
    costs = [math.fsum(SOURCE.surprisals(story)) for story in SAMPLE]
    mean = math.fsum(costs) / len(costs)
    spread = math.sqrt(sum((c - mean) ** 2 for c in costs) / len(costs) / len(costs))
    assert abs(mean - SOURCE.entropy().nats) < 4 * spread


def test_the_latent_mood_is_inferred_from_behaviour():
    """Bayes by hand: the mood is never emitted, yet what was seen tells of it."""
    start = "The cat sat on the mat. {} Anna came back from the park. She had lost her old keys. "
    search = "She looked near the mat, but they were not there. The cat"
    signs = {
        "It watched a bee.": (0.70 * 0.20, 0.05 * 0.20),
        "Its tail moved slowly.": (0.25 * 0.40, 0.25 * 0.40),
        "Its eyes were closed.": (0.05, 0.70),
    }
    for sign, (playful, sleepy) in signs.items():
        awake = 0.55 * playful / (0.55 * playful + 0.45 * sleepy)
        words = SOURCE.next_words(start.format(sign) + search)
        assert words["jumped"] == pytest.approx(awake * 0.95 + (1 - awake) * 0.05, abs=1e-12)


def test_what_was_taken_is_what_is_put_down_and_verbs_agree():
    many = {"keys", "shoes", "apples", "marbles"}
    for story in SAMPLE:
        text = to_text(story)
        things = {w for w in story if w in STORIES.variables["thing"].distribution}
        assert len(things) == 1
        assert ("them" in story or "they were" in text or "They were" in text) >= (
            things <= many and "there they" in text
        )
        assert not (things <= many and ("there it was" in text or " put it " in text))
        assert things <= many or not (" put them " in text or "there they were" in text)


def test_stories_are_the_same_for_the_same_seed_and_differ_for_another():
    assert SOURCE.stories(3, 50) == StorySource().stories(3, 50)
    assert SOURCE.stories(3, 50) != SOURCE.stories(4, 50)
    assert sum(story.count(".") for story in SOURCE.stories(3, 50)) >= 50


def test_to_words_inverts_to_text():
    for story in SAMPLE[:100]:
        assert to_words(to_text(story)) == story
        assert "".join(spelled(story)) == to_text(story)
    assert to_text(["The", "cat", ".", END, "The"]) == f"The cat.{END}The"


@pytest.mark.parametrize("text", ["The cat!", "The  cat", "the 3 cats"])
def test_text_that_is_not_a_sequence_of_words_is_refused(text):
    with pytest.raises(ValueError, match="not written as stories are"):
        to_words(text)


def test_an_impossible_word_is_refused_with_the_possible_ones():
    with pytest.raises(ValueError, match=r"on with 'cow' after 'The'.*cat, dog, hen"):
        SOURCE.next_words("The cow")


def test_a_distribution_that_does_not_sum_to_one_is_refused():
    with pytest.raises(ValueError, match="'story'"):
        Grammar({"story": {"a": 0.5, "b": 0.4}})


def test_a_word_has_probability_zero_where_it_is_not_an_option():
    rng = random.Random(1)
    for story in rng.sample(SAMPLE, 20):
        assert "zebra" not in SOURCE.next_words(to_text(story[:5]))
