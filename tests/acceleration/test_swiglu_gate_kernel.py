"""The SwiGLU gate kernels compute the formula and its gradient."""

import pytest
import torch

from scratchlm.accelerate.kernels.triton.swiglu_gate import (
    launch_swiglu_gate,
    launch_swiglu_gate_amax,
    launch_swiglu_gate_backward,
    launch_swiglu_gate_backward_amax,
)
from scratchlm.ops import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 10), (2, 3, 8), (2, 2 * 1024 + 6)])
def test_swiglu_gate_matches_the_formula_and_its_gradient(dtype, shape):
    gate_up = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
    dh = torch.randn(*shape[:-1], shape[-1] // 2, device=DEVICE).to(dtype)
    exact = gate_up.double().requires_grad_()
    a, b = exact.chunk(2, dim=-1)
    h = reference.silu(a) * b
    (grad,) = torch.autograd.grad(h, exact, dh.double())
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(launch_swiglu_gate(gate_up).double(), h.detach(), **close)
    torch.testing.assert_close(launch_swiglu_gate_backward(gate_up, dh).double(), grad, **close)


def test_swiglu_gate_of_large_inputs_is_its_limit():
    gate_up = torch.tensor([[-60.0, 60.0, 2.0, 3.0]], device=DEVICE)
    torch.testing.assert_close(launch_swiglu_gate(gate_up).tolist(), [[0.0, 180.0]])
    grad = launch_swiglu_gate_backward(gate_up, torch.ones(1, 2, device=DEVICE)).tolist()
    torch.testing.assert_close(grad, [[0.0, 3.0, 0.0, 60.0]])


def assert_amax_of(with_amax, plain):
    output, amax = with_amax
    assert torch.equal(output, plain)
    assert amax.dtype == torch.float32
    assert amax.item() == plain.float().abs().max().item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("column", [0, 1023, 1024, 1026])
@pytest.mark.parametrize("pair", [(20, -3), (3, -20)], ids=["db", "da"])
def test_amax_is_the_largest_magnitude_of_the_rounded_output(dtype, column, pair):
    gate_up = torch.randn(3, 2, 1027, device=DEVICE).to(dtype)
    dh = torch.randn(3, 1027, device=DEVICE).to(dtype)
    gate_up[1, :, column] = torch.tensor(pair)  # the maximum, in any of the programs
    dh[1, column] = -5.0
    gate_up = gate_up.flatten(1)
    assert_amax_of(launch_swiglu_gate_amax(gate_up), launch_swiglu_gate(gate_up))
    grads = launch_swiglu_gate_backward_amax(gate_up, dh), launch_swiglu_gate_backward(gate_up, dh)
    assert_amax_of(*grads)


def test_amax_of_zeros_is_zero():
    gate_up, dh = torch.zeros(2, 8, device=DEVICE), torch.ones(2, 4, device=DEVICE)
    assert launch_swiglu_gate_amax(gate_up)[1].item() == 0
    assert launch_swiglu_gate_backward_amax(gate_up, dh)[1].item() == 0
