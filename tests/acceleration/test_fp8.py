"""Products in 8 bits: close to the exact ones, forward and backward, and only where asked for.

Without a GPU the kernels run in Triton's interpreter, and a CPU counts as a GPU.
"""

from functools import partial, partialmethod

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from acceleration.gpu import register_on_cpu
from scratchlm.accelerate import accelerate, conditions, fp8
from scratchlm.accelerate.kernels.triton import fp8_quantize as quantize
from scratchlm.accelerate.kernels.triton import swiglu_gate as gate
from scratchlm.accelerate.kernels.triton.fp8_quantize import launch_quantize
from scratchlm.accelerate.layers import AcceleratedLinear, AcceleratedSwiGLU
from scratchlm.config import ModelConfig
from scratchlm.errors import ScratchLMError
from scratchlm.model import MultiHeadSelfAttention
from scratchlm.ops import OPS
from scratchlm.training.apply import apply_compile, apply_precision
from scratchlm.training.learner import build_model
from scratchlm.training.optimizers import AdamW

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
register_on_cpu(
    {
        quantize.quantize: quantize.launch_quantize,
        gate.swiglu_gate: gate.launch_swiglu_gate,
        gate.swiglu_gate_backward: gate.launch_swiglu_gate_backward,
        gate.swiglu_gate_amax: gate.launch_swiglu_gate_amax,
        gate.swiglu_gate_backward_amax: gate.launch_swiglu_gate_backward_amax,
    }
)


