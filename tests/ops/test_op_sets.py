"""A set of ops of one's own: a replaced op is used wherever its formula is used."""

import pytest
import torch

from scratchlm.ops import OP_NAMES, OPS, CausalMask, FastOps, Ops, ReferenceOps, get_ops, reference
from tiny_models import FAMILIES, build, ids

QKV = (torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8))
GROUPED = (torch.randn(3, 8), torch.randn(2, 8, 8), torch.tensor([1, 3], dtype=torch.int32))
LOGITS, TARGETS = torch.randn(3, 7), torch.tensor([0, 6, 2])

# op that is replaced -> calls of other ops that must reach it
USERS = {
    "softmax": {
        "scaled_dot_product_attention": (QKV[0], QKV[0], QKV[0], CausalMask()),
        "attention": (*QKV, CausalMask()),
        "route": (LOGITS, 2, True),
    },
    "scaled_dot_product_attention": {"attention": (*QKV, CausalMask())},
    "log_sum_exp": {"cross_entropy": (LOGITS, TARGETS)},
    "linear": {"grouped_linear": GROUPED},
}


def counted(name):
    """Return the formula of an op as a plain function, and the list of its calls."""
    calls = []

    def function(*arguments, **keywords):
        calls.append(name)
        return getattr(OPS["reference"], name)(*arguments, **keywords)

    return function, calls


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize(("name", "user"), [(name, user) for name in USERS for user in USERS[name]])
def test_composed_ops_use_a_replaced_op(name, user, ops):
    function, calls = counted(name)
    mine = OPS[ops].replace(**{name: function})
    result = getattr(mine, user)(*USERS[name][user])
    assert calls
    torch.testing.assert_close(result, getattr(OPS["reference"], user)(*USERS[name][user]))


@pytest.mark.parametrize("name", USERS)
def test_a_subclass_is_used_as_a_replaced_op_is(name):
    function, calls = counted(name)
    mine = type("Mine", (FastOps,), {name: lambda self, *a, **k: function(*a, **k)})()
    for user, arguments in USERS[name].items():
        calls.clear()
        getattr(mine, user)(*arguments)
        assert calls


def test_replacing_twice_keeps_both():
    softmax, softmaxes = counted("softmax")
    norm, norms = counted("rms_norm")
    mine = OPS["fast"].replace(softmax=softmax).replace(rms_norm=norm)
    mine.attention(*QKV, CausalMask())
    mine.rms_norm(QKV[0], torch.ones(8))
    assert softmaxes
    assert norms


def test_other_fast_ops_stay_fast():
    mine = OPS["fast"].replace(softmax=reference.softmax)
    changed = {name for name in OP_NAMES if getattr(type(mine), name) is not getattr(FastOps, name)}
    assert changed == {"softmax"}
    assert mine.by_formula == {"attention", "scaled_dot_product_attention"}
    assert OPS["fast"].by_formula == set()


# op -> a model that uses it
MODELS = dict.fromkeys(OP_NAMES, "plain") | {
    "layer_norm": "gpt2",
    "gelu_tanh": "gpt2",
    "route": "mixtral",
    "grouped_linear": "mixtral",
}


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("name", [name for name in OP_NAMES if name not in ("gelu", "relu")])
def test_a_model_uses_a_replaced_op_and_stays_the_same_model(name, ops):
    function, calls = counted(name)
    config, tokens = FAMILIES[MODELS[name]], ids(2, 6)
    mine = build(config, OPS[ops].replace(**{name: function}))
    loss = mine.loss(tokens, tokens)
    assert calls
    torch.testing.assert_close(loss, build(config, "reference").loss(tokens, tokens))


def test_an_unknown_op_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="no op is called 'soft_max'; did you mean softmax"):
        OPS["fast"].replace(soft_max=reference.softmax)


def test_a_set_of_ops_is_not_changed_in_place():
    with pytest.raises(AttributeError, match=r"use \.replace\(softmax=…\)"):
        OPS["fast"].softmax = reference.softmax


def test_get_ops_takes_a_name_or_a_set():
    assert get_ops("fast") is OPS["fast"]
    mine = ReferenceOps()
    assert get_ops(mine) is mine
    assert issubclass(FastOps, Ops)
