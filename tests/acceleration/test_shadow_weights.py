"""bf16 shadow weights: autocast's own numbers, and visible in a backward pass alone."""

import contextlib

import pytest
import torch

from scratchlm.accelerate import accelerate
from scratchlm.accelerate.shadow_weights import ShadowWeights, weight_groups
from scratchlm.model.layers import SwiGLU
from scratchlm.ops import OPS
from tiny_models import FAMILIES, build, ids

LOW = torch.bfloat16


@contextlib.contextmanager
def as_autocast_does(model):
    """Round and join the matrices anew, as autocast does on a GPU; autograd finds its way back."""
    groups = list(weight_groups(model))
    for group in groups:
        group.owner.shadow = torch.cat([weight.to(LOW) for weight in group.weights])
    yield
    for group in groups:
        group.owner.shadow = None


def gradients(model, shadow, batches=1):
    """Forward and backward under autocast, several times; return the loss and the gradients."""
    model.zero_grad(set_to_none=True)
    for number in range(batches):
        tokens = ids(2, 7).roll(number, dims=1)
        with as_autocast_does(model) if shadow is None else shadow.visible():
            with torch.autocast("cpu", LOW):
                loss = model.loss(tokens, tokens)
            loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def model_of(family):
    return accelerate(build(FAMILIES[family], dtype=torch.float32))


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
    shadow = ShadowWeights(model, low_gradients=low)
    ours = gradients(model, shadow, batches)
    assert_same(ours, truth)
    dtypes = {ours[1][name].dtype for name, p in model.named_parameters() if p in shadow.parts}
    assert dtypes == {LOW if low and batches == 1 else torch.float32}


@pytest.mark.parametrize("family", ["plain", "gpt2"])
def test_every_matrix_of_a_layer_has_a_shadow(family):
    model = model_of(family)
    matrices = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    shadow = ShadowWeights(model)
    assert set(map(id, shadow.parts)) == set(map(id, matrices))
    gated = isinstance(model.layers[0].ffn, SwiGLU)
    assert gated == (family == "plain")
    assert len(shadow.groups) == 4 * len(model.layers)  # QKV, O, [W1; W3] or W1, W2


def test_plain_and_user_provided_layers_have_none():
    assert not ShadowWeights(build(FAMILIES["plain"], dtype=torch.float32)).groups
    model = model_of("plain")
    model.layers[0].attn.q_proj.ops = OPS["fast"].replace(linear=OPS["reference"].linear)
    model.layers[1].ffn.w2 = torch.nn.Linear(64, 16)
    shadow = ShadowWeights(model)
    assert len(shadow.groups) == 4 * len(model.layers) - 2


def test_a_matrix_changed_by_somebody_else_is_rounded_anew():
    model = model_of("plain")
    shadow = ShadowWeights(model, low_gradients=True)
    with torch.no_grad():
        model.layers[1].ffn.w3.weight.mul_(3)
    shadow.refresh()
    assert_same(gradients(model, shadow), gradients(model, None))


def test_what_is_marked_as_equal_is_not_rounded_again():
    model = model_of("plain")
    shadow = ShadowWeights(model)
    weight = model.layers[0].attn.output_proj.weight
    with torch.no_grad():
        weight.mul_(3)
    shadow.mark_equal([weight])  # as an optimizer says that wrote both
    before = shadow.parts[weight].clone()
    shadow.refresh()
    assert torch.equal(shadow.parts[weight], before)
    with torch.no_grad():
        weight.mul_(1)
    shadow.refresh()
    assert torch.equal(shadow.parts[weight], weight.to(LOW))


def shadows_in(model):
    return [m for m in model.modules() if getattr(m, "shadow", None) is not None]


def test_outside_a_backward_pass_nobody_sees_them():
    model = model_of("plain")
    shadow = ShadowWeights(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)  # the shadows are old now
        tokens = ids(1, 5)
        with torch.autocast("cpu", LOW):
            expected = build(FAMILIES["plain"], dtype=torch.float32)
            expected.load_state_dict(model.state_dict())
            assert torch.equal(model(tokens), expected(tokens))
    seen = []
    with contextlib.suppress(KeyError), shadow.visible():
        seen += shadows_in(model)
        raise KeyError
    assert seen
    assert not shadows_in(model)
    assert not [name for name in model.state_dict() if "shadow" in name]


def test_a_hooked_layer_is_called():
    model, called = model_of("plain"), []
    shadow = ShadowWeights(model, low_gradients=True)
    model.layers[0].attn.k_proj.register_forward_hook(lambda *_: called.append(1))
    assert_same(gradients(model, shadow), gradients(model, None))
    assert len(called) == 2


def test_a_hooked_gradient_comes_from_autograd():
    model, heard = model_of("plain"), {}
    shadow = ShadowWeights(model, low_gradients=True)
    doubled, watched = model.layers[0].attn.v_proj.weight, model.layers[1].ffn.w2.weight
    truth = gradients(model, None)[1]
    doubled.register_hook(lambda g: heard.update(doubled=g.dtype) or 2 * g)
    watched.register_post_accumulate_grad_hook(lambda p: heard.update(watched=p.grad.dtype))
    ours = gradients(model, shadow)[1]
    assert heard == {"doubled": torch.float32, "watched": torch.float32}
    expected = 2 * truth["layers.0.attn.v_proj.weight"]
    assert (ours["layers.0.attn.v_proj.weight"] - expected).norm() < 0.02 * expected.norm()
    assert ours["layers.0.ffn.w2.weight"].dtype == LOW


def test_a_frozen_matrix_has_no_shadow_and_gets_no_gradient():
    model = model_of("plain")
    frozen = model.layers[0].attn.q_proj.weight.requires_grad_(False)
    shadow = ShadowWeights(model)
    assert frozen not in shadow.parts
    assert gradients(model, shadow)[1]["layers.0.attn.q_proj.weight"] is None
