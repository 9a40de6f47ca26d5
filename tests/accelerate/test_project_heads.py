"""The product that turns queries and keys: who takes it, its gradients, and, on a GPU, itself.

Nothing interprets the kernel on a CPU. There the formula stands for it (`turned.py`).
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelerate.gpu import heard, loss_and_gradients, on_hopper, relative_error
from accelerate.turned import CALLS, LAYOUTS, angles, tables_of
from scratchlm.accelerate import hopper
from scratchlm.accelerate.kernels.hopper import qkv_rope as project_heads
from scratchlm.config import ModelConfig
from scratchlm.model import TransformerLM
from scratchlm.model.attention import MultiHeadSelfAttention
from scratchlm.model.rotary import RotaryEmbedding
from scratchlm.ops import OPS, fast, qkv, reference


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(128, 32), (3, 1, 128, 32), (256, 32)])
def test_lines_hold_every_number_where_its_thread_reads_it(layout, shape):
    cos, sin = angles(*shape)
    lines = project_heads.in_lines(cos, sin, layout == "interleaved")
    assert lines.is_contiguous()
    got = tables_of(lines, layout == "interleaved")
    torch.testing.assert_close(got[0], cos.reshape(-1, 32), atol=0, rtol=0)
    torch.testing.assert_close(got[1], sin.reshape(-1, 32), atol=0, rtol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("own_places", [False, True], ids=["one table", "a table a row"])
def test_values_and_gradients_are_the_references(layout, own_places, compiled):
    CALLS.clear()
    number, kv_number, batch, seq, d = 4, 2, 2, 128, 24
    cos, sin = angles(*((batch, 1) if own_places else ()), seq, 32)
    x = torch.randn(batch, seq, d, requires_grad=True)
    w = torch.randn((number + 2 * kv_number) * 64, d, requires_grad=True)
    interleaved = layout == "interleaved"

    def run(x, w):
        lines = project_heads.in_lines(cos, sin, interleaved)
        tables = (cos, sin, lines)
        return project_heads.projected(x, w, tables, (number, kv_number), interleaved)

    got = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x, w)
    by_head = (x @ w.t()).unflatten(-1, (-1, 64)).transpose(1, 2)
    q, k, v = by_head.split((number, kv_number, kv_number), dim=1)
    truth = (reference.rope(q, cos, sin, layout), reference.rope(k, cos, sin, layout), v)
    slopes = [torch.randn_like(t) for t in truth]
    for ours, right in zip(got, truth, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-4, rtol=1e-4)
    for ours, right in zip(
        torch.autograd.grad(got, (x, w), slopes),
        torch.autograd.grad(truth, (x, w), slopes),
        strict=True,
    ):
        assert relative_error(ours, right) < 1e-5
    assert CALLS == ["product"]


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_gradient_asked_for_is_computed(wanted):
    cos, sin = angles(128, 32)
    leaves = [torch.randn(1, 128, 24), torch.randn(3 * 64, 24)]
    leaves[wanted].requires_grad_()
    tables = (cos, sin, project_heads.in_lines(cos, sin, True))
    q, k, v = project_heads.projected(*leaves, tables, (1, 1), True)
    with FlopCounterMode(display=False) as counted:
        (q + k + v).sum().backward()
    assert counted.get_total_flops() == 2 * 128 * (3 * 64) * 24  # of one product


@pytest.fixture
def taken(monkeypatch):
    """Let a CPU be taken for a GPU that has the kernel, float32 for what it multiplies in."""
    CALLS.clear()
    monkeypatch.setattr(fast, "trains_by_kernel", lambda x: torch.is_grad_enabled())
    monkeypatch.setattr(hopper, "takes_tables", lambda cos: True)
    monkeypatch.setattr(hopper, "takes_heads", lambda x, dtype: True)


def attend(ops="fast", **settings):
    rope = RotaryEmbedding(10_000.0, 64, 128, ops=ops)
    return MultiHeadSelfAttention(32, 2, 1, 64, rope=rope, ops=ops, **settings)


def test_attention_asks_for_it_and_is_what_it_was(taken):
    x = torch.randn(2, 128, 32)
    layer = attend()
    got = layer(x)
    assert CALLS == ["product"]
    plain = attend(ops="reference")
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(got, plain(x), atol=1e-4, rtol=1e-4)


def test_a_norm_a_bias_an_op_of_ones_own_or_an_evaluation_goes_the_other_way(taken, monkeypatch):
    cut = []

    def by_formula(joined, number, turn, norm):
        cut.append(norm)
        width = joined.shape[-1] // (number[0] + 2 * number[1])
        by_head = joined.unflatten(-1, (-1, width)).transpose(1, 2)
        return by_head.split((number[0], number[1], number[1]), dim=1)

    monkeypatch.setattr(qkv, "turned", by_formula)
    x = torch.randn(1, 128, 32)
    attend(bias="qkv")(x)
    attend(qk_norm=True)(x)
    assert len(cut) == 2
    mine = OPS["fast"].__class__(**{**vars(OPS["fast"]), "rope": lambda *given: given[0]})
    rope = RotaryEmbedding(10_000.0, 64, 128, ops=mine)
    assert rope.at(slice(0, 128)).lines is None
    with torch.no_grad():
        attend()(x)
    assert not CALLS


def test_it_is_for_bfloat16_heads_of_64_and_whole_tiles_on_a_hopper_gpu(monkeypatch):
    gpu = {"is hopper": True}
    monkeypatch.setattr(hopper, "is_hopper", lambda device: gpu["is hopper"])

    def reads(*shape, cuda=True):
        size = torch.Size(shape)
        device = SimpleNamespace(index=0)
        given = SimpleNamespace(shape=size, is_cuda=cuda, device=device, numel=size.numel)
        return hopper.takes_tables(given)

    assert reads(128, 32)
    assert reads(2, 1, 64, 32)
    assert not reads(64, 32)
    assert not reads(0, 32)
    assert not reads(128, 64)
    assert not reads(128, 32, cuda=False)
    gpu["is hopper"] = False
    assert not reads(128, 32)
    x = torch.empty(2, 64, 128)
    assert hopper.takes_heads(x, torch.bfloat16)
    assert not hopper.takes_heads(x, torch.float16)
    assert not hopper.takes_heads(x[:, :63], torch.bfloat16)
    assert not hopper.takes_heads(x[:0], torch.bfloat16)
    assert not hopper.takes_heads(x[..., :96], torch.bfloat16)


# On a Hopper GPU


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("programs", [0, 1, 3, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("number", "kv_number", "places", "d"), [(2, 2, 128, 64), (3, 1, 384, 128), (5, 5, 768, 320)]
)
def test_the_kernel_is_its_formula(number, kv_number, places, d, layout, programs):
    tokens, columns = 768, (number + 2 * kv_number) * 64
    x = torch.randn(tokens, d, device="cuda").bfloat16()
    w = (torch.randn(columns, d, device="cuda") * d**-0.5).bfloat16()
    cos, sin = (table.cuda() for table in angles(places, 32))
    interleaved, turned = layout == "interleaved", (number + kv_number) * 64
    lines = project_heads.in_lines(cos, sin, interleaved)
    got = project_heads.turned_product(x, w, lines, turned, interleaved, programs)
    rows = (x.double() @ w.double().t()).view(-1, places, columns // 64, 64).transpose(1, 2)
    some = reference.rope(rows[:, : turned // 64], cos.double(), sin.double(), layout)
    truth = torch.cat((some, rows[:, turned // 64 :]), dim=1).transpose(1, 2)
    assert relative_error(got, truth.reshape(tokens, columns)) < 3e-3
    for _ in range(3):  # a race would show
        again = project_heads.turned_product(x, w, lines, turned, interleaved, programs)
        assert torch.equal(again, got)


@pytest.mark.cuda
@on_hopper
@pytest.mark.parametrize("documents", [False, True], ids=["one text", "documents"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_trains_by_it_as_it_does_without(monkeypatch, compiled, documents):
    config = ModelConfig(128, 128, 128, 2, 2, 200)
    model = TransformerLM(config).cuda()
    if compiled:
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    ids = torch.randint(128, (2, 128), device="cuda")
    numbers = (torch.arange(128, device="cuda") // 50).expand(2, -1)
    more = {"document_ids": numbers} if documents else {}
    called = heard(monkeypatch, project_heads, "turned_product")
    ours = loss_and_gradients(model, ids, **more)
    assert called
    called.clear()
    monkeypatch.setattr(hopper, "takes_tables", lambda cos: False)
    for got, expected in zip(ours, loss_and_gradients(model, ids, **more), strict=True):
        assert relative_error(got, expected) < 2e-2
    assert not called
