"""Rounded copies of the layers' matrices: autocast's own numbers, and nobody else sees them."""

import contextlib

import pytest
import torch

from scratchlm.model.layers import SwiGLU
from scratchlm.training.twins import Twins, multiplied_together
from tiny_models import FAMILIES, build, ids

LOW = torch.bfloat16


@contextlib.contextmanager
def as_autocast_does(model):
    """Round and join the matrices anew, as autocast does on a GPU; autograd finds its way back."""
    groups = list(multiplied_together(model))
    for weights in groups:
        weights[0].twin = torch.cat([weight.to(LOW) for weight in weights])
    yield
    for weights in groups:
        del weights[0].twin


def gradients(model, twins, batches=1):
    """Forward and backward under autocast, several times; return the loss and the gradients."""
    model.zero_grad(set_to_none=True)
    for number in range(batches):
        tokens = ids(2, 7).roll(number, dims=1)
        with as_autocast_does(model) if twins is None else twins.shown():
            with torch.autocast("cpu", LOW):
                loss = model.loss(tokens, tokens)
            loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def model_of(family):
    return build(FAMILIES[family], dtype=torch.float32)


def assert_same(ours, truth):
    assert ours[0] == truth[0]
    assert ours[1].keys() == truth[1].keys()
    for name, gradient in truth[1].items():
        torch.testing.assert_close(ours[1][name].float(), gradient, atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("low", [False, True], ids=["float32 gradients", "bfloat16 gradients"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_are_those_of_autocast(family, low, batches):
    model = model_of(family)
    truth = gradients(model, None, batches)
    twins = Twins(model, low_gradients=low)
    ours = gradients(model, twins, batches)
    assert_same(ours, truth)
    kinds = {ours[1][name].dtype for name, p in model.named_parameters() if p in twins.parts}
    assert kinds == {LOW if low and batches == 1 else torch.float32}


def test_every_matrix_of_a_layer_has_a_twin():
    model = model_of("plain")
    layers = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    twins = Twins(model)
    assert set(map(id, twins.parts)) == set(map(id, layers))
    assert isinstance(model.layers[0].ffn, SwiGLU)
    assert len(twins.groups) == 4 * len(model.layers)  # Q·K·V, O, W1·W3, W2


def test_a_matrix_changed_by_somebody_else_is_rounded_anew():
    model = model_of("plain")
    twins = Twins(model, low_gradients=True)
    with torch.no_grad():
        model.layers[1].ffn.w3.weight.mul_(3)
    twins.refresh()
    assert_same(gradients(model, twins), gradients(model, None))


def test_what_is_noted_as_equal_is_not_rounded_again():
    model = model_of("plain")
    twins = Twins(model)
    weight = model.layers[0].attn.output_proj.weight
    with torch.no_grad():
        weight.mul_(3)
    twins.are_equal([weight])  # as an optimizer says that wrote both
    before = twins.parts[weight].clone()
    twins.refresh()
    assert torch.equal(twins.parts[weight], before)
    with torch.no_grad():
        weight.mul_(1)
    twins.refresh()
    assert torch.equal(twins.parts[weight], weight.to(LOW))


def test_outside_a_backward_pass_nobody_sees_them():
    model = model_of("plain")
    twins = Twins(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)  # the twins are old now
        tokens = ids(1, 5)
        with torch.autocast("cpu", LOW):
            expected = build(FAMILIES["plain"], dtype=torch.float32)
            expected.load_state_dict(model.state_dict())
            assert torch.equal(model(tokens), expected(tokens))
    seen = []
    with contextlib.suppress(KeyError), twins.shown():
        seen += [p for p in model.parameters() if hasattr(p, "twin")]
        raise KeyError
    assert seen
    assert not any(hasattr(p, "twin") for p in model.parameters())


def test_a_layer_that_somebody_listens_to_goes_its_own_way():
    model, heard = model_of("plain"), []
    twins = Twins(model, low_gradients=True)
    model.layers[0].attn.k_proj.register_forward_hook(lambda *_: heard.append(1))
    assert_same(gradients(model, twins), gradients(model, None))
    assert len(heard) == 2


def test_a_gradient_that_somebody_listens_to_passes_by_them():
    model, heard = model_of("plain"), {}
    twins = Twins(model, low_gradients=True)
    doubled, watched = model.layers[0].attn.v_proj.weight, model.layers[1].ffn.w2.weight
    plain = gradients(model, None)[1]
    doubled.register_hook(lambda g: heard.update(doubled=g.dtype) or 2 * g)
    watched.register_post_accumulate_grad_hook(lambda p: heard.update(watched=p.grad.dtype))
    ours = gradients(model, twins)[1]
    assert heard == {"doubled": torch.float32, "watched": torch.float32}
    expected = 2 * plain["layers.0.attn.v_proj.weight"]
    assert (ours["layers.0.attn.v_proj.weight"] - expected).norm() < 0.02 * expected.norm()
    assert ours["layers.0.ffn.w2.weight"].dtype == LOW


def test_a_frozen_matrix_has_no_twin_and_gets_no_gradient():
    model = model_of("plain")
    frozen = model.layers[0].attn.q_proj.weight.requires_grad_(False)
    twins = Twins(model)
    assert frozen not in twins.parts
    assert gradients(model, twins)[1]["layers.0.attn.q_proj.weight"] is None
