"""The kernel that chooses tokens chooses those of the filters, applied one after the other."""

import math
import random

import pytest
import torch

from scratchlm.accelerate.kernels.triton import choose_token
from scratchlm.accelerate.kernels.triton.choose_token import MAX_K, choose_tokens
from scratchlm.inference import filters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 1500


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(choose_token, "_BLOCK", 512)
        monkeypatch.setattr(choose_token, "_PARTS", 2)


def by_filters(row, temperature, k, p, number):
    """The token, and the nearest that a rounding of the masses could make of it."""
    x = row.double()[None]
    if not bool(row.max().isfinite()):
        return {-1}
    if temperature == 0:
        return {int(x.argmax())}
    x = filters.temperature(x, temperature)
    if k < len(row):
        x = filters.top_k(x, k)
    if p < 1:
        x = filters.top_p(x, p)
    cdf = x.softmax(dim=-1).cumsum(dim=-1)[0]
    near = (number - 1e-12, number, number + 1e-12)
    last = int(x[0].isfinite().nonzero().max())
    return {min(int((cdf <= n * cdf[-1]).sum()), last) for n in near}


def check(logits, settings):
    temperature, k, p, number = zip(*settings, strict=True)
    rows = len(settings)
    order = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(0))[:rows]
    last = torch.full((rows + 3,), 77, device=DEVICE)
    wide = {"dtype": torch.float64, "device": DEVICE}
    tokens = choose_tokens(
        logits.to(DEVICE),
        torch.tensor(temperature, **wide),
        torch.tensor(k, device=DEVICE),
        torch.tensor(p, **wide),
        torch.tensor(number, **wide),
        order.to(DEVICE),
        last,
    )
    for i, given in enumerate(settings):
        assert int(tokens[i]) in by_filters(logits[i], *given), (i, given)
    assert last[order.to(DEVICE)].tolist() == tokens.clamp(min=0).tolist()
    assert (last == 77).sum() == 3 + (tokens == 77).sum()


ROWS = 12 if DEVICE == "cuda" else 5  # the interpreter looks at candidates one by one


@pytest.mark.parametrize(
    ("dtype", "vocab"), [(torch.float32, VOCAB), (torch.float16, 29), (torch.float16, 512)]
)
def test_draws_are_those_of_the_filters(dtype, vocab):
    draw = random.Random(vocab)
    logits = (3 * torch.randn(ROWS, vocab)).to(dtype)
    settings = [
        (
            draw.choice([0.0, 0.3, 0.8, 1.7]),
            *draw.choice([(vocab, 1.0), (1, 1.0), (5, 0.9), (50, 0.95), (MAX_K, 0.5), (7, 1e-9)]),
            draw.choice([0.0, draw.random(), math.nextafter(1.0, 0.0)]),
        )
        for _ in range(ROWS)
    ]
    settings = [
        (t, min(k, vocab) if p == 1 else min(k, vocab - 1), p, u) for t, k, p, u in settings
    ]
    check(logits, settings)


def test_ties_go_to_the_lower_id():
    logits = torch.zeros(4, VOCAB)
    logits[1, 3::7] = 2.0
    logits[2] = -0.0
    logits[2, 900:] = 0.0
    logits[3, 40:44] = 5.0
    check(logits, [(1.0, 9, 0.9, number) for number in (0.0, 0.31, 0.99, 0.31)])
    check(logits, [(0.0, VOCAB, 1.0, 0.5)] * 4)


def test_candidates_that_are_too_many_are_found_by_bisection(monkeypatch):
    """All the large logits in one group: its maximum hides them."""
    found, bisect = [], choose_token._kth_largest
    if DEVICE == "cpu":
        monkeypatch.setattr(choose_token, "_kth_largest", lambda *a: found.append(1) or bisect(*a))
    logits = torch.randn(2, 300 * 256)
    logits[:, ::256] += 100
    logits[1, 1::256] += 90
    monkeypatch.setattr(choose_token, "_BLOCK", 8192)
    check(logits, [(2.0, 40, 1.0, 0.6), (2.0, 9, 0.8, 0.2)])
    assert DEVICE == "cuda" or len(found) == 2


def test_rows_that_leave_nothing_to_choose_from_are_marked():
    logits = torch.randn(5, VOCAB)
    logits[0, 7], logits[1, 7], logits[2] = math.nan, math.inf, -math.inf
    logits[3] = -math.inf
    logits[3, 1234] = 1.0  # one token is enough
    for given in ((0.0, VOCAB, 1.0, 0.5), (1.0, VOCAB, 1.0, 0.5), (1.0, 50, 0.9, 0.5)):
        check(logits, [given] * 5)


def test_no_number_means_greedy_for_all():
    logits = torch.randn(3, VOCAB).to(DEVICE)
    none = torch.zeros(3, dtype=torch.float64, device=DEVICE)
    last = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    slots = torch.arange(3, device=DEVICE)
    tokens = choose_tokens(logits, none, slots, none, None, slots, last)
    assert tokens.tolist() == last.tolist() == logits.argmax(dim=-1).tolist()
