"""An op is replaced everywhere or nowhere.

Whoever brings an op of their own finds it used wherever its formula is used: in forward, loss,
backward, cached forward, generation and probabilities; whichever set it joins, whichever way it is
brought, and on an accelerated model too.
"""

import copy

import pytest
import torch
from torch.utils._pytree import tree_map_only

from acceleration import paths
from acceleration.paths import PATHS, differs, generated, tokens_for
from scratchlm import config as c
from scratchlm.accelerate import accelerate
from scratchlm.model import MoE
from scratchlm.ops import OP_NAMES, OPS
from tiny_models import FAMILIES, PLAIN, build


def next_token_probabilities(model):
    with torch.no_grad():
        return model.next_token_probabilities(tokens_for(model))


ALL = {**PATHS, "probabilities": next_token_probabilities}
LOSSES = ("loss", "backward")
MLPS = {name: PLAIN.replace(ffn=c.MLP(name)) for name in ("gelu", "gelu_tanh", "relu")}

# op -> a model whose formula has it, and the paths that need it: all, unless said
USES = {
    "linear": (FAMILIES["plain"], ALL),
    "grouped_linear": (FAMILIES["mixtral"], ALL),
    "embedding": (FAMILIES["gpt2"], ALL),
    "rms_norm": (FAMILIES["qwen3"], ALL),
    "layer_norm": (FAMILIES["gpt2"], ALL),
    "silu": (FAMILIES["plain"], ALL),
    "gelu": (MLPS["gelu"], ALL),
    "gelu_tanh": (MLPS["gelu_tanh"], ALL),
    "relu": (MLPS["relu"], ALL),
    "softmax": (FAMILIES["qwen3"], ALL),
    "log_sum_exp": (FAMILIES["plain"], LOSSES),
    "cross_entropy": (FAMILIES["plain"], LOSSES),
    "rope": (FAMILIES["llama"], ALL),
    "scaled_dot_product_attention": (FAMILIES["llama"], ALL),
    "attention": (FAMILIES["plain"], ALL),
    "route": (FAMILIES["mixtral"], ALL),
}


class Probe(torch.autograd.Function):
    """Change a tensor a little, both ways, and count."""

    forwards = backwards = 0

    @staticmethod
    def forward(ctx, x):
        Probe.forwards += 1
        return paths.perturb(x)

    @staticmethod
    def backward(ctx, grad_output):
        Probe.backwards += 1
        return paths.perturb(grad_output)


def probed(output):
    return tree_map_only(
        torch.Tensor, lambda x: Probe.apply(x) if x.is_floating_point() else x, output
    )


def by_replace(base, name):
    formula = getattr(OPS[base], name)
    return OPS[base].replace(**{name: lambda *given, **more: probed(formula(*given, **more))})


def by_subclass(base, name):
    kind = type(OPS[base])

    def op(self, *given, **more):
        return probed(getattr(super(Mine, self), name)(*given, **more))

    Mine = type("Mine", (kind,), {name: op})
    return Mine()


def by_subclass_of_a_subclass(base, name):
    return type("Same", (type(by_subclass(base, name)),), {})()


WAYS = {"replace": by_replace, "subclass": by_subclass, "grandchild": by_subclass_of_a_subclass}


def test_every_op_is_listed_here():
    assert set(USES) == set(OP_NAMES)


