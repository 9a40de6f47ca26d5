"""Learning rates at the steps that matter."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchlm.training import constant_schedule, cosine_schedule, make_schedule, wsd_schedule


def test_cosine_rises_from_zero_peaks_after_warmup_and_ends_at_the_minimum():
    def lr(step):
        return cosine_schedule(step, max_lr=1.0, min_lr=0.1, warmup_steps=7, cosine_steps=21)

    assert [lr(step) for step in range(8)] == pytest.approx([i / 7 for i in range(8)])
    assert lr(0) == 0.0
    assert lr(7) == 1.0
    assert lr(14) == pytest.approx(0.55)  # half-way along the cosine
    assert lr(10) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 3 / 14)))
    assert [lr(21), lr(22), lr(1_000_000)] == [0.1, 0.1, 0.1]


@given(
    warmup=st.integers(0, 50),
    rest=st.integers(0, 50),
    step=st.integers(0, 150),
    low=st.floats(0, 1),
    high=st.floats(1, 2),
)
def test_every_schedule_stays_between_its_bounds(warmup, rest, step, low, high):
    total = warmup + rest
    for rate in (
        cosine_schedule(step, high, low, warmup, total),
        wsd_schedule(step, high, low, warmup, total, rest // 2),
        constant_schedule(step, high, warmup),
    ):
        assert 0 <= rate <= high
        if step >= warmup:
            assert rate >= low * (1 - 1e-12)


def test_no_warmup_begins_at_the_maximum():
    assert cosine_schedule(0, 1.0, 0.0, 0, 10) == 1.0
    assert constant_schedule(0, 1.0) == 1.0


def test_wsd_is_flat_until_its_decay_and_linear_in_it():
    rates = [wsd_schedule(step, 1.0, 0.2, 2, 10, 4) for step in range(12)]
    flat, fall = [1.0] * 5, [0.8, 0.6, 0.4, 0.2, 0.2]
    assert rates == pytest.approx([0.0, 0.5, *flat, *fall])


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="schedule must be one of cosine, wsd, constant; got 'x'"):
        make_schedule("x", max_lr=1, min_lr=0, warmup_steps=0, total_steps=1, decay_steps=0)
