"""A batch computed in shares, a thread each: the same step, the same bits, no thread left over."""

import threading

import pytest
import torch

from scratchlm.config import ModelConfig
from scratchlm.data import Batch
from scratchlm.model import TransformerLM
from scratchlm.training import learner as learners
from scratchlm.training.learner import Learner
from scratchlm.training.settings import TrainConfig
from scratchlm.training.shares import Shares
from scratchlm.training.step import backward, take_step

CONFIG = ModelConfig(31, 12, 16, 2, 2, 24)


def some_batch(rows=6, documents=False):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(31, (rows, 13), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, 2:] = -100  # shares of unequal weight
    targets[-1] = -100  # and one row of none
    given = torch.arange(12).expand(rows, 12) // 5 if documents else None
    return Batch(ids[:, :-1].contiguous(), targets, given)


def learner_of(shares, **settings):
    torch.manual_seed(0)
    model = TransformerLM(CONFIG, dtype=torch.float64)
    return Learner(model, TrainConfig(batch_size=6, shares=shares, **settings))


@pytest.mark.parametrize("shares", [2, 3, 5, 16])
@pytest.mark.parametrize(
    "settings", [{}, {"z_loss": 0.1, "micro_batch_size": 4}, {"document_mask": True}]
)
def test_shares_give_the_gradients_of_the_whole(shares, settings):
    batch = some_batch(documents=settings.get("document_mask", False))
    whole, shared = learner_of(1, **settings), learner_of(shares, **settings)
    torch.testing.assert_close(backward(shared, batch), backward(whole, batch))
    for (name, p), q in zip(shared.parameters.items(), whole.parameters.values(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_the_same_steps_give_the_same_bits():
    def train():
        learner = learner_of(3)
        losses = [take_step(learner, some_batch(), step, 1e-2).loss for step in range(1, 6)]
        return losses, [p.detach().clone() for p in learner.parameters.values()]

    (losses, weights), (again, twice) = train(), train()
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(weights, twice, strict=True))


def test_each_share_has_a_thread_of_its_own_with_one_torch_thread():
    meet = threading.Barrier(3, timeout=600)
    shares, batch = Shares(3), some_batch()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        shares.each(lambda part: None, batch)  # the first of a shape goes alone

        def work(part):
            meet.wait()  # passed only if all three are at work at once
            return len(part.inputs), torch.get_num_threads(), threading.get_ident()

        rows, threads, who = zip(*shares.each(work, batch), strict=True)
        assert rows == (2, 2, 2)
        assert set(threads) == {1}
        assert len(set(who)) == 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_first_of_a_shape_is_computed_before_the_others():
    running, most = [], []

    def work(part):
        running.append(1)
        most.append(len(running))
        threading.Event().wait(0.05)
        running.pop()

    Shares(2).each(work, some_batch())  # two of one shape
    assert most == [1, 1]


def test_an_error_in_a_share_is_raised_when_all_have_ended():
    ended = []
    before = torch.get_num_threads()

    def work(part):
        if len(ended) == 1:
            ended.append("bad")
            raise ValueError("this share")
        ended.append("good")

    shares = Shares(3)
    shares._known.add(some_batch().inputs[:2].shape)
    with pytest.raises(ValueError, match="this share"):
        shares.each(work, some_batch())
    assert sorted(ended) == ["bad", "good", "good"]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("how", ["block", "model"])
def test_compiled_code_is_shared_too(how, monkeypatch):
    compiled = torch.compile

    def with_backend(function, **options):
        return compiled(function, backend="aot_eager", **options)

    def compile_module(self, **options):
        self._compiled_call_impl = with_backend(self._call_impl, **options)

    monkeypatch.setattr(torch, "compile", with_backend)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_module)
    torch._dynamo.reset()
    whole, shared = learner_of(1), learner_of(2, compile=how)
    for _ in range(2):
        torch.testing.assert_close(backward(shared, some_batch()), backward(whole, some_batch()))
        for p, q in zip(shared.parameters.values(), whole.parameters.values(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_one_share_has_no_thread_of_its_own(monkeypatch):
    made = []
    monkeypatch.setattr(learners, "Shares", made.append)
    learner_of(1)
    assert not made
    learner_of(4)
    assert made == [4]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_shares_are_a_whole_number_from_1(value):
    with pytest.raises((ValueError, TypeError), match="shares"):
        TrainConfig(shares=value)
