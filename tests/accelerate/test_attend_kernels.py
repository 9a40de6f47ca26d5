"""Attention's kernels for Hopper: what is around them, who takes them, and, on a GPU, themselves.

Nothing interprets them on a CPU. There formulas stand for them.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelerate.gpu import heard, loss_and_gradients, on_hopper, relative_error
from accelerate.turned import CALLS as PRODUCTS
from accelerate.turned import LAYOUTS, angles, tables_of
from scratchlm.accelerate import hopper
from scratchlm.accelerate.kernels.hopper import attention_backward as attend_back
from scratchlm.accelerate.kernels.hopper import qkv_rope as project_heads
from scratchlm.accelerate.kernels.hopper.work_schedule import shared_out
from scratchlm.accelerate.kernels.triton import attention_stats as row_stats
from scratchlm.accelerate.kernels.triton import dq_rope as turn_sums
from scratchlm.config import ModelConfig
from scratchlm.model import TransformerLM
from scratchlm.model.attention import MultiHeadSelfAttention, Scene
from scratchlm.model.rotary import RotaryEmbedding
from scratchlm.ops import OPS, CausalMask, fast, qkv, reference
from scratchlm.training.learner import _PartlyRecomputed, _recomputed

CALLS = []


def heads_of(joined):
    return joined.unflatten(-1, (-1, 64)).transpose(1, 2).chunk(3, dim=1)


def forth(joined):
    """Return what attention mixes, and the logarithms of its sums."""
    q, k, v = heads_of(joined)
    scores = q @ k.transpose(-1, -2) / 8
    hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), scores.logsumexp(-1)


def back(joined, mixed, slope, log_sums, cos, sin, layout):
    """Return the gradient of the joined product before it was turned: the kernel's formulas."""
    q, k, v = heads_of(joined)
    slope, mixed = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in (slope, mixed))
    p = (q @ k.transpose(-1, -2) / 8 - log_sums.reshape(*q.shape[:3], 1)).exp().tril()
    ds = p * (slope @ v.transpose(-1, -2) - (slope * mixed).sum(-1, keepdim=True)) / 8
    of_q, of_k, of_v = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ slope
    of_q, of_k = (reference.rope(d, cos, -sin, layout) for d in (of_q, of_k))
    return torch.cat((of_q, of_k, of_v), dim=1).transpose(1, 2).flatten(2)


def stand_in(joined, mixed, slope, log_sums, lines, interleaved):
    CALLS.append("back")
    cos, sin = tables_of(lines, interleaved).to(joined.dtype)
    if len(cos) > joined.shape[1]:
        cos, sin = (t.view(len(joined), 1, -1, 32) for t in (cos, sin))
    layout = "interleaved" if interleaved else "half"
    return back(joined, mixed, slope, log_sums, cos, sin, layout)


def cudnn_on_cpu(q, k, v, bias, compute_log_sumexp, dropout_p, is_causal, debug=False, scale=None):
    CALLS.append("forth")
    assert compute_log_sumexp
    assert is_causal
    attn_out, log_sums = forth(torch.cat((q, k, v), dim=1).transpose(1, 2).flatten(2))
    none, seq = torch.empty(0), q.shape[2]
    attn_out = attn_out.unflatten(-1, (-1, 64)).transpose(1, 2)
    return attn_out, log_sums[..., None], none, none, seq, seq, none, none, none


CUDNN = torch.library.Library("aten", "IMPL")
CUDNN.impl("_scaled_dot_product_cudnn_attention", cudnn_on_cpu, "CPU")
attend_back.through_attention.register_kernel("cpu")(stand_in)


@pytest.fixture(autouse=True)
def no_calls_yet():
    CALLS.clear()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("own_places", [False, True], ids=["one table", "a table a row"])
