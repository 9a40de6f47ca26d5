"""The layers made of several ops, and the loss in chunks, against their formulas in one line."""

import pytest
import torch

from ops.test_fast_matches_reference import TOLERANCE, compare_functions
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accelerate.lm_head_loss import chunked_lm_head_loss
from scratchlm.model import MLP, MoE, SwiGLU
from scratchlm.ops import reference


def draw(*shape):
    return torch.randn(*shape)


def with_weights(layer, weights):
    """Call a layer with these tensors in place of its parameters, so that gradients reach them."""
    return lambda *given: torch.func.functional_call(layer, weights, given)


def swiglu(ops, inputs, _):
    x, w1, w2, w3, *biases = inputs
    if ops == "reference":
        return reference.swiglu(*inputs)
    layer = SwiGLU(w1.shape[1], len(w1), bool(biases), ops="fast", dtype=x.dtype, device=x.device)
    weights = dict(zip(("w1.weight", "w2.weight", "w3.weight"), (w1, w2, w3), strict=True))
    weights |= dict(zip(("w1.bias", "w2.bias", "w3.bias"), biases, strict=False))
    return with_weights(layer, weights)(x)


def mlp(ops, inputs, rest):
    x, w1, w2, *biases = inputs
    (activation,) = rest
    if ops == "reference":
        return reference.mlp(*inputs, activation=activation)
    d_ff, d_model = w1.shape
    layer = MLP(d_model, d_ff, activation, bool(biases), ops="fast", dtype=x.dtype, device=x.device)
    weights = {"w1.weight": w1, "w2.weight": w2}
    weights |= dict(zip(("w1.bias", "w2.bias"), biases, strict=False))
    return with_weights(layer, weights)(x)


def moe_layer(x, w1, k, renormalize):
    experts, d_ff, d_model = w1.shape
    return MoE(d_model, d_ff, experts, k, renormalize, ops="fast", dtype=x.dtype, device=x.device)


MOE_NAMES = ("router.weight", "w1.weight", "w2.weight", "w3.weight")


def moe(ops, inputs, rest):
    if ops == "reference":
        return reference.moe(*inputs, *rest).output
    x, *weights = inputs
    layer = moe_layer(x, weights[1], *rest)
    return with_weights(layer, dict(zip(MOE_NAMES, weights, strict=True)))(x)


def chunked_loss(ops, inputs, rest):
    of = reference.linear_cross_entropy if ops == "reference" else chunked_lm_head_loss
    targets, how = rest
    return of(*inputs, targets, **how)


def head_loss(ops, inputs, rest):
    """The plain model's: all logits, then the loss."""
    hidden, weight = inputs
    targets, how = rest
    if ops == "reference":
        return reference.linear_cross_entropy(hidden, weight, targets, **how)
    config = ModelConfig(len(weight), 8, weight.shape[1], 1, 1, d_head=2)
    model = TransformerLM(config, ops="fast", dtype=hidden.dtype, device=hidden.device)
    del model.lm_head.weight
    model.lm_head.weight = weight
    return model.head_loss(hidden, targets, **how)


targets = torch.tensor([[1, -100, 3], [0, 6, 2]])
none_counts = torch.full((2, 3), -100)
many = torch.arange(300).masked_fill(torch.arange(300) % 7 == 0, -100)

# layer -> (how to call it, case -> (differentiable arguments, other arguments))
LAYERS = {
    "SwiGLU": (
        swiglu,
        {
            "plain": lambda: ((draw(2, 3, 5), draw(7, 5), draw(5, 7), draw(7, 5)), ()),
            "bias": lambda: (
                (draw(3, 5), draw(7, 5), draw(5, 7), draw(7, 5), draw(7), draw(5), draw(7)),
                (),
            ),
        },
    ),
    "MLP": (
        mlp,
        {
            **{
                name: lambda name=name: (
                    (draw(3, 5), draw(7, 5), draw(5, 7), draw(7), draw(5)),
                    (name,),
                )
                for name in reference.ACTIVATIONS
            },
            "no bias": lambda: ((draw(2, 3, 5), draw(7, 5), draw(5, 7)), ("gelu_tanh",)),
        },
    ),
    "MoE": (
        moe,
        {
            "plain": lambda: (
                (draw(2, 6, 8), draw(4, 8), draw(4, 16, 8), draw(4, 8, 16), draw(4, 16, 8)),
                (2, True),
            ),
            "an expert nobody chose, odd widths": lambda: (
                (draw(1, 5), draw(4, 5), draw(4, 7, 5), draw(4, 5, 7), draw(4, 7, 5)),
                (1, False),
            ),
            "all experts": lambda: (
                (draw(3, 8), draw(3, 8), draw(3, 4, 8), draw(3, 8, 4), draw(3, 4, 8)),
                (3, True),
            ),
        },
    ),
    "loss in chunks": (
        chunked_loss,
        {
            "plain": lambda: ((draw(2, 3, 5), draw(7, 5)), (targets, {})),
            "z-loss": lambda: ((draw(2, 3, 5), draw(7, 5)), (targets, {"z_loss": 0.1})),
            "sum": lambda: ((draw(2, 3, 5), draw(7, 5)), (targets, {"reduction": "sum"})),
            "no target": lambda: ((draw(2, 3, 5), draw(7, 5)), (none_counts, {})),
            "several chunks": lambda: ((draw(300, 8), draw(20_000, 8)), (many, {})),
        },
    ),
    "loss of the plain model": (
        head_loss,
        {
            "plain": lambda: ((draw(2, 3, 6), draw(7, 6)), (targets, {})),
            "z-loss": lambda: ((draw(2, 3, 6), draw(7, 6)), (targets, {"z_loss": 0.1})),
            "no target": lambda: ((draw(2, 3, 6), draw(7, 6)), (none_counts, {})),
        },
    ),
}
ALL = [(layer, case) for layer, (_, cases) in LAYERS.items() for case in cases]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("layer", "case"), ALL)
def test_layer_matches_its_formula(layer, case, dtype):
    apply, cases = LAYERS[layer]
    compare_functions(apply, *cases[case](), dtype, "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("layer", "case"), ALL)
def test_layer_matches_its_formula_on_cuda(layer, case, dtype):
    apply, cases = LAYERS[layer]
    compare_functions(apply, *cases[case](), dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("layer", "case"), ALL)
def test_layer_without_gradients_matches_its_formula(layer, case, dtype):
    """Without gradients a layer may work in place: the same values, and no input changed."""
    apply, cases = LAYERS[layer]
    leaves, rest = cases[case]()
    leaves = [leaf.to(dtype) for leaf in leaves]
    before = [leaf.clone() for leaf in leaves]
    with torch.inference_mode():
        truth, ours = (apply(ops, leaves, rest) for ops in ("reference", "fast"))
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, leaves, before))


def moe_with_weights():
    (x, *weights), rest = LAYERS["MoE"][1]["plain"]()
    layer = moe_layer(x, weights[1], *rest)
    layer.load_state_dict(dict(zip(MOE_NAMES, weights, strict=True)))
    return layer, x, reference.moe(x, *weights, *rest)


def test_moe_reports_the_same_routing_as_the_reference():
    layer, x, truth = moe_with_weights()
    routes = []
    layer(x, routes)
    (routed,) = routes
    assert torch.equal(routed.experts, truth.experts)
    torch.testing.assert_close(routed.probabilities, truth.probabilities)


def test_moe_runs_under_autocast():
    layer, x, truth = moe_with_weights()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    torch.testing.assert_close(output.float(), truth.output, atol=0.3, rtol=0.1)
