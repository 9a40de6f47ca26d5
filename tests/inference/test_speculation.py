"""Speculation: the same tokens where greedy, the same distribution where drawn, fewer steps."""

import itertools
import math
import random
from functools import cache, partial

import pytest
import torch

from inference import oracle_sampling as oracle
from inference.engine_oracle import HashRunner, alone, habits, logits_after
from inference.test_engine import check_empty, said
from inference.tiny import byte_tokenizer, tiny_model
from scratchlm.data.stories.grammar import END
from scratchlm.data.stories.source import INITIAL_BELIEF, StorySource
from scratchlm.inference import GREEDY, Engine, Sampling, generate, verifying
from scratchlm.inference.drawing import draw
from scratchlm.inference.speculation import ALLOWANCE, COST, FIRST_CREDIT, Lookup
from tiny_models import FAMILIES, build

PENALISED = Sampling(0.9, 20, 0.95, repetition_penalty=1.2, frequency_penalty=0.3)
CIRCLE = [3, 1, 4, 1, 5, 9, 2, 6] * 3  # what follows can be looked up


def an_engine(model, **options):
    return Engine(model, **{"num_pages": 60, "page_size": 4, "max_rows": 4, **options})


def a_draft(model, noise=0.05):
    """Return a model that says nearly the same."""
    draft = build(model.config, dtype=torch.float32)
    draft.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return draft.eval()


# The same tokens, to the bit


@pytest.mark.parametrize("accelerate", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "mixtral"])
def test_greedy_gives_the_same_tokens_and_bits_as_without(family, accelerate):
    """And a lookup does so however tokens are drawn: it changes no draw."""
    model = build(FAMILIES[family].replace(context_length=64), dtype=torch.float32)
    ways = [GREEDY, Sampling(0.7), PENALISED, Sampling(0, frequency_penalty=0.5)]

    def run(speculate):
        engine = an_engine(model, accelerate=accelerate, draft=a_draft(model))
        handles = [
            engine.submit(
                CIRCLE, max_new_tokens=12, sampling=way, seed=i, num_logprobs=2, speculate=speculate
            )
            for i, way in enumerate(ways)
        ]
        engine.run()
        check_empty(engine)
        return [[said(piece) for piece in handle] for handle in handles]

    expected = run("off")
    assert run("lookup") == expected
    drafted = run("draft")
    assert [drafted[0], drafted[3]] == [expected[0], expected[3]]


@pytest.mark.parametrize("family", ["llama", "post-norm"])
def test_a_drafted_request_has_the_same_bits_alone_and_in_any_company(family):
    """Also if the draft proposes one at a time, or nothing at all for want of room."""
    model = build(FAMILIES[family].replace(context_length=64), dtype=torch.float32)
    draft, rng = a_draft(model), random.Random(0)
    work = [
        {
            "prompt": [rng.randrange(2)] * rng.choice([0, 4, 9]) + [rng.randrange(20)],
            "max_new_tokens": rng.randrange(1, 30),
            "sampling": rng.choice([Sampling(), PENALISED]),
            "seed": i,
            "num_logprobs": 2,
        }
        for i in range(8 if family == "llama" else 5)
    ]

    def run(requests, **options):
        engine = an_engine(model, draft=draft, **options)
        handles = []
        for one in requests:
            handles.append(engine.submit(**one))
            for _ in range(rng.randrange(2)):
                engine.step()
        engine.run()
        check_empty(engine)
        return [[said(piece) for piece in handle] for handle in handles], engine.scheduler

    expected = [run([one])[0][0] for one in work]
    assert [run([one], draft_tokens=1)[0][0] for one in work] == expected
    put_back = 0
    for pages, tokens in ((30, 99), (10, 9), (11, 5)):
        got, scheduler = run(work, num_pages=pages, max_tokens_per_step=tokens)
        assert got == expected
        put_back += scheduler.num_put_back
    assert put_back


def test_text_ends_where_it_did_at_end_tokens_stop_strings_and_limits():
    tokenizer, model = byte_tokenizer(), tiny_model(257, 96)
    ends = 0
    for seed in range(6):
        options = {"tokenizer": tokenizer, "max_new_tokens": 40, "seed": seed, "num_logprobs": 1}
        prompt = "abcabcabcabc"
        whole = generate(model, prompt, sampling=GREEDY, **options)[0]
        stop = whole.text[10:13]
        for more in ({"stop": stop}, {"eos_ids": [whole.token_ids[15]]}, {"max_new_tokens": 7}):
            options = {**options, **more, "sampling": GREEDY}
            expected = generate(model, prompt, **options)
            ends += expected[0].finish_reason != "length"
            assert generate(model, prompt, speculate="lookup", **options) == expected
            assert generate(model, prompt, draft=model, **options) == expected
    assert ends


