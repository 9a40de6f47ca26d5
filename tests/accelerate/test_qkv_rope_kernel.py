"""The Q, K, V projection with fused RoPE: its packed tables, its gradients and, on a GPU, itself.

Nothing interprets the kernel on a CPU. There a formula stands in (`qkv_rope_formula.py`).
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelerate.gpu import on_hopper, relative_error
from accelerate.qkv_rope_formula import CALLS, LAYOUTS, random_tables, split_heads, unpack_tables
from scratchlm.accelerate.kernels.hopper.qkv_rope import qkv_rope, qkv_rope_gemm, rope_tables
from scratchlm.ops import reference


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(128, 32), (3, 1, 128, 32), (256, 32)])
def test_packed_tables_hold_every_value_where_its_thread_reads_it(layout, shape):
    cos, sin = random_tables(*shape)
    tables = rope_tables(cos, sin, layout == "interleaved")
    assert tables.is_contiguous()
    got = unpack_tables(tables, layout == "interleaved")
    torch.testing.assert_close(got[0], cos.reshape(-1, 32), atol=0, rtol=0)
    torch.testing.assert_close(got[1], sin.reshape(-1, 32), atol=0, rtol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batched", [False, True], ids=["one table", "a table per row"])
def test_values_and_gradients_equal_the_reference(layout, batched, compiled):
    CALLS.clear()
    num_heads, batch, seq, d = (4, 2), 2, 128, 24
    cos, sin = random_tables(*((batch, 1) if batched else ()), seq, 32)
    x = torch.randn(batch, seq, d, requires_grad=True)
    w = torch.randn((num_heads[0] + 2 * num_heads[1]) * 64, d, requires_grad=True)
    interleaved = layout == "interleaved"

    def run(x, w):
        tables = (cos, sin, rope_tables(cos, sin, interleaved))
        return qkv_rope(x, w, tables, num_heads, interleaved)

    got = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, w)
    q, k, v = split_heads(x @ w.t(), num_heads)
    expected = (reference.rope(q, cos, sin, layout), reference.rope(k, cos, sin, layout), v)
    grad_outputs = [torch.randn_like(t) for t in expected]
    for ours, right in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-4, rtol=1e-4)
    for ours, right in zip(
        torch.autograd.grad(got, (x, w), grad_outputs),
        torch.autograd.grad(expected, (x, w), grad_outputs),
        strict=True,
    ):
        assert relative_error(ours, right) < 1e-5
    assert CALLS == ["qkv_rope_product"]


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_gradient_asked_for_is_computed(wanted):
    cos, sin = random_tables(128, 32)
    leaves = [torch.randn(1, 128, 24), torch.randn(3 * 64, 24)]
    leaves[wanted].requires_grad_()
    tables = (cos, sin, rope_tables(cos, sin, True))
    q, k, v = qkv_rope(*leaves, tables, (1, 1), True)
    with FlopCounterMode(display=False) as counted:
        (q + k + v).sum().backward()
    assert counted.get_total_flops() == 2 * 128 * (3 * 64) * 24  # of one GEMM


# On a Hopper GPU


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("programs", [0, 1, 3, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("num_heads", "positions", "d"),
    [((2, 2), 128, 64), ((3, 1), 384, 128), ((5, 5), 768, 320), ((8, 2), 768, 64)],
)
def test_the_kernel_equals_its_formula(num_heads, positions, d, layout, programs):
    tokens, columns = 768, (num_heads[0] + 2 * num_heads[1]) * 64
    x = torch.randn(tokens, d, device="cuda").bfloat16()
    w = (torch.randn(columns, d, device="cuda") * d**-0.5).bfloat16()
    cos, sin = (table.cuda() for table in random_tables(positions, 32))
    interleaved, rotated = layout == "interleaved", sum(num_heads)
    tables = rope_tables(cos, sin, interleaved)
    got = qkv_rope_gemm(x, w, tables, rotated * 64, interleaved, programs)
    rows = (x.double() @ w.double().t()).view(-1, positions, columns // 64, 64).transpose(1, 2)
    qk = reference.rope(rows[:, :rotated], cos.double(), sin.double(), layout)
    expected = torch.cat((qk, rows[:, rotated:]), dim=1).transpose(1, 2)
    assert relative_error(got, expected.reshape(tokens, columns)) < 3e-3
    for _ in range(3):  # a race would show
        again = qkv_rope_gemm(x, w, tables, rotated * 64, interleaved, programs)
        assert torch.equal(again, got)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_those_of_the_formula_in_float64(layout, compiled):
    num_heads, batch, seq, d = (4, 2), 2, 256, 128
    x = torch.randn(batch, seq, d, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(8 * 64, d, device="cuda") * d**-0.5).bfloat16().requires_grad_()
    cos, sin = (table.cuda() for table in random_tables(seq, 32))
    interleaved = layout == "interleaved"

    def run(x, w):
        tables = (cos, sin, rope_tables(cos, sin, interleaved))
        return qkv_rope(x, w, tables, num_heads, interleaved)

    got = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, w)
    grad_outputs = [torch.randn_like(t) for t in got]
    ours = torch.autograd.grad(got, (x, w), grad_outputs)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    q, k, v = split_heads(wide[0] @ wide[1].t(), num_heads)
    q, k = (reference.rope(t, cos.double(), sin.double(), layout) for t in (q, k))
    right = torch.autograd.grad((q, k, v), wide, [g.double() for g in grad_outputs])
    for one, expected in zip((*got, *ours), (q, k, v, *right), strict=True):
        assert relative_error(one, expected) < 5e-3