def test_values_and_gradients_are_the_references(layout, own_places, compiled):
    heads, batch, seq, d = 3, 2, 128, 24
    cos, sin = angles(*((batch, 1) if own_places else ()), seq, 32)
    x = torch.randn(batch, seq, d, requires_grad=True)
    w = (torch.randn(3 * heads * 64, d) * d**-0.5).requires_grad_()

    def run(x, w):
        lines = project_heads.in_lines(cos, sin, layout == "interleaved")
        return project_heads.attended(x, w, lines, heads, layout == "interleaved")

    got = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, w)
    q, k, v = (x @ w.t()).unflatten(-1, (-1, 64)).transpose(1, 2).chunk(3, dim=1)
    q, k = (reference.rope(t, cos, sin, layout) for t in (q, k))
    truth = reference.attention(q, k, v, CausalMask()).transpose(1, 2).flatten(2)
    torch.testing.assert_close(got, truth, atol=1e-4, rtol=1e-4)
    slope = torch.randn_like(truth)
    for ours, right in zip(
        torch.autograd.grad(got, (x, w), slope),
        torch.autograd.grad(truth, (x, w), slope),
        strict=True,
    ):
        assert relative_error(ours, right) < 1e-5
    assert CALLS == ["forth", "back"]


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_gradient_asked_for_is_computed(wanted):
    leaves = [torch.randn(1, 128, 24), torch.randn(3 * 64, 24)]
    leaves[wanted].requires_grad_()
    lines = project_heads.in_lines(*angles(128, 32), True)
    mixed = project_heads.attended(*leaves, lines, 1, True)
    with FlopCounterMode(display=False) as counted:
        mixed.sum().backward()
    assert counted.get_total_flops() == 2 * 128 * (3 * 64) * 24  # of one product
    assert leaves[wanted].grad is not None


