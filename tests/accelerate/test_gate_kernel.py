"""SwiGLU's gate in one pass: what the kernels compute is the formula and its derivative."""

import pytest
import torch

from scratchlm.accelerate.kernels.triton.swiglu_gate import (
    gate_backward,
    gate_forward,
    measured_gate_backward,
    measured_gate_forward,
)
from scratchlm.ops import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 10), (2, 3, 8), (2, 2 * 1024 + 6)])
def test_the_gate_and_its_gradient(dtype, shape):
    joined = (3 * torch.randn(shape, device=DEVICE)).to(dtype)
    slope = torch.randn(*shape[:-1], shape[-1] // 2, device=DEVICE).to(dtype)
    exact = joined.double().requires_grad_()
    a, b = exact.chunk(2, dim=-1)
    hidden = reference.silu(a) * b
    (truth,) = torch.autograd.grad(hidden, exact, slope.double())
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(gate_forward(joined).double(), hidden.detach(), **close)
    torch.testing.assert_close(gate_backward(joined, slope).double(), truth, **close)


def test_far_from_zero_the_gate_is_its_limit():
    joined = torch.tensor([[-60.0, 60.0, 2.0, 3.0]], device=DEVICE)
    torch.testing.assert_close(gate_forward(joined).tolist(), [[0.0, 180.0]])
    slopes = gate_backward(joined, torch.ones(1, 2, device=DEVICE)).tolist()
    torch.testing.assert_close(slopes, [[0.0, 3.0, 0.0, 60.0]])


def assert_measured(measured, plain):
    written, greatest = measured
    assert torch.equal(written, plain)
    assert greatest.dtype == torch.float32
    assert greatest.item() == plain.float().abs().max().item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("column", [0, 1023, 1024, 1026])
@pytest.mark.parametrize("pair", [(20, -3), (3, -20)], ids=["b's gradient", "a's gradient"])
def test_it_can_say_the_largest_magnitude_of_what_it_wrote(dtype, column, pair):
    """Of the numbers as rounded: those that `quantize` will read."""
    joined = torch.randn(3, 2, 1027, device=DEVICE).to(dtype)
    slope = torch.randn(3, 1027, device=DEVICE).to(dtype)
    joined[1, :, column] = torch.tensor(pair)  # what makes the largest, in whichever program
    slope[1, column] = -5.0
    joined = joined.flatten(1)
    assert_measured(measured_gate_forward(joined), gate_forward(joined))
    assert_measured(measured_gate_backward(joined, slope), gate_backward(joined, slope))


def test_where_all_is_zero_so_is_the_largest_magnitude():
    joined, slope = torch.zeros(2, 8, device=DEVICE), torch.ones(2, 4, device=DEVICE)
    assert measured_gate_forward(joined)[1].item() == 0
    assert measured_gate_backward(joined, slope)[1].item() == 0
