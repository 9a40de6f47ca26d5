"""Confidence intervals: known values, and that they hold as often as they say."""

import math
import random

import pytest

from scratchlm.evaluation import Estimate, mean_interval, ratio_interval, wilson_interval


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),  # scipy.stats.binomtest(8, 10).proportion_ci(method="wilson")
        (50, 100, 0.403831, 0.596169),
        (0, 20, 0.0, 0.161125),
        (20, 20, 0.838875, 1.0),
    ],
)
def test_a_share_has_wilsons_interval(hits, count, low, high):
    found = wilson_interval(hits, count)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)
    assert found.value == hits / count


def holds(draw, truth, interval, times=1000):
    hits = 0
    for _ in range(times):
        found = interval(draw)
        hits += found.low <= truth <= found.high
    return hits / times


def test_an_interval_holds_the_truth_in_about_95_of_100_samples():
    draw = random.Random(0)

    def share(draw):
        return wilson_interval(sum(draw.random() < 0.9 for _ in range(40)), 40)

    def ratio(draw):  # documents of very different lengths, longer ones easier
        sizes = [draw.choice([5, 50, 400]) for _ in range(60)]
        sums = [n * (2 + draw.gauss(0, 0.5) - n / 1000) for n in sizes]
        return ratio_interval(sums, sizes)

    truth = sum(n * (2 - n / 1000) for n in (5, 50, 400)) / 455
    assert 0.92 < holds(draw, 0.9, share) < 0.98
    assert 0.92 < holds(draw, truth, ratio) < 0.98


def test_a_mean_has_the_interval_of_its_standard_error():
    values = [1.0, 2.0, 4.0, 9.0]
    found = mean_interval(values)
    error = math.sqrt(sum((v - 4) ** 2 for v in values) / 3 / 4)
    assert (found.value, found.low) == pytest.approx((4.0, 4 - 1.959964 * error))


def test_one_document_has_no_interval_and_a_rising_function_takes_both_ends_along():
    assert ratio_interval([3.0], [2]) == Estimate(1.5)
    assert Estimate(0.0, -1.0, 1.0).map(math.exp) == Estimate(1.0, math.exp(-1), math.e)
    assert Estimate(0.0).map(math.exp) == Estimate(1.0)
    with pytest.raises(ValueError, match="hits must lie in"):
        wilson_interval(3, 2)
