"""Each filter against its definition, written as a loop over plain Python numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from scratchlm.inference import filters

INF = math.inf


def log(p):
    return math.log(p) if p else -INF


def softmax(row):
    top = max(row)
    weights = [math.exp(x - top) for x in row]
    return [w / sum(weights) for w in weights]


def kept(logits):
    return [{i for i, x in enumerate(row) if x > -INF} for row in logits.tolist()]


def naive_top_k(row, k):
    return set(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])


def naive_until(row, order, mass):
    p, chosen, total = softmax(row), set(), 0.0
    for i in order:
        if total >= mass:
            break
        chosen.add(i)
        total += p[i]
    return chosen


def naive_top_p(row, p):
    return naive_until(row, sorted(range(len(row)), key=lambda i: (-row[i], i)), p)


def naive_min_p(row, p):
    probability = softmax(row)
    return {i for i, q in enumerate(probability) if q >= p * max(probability)}


def naive_typical(row, mass):
    p = softmax(row)
    entropy = -sum(q * math.log(q) for q in p)
    return naive_until(
        row, sorted(range(len(row)), key=lambda i: (abs(-math.log(p[i]) - entropy), i)), mass
    )


def random_logits(seed=0, rows=40, vocab=17):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 2


@pytest.mark.parametrize("k", [1, 2, 5, 16, 17, 100])
def test_top_k_keeps_the_k_largest_and_masks_the_rest(k):
    logits = random_logits()
    out = filters.top_k(logits, k)
    assert kept(out) == [naive_top_k(row, k) for row in logits.tolist()]
    assert all(len(row) == min(k, 17) for row in kept(out))


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_smallest_set_that_reaches_p(p):
    logits = random_logits()
    assert kept(filters.top_p(logits, p)) == [naive_top_p(row, p) for row in logits.tolist()]


def test_top_p_stops_where_the_mass_is_reached_exactly():
    logits = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64).log2() * math.log(2)
    assert kept(filters.top_p(logits, 0.5)) == [{1}]
    assert kept(filters.top_p(logits, 0.75)) == [{0, 1}]


@pytest.mark.parametrize("p", [0.0, 0.05, 0.3, 1.0])
def test_min_p_keeps_tokens_at_least_p_times_as_likely_as_the_best(p):
    logits = random_logits()
    assert kept(filters.min_p(logits, log(p))) == [naive_min_p(row, p) for row in logits.tolist()]


@pytest.mark.parametrize("mass", [0.05, 0.3, 0.7, 0.95])
def test_typical_keeps_tokens_of_surprisal_near_the_entropy(mass):
    logits = random_logits()
    out = filters.typical(logits, mass)
    assert kept(out) == [naive_typical(row, mass) for row in logits.tolist()]


@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12),
    st.integers(1, 14),
)
@settings(max_examples=200, deadline=None)
def test_ties_keep_exactly_k_and_the_lower_ids(row, k):
    out = filters.top_k(torch.tensor([row], dtype=torch.float64), k)
    assert kept(out) == [naive_top_k(row, k)]


def test_top_k_one_is_greedy_even_where_all_tie():
    logits = torch.zeros(2, 9)
    assert kept(filters.top_k(logits, 1)) == [{0}, {0}]


def test_kept_logits_keep_their_values():
    logits = random_logits()
    for out in (
        filters.top_k(logits, 3),
        filters.top_p(logits, 0.5),
        filters.min_p(logits, log(0.2)),
        filters.typical(logits, 0.5),
    ):
        assert (out == -INF).any()
        assert torch.equal(out[out > -INF], logits[out > -INF])


@pytest.mark.parametrize(
    "apply",
    [
        lambda x: filters.top_k(x, 2),
        lambda x: filters.top_p(x, 0.5),
        lambda x: filters.min_p(x, log(0.2)),
        lambda x: filters.typical(x, 0.5),
        lambda x: filters.temperature(x, 0.7),
        lambda x: filters.repetition_penalty(x, x > 0, 2.0),
    ],
)
def test_a_filter_is_pure_and_treats_rows_independently(apply):
    logits = random_logits()
    before = logits.clone()
    whole = apply(logits)
    assert torch.equal(logits, before)
    assert torch.equal(whole, torch.cat([apply(row[None]) for row in logits]))


def test_masked_tokens_stay_masked():
    logits = filters.top_k(random_logits(), 4)
    for out in (
        filters.top_p(logits, 0.9),
        filters.min_p(logits, log(0.01)),
        filters.typical(logits, 0.9),
        filters.temperature(logits, 0.5),
    ):
        assert all(now <= was for now, was in zip(kept(out), kept(logits), strict=True))
        assert all(kept(out))
        assert not out.isnan().any()


def test_penalties_are_their_formulas():
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    counts = torch.tensor([[3, 1, 0, 0]])
    assert filters.repetition_penalty(logits, counts > 0, 2.0).tolist() == [[1.0, -4.0, 1.0, -1.0]]
    assert filters.presence_penalty(logits, counts, 0.5).tolist() == [[1.5, -2.5, 1.0, -1.0]]
    assert filters.frequency_penalty(logits, counts, 0.5).tolist() == [[0.5, -2.5, 1.0, -1.0]]


def test_bias_is_added_and_minus_infinity_forbids():
    rows, tokens = torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1])
    out = filters.logit_bias(torch.zeros(3, 3), rows, tokens, torch.tensor([1.5, -INF, 2.0]))
    assert out.tolist() == [[1.5, 0.0, -INF], [0.0, 2.0, 0.0], [0.0] * 3]


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    ("with_column", "with_number", "values"),
    [
        (filters.temperature, filters.temperature, (0.5, 2.0, 1.0)),
        (lambda x, k: filters.top_k(x, k.long(), 17), filters.top_k, (1, 17, 4)),
        (filters.top_p, filters.top_p, (0.2, 1.0, 0.9)),
        (filters.min_p, filters.min_p, (log(0.3), log(0.0), log(1.0))),
        (filters.typical, filters.typical, (0.2, 1.0, 0.6)),
    ],
)
def test_a_setting_may_be_one_for_each_row(with_column, with_number, values):
    logits = random_logits(rows=3)
    whole = with_column(logits, column(*values))
    alone = [with_number(row[None], value) for row, value in zip(logits, values, strict=True)]
    assert torch.equal(whole, torch.cat(alone))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: filters.temperature(x, 0.7), hf.TemperatureLogitsWarper(0.7)),
        (lambda x: filters.top_k(x, 5), hf.TopKLogitsWarper(5)),
        (lambda x: filters.top_p(x, 0.8), hf.TopPLogitsWarper(0.8)),
        (lambda x: filters.min_p(x, log(0.1)), hf.MinPLogitsWarper(0.1)),
        (lambda x: filters.typical(x, 0.6), hf.TypicalLogitsWarper(0.6)),
    ],
)
def test_a_filter_equals_transformers_where_nothing_ties(ours, theirs):
    logits = random_logits(seed=3)
    assert torch.allclose(ours(logits), theirs(None, logits.clone()))


def test_repetition_penalty_equals_transformers():
    logits, ids = random_logits(rows=1), torch.tensor([[1, 5, 5, 9]])
    seen = torch.zeros(1, 17, dtype=torch.bool).scatter(1, ids, True)
    theirs = hf.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    assert torch.allclose(filters.repetition_penalty(logits, seen, 1.7), theirs)
