"""The QKV kernels: QK-norm and RoPE match the formula, forward and backward, for any strides."""

import pytest
import torch

from scratchlm.accelerate.kernels.triton.qkv_norm_rope import (
    launch_qk_norm_rope,
    launch_qkv_norm_rope_backward,
)
from scratchlm.ops import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LAYOUTS = ("interleaved", "half")
SHAPES = [(2, 1, 5, 8), (3, 3, 33, 6), (1, 1, 1, 2), (4, 2, 40, 64), (2, 1, 17, 128)]


def tables(*shape):
    angle = torch.randn(*shape, device=DEVICE)
    return 1.3 * angle.cos(), 1.3 * angle.sin()  # scaled, as by YaRN's attention factor


def by_formula(qkv, cos, sin, weights, eps, heads, kv_heads, layout):
    d_head = qkv.shape[-1] // (heads + 2 * kv_heads)
    sizes = [heads * d_head, kv_heads * d_head, kv_heads * d_head]
    q, k, v = (
        part.unflatten(-1, (-1, d_head)).transpose(1, 2) for part in qkv.split(sizes, dim=-1)
    )
    if weights is not None:
        q, k = reference.rms_norm(q, weights[0], eps), reference.rms_norm(k, weights[1], eps)
    return reference.rope(q, cos, sin, layout), reference.rope(k, cos, sin, layout), v


def distance(got, expected):
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("normed", [False, True], ids=["no norm", "qk-norm"])
@pytest.mark.parametrize(("heads", "kv_heads", "seq", "d_head"), SHAPES)
def test_qkv_norm_rope_matches_the_formula_and_its_gradients(
    dtype, layout, normed, heads, kv_heads, seq, d_head
):
    qkv = torch.randn(2, seq, (heads + 2 * kv_heads) * d_head, device=DEVICE).to(dtype)
    weights = [torch.randn(d_head, device=DEVICE) for _ in range(2)] if normed else None
    cos, sin = tables(2, 1, seq, d_head // 2)  # one table per row of the batch
    exact = [part.double().requires_grad_() for part in (qkv, *(weights or []))]
    constants = (cos.double(), sin.double(), exact[1:] or None)
    outputs = by_formula(exact[0], *constants, 1e-3, heads, kv_heads, layout)
    grad_outputs = [torch.randn(t.shape, device=DEVICE).to(dtype) for t in outputs]
    grads = torch.autograd.grad(outputs, exact, [grad.double() for grad in grad_outputs])

    given = (None, None) if weights is None else tuple(weights)
    interleaved = layout == "interleaved"
    q, k = launch_qk_norm_rope(qkv, cos, sin, *given, 1e-3, heads, kv_heads, interleaved)
    dqkv, dweights = launch_qkv_norm_rope_backward(
        *(*grad_outputs, qkv if normed else None, cos, sin, *given, 1e-3, interleaved)
    )
    found = [q, k, dqkv, *(dweights.unbind() if normed else [])]
    for got, wanted in zip(found, (*outputs[:2], *grads), strict=True):
        assert distance(got, wanted.detach()) < TOLERANCE[dtype] / 2


@pytest.mark.parametrize("shape", [(1, 1, 5, 4), (5, 4)], ids=["batch of one", "no batch"])
def test_one_table_serves_the_whole_batch(shape):
    cos, sin = tables(*shape)
    qkv = torch.randn(3, 5, 4 * 8, device=DEVICE)
    expected = by_formula(qkv, cos, sin, None, 0.0, 2, 1, "half")
    q, k = launch_qk_norm_rope(qkv, cos, sin, None, None, 0.0, 2, 1, False)
    torch.testing.assert_close((q, k), expected[:2])
    assert q.transpose(1, 2).is_contiguous()


def test_strides_of_the_projection_do_not_matter():
    cos, sin = tables(5, 4)
    qkv = torch.randn(2, 5, 3 * 4 * 8, device=DEVICE)[..., 32:64]  # not contiguous
    expected = launch_qk_norm_rope(qkv.clone(), cos, sin, None, None, 0.0, 2, 1, True)
    found = launch_qk_norm_rope(qkv, cos, sin, None, None, 0.0, 2, 1, True)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_strides_of_the_gradients_do_not_matter():
    cos, sin = tables(1, 1, 5, 4)
    shapes = [(3, heads, 8, 5) for heads in (2, 1, 1)]
    grads = [torch.randn(shape, device=DEVICE).mT for shape in shapes]  # channels are strided
    given = (None, cos, sin, None, None, 0.0, False)
    got, _ = launch_qkv_norm_rope_backward(*grads, *given)
    expected, _ = launch_qkv_norm_rope_backward(*(grad.contiguous() for grad in grads), *given)
    torch.testing.assert_close(got, expected)
    dv = grads[2].transpose(1, 2).flatten(-2)
    torch.testing.assert_close(got[..., 3 * 8 :], dv, atol=0, rtol=0)
