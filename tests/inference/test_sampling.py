"""The draw: its distribution, its independence of everything but seed and step, its errors."""

import math
from dataclasses import dataclass

import pytest
import torch
from transformers.generation import logits_process as hf

from inference import oracle_sampling as oracle
from scratchlm.inference import GREEDY, Sampling, uniform
from scratchlm.inference.device_sampling import Settings, choose, logprobs, masked, shifted
from scratchlm.inference.drawing import NOTHING, draw
from scratchlm.inference.rows import Row

SAMPLINGS = {
    "as it is": Sampling(),
    "temperature": Sampling(temperature=0.6),
    "top_k": Sampling(top_k=4),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.1),
    "typical": Sampling(typical=0.7),
    "repetition": Sampling(repetition_penalty=1.5),
    "presence": Sampling(presence_penalty=0.7),
    "frequency": Sampling(frequency_penalty=0.4),
    "bias": Sampling(logit_bias={3: 2.0, 5: -math.inf}),
    "all at once": Sampling(0.9, 9, 0.95, 0.02, 0.9, 1.2, 0.3, 0.1, {1: 1.0}),
}


PROMPT, ANSWER = [1, 2, 2, 7], [4, 4, 3]


@dataclass(frozen=True)
class Chooser:
    """A row that has read and written something, as the engine's requests are."""

    row: Row
    num_logprobs: int | None = None


def chooser(sampling, prompt=PROMPT, answer=ANSWER, num_logprobs=None):
    row = Row(0, prompt, limit=99, seed=0, sampling=sampling, tokenizer=None, stop=(), eos_ids=())
    row.ids += answer
    return Chooser(row, num_logprobs)


def settings_of(samplings, vocab):
    return Settings.of([chooser(s) for s in samplings], vocab, torch.device("cpu"))


def sample(logits, sampling, numbers, seen=None):
    """Choose for rows of one sampling, which have all read and written the same."""
    samplings = [sampling] * len(logits)
    settings = settings_of(samplings, logits.shape[-1])
    return choose(logits, settings, torch.tensor(numbers, dtype=torch.float64)).tolist()


def filtered(logits, sampling, seen=None):
    settings = settings_of([sampling], logits.shape[-1])
    return masked(shifted(logits, settings), settings)


def logits_and_seen(vocab=12):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, vocab, generator=generator) * 1.5
    return logits, seen_by(1, vocab)


def seen_by(rows, vocab):
    seen = oracle.Seen.of([PROMPT] * rows, vocab, torch.device("cpu"))
    for token in ANSWER:
        seen.add([token] * rows)
    return seen


def chi_square_limit(freedom):
    """Wilson and Hilferty's approximation of the 0.999 quantile."""
    z = 3.0902
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_token_is_drawn_by_a_share_of_the_numbers_that_is_its_probability(name):
    """Of evenly spaced numbers an interval as long as p holds n p, to within one."""
    logits, seen = logits_and_seen()
    sampling, n = SAMPLINGS[name], 1_000
    exact = oracle.filtered(logits, sampling, seen).softmax(-1)[0]
    tokens = sample(logits.expand(n, -1), sampling, [(i + 0.5) / n for i in range(n)])
    counts = torch.tensor(tokens).bincount(minlength=12)
    assert (counts[exact == 0] == 0).all()
    assert ((counts - n * exact).abs() <= 1).all()


@pytest.mark.parametrize("draws", ["of many rows", "of one row over its steps"])
def test_the_numbers_of_draws_pass_a_chi_square_test_of_being_uniform(draws):
    pairs = ((i, 5) if draws == "of many rows" else (7, i) for i in range(20_000))
    counts = torch.tensor([int(uniform(*pair) * 10) for pair in pairs]).bincount()
    assert ((counts - 2000) ** 2 / 2000).sum() < chi_square_limit(9)


def test_a_draw_depends_on_seed_and_step_and_lies_in_range():
    numbers = {uniform(seed, step) for seed in range(30) for step in range(30)}
    assert len(numbers) == 900
    assert all(0 <= u < 1 for u in numbers)
    assert uniform(12, 3) != uniform(1, 23)
    assert uniform(-5, 0) == uniform(-5, 0)


