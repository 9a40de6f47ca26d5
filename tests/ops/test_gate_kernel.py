"""SwiGLU's gate in one pass: what the kernels compute is the formula and its derivative."""

import pytest
import torch

from scratchlm.ops import reference
from scratchlm.ops.kernels.gate import gate_backward, gate_forward

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
