"""A sum and its norm in one pass: what the kernels compute is the formula and its derivative."""

import pytest
import torch

from scratchlm.accelerate.kernels.triton import rms_norm as add_norm
from scratchlm.accelerate.kernels.triton.rms_norm import add_norm_backward, add_norm_forward
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
def test_the_sum_its_norm_and_the_gradients(monkeypatch, kind, shape, programs):
    monkeypatch.setattr(add_norm, "PROGRAMS", programs)  # so that each takes several rows
    wide, low, tolerance = DTYPES[kind]
    x, delta = torch.randn(shape, device=DEVICE).to(wide), torch.randn(shape, device=DEVICE).to(low)
    gain = torch.randn(shape[-1], device=DEVICE)
    dy, dn = torch.randn_like(x), torch.randn_like(delta)
    y, n = add_norm_forward(x, delta, gain, 1e-3, low)
    dx, of_gain, of_delta = add_norm_backward(y, gain, dy, dn, 1e-3, low)
    assert (y.dtype, n.dtype, dx.dtype) == (wide, low, wide)

    exact = [t.double().requires_grad_() for t in (x, delta, gain)]
    total = exact[0] + exact[1]
    truth = (total, reference.rms_norm(total, exact[2], 1e-3))
    slopes = torch.autograd.grad(truth, exact, (dy.double(), dn.double()))
    of_delta = dx if wide == low else of_delta
    assert of_delta.dtype == low
    found = (y, n, dx, of_delta, of_gain)
    for got, expected in zip(found, (*truth, *slopes), strict=True):
        expected = expected.detach()
        assert float((got.double() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 4), (2, 3, 24), (9, 1030)])
def test_the_norm_alone_and_its_gradients(dtype, shape):
    x = torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
    gain = torch.randn(shape[-1], device=DEVICE, requires_grad=True)
    dn = torch.randn_like(x)
    n = add_norm.Norm.apply(x, gain, 1e-3)
    slopes = torch.autograd.grad(n, (x, gain), dn)
    assert [t.dtype for t in (n, *slopes)] == [dtype, dtype, torch.float32]

    exact = [t.detach().double().requires_grad_() for t in (x, gain)]
    truth = reference.rms_norm(*exact, 1e-3)
    expected = (truth.detach(), *torch.autograd.grad(truth, exact, dn.double()))
    for got, wanted in zip((n, *slopes), expected, strict=True):
        error = float((got.detach().double() - wanted).norm() / wanted.norm())
        assert error < {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]


def test_a_gain_the_kernels_cannot_read_goes_another_way(monkeypatch):
    """One of every third number in memory; one too short."""
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: True)
    x, delta = torch.randn(2, 5, 8, device=DEVICE)
    gain = torch.randn(8, 3, device=DEVICE)[:, 1]
    torch.testing.assert_close(fast.rms_norm(x, gain), reference.rms_norm(x, gain))
    total, normed = fast.add_norm(x, delta, gain, 1e-5)
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normed, reference.rms_norm(x + delta, gain))
    for refused in (
        lambda: fast.rms_norm(x, gain[:4]),
        lambda: fast.add_norm(x, delta, gain[:4], 0),
    ):
        with pytest.raises(RuntimeError):
            refused()
