"""Causal attention on Hopper: q, k, v and RoPE, cuDNN's forward pass, our backward kernel.

Nothing interprets the Hopper kernels on a CPU. There formulas stand in (`qkv_rope_formula.py`). The
oracle is autograd of the plain formula, on a GPU in float64.
"""

import math

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from acceleration.gpu import on_hopper, relative_error
from acceleration.qkv_rope_formula import (
    CALLS,
    LAYOUTS,
    causal_attention,
    grad_qkv,
    qkv_attention,
    random_tables,
    split_heads,
    unpack_tables,
)
from scratchlm.accelerate.kernels.hopper import attention_backward as kernel
from scratchlm.accelerate.kernels.hopper.attention_backward import attention_grad_qkv
from scratchlm.accelerate.kernels.hopper.qkv_rope import qkv_rope_attention, rope_tables
from scratchlm.accelerate.kernels.hopper.work_schedule import make_schedule
from scratchlm.accelerate.kernels.triton.attention_stats import attention_stats
from scratchlm.accelerate.kernels.triton.dkv_group_sum import sum_dkv_groups
from scratchlm.accelerate.kernels.triton.dq_rope import rotate_dq_back
from scratchlm.ops import CausalMask, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = [(3, 3), (4, 2), (4, 1)]


@pytest.fixture(autouse=True)
def no_calls_yet():
    CALLS.clear()
    torch.compiler.reset()  # else its limit of recompilations is reached


def num_columns(num_heads):
    return (num_heads[0] + 2 * num_heads[1]) * 64


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("batched", [False, True], ids=["one table", "a table per row"])
def test_values_and_gradients_equal_the_reference(layout, num_heads, batched, compiled):
    batch, seq, d = 2, 128, 24
    cos, sin = random_tables(*((batch, 1) if batched else ()), seq, 32)
    x = torch.randn(batch, seq, d, requires_grad=True)
    w = (torch.randn(num_columns(num_heads), d) * d**-0.5).requires_grad_()

    def run(x, w):
        tables = rope_tables(cos, sin, layout == "interleaved")
        return qkv_rope_attention(x, w, tables, num_heads, layout == "interleaved")

    got = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, w)
    assert got.is_contiguous()
    q, k, v = split_heads(x @ w.t(), num_heads)
    q, k = (reference.rope(t, cos, sin, layout) for t in (q, k))
    expected = reference.attention(q, k, v, CausalMask()).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    grad_output = torch.randn_like(expected)
    for ours, right in zip(
        torch.autograd.grad(got, (x, w), grad_output),
        torch.autograd.grad(expected, (x, w), grad_output),
        strict=True,
    ):
        assert relative_error(ours, right) < 1e-5
    assert CALLS == ["qkv_rope_product", "cudnn_attention", "attention_backward"]


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_gradient_asked_for_is_computed(wanted):
    leaves = [torch.randn(1, 128, 24), torch.randn(3 * 64, 24)]
    leaves[wanted].requires_grad_()
    tables = rope_tables(*random_tables(128, 32), True)
    attn_out = qkv_rope_attention(*leaves, tables, (1, 1), True)
    with FlopCounterMode(display=False) as counted:
        attn_out.sum().backward()
    assert counted.get_total_flops() == 2 * 128 * (3 * 64) * 24  # of one GEMM
    assert leaves[wanted].grad is not None


def test_selective_checkpointing_can_save_both_forward_ops():
    saved = (
        torch.ops.scratchlm.qkv_rope_product.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    )

    def policy(ctx, op, *args, **kwargs):
        save = op in saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    tables = rope_tables(*random_tables(128, 32), True)
    x = torch.randn(1, 128, 24, requires_grad=True)
    w = torch.randn(3 * 64, 24, requires_grad=True)
    found = []
    for contexts in (None, lambda: create_selective_checkpoint_contexts(policy)):
        more = {} if contexts is None else {"context_fn": contexts}
        y = checkpoint(qkv_rope_attention, x, w, tables, (1, 1), True, use_reentrant=False, **more)
        found.append(torch.autograd.grad(y.sum(), (x, w)))
    assert CALLS.count("qkv_rope_product") == CALLS.count("cudnn_attention") == 3
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


# The kernel's addresses in plain Python, with the true schedule, buffers and Triton kernels


