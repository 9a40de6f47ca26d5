"""SwiGLU with its gate fused into its GEMMs: its gradients, recomputation and, on a GPU, itself.

Nothing interprets the Hopper kernels on a CPU. There formulas stand in, and the compiler shows that
all of them are programs for the GPU they are meant for.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from acceleration.gpu import compiled_lines, on_hopper, relative_error
from scratchlm.accelerate.kernels.hopper import swiglu as kernels
from scratchlm.ops import reference

CALLS = []


def forward_formula(x, w13, w2):
    CALLS.append("forward")
    a, b = (x @ w13.t()).chunk(2, dim=-1)
    hidden = F.silu(a) * b
    both = torch.cat((torch.ops.aten.silu_backward(b, a), F.silu(a)), dim=-1)
    factors = x.new_zeros(kernels.factors_size(*hidden.shape))  # as large as the kernel's
    factors[: both.numel()] = both.flatten()
    return hidden @ w2.t(), factors, hidden


def backward_formula(dy, w2, factors):
    CALLS.append("backward")
    rows, d_ff = len(dy), w2.shape[1]
    p, q = factors[: 2 * rows * d_ff].view(rows, 2, d_ff).unbind(1)
    dh = dy @ w2
    return torch.cat((dh * p, dh * q), dim=-1)


kernels.swiglu_op.register_kernel("cpu")(forward_formula)
kernels.swiglu_backward_op.register_kernel("cpu")(backward_formula)


@pytest.fixture(autouse=True)
def no_calls_yet():
    CALLS.clear()
    torch.compiler.reset()  # else its limit of recompilations is reached


def draw(*shape, d=12, d_ff=20):
    sizes = ((*shape, d), (2 * d_ff, d), (d, d_ff))
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


def by_reference(x, w13, w2):
    w1, w3 = w13.chunk(2)
    return reference.swiglu(x, w1, w2, w3)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("shape", [(7,), (2, 5)])
def test_value_and_gradients_equal_the_reference(shape, compiled):
    leaves = draw(*shape)
    run = kernels.swiglu
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    grad_output = torch.randn(*shape, 12, dtype=torch.float64)
    got, expected = run(*leaves), by_reference(*leaves)
    torch.testing.assert_close(got, expected)
    for ours, right in zip(
        torch.autograd.grad(got, leaves, grad_output),
        torch.autograd.grad(expected, leaves, grad_output),
        strict=True,
    ):
        torch.testing.assert_close(ours, right)
    assert CALLS == ["forward", "backward"]


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_only_the_gradients_asked_for_are_computed(wanted):
    leaves = draw(6)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in wanted)
    got = torch.autograd.grad(kernels.swiglu(*leaves).sum(), [leaves[i] for i in wanted])
    right = torch.autograd.grad(by_reference(*leaves).sum(), [leaves[i] for i in wanted])
    for ours, expected in zip(got, right, strict=True):
        torch.testing.assert_close(ours, expected)
    assert ("backward" in CALLS) == (wanted != (2,))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_checkpointing_recomputes_it_also_in_a_compiled_graph(compiled):
    leaves = draw(6)
    expected = torch.autograd.grad(by_reference(*leaves).sum(), leaves)

    def run(*given):
        return checkpoint(kernels.swiglu, *given, use_reentrant=False)

    if compiled:  # with what decides on saving or recomputing
        run = torch.compile(run, fullgraph=True, backend="aot_eager_decomp_partition")
    got = torch.autograd.grad(run(*leaves).sum(), leaves)
    for ours, right in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, right)
    assert CALLS == ["forward", "forward", "backward"]


@pytest.mark.parametrize("which", ["each", pytest.param("all", marks=pytest.mark.slow)])
def test_all_gluon_kernels_compile_for_a_hopper_gpu_and_spill_nothing(which):
    lines = [line.split() for line in compiled_lines("compile_gluon.py", which)]
    gemms = ["_swiglu_gemm_kernel", "_swiglu_gemm_backward_kernel", "_lm_head_exp_kernel"]
    gemms += ["_qkv_rope_kernel"] * 2
    attention = ["_attention_backward_kernel"] * (4 if which == "all" else 2)
    assert [line[0] for line in lines] == [*gemms, *attention, *["decode_qkv_attention"] * 3]
    for name, spilled, shared, instructions in lines:
        # Attention's: values that it needs once per block of keys
        assert int(spilled) <= (256 if name == "_attention_backward_kernel" else 0)
        assert int(shared) <= 227 * 1024  # what a program can have
        assert int(instructions) > 0


# On a Hopper GPU


def unpack_factors(factors, rows, d_ff):
    """Return P and Q by rows and columns."""
    tiles_n = -(-d_ff // 64)
    tiles = factors.view(
        rows // 128, tiles_n, 2, 2, 4, 4, 8, 4, 2, 2, 2
    )  # m n which i g w q p h j e
    whole = tiles.permute(2, 0, 3, 5, 9, 6, 1, 4, 8, 7, 10).reshape(2, rows, 64 * tiles_n)
    return whole[:, :, :d_ff].unbind()


def draw_bfloat16(*shape, scale=1.0):
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("programs", [0, 1, 3, 7])
@pytest.mark.parametrize(
    ("rows", "d", "d_ff"), [(128, 64, 8), (512, 128, 200), (1024, 320, 1000), (640, 768, 3072)]
)
def test_the_kernels_equal_their_formulas(rows, d, d_ff, programs):
    x, dy, w2 = draw_bfloat16(rows, d), draw_bfloat16(rows, d), draw_bfloat16(d, d_ff)
    w13 = draw_bfloat16(2 * d_ff, d, scale=d**-0.5)
    factors, hidden = kernels.swiglu_gemm(x, w13, programs)
    a, b = (x.double() @ w13.double().t()).chunk(2, dim=-1)
    p, q = torch.ops.aten.silu_backward(b, a), F.silu(a)
    assert relative_error(hidden, q * b) < 4e-3
    for got, expected in zip(unpack_factors(factors, rows, d_ff), (p, q), strict=True):
        assert relative_error(got, expected) < 4e-3
    grad_ab = kernels.swiglu_gemm_backward(dy, w2, factors, programs)
    dh = dy.double() @ w2.double()
    assert relative_error(grad_ab, torch.cat((dh * p, dh * q), dim=-1)) < 4e-3
    for _ in range(3):  # a race would show
        factors_again, hidden_again = kernels.swiglu_gemm(x, w13, programs)
        assert torch.equal(factors_again, factors)
        assert torch.equal(hidden_again, hidden)
        assert torch.equal(kernels.swiglu_gemm_backward(dy, w2, factors, programs), grad_ab)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_equal_those_of_the_formula_in_float64(compiled):
    d, d_ff = 128, 200
    x = draw_bfloat16(2, 128, d)
    w13, w2 = draw_bfloat16(2 * d_ff, d, scale=d**-0.5), draw_bfloat16(d, d_ff, scale=d_ff**-0.5)
    leaves = [t.requires_grad_() for t in (x, w13, w2)]
    run = kernels.swiglu
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    y = run(*leaves)
    grad_output = torch.randn_like(y)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = by_reference(*wide)
    assert relative_error(y, expected) < 6e-3
    for ours, right in zip(
        torch.autograd.grad(y, leaves, grad_output),
        torch.autograd.grad(expected, wide, grad_output.double()),
        strict=True,
    ):
        assert relative_error(ours, right) < 8e-3
