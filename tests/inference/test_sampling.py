"""The draw: its distribution, its independence of everything but seed and step, its errors."""

import math

import pytest
import torch
from transformers.generation import logits_process as hf

from scratchlm.inference import GREEDY, Sampling, Seen, filtered, sample, uniform
from scratchlm.inference.sampling import draw

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


def logits_and_seen(vocab=12):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, vocab, generator=generator) * 1.5
    seen = Seen.of([[1, 2, 2, 7]], vocab, torch.device("cpu"))
    for token in (4, 4, 3):
        seen.add([token])
    return logits, seen


def chi_square_limit(freedom):
    """Wilson and Hilferty's approximation of the 0.999 quantile."""
    z = 3.0902
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("name", SAMPLINGS)
def test_frequencies_pass_a_chi_square_test_against_the_exact_distribution(name):
    logits, seen = logits_and_seen()
    sampling, n = SAMPLINGS[name], 20_000
    exact = filtered(logits, sampling, seen).softmax(-1)[0].tolist()
    many = logits.expand(n, -1)
    rows = Seen(seen.prompt.expand(n, -1), seen.answer.expand(n, -1))
    tokens = sample(many, sampling, [uniform(seed, 5) for seed in range(n)], rows)
    counts = torch.tensor(tokens).bincount(minlength=12).tolist()
    assert all(count == 0 for count, p in zip(counts, exact, strict=True) if p == 0)
    likely = [(count, n * p) for count, p in zip(counts, exact, strict=True) if p > 0]
    statistic = sum((count - expected) ** 2 / expected for count, expected in likely)
    assert statistic < chi_square_limit(max(len(likely) - 1, 1)), statistic


def test_the_draws_of_one_row_over_its_steps_are_uniform_too():
    counts = torch.tensor([int(uniform(7, step) * 10) for step in range(20_000)]).bincount()
    assert ((counts - 2000) ** 2 / 2000).sum() < chi_square_limit(9)


def test_a_draw_depends_on_seed_and_step_and_lies_in_range():
    numbers = {uniform(seed, step) for seed in range(30) for step in range(30)}
    assert len(numbers) == 900
    assert all(0 <= u < 1 for u in numbers)
    assert uniform(12, 3) != uniform(1, 23)
    assert uniform(-5, 0) == uniform(-5, 0)


def test_draw_inverts_the_distribution_function():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    numbers = [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53]
    assert draw(p.expand(6, -1), numbers) == [1, 1, 3, 3, 4, 4]


def test_the_largest_draw_gives_a_valid_token():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(500, 33, generator=generator, dtype=torch.float64)
    p[:, -3:] = 0
    p = p / p.sum(-1, keepdim=True)
    assert all(token < 30 for token in draw(p, [1 - 2**-53] * 500))


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
    seen = Seen.of([[0]], 3, logits.device)
    assert sample(logits, Sampling(temperature=0.0, repetition_penalty=2.0), [0.5], seen) == [1]


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
def test_nan_or_infinite_logits_are_an_error_not_a_token(value, sampling):
    with pytest.raises(ValueError, match="nothing to choose from"):
        sample(torch.tensor([[0.0, value, 1.0]]), sampling, [0.5])


def test_forbidding_every_token_is_an_error():
    with pytest.raises(ValueError, match="every token is forbidden"):
        sample(torch.zeros(1, 2), Sampling(logit_bias={0: -math.inf, 1: -math.inf}), [0.5])
