"""The rotation in one kernel: it is the formula, on any view, and its own inverse turned back."""

import pytest
import torch

from scratchlm.accelerate.kernels.triton.rope import turn_pairs
from scratchlm.ops import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LAYOUTS = ("interleaved", "half")


def tables(*shape):
    angle = torch.randn(*shape, device=DEVICE)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "seq", "width"), [(2, 5, 8), (3, 33, 6), (1, 1, 2), (1, 40, 64)])
def test_it_turns_as_the_formula_does(dtype, layout, heads, seq, width):
    x = torch.randn(2, heads, seq, width, device=DEVICE).to(dtype)
    cos, sin = tables(seq, width // 2)
    truth = reference.rope(x.double(), cos.double(), sin.double(), layout)
    ours = turn_pairs(x, cos, sin, layout == "interleaved", back=False)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(ours.double(), truth, **close)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_turns_the_other_way(layout):
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64, device=DEVICE, requires_grad=True)
    cos, sin = (1.3 * table for table in tables(2, 1, 7, 4))  # stretched, and one per row
    slope = torch.randn(2, 3, 7, 8, device=DEVICE)
    turned = reference.rope(x, cos.double(), sin.double(), layout)
    (truth,) = torch.autograd.grad(turned, x, slope.double())
    ours = turn_pairs(slope, cos, sin, layout == "interleaved", back=True)
    torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=1e-5)


def test_a_part_of_a_joined_product_is_read_where_it_lies():
    joined = torch.randn(2, 5, 3 * 4 * 8, device=DEVICE)
    part = joined[..., 32:64].unflatten(-1, (4, 8)).transpose(1, 2)
    assert not part.is_contiguous()
    cos, sin = tables(5, 4)
    ours = turn_pairs(part, cos, sin, True, back=False)
    torch.testing.assert_close(ours, reference.rope(part, cos, sin, "interleaved"))
    assert ours.transpose(1, 2).is_contiguous()


def test_one_table_serves_all_rows():
    x, (cos, sin) = torch.randn(3, 2, 5, 8, device=DEVICE), tables(1, 1, 5, 4)
    truth = reference.rope(x, cos, sin, "half")
    torch.testing.assert_close(turn_pairs(x, cos, sin, False, back=False), truth)
