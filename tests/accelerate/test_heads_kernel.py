"""From the joined product to attention's inputs and back: the formula, its gradients, any view."""

import pytest
import torch

from scratchlm.accelerate.kernels.triton.qkv_norm_rope import heads_backward, heads_forward
from scratchlm.ops import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LAYOUTS = ("interleaved", "half")
SHAPES = [(2, 1, 5, 8), (3, 3, 33, 6), (1, 1, 1, 2), (4, 2, 40, 64), (2, 1, 17, 128)]


def tables(*shape):
    angle = torch.randn(*shape, device=DEVICE)
    return 1.3 * angle.cos(), 1.3 * angle.sin()  # stretched, as some scalings of RoPE have it


def by_formula(joined, cos, sin, gains, eps, heads, kv_heads, layout):
    width = joined.shape[-1] // (heads + 2 * kv_heads)
    sizes = [heads * width, kv_heads * width, kv_heads * width]
    q, k, v = (
        part.unflatten(-1, (-1, width)).transpose(1, 2) for part in joined.split(sizes, dim=-1)
    )
    if gains is not None:
        q, k = reference.rms_norm(q, gains[0], eps), reference.rms_norm(k, gains[1], eps)
    return reference.rope(q, cos, sin, layout), reference.rope(k, cos, sin, layout), v


def distance(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("heads", "kv_heads", "seq", "width"), SHAPES)
def test_heads_and_their_gradients(dtype, layout, normed, heads, kv_heads, seq, width):
    joined = torch.randn(2, seq, (heads + 2 * kv_heads) * width, device=DEVICE).to(dtype)
    gains = [torch.randn(width, device=DEVICE) for _ in range(2)] if normed else None
    cos, sin = tables(2, 1, seq, width // 2)  # every row of the batch has its own
    exact = [part.double().requires_grad_() for part in (joined, *(gains or []))]
    wide = (cos.double(), sin.double(), exact[1:] or None)
    truth = by_formula(exact[0], *wide, 1e-3, heads, kv_heads, layout)
    slopes = [torch.randn(t.shape, device=DEVICE).to(dtype) for t in truth]
    expected = torch.autograd.grad(truth, exact, [slope.double() for slope in slopes])

    given = (None, None) if gains is None else tuple(gains)
    interleaved = layout == "interleaved"
    q, k = heads_forward(joined, cos, sin, *given, 1e-3, heads, kv_heads, interleaved)
    kept = joined if normed else None
    of_joined, of_gains = heads_backward(*slopes, kept, cos, sin, *given, 1e-3, interleaved)
    found = [q, k, of_joined, *(of_gains.unbind() if normed else [])]
    for got, wanted in zip(found, (*truth[:2], *expected), strict=True):
        assert distance(got, wanted.detach()) < TOLERANCE[dtype] / 2


def test_one_table_serves_all_rows_and_gradients_may_lie_anyhow():
    cos, sin = tables(1, 1, 5, 4)
    joined = torch.randn(3, 5, 4 * 8, device=DEVICE)
    expected = by_formula(joined, cos, sin, None, 0.0, 2, 1, "half")
    q, k = heads_forward(joined, cos, sin, None, None, 0.0, 2, 1, False)
    torch.testing.assert_close((q, k), expected[:2])
    assert q.transpose(1, 2).is_contiguous()
    slopes = [torch.randn_like(t.mT.contiguous()).mT for t in expected]  # by channel, not by token
    got, _ = heads_backward(*slopes, None, cos, sin, None, None, 0.0, False)
    same, _ = heads_backward(*map(torch.clone, slopes), None, cos, sin, None, None, 0.0, False)
    torch.testing.assert_close(got, same)
    values = slopes[2].transpose(1, 2).flatten(-2)
    torch.testing.assert_close(got[..., 3 * 8 :], values, atol=0, rtol=0)
