"""Products in 8 bits: close to the exact ones, forward and backward, and only where asked for.

Without a GPU the kernels run in Triton's interpreter, and a CPU is taken for a GPU.
"""

from functools import partial

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from scratchlm.accelerate.kernels.triton import fp8_quantize as quantize
from scratchlm.accelerate.kernels.triton import swiglu_gate as gate
from scratchlm.accelerate.kernels.triton.fp8_quantize import launch_quantize
from scratchlm.config import ModelConfig
from scratchlm.ops import OPS, fast, fp8
from scratchlm.training.learner import Learner, build_model
from scratchlm.training.settings import TrainConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPERATIONS = {
    quantize.quantize: quantize.launch_quantize,
    gate.swiglu_gate: gate.launch_swiglu_gate,
    gate.swiglu_gate_backward: gate.launch_swiglu_gate_backward,
    gate.swiglu_gate_amax: gate.launch_swiglu_gate_amax,
    gate.swiglu_gate_backward_amax: gate.launch_swiglu_gate_backward_amax,
}
if DEVICE == "cpu":
    for operation, function in OPERATIONS.items():
        operation.register_kernel("cpu")(function)


def error(got, expected):
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", [fp8.FORWARD, fp8.BACKWARD], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(16, 48), (72, 36), (64, 128)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_kernel_writes_both_ways_under_one_scale(kind, shape, size):
    x = size * torch.randn(shape, device=DEVICE)
    q, turned, scale = launch_quantize(x, kind)
    assert torch.equal(turned.float(), q.float().t())
    most = {fp8.FORWARD: 0.06, fp8.BACKWARD: 0.12}[kind]
    assert error(q.float() * scale, x) < (most if DEVICE == "cuda" else 0.25)  # see below
    torch.testing.assert_close(q.float().abs().max().item(), torch.finfo(kind).max)


# Triton's interpreter drops carries when it rounds to 8 bits; what is exact there is the rest.


def test_a_matrix_of_zeros_stays_zero():
    q, _, scale = launch_quantize(torch.zeros(16, 16, device=DEVICE), fp8.FORWARD)
    assert not q.float().any()
    assert scale.item() == 1


def bits(x):
    return x.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("kind", [fp8.FORWARD, fp8.BACKWARD], ids=["e4m3", "e5m2"])
