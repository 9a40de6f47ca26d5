"""The stateless shuffle is a bijection, scatters, and is the same everywhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.oracles import naive_permutation
from scratchlm.data.permutation import derive_key, permute

FROZEN_TEN = [2, 6, 5, 0, 4, 9, 8, 7, 1, 3]
FROZEN_FAR = [770504378963, 463489851655, 806630882781]


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_every_index_is_hit_exactly_once(n, key):
    assert sorted(permute(np.arange(n), n, key).tolist()) == list(range(n))


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_second_implementation_in_plain_integers_agrees(n, key, data):
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5))
    expected = [naive_permutation(i, n, key) for i in index]
    assert permute(np.array(index, dtype=np.uint64), n, key).tolist() == expected


def test_the_permutation_is_the_same_as_in_earlier_versions():
    # Written down once from the plain-integer implementation: if this changes, every run changes.
    assert permute(np.arange(10), 10, derive_key(1234, 0, 1)).tolist() == FROZEN_TEN
    far = np.array([0, 1, 10**12 - 1])
    assert permute(far, 10**12, derive_key(1234, 7, 1)).tolist() == FROZEN_FAR


def test_a_single_element_equals_that_of_the_whole_permutation():
    whole = permute(np.arange(1000), 1000, 5)
    assert [int(permute(np.array([i]), 1000, 5)[0]) for i in range(1000)] == whole.tolist()


def test_keys_give_unrelated_orders():
    orders = [permute(np.arange(1000), 1000, derive_key(0, epoch)) for epoch in range(50)]
    same_place = [
        int((a == b).sum()) for i, a in enumerate(orders) for b in orders[:i]
    ]  # two random orders agree in one place on average, with variance one
    assert 0.8 < np.mean(same_place) < 1.2
    assert max(same_place) < 10


def test_neighbours_are_scattered():
    order = permute(np.arange(100_000), 100_000, 3).astype(np.float64)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    # a random order has runs up and down of equal number
    assert abs((np.diff(order) > 0).mean() - 0.5) < 0.01


def test_all_orders_of_four_occur_about_equally():
    counts: dict[tuple[int, ...], int] = {}
    for key in range(4800):
        order = tuple(permute(np.arange(4), 4, derive_key(key)).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert 120 < min(counts.values()) <= max(counts.values()) < 290  # expected 200 each


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="n=0"):
        permute(np.arange(0), 0, 1)
    with pytest.raises(ValueError, match="index=5, n=5"):
        permute(np.array([5]), 5, 1)