@pytest.mark.parametrize("accelerated", [False, True], ids=["plain", "accelerated"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", ["reference", "fast"])
@pytest.mark.parametrize("name", USES)
def test_a_replaced_op_is_used_on_every_path(name, base, way, accelerated):
    config, uses = USES[name]
    original = build(config, base, dtype=torch.float32)
    model = build(config, WAYS[way](base, name), dtype=torch.float32)
    if accelerated:
        accelerate(model)
    for path in uses:
        run = ALL[path]
        Probe.forwards = Probe.backwards = 0
        got = generated(model, accelerated) if path == "generate" else run(model)
        assert Probe.forwards, f"not called in {path}"
        if path == "backward":
            assert Probe.backwards, "its backward pass is not called"
        assert differs(got, run(original)), f"no effect in {path}"


# Not only somewhere, but wherever


def listen(base, name):
    """A set of ops that tells what one of its ops was given, and changes nothing."""
    calls, formula = [], getattr(OPS[base], name)

    def op(*given, **more):
        calls.append(given)
        return formula(*given, **more)

    return OPS[base].replace(**{name: op}), calls


both_bases = pytest.mark.parametrize("base", ["reference", "fast"])
plain_or_accelerated = pytest.mark.parametrize(
    "prepare", [lambda model: model, accelerate], ids=["plain", "accelerated"]
)


@both_bases
@plain_or_accelerated
@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("family", ["plain", "qwen3", "gpt2", "mixtral"])
def test_a_user_provided_linear_makes_every_product(family, path, base, prepare):
    ops, calls = listen(base, "linear")
    model = prepare(build(FAMILIES[family], ops, dtype=torch.float32))
    ALL[path](model)
    used = {weight.data_ptr() for _, weight, *_ in calls}
    for name, weight in matrices(model).items():
        parts = weight if weight.ndim == 3 else [weight]  # an expert's, each; some get no token
        assert any(part.data_ptr() in used for part in parts), f"{name} in {path}"


def matrices(model):
    """The weights that multiply: all matrices but tables; a tied table multiplies too."""
    named = {n: p for n, p in model.named_parameters() if p.ndim > 1 and "embeddings" not in n}
    return {**named, "the head": model.lm_head.weight}


@both_bases
@plain_or_accelerated
@pytest.mark.parametrize("path", ALL)
def test_a_user_provided_softmax_weighs_attention_experts_and_tokens(path, base, prepare):
    ops, calls = listen(base, "softmax")
    config = FAMILIES["mixtral"].replace(num_layers=3)
    model = prepare(build(config, ops, dtype=torch.float32))
    ALL[path](model)
    shapes = [x.shape for x, *_ in calls]
    experts = [shape for shape in shapes if shape[-1] == config.ffn.num_experts]
    keys = [shape for shape in shapes if len(shape) == 4 and shape[1] == config.num_heads]
    assert len(experts) >= config.num_layers, f"routing in {path}"
    assert len(keys) >= config.num_layers, f"attention in {path}"
    if path == "probabilities":
        assert shapes[-1] == (2, config.vocab_size)


@both_bases
def test_load_balancing_sees_the_softmax_that_routed(base):
    model = build(FAMILIES["mixtral"], by_replace(base, "softmax"), dtype=torch.float32)
    layer = next(m for m in model.modules() if isinstance(m, MoE))
    assert type(layer.ops) is type(model.ops)
    x = torch.randn(5, model.config.d_model)
    logits = layer.router(x)
    probabilities = layer.ops.route(logits, 2, True)[0]
    torch.testing.assert_close(probabilities, paths.perturb(logits.softmax(-1)))


# The edges of a set of ops


def test_two_ops_replaced_one_after_the_other_are_both_used():
    first, softmaxes = listen("fast", "softmax")
    linears = []

    def linear(x, weight, bias=None):
        linears.append(weight)
        return OPS["fast"].linear(x, weight, bias)

    model = build(PLAIN, first.replace(linear=linear), dtype=torch.float32)
    PATHS["forward"](model)
    assert softmaxes
    assert linears


def test_a_user_provided_softmax_reaches_an_attention_that_calls_the_fast_one():
    calls = []

    class Mine(type(OPS["fast"])):
        def softmax(self, x, dim=-1):
            calls.append(x)
            return super().softmax(x, dim)

        def attention(self, *given):
            return 2 * super().attention(*given)

    PATHS["forward"](build(PLAIN, Mine(), dtype=torch.float32))
    assert calls


def test_a_copied_model_keeps_its_own_op():
    ops, calls = listen("fast", "softmax")
    model = copy.deepcopy(build(PLAIN, ops, dtype=torch.float32))
    PATHS["forward"](accelerate(model))
    assert calls


def test_replacing_an_op_leaves_the_set_it_came_from():
    before = {name: getattr(type(OPS["fast"]), name) for name in OP_NAMES}
    OPS["fast"].replace(softmax=torch.softmax, linear=torch.nn.functional.linear)
    assert {name: getattr(type(OPS["fast"]), name) for name in OP_NAMES} == before


def test_replacing_an_unknown_op_is_refused_by_name():
    with pytest.raises(ValueError, match=r"softmux.*softmax"):
        OPS["fast"].replace(softmux=torch.softmax)


def test_a_set_of_ops_with_arguments_of_its_own_can_be_replaced_in():
    class Scaled(type(OPS["fast"])):
        def __init__(self, factor):
            self.factor = factor

        def silu(self, x):
            return self.factor * super().silu(x)

    ops = Scaled(3.0).replace(softmax=torch.softmax)
    torch.testing.assert_close(ops.silu(torch.ones(2)), 3 * torch.nn.functional.silu(torch.ones(2)))