def test_a_maximum_that_is_known_is_not_looked_for(monkeypatch, kind):
    x = torch.randn(64, 32, device=DEVICE).bfloat16()
    looked = launch_quantize(x, kind)
    monkeypatch.setattr(quantize, "launch_amax", None)
    known = launch_quantize(x, kind, x.abs().max().float())
    for got, expected in zip(known, looked, strict=True):
        assert torch.equal(got.float(), expected.float())
    doubled = launch_quantize(x, kind, 2 * x.abs().max().float())
    assert doubled[2] == 2 * looked[2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_is_written_as_if_the_maximum_were_looked_for(bad):
    joined = torch.randn(16, 32, device=DEVICE).bfloat16()
    slope = torch.randn(16, 16, device=DEVICE).bfloat16()
    joined[3, 16 + 5] = bad
    wholes = gate.launch_swiglu_gate(joined), gate.launch_swiglu_gate_backward(joined, slope)
    measured = (
        gate.launch_swiglu_gate_amax(joined),
        gate.launch_swiglu_gate_backward_amax(joined, slope),
    )
    kinds = fp8.FORWARD, fp8.BACKWARD
    for whole, (written, greatest), kind in zip(wholes, measured, kinds, strict=True):
        assert not written.isfinite().all()
        looked, known = launch_quantize(whole, kind), launch_quantize(written, kind, greatest)
        for got, expected in zip(known, looked, strict=True):
            assert torch.equal(bits(got), bits(expected))


def products(ops, x, weights, slopes):
    outputs = OPS[ops].linears(x, weights, [None] * len(weights))
    total = sum((y.float() * slope).sum() for y, slope in zip(outputs, slopes, strict=True))
    return [*outputs, *torch.autograd.grad(total, [x, *weights])]


def test_values_and_gradients_are_within_eight_bits_of_exact():
    x = torch.randn(2, 32, 64, device=DEVICE, requires_grad=True)
    weights = [torch.randn(n, 64, device=DEVICE, requires_grad=True) for n in (48, 16)]
    slopes = [torch.randn(2, 32, n, device=DEVICE) for n in (48, 16)]
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = products("fp8", x, weights, slopes)
    exact = products("fast", x, weights, slopes)
    for got, expected in zip(ours, exact, strict=True):
        assert 1e-3 < error(got, expected) < 0.1  # it did run low, and not too low


def test_without_autocast_or_gradients_nothing_is_rounded():
    x, weight = torch.randn(16, 16, device=DEVICE), torch.randn(32, 16, device=DEVICE)
    assert torch.equal(fp8.linear(x, weight), fast.linear(x, weight))
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(fp8.linear(x, weight), fast.linear(x, weight))


def test_sides_that_are_not_whole_run_in_bfloat16():
    x = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(10, 16, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(fp8.linear(x, weight), fast.linear(x, weight))


@pytest.mark.parametrize("compile_how", ["off", "block"])
def test_a_model_learns_in_eight_bits(compile_how):
    config = ModelConfig(64, 16, d_model=32, num_layers=2, num_heads=2, d_ff=64)
    tokens = torch.arange(16, device=DEVICE).repeat(4, 1)
    losses = {}
    for precision in ("bf16-residual", "fp8"):
        settings = TrainConfig(precision=precision, lr=1e-2, compile=compile_how)
        learner = Learner(build_model(config, 0, DEVICE), settings)
        for _ in range(12):
            with learner.autocast():
                loss = learner.loss(tokens, tokens.roll(-1, dims=1))
            loss.backward()
            for optimizer in learner.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        losses[precision] = loss.item()
    assert losses["fp8"] != losses["bf16-residual"]
    assert losses["fp8"] == pytest.approx(losses["bf16-residual"], rel=0.15)
    assert losses["fp8"] < 2.0  # from log 64 = 4.2


# SwiGLU as one function


@pytest.fixture(params=[False, True], ids=["formulas", "kernels"])
def kernels(request, monkeypatch):
    """With the kernels, and without."""
    with_them = request.param
    monkeypatch.setattr(fp8, "runs_by_kernel", lambda x: with_them)
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: with_them and torch.is_grad_enabled())
    return with_them


def one_after_the_other(x, w1, w2, w3):
    """The definition: a product, the gate, a product, none of which knows of the others."""
    return fp8.linear(fast.gate(fp8.joined_product(x, (w1, w3), (None, None))), w2)


def plain(function):
    return function


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def recomputed(function):
    return partial(checkpoint, function, use_reentrant=False)


def recomputed_and_compiled(function):
    return compiled(recomputed(function))


def matrices(twins=False):
    """x, three matrices and a gradient; with their rounded copies, where these are wanted."""
    x = torch.randn(2, 16, 32, device=DEVICE, requires_grad=True)
    w1, w3 = (torch.randn(48, 32, device=DEVICE, requires_grad=True) for _ in range(2))
    w2 = torch.randn(32, 48, device=DEVICE, requires_grad=True)
    leaves = [x, w1, w2, w3]
    if twins:
        w1.twin = torch.cat((w1, w3)).detach().bfloat16().requires_grad_()
        w2.twin = w2.detach().bfloat16().requires_grad_()
        leaves = [x, w1.twin, w2.twin]
    return (x, w1, w2, w3), leaves, torch.randn(2, 16, 32, device=DEVICE).bfloat16()


def values(function, inputs, leaves, slope):
    with torch.autocast(DEVICE, torch.bfloat16):
        y = function(*inputs)
    return [y, *torch.autograd.grad(y, leaves, slope)]


@pytest.mark.parametrize("twins", [False, True], ids=["", "twins"])
@pytest.mark.parametrize("how", [plain, compiled, recomputed, recomputed_and_compiled])
def test_swiglu_is_its_parts_one_after_the_other(kernels, how, twins):
    given = matrices(twins)
    ours = values(how(fp8.swiglu), *given)
    # Compiled as well: where a CPU stands in for 8-bit products, autocast rounds inside them.
    for got, expected in zip(ours, values(how(one_after_the_other), *given), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_what_the_gate_wrote_is_not_read_again_for_its_maximum(kernels, monkeypatch):
    if not kernels:
        pytest.skip("without kernels there is nothing to spare")
    greatest_of, passes = quantize.launch_amax, []
    monkeypatch.setattr(quantize, "launch_amax", lambda x: passes.append(x.shape) or greatest_of(x))
    values(fp8.swiglu, *matrices())
    assert passes == [(32, 32), (96, 32), (32, 48), (32, 32)]  # x, [W1; W3], W2 and the gradient
    passes.clear()
    values(one_after_the_other, *matrices())
    assert len(passes) == 6


def test_swiglu_keeps_no_more_than_its_parts(kernels):
    (x, *weights), leaves, slope = matrices()
    bytes_kept = {}
    for function in (fp8.swiglu, one_after_the_other):
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            values(function, (x, *weights), leaves, slope)
        bytes_kept[function] = sum(kept.values())
    assert 0 < bytes_kept[fp8.swiglu] <= bytes_kept[one_after_the_other]


def test_a_nan_shows_in_the_gradients(kernels):
    inputs, leaves, slope = matrices()
    with torch.no_grad():
        inputs[0][1, 2, 3] = torch.nan
    ours = values(fp8.swiglu, inputs, leaves, slope)
    for got, expected in zip(ours, values(one_after_the_other, inputs, leaves, slope), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    if DEVICE == "cuda" or not kernels:  # the interpreter loses NaN in 8 bits
        assert ours[2].isnan().any()


@pytest.mark.parametrize("biased", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_swiglu_is_within_eight_bits_of_exact_whatever_has_a_bias(biased):
    inputs, leaves, slope = matrices()
    biases = [
        torch.randn(n, device=DEVICE) if i in biased else None for i, n in enumerate((48, 32, 48))
    ]
    ours = values(lambda *given: fp8.swiglu(*given, *biases), inputs, leaves, slope)
    exact = fast.swiglu(*inputs, *biases)
    exact = [exact, *torch.autograd.grad(exact, leaves, slope.float())]
    for got, expected in zip(ours, exact, strict=True):
        assert 1e-3 < error(got, expected) < 0.15
