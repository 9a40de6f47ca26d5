"""SwiGLU whose gate is part of its products: its gradients, what it keeps, and, on a GPU, itself.

Nothing interprets the kernels on a CPU. There the formulas stand for them, and the compiler shows
that they are programs for the GPU they are meant for.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from accelerate.gpu import compiled_lines, heard, loss_and_gradients, on_hopper, relative_error
from scratchlm.accelerate import hopper
from scratchlm.accelerate.kernels.hopper import swiglu as kernels
from scratchlm.accelerate.kernels.triton import swiglu_gate as gate
from scratchlm.config import ModelConfig
from scratchlm.model import TransformerLM
from scratchlm.model.layers import SwiGLU
from scratchlm.ops import OPS, fast, reference
from scratchlm.ops import swiglu as products_with_gate
from scratchlm.training.learner import apply_checkpointing

CUDA = torch.cuda.is_available()
CALLS = []


def product(x, w13, w2):
    CALLS.append("product")
    a, b = (x @ w13.t()).chunk(2, dim=-1)
    hidden = F.silu(a) * b
    factors = torch.cat((torch.ops.aten.silu_backward(b, a), F.silu(a)), dim=-1)
    kept = x.new_zeros(kernels.kept_size(*hidden.shape))  # as large as the kernel's
    kept[: factors.numel()] = factors.flatten()
    return hidden @ w2.t(), kept, hidden


def back(dy, w2, kept):
    CALLS.append("back")
    rows, d_ff = len(dy), w2.shape[1]
    p, q = kept[: 2 * rows * d_ff].view(rows, 2, d_ff).unbind(1)
    of_h = dy @ w2
    return torch.cat((of_h * p, of_h * q), dim=-1)


kernels.swiglu.register_kernel("cpu")(product)
kernels.through_gate.register_kernel("cpu")(back)


@pytest.fixture
def taken(monkeypatch):
    """Let a CPU be taken for a GPU that has the kernels."""
    CALLS.clear()
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: torch.is_grad_enabled())
    monkeypatch.setattr(hopper, "takes_gate", lambda x, w2, dtype: True)


def some(*shape, d=12, d_ff=20, dtype=torch.float64):
    x = torch.randn(*shape, d, dtype=dtype, requires_grad=True)
    sizes = ((d_ff, d), (d, d_ff), (d_ff, d))
    return x, *(torch.randn(*size, dtype=dtype, requires_grad=True) for size in sizes)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", [(7,), (2, 5)])
def test_value_and_gradients_are_the_references(taken, shape, compiled):
    given = some(*shape)
    run = fast.swiglu
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    slope = torch.randn(*shape, 12, dtype=torch.float64)
    got, expected = run(*given), reference.swiglu(*given)
    torch.testing.assert_close(got, expected)
    for ours, truth in zip(
        torch.autograd.grad(got, given, slope),
        torch.autograd.grad(expected, given, slope),
        strict=True,
    ):
        torch.testing.assert_close(ours, truth)
    assert CALLS == ["product", "back"]


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_only_the_gradients_asked_for_are_computed(taken, wanted):
    x, w1, w2, w3 = some(6)
    leaves = (x, torch.cat((w1, w3)).detach().requires_grad_(), w2)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in wanted)
    y = products_with_gate.swiglu(*leaves)
    slopes = torch.autograd.grad(y.sum(), [leaves[i] for i in wanted])
    truth = reference.swiglu(x, leaves[1][:20], w2, leaves[1][20:])
    expected = torch.autograd.grad(truth.sum(), [leaves[i] for i in wanted])
    for got, right in zip(slopes, expected, strict=True):
        torch.testing.assert_close(got, right)
    assert ("back" in CALLS) == (wanted != (2,))


def test_a_bias_or_an_evaluation_goes_the_other_way(taken, monkeypatch):
    monkeypatch.setattr(gate, "gate", lambda joined: F.silu(joined[..., :20]) * joined[..., 20:])
    x, w1, w2, w3 = some(3)
    bias = torch.randn(12, dtype=torch.float64)
    torch.testing.assert_close(
        fast.swiglu(x, w1, w2, w3, None, bias, None),
        reference.swiglu(x, w1, w2, w3, None, bias, None),
    )
    with torch.no_grad():
        fast.swiglu(x, w1, w2, w3)
    assert not CALLS


def test_twins_are_multiplied_and_get_the_gradients(taken):
    x, w1, w2, w3 = some(4)
    joined = torch.cat((w1, w3)).detach().requires_grad_()
    w1.twin, w2.twin = joined, (2 * w2).detach().requires_grad_()
    y = fast.swiglu(x, w1, w2, w3)
    torch.testing.assert_close(y, 2 * reference.swiglu(x, w1, w2, w3))
    y.sum().backward()
    assert w1.grad is w2.grad is w3.grad is None
    assert joined.grad.shape == joined.shape
    assert w1.twin.grad is not None
    assert w2.twin.grad is not None


CONFIG = ModelConfig(31, 16, 16, 3, 2, 24)


def gradients(policy, layers=None, compiled=False):
    torch.manual_seed(0)
    model = TransformerLM(CONFIG)
    apply_checkpointing(model, policy, layers)
    if compiled:  # with what decides on keeping or computing again
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    ids = torch.randint(31, (2, 9))
    model.loss(ids, ids).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("policy", "layers", "products"),
    [("none", None, 3), ("ffn", None, 6), ("ffn", 1, 4), ("selective", 1, 4), ("block", 2, 5)],
)
def test_a_product_is_computed_again_only_where_it_is_not_kept(
    monkeypatch, policy, layers, products, compiled
):
    expected = gradients("none")
    CALLS.clear()

    def as_on_a_gpu(x, w1, w2, w3, *biases):
        """The feed-forward layer alone: other kernels are not here."""
        return products_with_gate.swiglu(x, fast.in_one((w1, w3), x.dtype), w2)

    monkeypatch.setitem(OPS, "fast", replace(OPS["fast"], swiglu=as_on_a_gpu))
    got = gradients(policy, layers, compiled)
    assert CALLS.count("product") == products
    assert CALLS.count("back") == 3
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-5, rtol=1e-4)


def test_it_is_for_bfloat16_and_whole_tiles_on_a_hopper_gpu(monkeypatch):
    gpu = {"is hopper": True}
    monkeypatch.setattr(hopper, "is_hopper", lambda device: gpu["is hopper"])

    def takes(*shape, d_ff=200, dtype=torch.bfloat16, cuda=True):
        x = SimpleNamespace(shape=torch.Size(shape), is_cuda=cuda, device=SimpleNamespace(index=0))
        return hopper.takes_gate(x, torch.empty(shape[-1], d_ff), dtype)

    assert takes(128, 64)
    assert takes(2, 64, 128)
    assert not takes(127, 64)
    assert not takes(0, 64)
    assert not takes(128, 96)
    assert not takes(128, 64, d_ff=204)
    assert not takes(128, 64, dtype=torch.float16)
    assert not takes(128, 64, cuda=False)
    gpu["is hopper"] = False
    assert not takes(128, 64)


@pytest.mark.parametrize("version", [(9, 0), (10, 0)])
@pytest.mark.parametrize("policy", ["none", "ffn", "selective"])
def test_a_compiler_asks_what_the_gpu_is_and_goes_on(taken, monkeypatch, policy, version):
    torch._dynamo.reset()  # it would not ask again
    asked = []
    monkeypatch.setattr(hopper, "_KNOWN", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: (asked.append(device), version)[1]
    )
    monkeypatch.setattr(hopper, "takes_gate", lambda x, w2, dtype: hopper.is_hopper(3))
    layers = torch.nn.Module()
    layers.attn, layers.ffn = torch.nn.Identity(), SwiGLU(12, 20)
    model = SimpleNamespace(layers=[layers])
    apply_checkpointing(model, policy, 0 if policy == "selective" else None)
    monkeypatch.setattr(gate, "gate", lambda joined: F.silu(joined[..., :20]) * joined[..., 20:])
    layers.ffn.compile(fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 12, requires_grad=True)
    layers.ffn(x).sum().backward()
    assert set(asked) == {3}
    assert ("product" in CALLS) == (version == (9, 0))


def test_the_kernels_compile_for_a_hopper_gpu_and_spill_nothing():
    lines = [line.split() for line in compiled_lines("compile_gluon.py")]
    kernels = ["_forward", "_back", "_exp_product", *["_project"] * 2, *["_attend_back"] * 4]
    assert [line[0] for line in lines] == [*kernels, *["project_attend"] * 3]
    for name, spilled, shared, instructions in lines:
        # Attention's: numbers that it needs once for a block of keys
        assert int(spilled) <= (256 if name == "_attend_back" else 0)
        assert int(shared) <= 227 * 1024  # what a program can have
        assert int(instructions) > 0


# On a Hopper GPU


def matrices(kept, rows, d_ff):
    """Return P and Q by rows and columns."""
    across = -(-d_ff // 64)
    tiles = kept.view(rows // 128, across, 2, 2, 4, 4, 8, 4, 2, 2, 2)  # m n kind i g w q p h j e
    whole = tiles.permute(2, 0, 3, 5, 9, 6, 1, 4, 8, 7, 10).reshape(2, rows, 64 * across)
    return whole[:, :, :d_ff].unbind()


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("programs", [0, 1, 3, 7])
@pytest.mark.parametrize(
    ("rows", "d", "d_ff"), [(128, 64, 8), (512, 128, 200), (1024, 320, 1000), (640, 768, 3072)]
)
def test_the_kernels_are_their_formulas(rows, d, d_ff, programs):
    def draw(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda") * scale).bfloat16()

    x, dy, w13, w2 = draw(rows, d), draw(rows, d), draw(2 * d_ff, d, scale=d**-0.5), draw(d, d_ff)
    kept, hidden = kernels.gated_product(x, w13, programs)
    a, b = (x.double() @ w13.double().t()).chunk(2, dim=-1)
    of_a, of_b = torch.ops.aten.silu_backward(b, a), F.silu(a)
    assert relative_error(hidden, of_b * b) < 4e-3
    for got, expected in zip(matrices(kept, rows, d_ff), (of_a, of_b), strict=True):
        assert relative_error(got, expected) < 4e-3
    of_joined = kernels.gated_product_back(dy, w2, kept, programs)
    of_h = dy.double() @ w2.double()
    assert relative_error(of_joined, torch.cat((of_h * of_a, of_h * of_b), dim=-1)) < 4e-3
    for _ in range(3):  # a race would show
        again, hidden_again = kernels.gated_product(x, w13, programs)
        assert torch.equal(again, kept)
        assert torch.equal(hidden_again, hidden)
        assert torch.equal(kernels.gated_product_back(dy, w2, kept, programs), of_joined)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_trains_by_them_as_it_does_without(monkeypatch, compiled):
    config = ModelConfig(128, 128, 128, 2, 2, 200)
    model = TransformerLM(config).cuda()
    if compiled:
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    ids = torch.randint(128, (2, 128), device="cuda")
    called = heard(monkeypatch, products_with_gate, "swiglu")
    ours = loss_and_gradients(model, ids)
    assert called
    monkeypatch.setattr(hopper, "takes_gate", lambda x, w2, dtype: False)
    for got, expected in zip(ours, loss_and_gradients(model, ids), strict=True):
        assert relative_error(got, expected) < 2e-2
