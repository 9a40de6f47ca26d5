"""The engine kept for a model: the same one while it fits, gone with the model.

It is for GPUs; its logic is shown on a CPU whose memory is taken for a GPU's.
"""

import types
import weakref

import pytest
import torch

from scratchlm.inference import GREEDY
from scratchlm.inference.kept_engine import _kept, engine_of
from tiny_models import PLAIN, build


@pytest.fixture(autouse=True)
def a_gpu_of_a_gigabyte(monkeypatch):
    found = types.SimpleNamespace(total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def answer(engine):
    return engine.submit([1, 2, 3], max_new_tokens=6, sampling=GREEDY, eos_ids=()).result()


def test_the_same_engine_serves_again_and_a_larger_one_where_it_is_too_small():
    model = build(PLAIN, dtype=torch.float32)
    first = engine_of(model, 2, 1)
    assert engine_of(model, 1, 1) is first
    wide = engine_of(model, 2, 3)
    assert wide is not first
    assert wide.max_rows == 3
    large = engine_of(model, 3, 2)
    assert large.pool.num_pages >= 3
    assert large.max_rows == 3
    assert engine_of(model, 3, 3) is large


def test_weights_and_hooks_that_change_between_two_calls_are_followed():
    model = build(PLAIN, dtype=torch.float32)
    before = answer(engine_of(model, 2, 1)).token_ids
    with torch.no_grad():
        model.lm_head.weight.neg_()
    engine = engine_of(model, 2, 1)
    changed = answer(engine).token_ids
    assert changed != before
    fresh = build(PLAIN, dtype=torch.float32)
    with torch.no_grad():
        fresh.lm_head.weight.neg_()
    assert changed == answer(engine_of(fresh, 2, 1)).token_ids
    calls = []
    model.layers[0].ffn.w1.register_forward_hook(lambda *_: calls.append(1))
    assert engine_of(model, 2, 1) is engine
    answer(engine)
    assert len(calls) >= 6


def test_a_model_whose_outermost_object_has_changed_gets_another_engine():
    model = build(PLAIN, dtype=torch.float32)
    first = engine_of(model, 2, 1)
    model.forward = lambda *_, **__: None
    assert engine_of(model, 2, 1) is not first
    del model.forward
    second = engine_of(model, 2, 1)
    model.to(torch.float64)
    assert engine_of(model, 2, 1) is not second


def test_the_engine_goes_with_its_model_without_the_collector():
    model = build(PLAIN, dtype=torch.float32)
    engine = engine_of(model, 2, 1)
    answer(engine)
    pool, weight = weakref.ref(engine.cache), weakref.ref(model.lm_head)
    assert model in _kept
    del engine, model
    assert pool() is None
    assert weight() is None


def test_a_pool_that_is_large_for_the_device_is_not_kept(monkeypatch):
    found = types.SimpleNamespace(total_memory=1 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    model = build(PLAIN, dtype=torch.float32)
    assert engine_of(model, 2, 1) is not engine_of(model, 2, 1)
