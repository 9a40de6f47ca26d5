"""The RMSNorm kernels compute the formula and its gradients, with and without the addition."""

import pytest
import torch

from scratchlm.accelerate.kernels.triton import rms_norm as kernel
from scratchlm.accelerate.kernels.triton.rms_norm import (
    launch_add_rms_norm,
    launch_add_rms_norm_backward,
    rms_norm,
)
from scratchlm.ops import fast, reference

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


def test_a_weight_the_kernels_cannot_read_falls_back_to_torch(monkeypatch):
    """A strided one; one that is too short, which torch rejects."""
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: True)
    x, delta = torch.randn(2, 5, 8, device=DEVICE)
    weight = torch.randn(8, 3, device=DEVICE)[:, 1]
    torch.testing.assert_close(fast.rms_norm(x, weight), reference.rms_norm(x, weight))
    total, normed = fast.add_norm(x, delta, weight, 1e-5)
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normed, reference.rms_norm(x + delta, weight))
    for rejected in (
        lambda: fast.rms_norm(x, weight[:4]),
        lambda: fast.add_norm(x, delta, weight[:4], 0),
    ):
        with pytest.raises(RuntimeError):
            rejected()