def test_the_models_own_forward_on_a_cpu_verifies_nothing_and_says_so():
    model = tiny_model()
    engine = an_engine(model, accelerate=False, speculate="lookup")
    assert "one by one" in engine.why_not_verified
    assert an_engine(model).why_not_verified is None
    handle = engine.submit(CIRCLE, max_new_tokens=10, sampling=GREEDY)
    steps = 0
    while not handle.done:
        steps += engine.step()
    assert steps == 10  # a token each
    with pytest.warns(UserWarning, match="speculation gains nothing: the model's own forward"):
        generate(model, CIRCLE, max_new_tokens=2, speculate="lookup", accelerate=False)
    fast = an_engine(model)
    model.lm_head.register_forward_hook(lambda *_: None)
    try:
        assert fast.why_not_verified is not None
    finally:
        model.lm_head._forward_hooks.clear()


# The same distribution

VOCAB = 7
WAY = Sampling(1.3, top_k=5, top_p=0.9)
ANSWERS = 6_700  # of three tokens: 20,000 draws


@cache
def world_logits(ids, vocab, salt=0):
    return logits_after([*ids, salt], vocab) / 2


def target(ids, vocab):
    return world_logits(tuple(ids), vocab)


def poor_draft(ids, vocab):
    return world_logits(tuple(ids), vocab, salt=1)


def exact_distribution(prompt, length):
    """Return P(answer) of every answer of `length` tokens: products of filtered softmaxes."""
    found = {}
    for answer in itertools.product(range(VOCAB), repeat=length):
        p, ids = 1.0, list(prompt)
        for token in answer:
            p *= oracle.filtered(target(ids, VOCAB)[None], WAY).softmax(-1)[0, token].item()
            ids.append(token)
        if p > 0:
            found[answer] = p
    return found


def answers(draws, speculate, prompt, length):
    engine = Engine(
        tiny_model(VOCAB, 40),
        num_pages=1000,
        page_size=8,
        max_rows=250,
        max_tokens_per_step=4000,
        draft=tiny_model(VOCAB, 40, seed=1),
        draft_tokens=3,
        make_runner=partial(HashRunner, logits_of=target),
    )
    engine.drafter.runner = HashRunner(engine.model, engine.drafter.cache, logits_of=poor_draft)
    handles = [
        engine.submit(prompt, max_new_tokens=length, sampling=WAY, seed=seed, speculate=speculate)
        for seed in range(draws)
    ]
    engine.run()
    return [tuple(handle.result().token_ids) for handle in handles]


def chi_square(found, distribution):
    """Return the probability of counts as far from a distribution as these, or farther."""
    total, counts = len(found), dict.fromkeys(distribution, 0)
    for answer in found:
        if answer not in counts:
            return 0.0
        counts[answer] += 1
    expected = {a: p * total for a, p in distribution.items()}
    rare = [a for a in expected if expected[a] < 8]  # put together, as chi-square needs
    cells = [(counts[a], expected[a]) for a in expected if expected[a] >= 8]
    if sum(expected[a] for a in rare) >= 8:
        cells.append((sum(counts[a] for a in rare), sum(expected[a] for a in rare)))
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


AFTER_ANY = [token for t in range(VOCAB) for token in (0, 1, t, (t + 1) % VOCAB)]
PROMPTS = {"draft": [2, 3], "lookup": [*AFTER_ANY, 0, 1]}  # whatever comes next stood there before