class BlocksOfKeys:
    """Stands for the Gluon kernel: takes the blocks of keys that its programs would take."""

    def __init__(self, layout):
        self.layout = layout

    def __getitem__(self, grid):
        return self.launch

    def launch(self, qkv, kv, grad_out, grad, grad_kv, stats, *rest, SPLIT, **constants):
        tables, accumulators, schedule, group, heads, blocks, stride, table_tiles, step = rest
        assert stride == schedule.shape[1]
        every = unpack_tables(tables.cpu(), self.layout == "interleaved").to(qkv)
        assert every.shape[1] == table_tiles * 64
        sums = torch.zeros(len(stats[0]), 64).to(qkv)
        for item in (i for row in schedule.tolist() for i in row[1 : 1 + row[0]]):
            unit, j = divmod(item, blocks)
            first, column = unit // heads * blocks * 128, unit % heads * 64
            kv_column = unit % heads // group * 64
            keys = slice(first + j * 128, first + (j + 1) * 128)
            queries = slice(first + j * 128, first + blocks * 128)
            own = slice((unit * blocks + j) * 128, (unit + 1) * blocks * 128)
            q, do = qkv[queries, column : column + 64], grad_out[queries, column : column + 64]
            k = kv[keys, kv_column : kv_column + 64]
            v = kv[keys, heads // group * 64 :][:, kv_column : kv_column + 64]
            shift, delta = (stat[own, None] for stat in stats)
            p = torch.exp2(q @ k.t() / 8 / math.log(2) + shift).tril()
            ds = p * (do @ v.t() - delta)
            cos, sin = every[:, unit // heads * step * 64 :][:, : blocks * 128]
            of_keys = slice(j * 128, (j + 1) * 128)
            dk = reference.rope(ds.t() @ q / 8, cos[of_keys], -sin[of_keys], self.layout)
            grad_kv[keys, column : column + 64] = dk
            grad_kv[keys, heads * 64 :][:, column : column + 64] = p.t() @ do
            sums[own] += ds @ k
            if not SPLIT:  # the rows that see their last key: all others come again
                dq = reference.rope(sums[own] / 8, cos[j * 128 :], -sin[j * 128 :], self.layout)
                grad[queries, column : column + 64] = dq
        if SPLIT:
            in_order = sums.view(-1, 4, 2, 8, 8, 4, 2).permute(0, 4, 1, 3, 5, 2, 6)  # w j q g p e
            accumulators += in_order.reshape(accumulators.shape)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("num_heads", "batched"), [((3, 3), True), ((4, 2), False), ((4, 2), True), ((4, 1), False)]
)
def test_blocks_of_keys_add_up_to_the_gradient(monkeypatch, num_heads, batched, layout, split):
    batch, seq = 2, 256
    monkeypatch.setattr(kernel, "tma_descriptor", lambda matrix, rows, columns: matrix)
    monkeypatch.setattr(kernel.TensorDescriptor, "from_tensor", lambda matrix, *more: matrix)
    monkeypatch.setattr(kernel, "_attention_backward_kernel", BlocksOfKeys(layout))
    qkv = torch.randn(batch, seq, num_columns(num_heads), device=DEVICE)
    grad_output = torch.randn(batch, seq, num_heads[0] * 64, device=DEVICE)
    cos, sin = (t.to(DEVICE) for t in random_tables(*((batch, 1) if batched else ()), seq, 32))
    attn_out, log_sum_exp = causal_attention(*split_heads(qkv, num_heads))
    attn_out = attn_out.transpose(1, 2).flatten(2)
    stats = attention_stats(attn_out, grad_output, log_sum_exp)
    tables = rope_tables(cos, sin, layout == "interleaved")
    how = (layout == "interleaved", split, 3)
    got = kernel.attention_grad_qkv(qkv, grad_output, stats, tables, *how)
    expected = grad_qkv(qkv, attn_out, grad_output, log_sum_exp, cos, sin, layout)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


# The small Triton kernels around it, and its schedule


@pytest.mark.parametrize(("batch", "heads", "seq"), [(2, 3, 64), (1, 1, 100), (3, 2, 129)])
def test_stats_are_scaled_log_sum_exps_and_row_sums_per_head(batch, heads, seq):
    attn_out, grad = (torch.randn(batch, seq, heads * 64, device=DEVICE) for _ in range(2))
    log_sum_exp = torch.randn(batch, heads, seq, 1, device=DEVICE)
    shift, delta = attention_stats(attn_out, grad, log_sum_exp)
    torch.testing.assert_close(torch.exp2(-shift), log_sum_exp[..., 0].exp(), atol=0, rtol=1e-5)
    sums = (attn_out.double() * grad.double()).unflatten(-1, (heads, 64)).sum(-1).transpose(1, 2)
    torch.testing.assert_close(delta.double(), sums, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batched", [False, True], ids=["one table", "a table per row"])
def test_dq_in_thread_order_is_rotated_back(layout, batched):
    batch, heads, seq = 2, 3, 192
    dq = torch.randn(batch * heads, seq // 64, 8, 4, 8, 4, 2, 2, device=DEVICE)  # g w q p j e
    cos, sin = (t.to(DEVICE) for t in random_tables(*((batch, 1) if batched else ()), seq, 32))
    grad = torch.full((batch, seq, 5 * heads * 64), 7.0, device=DEVICE)
    tables = rope_tables(cos, sin, layout == "interleaved")
    rotate_dq_back(dq, tables, grad, layout == "interleaved")
    by_row = dq.permute(0, 1, 3, 6, 4, 2, 5, 7).reshape(batch, heads, seq, 64)
    expected = reference.rope(by_row / 8, cos, -sin, layout).transpose(1, 2).flatten(2)
    torch.testing.assert_close(grad[..., : heads * 64], expected, atol=1e-5, rtol=1e-5)
    assert (grad[..., heads * 64 :] == 7).all()


@pytest.mark.parametrize(("tokens", "num_heads"), [(70, (4, 2)), (128, (8, 1)), (5, (6, 3))])
def test_dk_and_dv_are_summed_over_each_group_in_float32(tokens, num_heads):
    heads, kv_heads = num_heads
    per_head = torch.randn(tokens, 2 * heads * 64, device=DEVICE).bfloat16()
    grad = torch.full((tokens, num_columns(num_heads)), 7.0, device=DEVICE)
    sum_dkv_groups(per_head, grad)
    dk, dv = per_head.double().view(tokens, 2, kv_heads, heads // kv_heads, 64).sum(3).unbind(1)
    expected = torch.cat((dk, dv), dim=1).flatten(1)
    torch.testing.assert_close(grad[:, heads * 64 :].double(), expected, atol=1e-5, rtol=1e-6)
    assert (grad[:, : heads * 64] == 7).all()


@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
@pytest.mark.parametrize(
    ("units", "parts", "programs"), [(1, 1, 1), (16, 128, 132), (200, 8, 132), (7, 5, 3)]
)
def test_the_schedule_takes_every_item_once_and_is_balanced(units, parts, programs, whole):
    costs = tuple(range(parts, 0, -1))
    programs = min(programs, units if whole else units * parts)
    schedule = make_schedule(units, costs, programs, torch.device("cpu"), whole).tolist()
    rows = [row[1 : 1 + row[0]] for row in schedule]
    assert sorted(item for row in rows for item in row) == list(range(units * parts))
    assert all(row and row == sorted(row) for row in rows)
    owners = [
        {p for p, row in enumerate(rows) for i in row if i // parts == u} for u in range(units)
    ]
    assert not whole or all(len(some) == 1 for some in owners)
    loads = [sum(costs[item % parts] for item in row) for row in rows]
    largest = sum(costs) if whole else costs[0]
    assert max(loads) - min(loads) <= largest


# On a Hopper GPU


def draw_layer(batch, seq, num_heads, d=128, batched=False):
    x = torch.randn(batch, seq, d, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(num_columns(num_heads), d, device="cuda") * d**-0.5).bfloat16()
    cos, sin = (t.cuda() for t in random_tables(*((batch, 1) if batched else ()), seq, 32))
    return x, w.requires_grad_(), cos, sin


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("programs", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("batch", "seq", "num_heads", "batched"),
    [
        (1, 128, (1, 1), False),
        (2, 256, (3, 3), True),
        (3, 640, (2, 2), False),
        (40, 384, (5, 5), True),
        (1, 128, (2, 1), False),
        (3, 640, (4, 2), True),
        (2, 384, (8, 2), False),
        (20, 256, (8, 1), True),
    ],
)
def test_the_kernel_equals_its_formula(batch, seq, num_heads, batched, layout, programs, split):
    heads, kv_heads = num_heads
    qkv = torch.randn(batch, seq, num_columns(num_heads), device="cuda").bfloat16()
    grad_output = torch.randn(batch, seq, heads * 64, device="cuda").bfloat16()
    cos, sin = (t.cuda() for t in random_tables(*((batch, 1) if batched else ()), seq, 32))
    attn_out, log_sum_exp = causal_attention(*split_heads(qkv.double(), num_heads))
    attn_out = attn_out.transpose(1, 2).flatten(2)
    stats = attention_stats(*(t.float() for t in (attn_out, grad_output, log_sum_exp)))
    interleaved = layout == "interleaved"
    how = (rope_tables(cos, sin, interleaved), interleaved, split, programs)
    got = attention_grad_qkv(qkv, grad_output, stats, *how)
    wide = (t.double() for t in (grad_output, log_sum_exp, cos, sin))
    expected = grad_qkv(qkv.double(), attn_out, *wide, layout)
    sizes = [heads * 64, kv_heads * 64, kv_heads * 64]
    names = ("dq", "dk", "dv")
    for name, ours, right in zip(
        names, got.split(sizes, dim=-1), expected.split(sizes, dim=-1), strict=True
    ):
        assert relative_error(ours, right) < 5e-3, name
    dq, *dkv = got.split(sizes, dim=-1)
    for _ in range(3):  # a race would show, and whole heads' sums in another order
        again, *more = attention_grad_qkv(qkv, grad_output, stats, *how).split(sizes, dim=-1)
        assert relative_error(again, dq) < 1e-3 if split else torch.equal(again, dq)
        assert all(map(torch.equal, more, dkv))


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize(("batch", "seq"), [(3, 128), (2, 1024), (1, 2048), (1, 4096)])
def test_gradients_equal_those_of_the_formula_in_float64(batch, seq, kv_heads, layout):
    num_heads = (8, kv_heads)
    x, w, cos, sin = draw_layer(batch, seq, num_heads)
    tables = rope_tables(cos, sin, layout == "interleaved")
    grad_output = torch.randn(batch, seq, 8 * 64, device="cuda").bfloat16()

    def run():
        attn_out = qkv_rope_attention(x, w, tables, num_heads, layout == "interleaved")
        return attn_out.detach(), *torch.autograd.grad(attn_out, (x, w), grad_output)

    got = run()
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = qkv_attention(*wide, cos.double(), sin.double(), num_heads, layout)
    right = torch.autograd.grad(expected, wide, grad_output.double())
    for ours, truth in zip(got, (expected, *right), strict=True):
        assert relative_error(ours, truth) < 2e-2
    if seq <= 2048:  # heads are taken whole
        assert all(map(torch.equal, run(), got))


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("num_heads", [(4, 4), (4, 1)])
def test_a_compiled_layer_equals_the_eager_one(num_heads, backend):
    x, w, cos, sin = draw_layer(2, 256, num_heads, batched=True)
    grad_output = torch.randn(2, 256, 4 * 64, device="cuda").bfloat16()

    def run(x, w):
        return qkv_rope_attention(x, w, rope_tables(cos, sin, True), num_heads, True)

    found = []
    for one in (run, torch.compile(run, fullgraph=True, backend=backend)):
        attn_out = one(x, w)
        assert attn_out.is_contiguous()
        found.append([attn_out.detach(), *torch.autograd.grad(attn_out, (x, w), grad_output)])
    for got, expected in zip(*found, strict=True):
        assert relative_error(got, expected) < 1e-3


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("scale", [1, 30], ids=["usual scores", "huge scores"])
@pytest.mark.parametrize("num_heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize(("seq", "changed"), [(256, 1), (256, 130), (1024, 1000), (4096, 77)])
@torch.no_grad()
def test_changing_the_future_leaves_the_past_untouched(seq, changed, num_heads, scale):
    x, w, cos, sin = draw_layer(2, seq, num_heads)
    w[: sum(num_heads) * 64] *= scale  # scores grow by its square
    tables = rope_tables(cos, sin, True)
    before = qkv_rope_attention(x, w, tables, num_heads, True)
    other = x.clone()
    other[:, changed:] = 10 * torch.randn_like(x[:, changed:])
    after = qkv_rope_attention(other, w, tables, num_heads, True)
    assert torch.equal(after[:, :changed], before[:, :changed])
    assert not torch.equal(after[:, changed:], before[:, changed:])
    assert after.isfinite().all()