def test_draw_inverts_the_distribution_function():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(p.double().expand(6, -1), numbers).tolist() == [1, 1, 3, 3, 4, 4]


def test_the_largest_draw_gives_a_valid_token():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(500, 33, generator=generator, dtype=torch.float64)
    p[:, -3:] = 0
    p = p / p.sum(-1, keepdim=True)
    numbers = torch.full((500,), 1 - 2**-53, dtype=torch.float64)
    assert all(token < 30 for token in draw(p, numbers).tolist())


def test_temperature_zero_and_top_k_one_are_greedy():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(50, 40, generator=generator)
    numbers = [uniform(i, 0) for i in range(50)]
    greedy = logits.argmax(-1).tolist()
    assert sample(logits, GREEDY, numbers) == greedy
    assert sample(logits, Sampling(top_k=1), numbers) == greedy
    assert sample(logits, Sampling(temperature=0.0, top_p=0.3), numbers) == greedy
    assert sample(logits, Sampling(temperature=1e-6), numbers) == greedy


def test_greedy_applies_bias_and_penalties():
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    assert sample(logits, Sampling(temperature=0.0, logit_bias={0: -math.inf}), [0.5]) == [1]
    one = chooser(Sampling(temperature=0.0, repetition_penalty=2.0), prompt=[0], answer=[])
    settings = Settings.of([one], 3, logits.device)
    assert choose(logits, settings).tolist() == [1]
    settings.seen.add(torch.tensor([1]))
    assert choose(logits, settings).tolist() == [0]  # 0.5 against 0.45


