"""The branches that only a CPU takes: products by blocks, forwards without gradients, one table."""

import dataclasses

import pytest
import torch

from ops.test_fast_matches_reference import CASES
from scratchlm.ops import OPS, CausalMask, attention, fast, reference, short_attention

FAST = OPS["fast"]
WIDE, HIGH = 256, fast.BLOCKS_FROM // 256


def count_blocks(monkeypatch):
    """Count the products that are cut into blocks."""
    calls = []
    whole = fast._linear_by_blocks

    def counted(x, weight):
        calls.append(len(x))
        return whole(x, weight)

    monkeypatch.setattr(fast, "_linear_by_blocks", counted)
    return calls


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 6, 8, 64])
def test_products_by_blocks_match_the_reference(rows, threads, monkeypatch):
    calls = count_blocks(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, weight, bias = torch.randn(rows, WIDE), torch.randn(HIGH + 4, WIDE), torch.randn(HIGH + 4)
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias)]
    truth = reference.linear(*(leaf.double() for leaf in leaves))
    ours = FAST.linear(*leaves)
    assert calls == [rows]
    torch.testing.assert_close(ours.double(), truth, atol=2e-4, rtol=1e-5)
    grad_output = torch.randn_like(ours)
    for got, wanted in zip(
        torch.autograd.grad(ours, leaves, grad_output),
        torch.autograd.grad(truth, leaves, grad_output.double()),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, WIDE),
        torch.randn(WIDE),
        torch.randn(WIDE, 4).t(),
        torch.randn(2, 2 * WIDE)[:, ::2],
        torch.randn(1, WIDE).expand(3, WIDE),
    ],
    ids=["leading dimensions", "one vector", "columns", "every second", "expanded"],
)
def test_products_by_blocks_take_any_layout(x, monkeypatch):
    calls = count_blocks(monkeypatch)
    weight = torch.randn(HIGH, WIDE)
    ours = FAST.linear(x, weight)
    assert len(calls) == 1
    torch.testing.assert_close(ours, reference.linear(x, weight), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "high", "dtype"),
    [(65, HIGH, torch.float32), (1, HIGH - 1, torch.float32), (1, HIGH, torch.bfloat16)],
    ids=["many rows", "small matrix", "low precision"],
)
def test_other_products_stay_whole(rows, high, dtype, monkeypatch):
    calls = count_blocks(monkeypatch)
    FAST.linear(torch.randn(rows, WIDE, dtype=dtype), torch.randn(high, WIDE, dtype=dtype))
    assert calls == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("op", "case"), [(op, case) for op in CASES for case in CASES[op]])
def test_without_gradients_fast_still_matches_reference(op, case, dtype):
    """Without gradients an op may work in place: the same values, and no input changed."""
    leaves, rest, keywords = CASES[op][case]()
    leaves = [leaf.to(dtype) for leaf in leaves]
    before = [leaf.clone() for leaf in leaves]
    given = [*rest, *leaves] if op == "embedding" else [*leaves, *rest]
    with torch.inference_mode():
        truth, ours = (getattr(OPS[name], op)(*given, **keywords) for name in ("reference", "fast"))
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, leaves, before))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("first", [0, 1], ids=["even offset", "odd offset"])
@pytest.mark.parametrize("width", [8, 9], ids=["odd strides", "even strides"])
def test_rope_takes_any_layout_in_memory(layout, first, width):
    x = torch.randn(2, 3, 5, width + 1)[..., first : first + 8].requires_grad_()
    angle = torch.randn(5, 4)
    grad_output = torch.randn(2, 3, 5, 8)
    ours, truth = (op(x, angle.cos(), angle.sin(), layout) for op in (FAST.rope, reference.rope))
    torch.testing.assert_close(ours, truth)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad_output)[0] for y in (ours, truth)))


def which_attention(monkeypatch, seq, kv_heads=4, dtype=torch.float32):
    """Attend causally, without a kernel of our own; say whether it went by two products."""
    monkeypatch.setattr(attention, "_has_cpu_kernel", lambda: False)
    calls = []
    whole = short_attention.attend
    monkeypatch.setattr(short_attention, "attend", lambda *qkv: (calls.append(qkv), whole(*qkv))[1])
    q = torch.randn(2, 4, seq, 8, dtype=dtype, requires_grad=True)
    k, v = torch.randn(2, 2, kv_heads, seq, 8, dtype=dtype).unbind()
    FAST.attention(q, k, v, CausalMask())
    return len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_sequences_that_train_are_attended_in_two_products(dtype, monkeypatch):
    assert which_attention(monkeypatch, short_attention.SHORT, dtype=dtype)


def test_other_sequences_take_torch_s_own_attention(monkeypatch):
    assert not which_attention(monkeypatch, short_attention.SHORT + 1)
    assert not which_attention(monkeypatch, 5, kv_heads=2)
    assert not which_attention(monkeypatch, 5, dtype=torch.bfloat16)
    with torch.no_grad():
        assert not which_attention(monkeypatch, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert not which_attention(monkeypatch, 5)


def test_the_future_of_a_short_sequence_gets_no_gradient_and_gives_no_value():
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64).unbind()
    k.requires_grad_()
    v.requires_grad_()
    past = FAST.attention(q, k, v, CausalMask())[:, :, :4]
    for grad in torch.autograd.grad(past.sum(), (k, v)):
        assert (grad[:, :, 4:] == 0).all()
        assert (grad[:, :, :3] != 0).any()


def test_a_mask_writes_its_table_once_for_all_layers():
    mask = CausalMask(slots=torch.tensor([[2], [4]]))
    table = mask.table(range(1), range(5), torch.device("cpu"))
    assert mask.table(range(1), range(5), torch.device("cpu")) is table
    assert mask.table(range(1), range(4), torch.device("cpu")).shape[-1] == 4
    windowed = dataclasses.replace(mask, window=1).table(range(1), range(5), torch.device("cpu"))
    assert windowed.sum() == 2
    assert table.sum() == 8


def test_only_padding_can_leave_a_query_blind():
    slots = torch.tensor([[1], [3]])
    assert not CausalMask().may_blind
    assert not CausalMask(slots=slots, slots_are_real=True).may_blind
    assert CausalMask(slots=slots).may_blind
    assert CausalMask(key_valid=torch.ones(1, 2, dtype=torch.bool)).may_blind


def test_a_weight_that_lies_by_columns_is_multiplied_too():
    x, weight = torch.randn(1, 512), torch.randn(512, 512).t()
    assert weight.numel() >= fast.BLOCKS_FROM
    torch.testing.assert_close(FAST.linear(x, weight), x @ weight.t(), atol=1e-4, rtol=1e-4)
