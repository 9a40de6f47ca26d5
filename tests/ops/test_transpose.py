"""A transposed copy is torch's, to the bit, whatever the sizes and strides."""

import pytest
import torch

from scratchlm.ops import native
from scratchlm.ops.transpose import SOURCE, transpose_into


@pytest.fixture(params=["kernel", "torch"])
def either(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda *_: None)
    elif native.library(SOURCE) is None:
        pytest.skip(f"{native.why_not(SOURCE)}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(1, 1), (8, 8), (7, 9), (16, 70), (33, 100), (128, 64), (300, 5), (0, 3)]
)
def test_every_item_lands_in_its_place_and_nothing_beside_it_changes(either, dtype, shape):
    rows, columns = shape
    wide = torch.arange(rows * (columns + 3), dtype=dtype).view(rows, columns + 3)
    room = torch.full((columns + 2, rows + 5), -1, dtype=dtype)
    expected = room.clone()
    expected[1:-1, 2:-3] = wide[:, 1:-2].T
    wide[:, 0] = wide[:, -2:] = float("nan")  # not of the matrix
    assert transpose_into(room[1:-1, 2:-3], wide[:, 1:-2])
    assert torch.equal(room, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_value_that_is_not_finite_is_told_wherever_it_is(either, dtype, value):
    largest = torch.finfo(dtype).max
    matrix = torch.tensor([largest, -largest, 0, -0.0], dtype=dtype).repeat(140, 10)
    out = torch.empty(40, 140, dtype=dtype)
    assert transpose_into(out, matrix)
    for row, column in [(0, 0), (127, 39), (128, 0), (139, 39), (5, 33), (70, 17)]:
        bad = matrix.clone()
        bad[row, column] = value
        assert not transpose_into(out, bad)
        torch.testing.assert_close(out, bad.T, rtol=0, atol=0, equal_nan=True)
        assert not transpose_into(torch.empty(40, 140, dtype=torch.float64), bad)


def test_another_dtype_is_converted_and_another_shape_refused(either):
    matrix = torch.randn(10, 20)
    out = torch.empty(20, 10, dtype=torch.bfloat16)
    transpose_into(out, matrix)
    assert torch.equal(out, matrix.T.bfloat16())
    with pytest.raises(ValueError, match=r"must be \[20, 10\]"):
        transpose_into(torch.empty(10, 21), matrix)