def test_the_filters_compose_in_transformers_order():
    logits, seen = logits_and_seen()
    ids = torch.tensor([[1, 2, 2, 7, 4, 4, 3]])
    expected = logits.double()
    for step in (
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(8),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.05),
        hf.TypicalLogitsWarper(0.8),
    ):
        expected = step(ids, expected)
    ours = Sampling(0.8, 8, 0.9, 0.05, 0.8, repetition_penalty=1.3)
    assert torch.allclose(filtered(logits, ours, seen), expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1}, "temperature must be finite and at least 0; got temperature=-1"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"temperature": "hot"}, "temperature must be a number; got temperature='hot'"),
        ({"top_k": 0}, "top_k must be at least 1; got top_k=0"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"top_p": 0}, "top_p must be finite and greater than 0 and at most 1; got top_p=0"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"min_p": -0.1}, "min_p must be"),
        ({"typical": 2}, "typical must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be finite and greater than 0"),
        ({"presence_penalty": math.inf}, "presence_penalty must be finite"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must name token ids; got 'a'"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\] must be finite"),
    ],
)
def test_a_wrong_setting_is_one_line(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Sampling(**wrong)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_nan_or_infinite_logits_are_flagged_in_their_row_alone(value, sampling):
    logits = torch.tensor([[0.0, 5.0, -9.0], [0.0, value, 1.0], [0.0, 5.0, -9.0]])
    assert sample(logits, sampling, [0.5] * 3) == [1, NOTHING, 1]


def test_forbidding_every_token_is_flagged():
    none = Sampling(logit_bias={0: -math.inf, 1: -math.inf})
    assert sample(torch.zeros(1, 2), none, [0.5]) == [NOTHING]


# Many rows, each in its own way: the oracle chooses row by row


def random_sampling(generator):
    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    return Sampling(
        temperature=pick(0.0, 0.3, 0.8, 1.0, 1.7),
        top_k=pick(None, None, 1, 3, 7, 500),
        top_p=pick(1.0, 1.0, 0.4, 0.95),
        min_p=pick(0.0, 0.0, 0.05),
        typical=pick(1.0, 1.0, 0.6),
        repetition_penalty=pick(1.0, 1.0, 1.3),
        presence_penalty=pick(0.0, 0.0, 0.4),
        frequency_penalty=pick(0.0, 0.0, -0.2),
        logit_bias=pick({}, {}, {3: 2.0, 5: -math.inf}),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_rows_of_any_settings_choose_as_the_oracle_does_row_by_row(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    vocab, kinds, steps = 40, 6, 4
    samplings = [random_sampling(generator) for _ in range(kinds)]
    if seed == 0:
        samplings = [GREEDY] * kinds
    if seed == 1:  # nothing but temperature, top-k and top-p
        samplings = [Sampling(0.8, 5, 0.9), Sampling(1.2), GREEDY, Sampling(top_p=0.5)] * 2
        kinds = len(samplings)
    choosers = [chooser(s) for s in samplings]
    settings = Settings.of(choosers, vocab, torch.device("cpu"))
    seen = [seen_by(1, vocab) for _ in samplings]
    for step in range(steps):
        logits = (torch.randn(kinds, vocab, generator=generator) * 2).to(dtype)
        numbers = [uniform(row, step) for row in range(kinds)]
        tokens = choose(logits, settings, torch.tensor(numbers, dtype=torch.float64))
        expected = [
            oracle.sample(logits[i : i + 1], samplings[i], numbers[i : i + 1], seen[i])[0]
            for i in range(kinds)
        ]
        assert tokens.tolist() == expected
        if settings.seen is not None:
            settings.seen.add(tokens)
        for row, token in zip(seen, expected, strict=True):
            row.add([token])
        if step == 1:  # rows come and go: the counts of those that stay are carried on
            keep = list(range(kinds - 1, 0, -1))
            choosers, samplings = [choosers[i] for i in keep], [samplings[i] for i in keep]
            seen, kinds = [seen[i] for i in keep], kinds - 1
            settings = Settings.of(choosers, vocab, torch.device("cpu"), settings)


LARGE = {  # the widths of logits: a nucleus of a few tokens, of hundreds, of thousands
    "top_k": (2.0, Sampling(0.8, top_k=50)),
    "top_k, all at once": (2.0, Sampling(0.8, 300, 0.9, 0.001, 0.9, 1.2, 0.3, 0.1, {1: 1.0})),
    "small nucleus": (5.0, Sampling(0.7, top_p=0.9, min_p=0.01)),
    "nucleus of hundreds": (3.0, Sampling(top_p=0.7, typical=0.9)),
    "nucleus of thousands": (0.5, Sampling(1.3, top_p=0.95)),
}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_few_of_a_large_vocabulary_are_those_of_the_oracle(name, ties):
    width, sampling = LARGE[name]
    vocab, rows = 20_001, 12
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * width
    if ties:  # at the border of k and of the nucleus, too
        logits = logits.round()
    settings, numbers = settings_of([sampling] * rows, vocab), [uniform(0, i) for i in range(rows)]
    tokens = choose(logits, settings, torch.tensor(numbers, dtype=torch.float64))
    expected = [
        oracle.sample(row[None], sampling, [number], seen_by(1, vocab))[0]
        for row, number in zip(logits, numbers, strict=True)
    ]
    assert tokens.tolist() == expected


def test_filtered_distributions_are_the_oracles_bit_for_bit():
    generator = torch.Generator().manual_seed(5)
    samplings = [s for s in SAMPLINGS.values()]
    logits = torch.randn(len(samplings), 50, generator=generator)
    settings = settings_of(samplings, 50)
    got = masked(shifted(logits, settings), settings)
    for i, sampling in enumerate(samplings):
        expected = oracle.filtered(logits[i : i + 1], sampling, seen_by(1, 50))
        assert torch.equal(got[i : i + 1], expected)


def test_log_probabilities_do_not_depend_on_what_others_ask_for():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]).expand(4, -1)  # ties
    choosers = [chooser(GREEDY, num_logprobs=n) for n in (2, None, 4, 2)]
    settings = Settings.of(choosers, 5, torch.device("cpu"))
    tokens = choose(logits, settings)
    found = {
        row: (f, at) for f in logprobs(logits, tokens, settings) for at, row in enumerate(f.rows)
    }
    assert sorted(found) == [0, 2, 3]
    table = logits[:1].double().log_softmax(-1)
    for row, best in ((0, 2), (2, 4), (3, 2)):
        f, at = found[row]
        values, ids = table.topk(best)
        assert torch.equal(f.values[at], values[0])
        assert torch.equal(f.ids[at], ids[0])
        assert f.chosen[at] == table[0, tokens[row]]
