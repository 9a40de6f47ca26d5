"""The RMSNorm kernels compute the formula and its gradients, with and without the addition."""

import pytest
import torch

from acceleration.gpu import use_kernels_on_cpu
from scratchlm.accelerate import accelerate
from scratchlm.accelerate.kernels.triton import rms_norm as kernel
from scratchlm.accelerate.kernels.triton.rms_norm import (
    launch_add_rms_norm,
    launch_add_rms_norm_backward,
    rms_norm,
)
from scratchlm.accelerate.layers import AcceleratedRMSNorm
from scratchlm.ops import reference
from tiny_models import FAMILIES, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {  # of x, of δ and of the norm -> tolerance
    "float32": (torch.float32, torch.float32, 1e-5),
    "mixed": (torch.float32, torch.bfloat16, 1e-2),
    "bfloat16": (torch.bfloat16, torch.bfloat16, 1e-2),
}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("programs", [2, 1056])
@pytest.mark.parametrize("shape", [(1, 4), (2, 3, 24), (5, 1030), (300, 8)])
def test_add_rms_norm_matches_the_formula_and_its_gradients(monkeypatch, kind, shape, programs):
    monkeypatch.setattr(kernel, "PROGRAMS", programs)  # so that each takes several rows
    dtype, out_dtype, tolerance = DTYPES[kind]
    x = torch.randn(shape, device=DEVICE).to(dtype)
    delta = torch.randn(shape, device=DEVICE).to(out_dtype)
    weight = torch.randn(shape[-1], device=DEVICE)
    dy, dn = torch.randn_like(x), torch.randn_like(delta)
    y, n = launch_add_rms_norm(x, delta, weight, 1e-3, out_dtype)
    dx, dweight, ddelta = launch_add_rms_norm_backward(y, weight, dy, dn, 1e-3, out_dtype)
    assert (y.dtype, n.dtype, dx.dtype) == (dtype, out_dtype, dtype)

    exact = [t.double().requires_grad_() for t in (x, delta, weight)]
    total = exact[0] + exact[1]
    outputs = (total, reference.rms_norm(total, exact[2], 1e-3))
    grads = torch.autograd.grad(outputs, exact, (dy.double(), dn.double()))
    ddelta = dx if dtype == out_dtype else ddelta
    assert ddelta.dtype == out_dtype
    for got, expected in zip((y, n, dx, ddelta, dweight), (*outputs, *grads), strict=True):
        expected = expected.detach()
        assert float((got.double() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 4), (2, 3, 24), (9, 1030)])
def test_rms_norm_matches_the_formula_and_its_gradients(dtype, shape):
    x = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(shape[-1], device=DEVICE, requires_grad=True)
    dn = torch.randn_like(x)
    n = rms_norm(x, weight, 1e-3)
    grads = torch.autograd.grad(n, (x, weight), dn)
    assert [t.dtype for t in (n, *grads)] == [dtype, dtype, torch.float32]

    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    output = reference.rms_norm(*exact, 1e-3)
    expected = (output.detach(), *torch.autograd.grad(output, exact, dn.double()))
    for got, wanted in zip((n, *grads), expected, strict=True):
        error = float((got.detach().double() - wanted).norm() / wanted.norm())
        assert error < {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]


def norm_with(weight):
    norm = AcceleratedRMSNorm(len(weight), device=DEVICE)
    norm.weight.data = weight
    return norm


def test_a_weight_the_kernel_cannot_read_falls_back_to_torch(monkeypatch):
    """A strided one; one that is too short, which is refused."""
    use_kernels_on_cpu(monkeypatch)
    monkeypatch.setattr(kernel, "rms_norm", None)  # whoever calls it fails
    x, weight = torch.randn(5, 8, device=DEVICE), torch.randn(8, 3, device=DEVICE)[:, 1]
    torch.testing.assert_close(norm_with(weight)(x), reference.rms_norm(x, weight, 1e-5))
    with pytest.raises(ValueError, match="the last dimension must be 4"):
        norm_with(weight[:4].contiguous())(x)
    with pytest.raises(TypeError):  # it would be called
        norm_with(weight.contiguous())(x)


def test_a_block_whose_gain_the_kernel_cannot_read_falls_back_to_torch(monkeypatch):
    model = build(FAMILIES["llama"], dtype=torch.float32).to(DEVICE)
    block, x = model.layers[0], torch.randn(2, 5, 16, device=DEVICE)
    expected, gain = block(x), block.ln2.weight
    use_kernels_on_cpu(monkeypatch)
    monkeypatch.setattr(kernel, "add_rms_norm", None)  # whoever calls it fails
    without = ("qkv_norm_rope", "swiglu_gate", "rms_norm")  # they are not what is tested
    accelerate(block, without)
    gain.data = torch.stack((gain.data, gain.data), dim=1)[:, 0]
    torch.testing.assert_close(block(x), expected, atol=1e-5, rtol=1e-5)
    gain.data = gain.data.contiguous()
    with pytest.raises(TypeError):  # it would be called
        block(x)
    gain.data = gain.data[:4]
    with pytest.raises(ValueError, match="the last dimension must be 4"):
        block(x)