@pytest.mark.parametrize(
    "count", [ANSWERS, pytest.param(60_000, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.parametrize("speculate", ["draft", "lookup"])
def test_20_000_draws_have_the_exact_distribution(speculate, count):
    """Of whole answers, three tokens long: what is accepted must not depend on what came before."""
    prompt = PROMPTS[speculate]
    distribution = exact_distribution(prompt, 3)
    assert sum(distribution.values()) == pytest.approx(1)
    assert 40 < len(distribution) < VOCAB**3  # the filters mask some
    assert chi_square(answers(count, speculate, prompt, 3), distribution) > 1e-3


def always(p, q, proposed, accept, numbers):
    return proposed


def from_p(p, q, proposed, accept, numbers):
    """Accept as one should, and draw the rest from p."""
    column = proposed[:, None]
    is_accepted = accept * q.gather(1, column)[:, 0] < p.gather(1, column)[:, 0]
    return torch.where(is_accepted, proposed, draw(p, numbers))


@pytest.mark.parametrize("broken", [always, from_p])
def test_the_test_of_the_distribution_fails_where_acceptance_is_broken(broken, monkeypatch):
    monkeypatch.setattr(verifying, "rejection_sample", broken)
    prompt = PROMPTS["draft"]
    found = answers(ANSWERS // 2, "draft", prompt, 3)
    assert chi_square(found, exact_distribution(prompt, 3)) < 1e-9


def test_the_test_of_the_distribution_fails_where_every_lookup_is_accepted(monkeypatch):
    read = Engine._read_verified

    def accept_all(self, requests, tokens, logprobs):
        tokens, at = list(tokens), 0
        for request in requests:
            tokens[at : at + request.ahead] = request.proposed[: request.ahead]
            at += 1 + request.ahead
        read(self, requests, tokens, logprobs)

    monkeypatch.setattr(Engine, "_read_verified", accept_all)
    prompt = PROMPTS["lookup"]
    found = answers(ANSWERS // 2, "lookup", prompt, 3)
    assert chi_square(found, exact_distribution(prompt, 3)) < 1e-9


# The demo's world, whose probabilities are known


class World:
    """The story source as logits over its words; and a draft that knows it less well."""

    def __init__(self):
        self.source = StorySource()
        told = self.source.stories("speculation", sentences=3000)
        self.names = sorted({END}.union(*told), key=lambda word: (word != END, word))
        self.numbers = {word: i for i, word in enumerate(self.names)}
        self.exact = cache(partial(self._logits, 0.0))
        self.smoothed = cache(partial(self._logits, 0.3))
        self.belief = cache(self._belief)

    def _logits(self, smoothing, words):
        p = torch.full((len(self.names),), smoothing / len(self.names), dtype=torch.float64)
        for word, (probability, _) in self.source.successors(self.belief(words)).items():
            p[self.numbers[word]] += (1 - smoothing) * probability
        return p.log()

    def _belief(self, words):
        if not words:
            return INITIAL_BELIEF
        options = self.source.successors(self.belief(words[:-1]))
        return options[words[-1]][1] if words[-1] in options else INITIAL_BELIEF

    def logits(self, which):
        def of(ids, vocab):
            return which(tuple(self.names[i] for i in ids[1:]))

        return of


def stories_by(world, speculate, count):
    vocab = len(world.names)
    engine = Engine(
        tiny_model(vocab, 512),
        num_pages=4000,
        page_size=8,
        max_rows=50,
        max_tokens_per_step=4000,
        draft=tiny_model(vocab, 512, seed=1),
        make_runner=partial(HashRunner, logits_of=world.logits(world.exact)),
    )
    engine.drafter.runner = HashRunner(
        engine.model, engine.drafter.cache, logits_of=world.logits(world.smoothed)
    )
    handles = [
        engine.submit([0], seed=seed, speculate=speculate, eos_ids=[0]) for seed in range(count)
    ]
    engine.run()
    return [[world.names[i] for i in handle.result().token_ids] for handle in handles]


def surprisal(world, story):
    """Return −ln P(story), or ∞ where no such story is told."""
    try:
        return math.fsum(world.source.surprisals(story))
    except ValueError:
        return math.inf


@pytest.mark.parametrize(
    "count", [40, pytest.param(1500, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.parametrize("speculate", ["draft", "lookup"])
def test_stories_told_by_speculation_are_those_of_their_world(speculate, count, monkeypatch):
    """Every one can be told, and they are as surprising as its entropy says."""
    world = World()
    found = [surprisal(world, story) for story in stories_by(world, speculate, count)]
    mean = sum(found) / count
    assert math.isfinite(mean)
    error = (sum((x - mean) ** 2 for x in found) / (count - 1) / count) ** 0.5
    if count > 1000:
        expected = world.source.entropy().nats
    else:  # which takes long; so, what its own stories have
        told = world.source.stories("others", sentences=8_000)
        expected = sum(surprisal(world, story) for story in told) / len(told)
    assert abs(mean - expected) < 4 * error
    if speculate == "draft":
        monkeypatch.setattr(verifying, "rejection_sample", always)
        broken = [surprisal(world, story) for story in stories_by(world, speculate, 10)]
        assert math.inf in broken


# How much is proposed


def test_a_lookup_proposes_what_followed_and_repeats_a_circle():
    lookup = Lookup()
    assert lookup.propose([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]) == [4, 5, 6, 7]
    assert lookup.propose([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 9]) == []
    assert Lookup().propose([5, 5, 5, 5]) == [5] * 4
    assert Lookup().propose([1, 2]) == []
    assert Lookup().propose([1, 2, 7, 8, 9, 1, 2, 7, 6, 9, 1, 2, 7])[:2] == [6, 9]  # the newest


@pytest.mark.parametrize("vocab", [2, 5, 30])
def test_on_text_that_repeats_nothing_by_intent_a_lookup_spends_no_more_than_its_allowance(vocab):
    rng = random.Random(vocab)
    ids, lookup = [rng.randrange(vocab) for _ in range(50)], Lookup()
    spent = 0.0
    for _ in range(3000):
        proposed = lookup.propose(ids)
        drawn = [rng.randrange(vocab) for _ in range(len(proposed) + 1)]
        accepted = 0
        while accepted < len(proposed) and drawn[accepted] == proposed[accepted]:
            accepted += 1
        ids += drawn[: accepted + 1]
        if proposed:
            lookup.learn(len(proposed), accepted)
            spent += COST * len(proposed) - accepted
    assert spent <= FIRST_CREDIT + ALLOWANCE * len(ids)


def count_steps(engine, prompt, new, **options):
    handle, steps = engine.submit(prompt, max_new_tokens=new, **options), 0
    while not handle.done:
        steps += engine.step()
    return handle.result().token_ids, steps


def test_copying_takes_far_fewer_steps_than_tokens():
    model = tiny_model(61, 512)

    def copy(ids, vocab):  # of what stands 60 tokens before
        return torch.nn.functional.one_hot(torch.tensor(ids[-60]), vocab) * 20.0

    runner = partial(HashRunner, logits_of=copy)
    prompt = [random.Random(0).randrange(61) for _ in range(60)]
    options = {"num_pages": 200, "page_size": 4, "make_runner": runner}
    expected, steps = count_steps(Engine(model, **options), prompt, 200, sampling=GREEDY)
    assert steps == 200
    engine = Engine(model, speculate="lookup", **options)
    tokens, steps = count_steps(engine, prompt, 200, sampling=GREEDY)
    assert tokens == expected
    assert steps < 80  # the first 60 tokens are new to it only in what they follow


def test_a_good_draft_takes_fewer_steps_and_a_draft_is_never_asked_for_more_than_fits():
    model = tiny_model(61, 48)
    draft = a_draft(model, noise=0.01)
    expected, plain = count_steps(an_engine(model), [1, 2], 40, sampling=GREEDY)
    for most in (2, 6, 200):
        engine = an_engine(model, draft=draft, draft_tokens=most)
        tokens, steps = count_steps(engine, [1, 2], 40, sampling=GREEDY)
        assert tokens == expected
        assert steps < plain * 0.7


# Settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "draft"}, "speculate='draft' needs a draft model; got none"),
        ({"speculate": "guess"}, "speculate must be one of off, lookup, draft; got 'guess'"),
        ({"draft_tokens": 0}, "draft_tokens must be at least 1; got draft_tokens=0"),
        ({"draft": tiny_model(60)}, "the draft's vocab_size must equal the model's 61; got 60"),
        (
            {"draft": tiny_model(61, 24)},
            "the draft's context_length must be at least the model's 48; got 24",
        ),
    ],
)
def test_a_wrong_setting_is_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        an_engine(tiny_model(), **options)


def test_speculation_without_a_cache_is_refused():
    for options in ({"speculate": "lookup"}, {"draft": tiny_model()}):
        with pytest.raises(ValueError, match="speculation needs the cache; got use_cache=False"):
            generate(tiny_model(), [1, 2], max_new_tokens=3, use_cache=False, **options)


def test_the_pool_counts_the_drafts_pages():
    model = tiny_model()
    engine = Engine(model, memory=100_000, page_size=8, draft=tiny_model(seed=1))
    caches = (engine.cache, engine.drafter.cache)
    size = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
    assert 100_000 - size // engine.pool.num_pages < size <= 100_000


def test_habits_are_looked_up_and_drawn_as_without():
    """The naive loop, which knows no speculation, gives what a lookup gives."""
    model = tiny_model(61, 48)
    runner = partial(HashRunner, logits_of=habits)
    engine = Engine(model, num_pages=40, page_size=4, make_runner=runner, speculate="lookup")
    tokens, steps = count_steps(engine, [0, 1, 2] * 3, 30, seed=5)
    assert tokens == [
        t for t, _ in alone(model, [0, 1, 2] * 3, habits, max_new_tokens=30, seed=5)[0]
    ]
    assert steps < 30