def error(got, expected):
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", [fp8.FORWARD, fp8.BACKWARD], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", [(16, 48), (72, 36), (64, 128)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_kernel_writes_both_ways_under_one_scale(kind, shape, size):
    x = size * torch.randn(shape, device=DEVICE)
    q, transposed, scale = launch_quantize(x, kind)
    assert torch.equal(transposed.float(), q.float().t())
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
def test_nan_and_infinity_are_written_as_if_the_maximum_were_looked_for(bad):
    joined = torch.randn(16, 32, device=DEVICE).bfloat16()
    grad = torch.randn(16, 16, device=DEVICE).bfloat16()
    joined[3, 16 + 5] = bad
    wholes = gate.launch_swiglu_gate(joined), gate.launch_swiglu_gate_backward(joined, grad)
    measured = (
        gate.launch_swiglu_gate_amax(joined),
        gate.launch_swiglu_gate_backward_amax(joined, grad),
    )
    kinds = fp8.FORWARD, fp8.BACKWARD
    for whole, (written, amax), kind in zip(wholes, measured, kinds, strict=True):
        assert not written.isfinite().all()
        looked, known = launch_quantize(whole, kind), launch_quantize(written, kind, amax)
        for got, expected in zip(known, looked, strict=True):
            assert torch.equal(bits(got), bits(expected))


# Layers


def qkv_gradients(attn, x, grads):
    """Return W_Q x, W_K x and W_V x, and the gradients of x and of the matrices."""
    outputs = attn.qkv(x)
    total = sum((y.float() * grad).sum() for y, grad in zip(outputs, grads, strict=True))
    weights = [attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]
    return [*outputs, *torch.autograd.grad(total, [x, *weights])]


@pytest.mark.parametrize("joined", [False, True], ids=["one by one", "joined"])
def test_values_and_gradients_are_within_eight_bits_of_exact(joined, monkeypatch):
    monkeypatch.setattr(conditions, "trains_by_kernel", lambda x: joined)
    x = torch.randn(2, 32, 64, device=DEVICE, requires_grad=True)
    attn = MultiHeadSelfAttention(64, 4, num_kv_heads=2, device=DEVICE)
    grads = [torch.randn(2, 32, n, device=DEVICE) for n in (64, 32, 32)]
    exact = qkv_gradients(attn, x, grads)
    enable_fp8(attn)
    products = count_products(monkeypatch)
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = qkv_gradients(attn, x, grads)
    assert len(products) == (1 if joined else 3)
    for got, expected in zip(ours, exact, strict=True):
        assert 1e-3 < error(got, expected) < 0.1  # it did run low, and not too low


def enable_fp8(module):
    """Accelerate a module whose products are in 8 bits."""
    accelerate(module)
    for part in module.modules():
        if hasattr(part, "fp8"):
            part.fp8 = True
    return module


def count_products(monkeypatch):
    """Return the list of 8-bit products from now on."""
    products, run = [], fp8._Product.apply
    monkeypatch.setattr(fp8._Product, "apply", lambda *args: (products.append(1), run(*args))[1])
    return products


def fp8_linear(weight):
    layer = AcceleratedLinear(weight.shape[1], weight.shape[0], device=DEVICE)
    layer.weight.data, layer.fp8 = weight, True
    return layer


def test_without_autocast_or_gradients_nothing_is_rounded():
    x, weight = torch.randn(16, 16, device=DEVICE), torch.randn(32, 16, device=DEVICE)
    layer = fp8_linear(weight)
    assert torch.equal(layer(x), OPS["fast"].linear(x, weight))
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(layer(x), OPS["fast"].linear(x, weight))


def test_sides_that_are_no_multiple_of_16_run_in_bfloat16():
    x = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(10, 16, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(fp8_linear(weight)(x), OPS["fast"].linear(x, weight))


@pytest.mark.parametrize(
    ("compile_how", "backend"),
    [
        ("off", None),
        ("block", "aot_eager"),  # what the front end and autograd's tracer make of it
        pytest.param("block", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_model_learns_in_eight_bits(compile_how, backend, monkeypatch):
    compile_block = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(compile_block, backend=backend))
    config = ModelConfig(64, 16, d_model=32, num_layers=2, num_heads=2, d_ff=64)
    tokens = torch.arange(16, device=DEVICE).repeat(4, 1)
    losses = {}
    for precision in ("bf16-residual", "fp8"):
        model = accelerate(build_model(config, 0, DEVICE))
        apply_precision(model, precision)
        loss_of = apply_compile(model, compile_how if precision == "fp8" else "off")
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for _ in range(12):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = loss_of(tokens, tokens.roll(-1, dims=1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[precision] = loss.item()
    assert losses["fp8"] != losses["bf16-residual"]
    assert losses["fp8"] == pytest.approx(losses["bf16-residual"], rel=0.15)
    assert losses["fp8"] < 2.0  # from log 64 = 4.2


def test_gradients_have_the_wider_range_of_e5m2():
    """10⁻⁷ of the largest is 0 in e4m3, and is not lost."""
    x = torch.randn(16, 16, device=DEVICE, requires_grad=True)
    grad_output = torch.ones(16, 16, device=DEVICE, dtype=torch.bfloat16)
    grad_output[1] = 1e-7
    with torch.autocast(DEVICE, torch.bfloat16):
        y = fp8_linear(torch.ones(16, 16, device=DEVICE))(x)
    (found,) = torch.autograd.grad(y, x, grad_output)
    assert error(found[0], torch.full_like(found[0], 16)) < 0.1
    assert error(found[1], torch.full_like(found[1], 16e-7)) < 0.3


def test_a_plain_model_and_other_ops_are_refused():
    config = ModelConfig(64, 16, d_model=32, num_layers=1, num_heads=2, d_ff=64)
    for model in (
        build_model(config, 0, DEVICE),
        accelerate(build_model(config, 0, DEVICE, "reference")),
    ):
        with pytest.raises(ScratchLMError, match="needs an accelerated model with the fast ops"):
            fp8.enable_fp8(model)


# SwiGLU as one autograd function


@pytest.fixture(params=[False, True], ids=["formulas", "kernels"])
def kernels(request, monkeypatch):
    """With the kernels, and without."""
    monkeypatch.setattr(fp8, "runs_by_kernel", lambda x: request.param)
    return request.param


def one_after_the_other(x, w13, w2):
    """The definition: a product, the gate, a product, none of which knows of the others."""
    joined = fp8.linear(x, w13)
    if fp8.runs_by_kernel(joined):
        return fp8.linear(gate.swiglu_gate(joined), w2)
    a, b = joined.chunk(2, dim=-1)
    return fp8.linear(F.silu(a) * b, w2)


def plain(function):
    return function


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def recomputed(function):
    return partial(checkpoint, function, use_reentrant=False)


def recomputed_and_compiled(function):
    return compiled(recomputed(function))


def matrices():
    """Return x, [W1; W3] and W2 in bfloat16, and the gradient of the output."""
    x = torch.randn(2, 16, 32, device=DEVICE, requires_grad=True)
    w13 = torch.randn(96, 32, device=DEVICE).bfloat16().requires_grad_()
    w2 = torch.randn(32, 48, device=DEVICE).bfloat16().requires_grad_()
    return (x, w13, w2), torch.randn(2, 16, 32, device=DEVICE).bfloat16()


def values(function, leaves, grad_output):
    with torch.autocast(DEVICE, torch.bfloat16):
        y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, grad_output)]


@pytest.mark.parametrize("how", [plain, compiled, recomputed, recomputed_and_compiled])
def test_swiglu_is_its_parts_one_after_the_other(kernels, how):
    leaves, grad_output = matrices()
    ours = values(how(fp8.swiglu), leaves, grad_output)
    # Compiled as well: where a CPU stands in for 8-bit products, autocast rounds inside them.
    truth = values(how(one_after_the_other), leaves, grad_output)
    for got, expected in zip(ours, truth, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_what_the_gate_wrote_is_not_read_again_for_its_maximum(kernels, monkeypatch):
    if not kernels:
        pytest.skip("without kernels there is nothing to spare")
    launch_amax, passes = quantize.launch_amax, []
    monkeypatch.setattr(quantize, "launch_amax", lambda x: passes.append(x.shape) or launch_amax(x))
    values(fp8.swiglu, *matrices())
    assert passes == [(32, 32), (96, 32), (32, 48), (32, 32)]  # x, [W1; W3], W2 and the gradient
    passes.clear()
    values(one_after_the_other, *matrices())
    assert len(passes) == 6


def test_swiglu_keeps_no_more_than_its_parts(kernels):
    leaves, grad_output = matrices()
    bytes_kept = {}
    for function in (fp8.swiglu, one_after_the_other):
        kept = {}

        def keep(tensor, kept=kept):
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            values(function, leaves, grad_output)
        bytes_kept[function] = sum(kept.values())
    assert 0 < bytes_kept[fp8.swiglu] <= bytes_kept[one_after_the_other]


def test_a_nan_shows_in_the_gradients(kernels):
    leaves, grad_output = matrices()
    with torch.no_grad():
        leaves[0][1, 2, 3] = torch.nan
    ours = values(fp8.swiglu, leaves, grad_output)
    truth = values(one_after_the_other, leaves, grad_output)
    for got, expected in zip(ours, truth, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    if DEVICE == "cuda" or not kernels:  # the interpreter loses NaN in 8 bits
        assert ours[2].isnan().any()


@pytest.mark.parametrize("shadows", [False, True], ids=["", "shadow weights"])
@pytest.mark.parametrize("biased", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_swiglu_is_within_eight_bits_of_exact_whatever_has_a_bias(biased, shadows, monkeypatch):
    """With biases the products run one by one, in 8 bits too."""
    layer = AcceleratedSwiGLU(32, 48, bias=True, device=DEVICE)
    for i, linear in enumerate((layer.w1, layer.w2, layer.w3)):
        linear.bias = torch.nn.Parameter(torch.randn_like(linear.bias)) if i in biased else None
        linear.weight.data.normal_()
    x = torch.randn(2, 16, 32, device=DEVICE, requires_grad=True)
    grad_output = torch.randn(2, 16, 32, device=DEVICE).bfloat16()
    leaves = [x, layer.w1.weight, layer.w3.weight, layer.w2.weight]
    exact = layer(x)
    exact = [exact, *torch.autograd.grad(exact, leaves, grad_output.float())]
    enable_fp8(layer)
    if shadows:
        w13 = torch.cat((layer.w1.weight, layer.w3.weight)).detach()
        layer.shadow = w13.bfloat16().requires_grad_()
        layer.w2.shadow = layer.w2.weight.detach().bfloat16().requires_grad_()
        leaves = [x, layer.shadow, layer.w2.shadow]
    products = count_products(monkeypatch)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = layer(x)
    assert bool(products) == bool(biased)
    ours = [y, *torch.autograd.grad(y, leaves, grad_output)]
    if shadows:
        ours[2:3] = ours[2].chunk(2)
    for got, expected in zip(ours, exact, strict=True):
        assert 1e-3 < error(got, expected) < 0.15