@pytest.mark.parametrize(("batch", "heads", "seq"), [(2, 3, 64), (1, 1, 100), (3, 2, 129)])
def test_row_stats_are_powers_and_sums_by_head(batch, heads, seq):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mixed, slope = (torch.randn(batch, seq, heads * 64, device=device) for _ in range(2))
    log_sums = torch.randn(batch, heads, seq, device=device)
    shift, delta = row_stats.row_stats(mixed, slope, log_sums)
    torch.testing.assert_close(torch.exp2(-shift), log_sums.exp(), atol=0, rtol=1e-5)
    sums = (mixed.double() * slope.double()).unflatten(-1, (heads, 64)).sum(-1).transpose(1, 2)
    torch.testing.assert_close(delta.double(), sums, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("own_places", [False, True], ids=["one table", "a table a row"])
def test_sums_as_threads_hold_them_are_turned_back(layout, own_places):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch, heads, seq = 2, 3, 192
    sums = torch.randn(batch * heads, seq // 64, 8, 4, 8, 4, 2, 2, device=device)  # g w q p j e
    cos, sin = (t.to(device) for t in angles(*((batch, 1) if own_places else ()), seq, 32))
    grad = torch.full((batch, seq, 3 * heads * 64), 7.0, device=device)
    lines = project_heads.in_lines(cos, sin, layout == "interleaved")
    turn_sums.turn_sums(sums, lines, grad, layout == "interleaved")
    by_row = sums.permute(0, 1, 3, 6, 4, 2, 5, 7).reshape(batch, heads, seq, 64)
    right = reference.rope(by_row / 8, cos, -sin, layout).transpose(1, 2).flatten(2)
    torch.testing.assert_close(grad[..., : heads * 64], right, atol=1e-5, rtol=1e-5)
    assert (grad[..., heads * 64 :] == 7).all()


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
@pytest.mark.parametrize(
    ("units", "parts", "programs"), [(1, 1, 1), (16, 128, 132), (200, 8, 132), (7, 5, 3)]
)
def test_work_is_shared_out_once_and_evenly(units, parts, programs, whole):
    costs = tuple(range(parts, 0, -1))
    programs = min(programs, units if whole else units * parts)
    plan = shared_out(units, costs, programs, torch.device("cpu"), whole).tolist()
    rows = [row[1 : 1 + row[0]] for row in plan]
    assert sorted(item for row in rows for item in row) == list(range(units * parts))
    assert all(row and row == sorted(row) for row in rows)
    owners = [
        {p for p, row in enumerate(rows) for i in row if i // parts == u} for u in range(units)
    ]
    assert not whole or all(len(some) == 1 for some in owners)
    loads = [sum(costs[item % parts] for item in row) for row in rows]
    dearest = sum(costs) if whole else costs[0]
    assert max(loads) - min(loads) <= dearest


# Who takes it


@pytest.fixture
def taken(monkeypatch):
    """Let a CPU be taken for a GPU that has the kernel, float32 for what it multiplies in."""
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: torch.is_grad_enabled())
    monkeypatch.setattr(hopper, "takes_tables", lambda cos: True)
    monkeypatch.setattr(hopper, "takes_heads", lambda x, dtype: True)
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 4)


def layer(heads=4, ops="fast", **settings):
    rope = RotaryEmbedding(10_000.0, 64, 128, ops=ops)
    return MultiHeadSelfAttention(32, heads, d_head=64, rope=rope, ops=ops, **settings)


def test_a_layer_asks_for_it_and_is_what_it_was(taken):
    x = torch.randn(1, 128, 32, requires_grad=True)
    ours = layer()
    plain = layer(ops="reference")
    plain.load_state_dict(ours.state_dict())
    slope = torch.randn(1, 128, 32)
    found = []
    for one in (ours, plain):
        y = one(x)
        wanted = (x, *one.parameters())
        found.append([y.detach(), *torch.autograd.grad(y, wanted, slope)])
    assert CALLS == ["forth", "back"]
    for got, expected in zip(*found, strict=True):
        assert relative_error(got, expected) < 1e-5


def scene(x, **given):
    rope = RotaryEmbedding(10_000.0, 64, 128)
    return Scene(rotation=rope.at(slice(0, x.shape[1])), **given)


OTHER_WAYS = {
    "window": lambda x: layer(sliding_window=9)(x),
    "bias": lambda x: layer(bias="qkv")(x),
    "few keys": lambda x: layer(num_kv_heads=2)(x),
    "norms": lambda x: layer(qk_norm=True)(x),
    "documents": lambda x: layer()(x, scene=scene(x, mask=CausalMask(documents=x[..., 0] > 0))),
    "cache": lambda x: layer()(
        x, scene=scene(x, cache=SimpleNamespace(update=lambda layer, k, v: (k, v)))
    ),
    "attention of one's own": lambda x: layer(
        ops=OPS["fast"].__class__(**{**vars(OPS["fast"]), "attention": reference.attention})
    )(x),
    "cudnn switched off": lambda x: without_cudnn(x),
    "too few heads": lambda x: layer(heads=5)(x),
}


def without_cudnn(x):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return layer()(x)


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_what_it_does_not_do_goes_another_way(taken, monkeypatch, way):
    asked = []

    def projected(x, weights, heads, turn):
        asked.append(heads)
        return None

    def cut(joined, number, turn, norm):
        by_head = joined.unflatten(-1, (-1, 64)).transpose(1, 2)
        return by_head.split((number[0], number[1], number[1]), dim=1)

    monkeypatch.setattr(qkv, "projected", projected)
    monkeypatch.setattr(qkv, "turned", cut)
    x = torch.randn(1, 128, 32)
    OTHER_WAYS[way](x).sum().backward()
    assert not CALLS
    assert asked or way in ("bias", "norms")  # these two ask for another kernel yet


def test_it_is_for_whole_blocks_and_heads_that_occupy_the_gpu(monkeypatch):
    monkeypatch.setattr(hopper, "_multiprocessors", lambda device: 132)
    repeatable = []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: bool(repeatable))

    def takes(batch, seq, heads, kv_heads=None):
        x = SimpleNamespace(shape=(batch, seq, 64 * heads), device=SimpleNamespace(index=0))
        return hopper.takes_attention(x, (heads, heads if kv_heads is None else kv_heads))

    assert takes(32, 1024, 12)
    assert takes(8, 1024, 25)  # 200 of 264
    assert takes(8, 1024, 13)  # 104 of 132
    assert not takes(8, 1024, 12)  # 96
    assert not takes(9, 1024, 15)  # 135 of 264
    assert not takes(32, 1024, 12, 4)
    assert not takes(32, 1000, 12)
    assert takes(32, 2048, 12)
    assert not takes(32, 3072, 12)
    assert takes(1, 4096, 9)  # 288 blocks of keys, for 264
    assert not takes(1, 4096, 8)
    assert takes(1, 16384, 16)
    assert not takes(1, 16384, 16, 8)
    assert not takes(1, 16448, 16)
    repeatable.append(True)
    assert takes(32, 1024, 12)
    assert not takes(1, 16384, 16)


def test_a_layer_that_is_partly_computed_again_keeps_its_products(taken):
    PRODUCTS.clear()
    x = torch.randn(1, 128, 32, requires_grad=True)
    ours = layer()
    plain = layer()
    plain.load_state_dict(ours.state_dict())
    ours.__class__ = _recomputed(type(ours), _PartlyRecomputed)
    found = []
    for one in (ours, plain):
        found.append(torch.autograd.grad(one(x).sum(), (x, *one.parameters())))
        assert PRODUCTS == ["product"]
        assert CALLS == ["forth", "back"]
        PRODUCTS.clear()
        CALLS.clear()
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


# On a Hopper GPU


def drawn(batch, seq, heads, own_places=False):
    joined = torch.randn(batch, seq, 3 * heads * 64, device="cuda").bfloat16()
    slope = torch.randn(batch, seq, heads * 64, device="cuda").bfloat16()
    cos, sin = (t.cuda() for t in angles(*((batch, 1) if own_places else ()), seq, 32))
    return joined, slope, cos, sin


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("programs", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("batch", "seq", "heads", "own_places"),
    [(1, 128, 1, False), (2, 256, 3, True), (3, 640, 2, False), (40, 384, 5, True)],
)
def test_the_backward_kernel_is_its_formula(batch, seq, heads, own_places, layout, programs, cut):
    joined, slope, cos, sin = drawn(batch, seq, heads, own_places)
    lines = project_heads.in_lines(cos, sin, layout == "interleaved")
    truth, true_sums = forth(joined.double())
    stats = row_stats.row_stats(*(t.float() for t in (truth, slope, true_sums)))
    how = (lines, layout == "interleaved", cut, programs)
    got = attend_back.attend_back(joined, slope, stats, *how)
    wide = (t.double() for t in (cos, sin))
    right = back(joined.double(), truth, slope.double(), true_sums, *wide, layout)
    for ours, expected in zip(got.chunk(3, dim=-1), right.chunk(3, dim=-1), strict=True):
        assert relative_error(ours, expected) < 4e-3
    of_q, *others = got.chunk(3, dim=-1)
    for _ in range(3):  # a race would show, and whole heads' sums taken in another order
        again, *more = attend_back.attend_back(joined, slope, stats, *how).chunk(3, dim=-1)
        assert relative_error(again, of_q) < 1e-3 if cut else torch.equal(again, of_q)
        assert all(map(torch.equal, more, others))


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("batch", "seq"), [(60, 256), (5, 4096)])
def test_a_model_trains_by_them_as_it_does_without(monkeypatch, batch, seq, compiled):
    config = ModelConfig(128, seq, 128, 2, 2, 200)
    model = TransformerLM(config).cuda()
    if compiled:
        for one in model.layers:
            one.compile(fullgraph=True, backend="aot_eager")
    ids = torch.randint(128, (batch, seq), device="cuda")
    forward = heard(monkeypatch, project_heads, "cudnn_attention")
    backward = heard(monkeypatch, attend_back, "attend_back")
    ours = loss_and_gradients(model, ids)
    assert len(forward) == len(backward) == config.num_layers
    assert [given[-1] for given in backward] == [seq == 4096] * config.num_layers  # cut
    forward.clear()
    backward.clear()
    monkeypatch.setattr(hopper, "takes_attention", lambda x, heads: False)
    if compiled:
        torch.compiler.reset()
    for got, expected in zip(ours, loss_and_gradients(model, ids), strict=True):
        assert relative_error(got, expected) < 2e-2
    assert not forward
    assert not backward
