"""Every formula of the reference against torch's own op, a float64 version, and gradcheck."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from scratchlm.ops import CausalMask, load_balancing_loss, reference

F64 = torch.float64


def randn(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


# name -> (ours, torch's, how to draw the arguments)
AGAINST_TORCH = {
    "linear": (
        reference.linear,
        F.linear,
        lambda t: (randn(2, 3, 5, dtype=t), randn(7, 5, dtype=t)),
    ),
    "linear_bias": (
        reference.linear,
        F.linear,
        lambda t: (randn(4, 5, dtype=t), randn(7, 5, dtype=t), randn(7, dtype=t)),
    ),
    "rms_norm": (
        lambda x, w: reference.rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        lambda t: (3 * randn(2, 3, 8, dtype=t), randn(8, dtype=t)),
    ),
    "layer_norm": (
        lambda x, w, b: reference.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        lambda t: (3 * randn(2, 3, 8, dtype=t), randn(8, dtype=t), randn(8, dtype=t)),
    ),
    "silu": (reference.silu, F.silu, lambda t: (5 * randn(4, 9, dtype=t),)),
    "gelu": (reference.gelu, F.gelu, lambda t: (5 * randn(4, 9, dtype=t),)),
    "gelu_tanh": (
        reference.gelu_tanh,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda t: (5 * randn(4, 9, dtype=t),),
    ),
    "relu": (reference.relu, F.relu, lambda t: (randn(4, 9, dtype=t),)),
    "softmax": (
        lambda x: reference.softmax(x, dim=1),
        lambda x: F.softmax(x, dim=1),
        lambda t: (20 * randn(3, 9, 2, dtype=t),),
    ),
    "log_softmax": (
        reference.log_softmax,
        lambda x: F.log_softmax(x, dim=-1),
        lambda t: (20 * randn(3, 9, dtype=t),),
    ),
    "log_sum_exp": (
        reference.log_sum_exp,
        lambda x: torch.logsumexp(x, dim=-1),
        lambda t: (20 * randn(3, 9, dtype=t),),
    ),
    "attention": (
        reference.scaled_dot_product_attention,
        F.scaled_dot_product_attention,
        lambda t: (
            randn(2, 3, 5, 4, dtype=t),
            randn(2, 3, 7, 4, dtype=t),
            randn(2, 3, 7, 6, dtype=t),
        ),
    ),
    "swiglu": (
        reference.swiglu,
        lambda x, w1, w2, w3: (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T,
        lambda t: (
            randn(2, 3, 4, dtype=t),
            randn(6, 4, dtype=t),
            randn(4, 6, dtype=t),
            randn(6, 4, dtype=t),
        ),
    ),
    "mlp": (
        reference.mlp,
        lambda x, w1, w2: F.gelu(x @ w1.T, approximate="tanh") @ w2.T,
        lambda t: (randn(2, 3, 4, dtype=t), randn(6, 4, dtype=t), randn(4, 6, dtype=t)),
    ),
}


@pytest.mark.parametrize("name", AGAINST_TORCH)
def test_reference_equals_torch(name):
    ours, theirs, draw = AGAINST_TORCH[name]
    arguments = draw(torch.float32)
    torch.testing.assert_close(ours(*arguments), theirs(*arguments), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("name", AGAINST_TORCH)
def test_reference_in_float64_equals_torch_to_the_last_digits(name):
    ours, theirs, draw = AGAINST_TORCH[name]
    arguments = draw(F64)
    torch.testing.assert_close(ours(*arguments), theirs(*arguments), atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("name", AGAINST_TORCH)
def test_reference_gradients_are_right(name):
    ours, _, draw = AGAINST_TORCH[name]
    arguments = tuple(argument.requires_grad_() for argument in draw(F64))
    assert gradcheck(ours, arguments)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "softmax", "attention"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(name, dtype):
    """The result is the float32 result, rounded once: off by half a unit at the most."""
    ours, _, draw = AGAINST_TORCH[name]
    for _ in range(20):
        low = tuple(argument.to(dtype) for argument in draw(torch.float32))
        result = ours(*low)
        assert result.dtype == dtype
        exact = ours(*(argument.to(F64) for argument in low))
        half_a_unit = 0.501 * torch.finfo(dtype).eps
        torch.testing.assert_close(result.to(F64), exact, atol=1e-5, rtol=half_a_unit)


def test_embedding_looks_rows_up():
    table = randn(9, 4)
    ids = torch.tensor([[0, 8], [3, 3]])
    assert torch.equal(reference.embedding(ids, table), F.embedding(ids, table))
    table = randn(9, 4, dtype=F64, grad=True)
    assert gradcheck(lambda w: reference.embedding(ids, w), (table,))


def test_the_padding_row_gets_no_gradient():
    table = randn(9, 4, grad=True)
    reference.embedding(torch.tensor([[3, 0, 3]]), table, padding_id=3).sum().backward()
    assert torch.equal(table.grad[3], torch.zeros(4))
    assert torch.equal(table.grad[0], torch.ones(4))


# Softmax at its limits


def test_softmax_is_unmoved_by_a_large_shift():
    x = randn(5, 7)
    torch.testing.assert_close(
        reference.softmax(x + 1000), reference.softmax(x), atol=1e-4, rtol=1e-3
    )
    assert reference.softmax(torch.tensor([1e38, -1e38])).tolist() == [1.0, 0.0]


def test_softmax_of_infinities_takes_the_limit():
    inf = math.inf
    rows = torch.tensor([[inf, 0.0, inf, -inf], [-inf, -inf, -inf, -inf], [-inf, 1.0, 1.0, -inf]])
    expected = torch.tensor([[0.5, 0.0, 0.5, 0.0], [0.0] * 4, [0.0, 0.5, 0.5, 0.0]])
    assert torch.equal(reference.softmax(rows), expected)


def test_softmax_of_infinities_has_finite_gradients():
    rows = torch.tensor([[math.inf, 0.0], [-math.inf, -math.inf], [-math.inf, 2.0]])
    rows.requires_grad_()
    (reference.softmax(rows) * torch.tensor([1.0, 3.0])).sum().backward()
    assert rows.grad.isfinite().all()


# Cross-entropy


@given(rows=st.integers(1, 6), vocab=st.integers(1, 9), scale=st.sampled_from([0.1, 10.0, 1e4]))
def test_cross_entropy_equals_torch(rows, vocab, scale):
    logits = scale * torch.randn(2, rows, vocab, dtype=F64)
    targets = torch.randint(vocab, (2, rows))
    targets[0, 0] = -100
    ours = reference.cross_entropy(logits, targets)
    if (targets == -100).all():
        assert ours == 0
        return
    theirs = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_cross_entropy_of_no_target_is_zero_with_zero_gradient():
    logits = randn(2, 3, 5, grad=True)
    loss = reference.cross_entropy(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_cross_entropy_survives_logits_that_overflow_exp():
    logits = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]])
    losses = reference.cross_entropy(logits, torch.tensor([0, 0]), reduction="sum")
    assert losses == 1000.0


def test_cross_entropy_gradient_and_z_loss():
    logits, targets = randn(4, 6, dtype=F64, grad=True), torch.tensor([0, -100, 5, 2])
    assert gradcheck(lambda x: reference.cross_entropy(x, targets, z_loss=0.3), (logits,))
    plain = reference.cross_entropy(logits, targets)
    with_z = reference.cross_entropy(logits, targets, z_loss=0.3)
    expected = 0.3 * torch.logsumexp(logits, -1)[targets != -100].pow(2).mean()
    torch.testing.assert_close(with_z - plain, expected)


def test_sum_reduction_adds_up_over_parts():
    logits, targets = randn(6, 5, dtype=F64), torch.tensor([0, 1, -100, 2, 3, 4])
    parts = sum(
        reference.cross_entropy(logits[half], targets[half], reduction="sum")
        for half in (slice(0, 2), slice(2, 6))
    )
    torch.testing.assert_close(parts / 5, reference.cross_entropy(logits, targets))


# Attention and its mask


def test_masked_attention_equals_torch_and_a_masked_row_is_zero():
    q, k, v = randn(2, 3, 5, 4), randn(2, 3, 7, 4), randn(2, 3, 7, 6)
    mask = torch.rand(2, 1, 5, 7) > 0.5
    mask[..., 0] = True
    mask[0, 0, 2] = False
    ours = reference.scaled_dot_product_attention(q, k, v, mask)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(ours[0, :, 2], torch.zeros(3, 6))
    torch.testing.assert_close(ours, theirs)


def test_a_fully_masked_row_has_finite_gradients():
    q, k, v = (randn(1, 4, 8, grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[1] = False
    reference.scaled_dot_product_attention(q, k, v, mask).pow(2).sum().backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
    assert torch.equal(q.grad[0, 1], torch.zeros(8))


@given(
    queries=st.integers(1, 6),
    start=st.integers(0, 5),
    window=st.none() | st.integers(1, 5),
    with_documents=st.booleans(),
    with_padding=st.booleans(),
    with_slots=st.booleans(),
)
def test_the_mask_table_says_what_the_rule_says(
    queries, start, window, with_documents, with_padding, with_slots
):
    if with_documents:
        start, with_slots = 0, False
    keys = start + queries
    valid = torch.rand(2, keys) > 0.3 if with_padding else None
    documents = torch.randint(3, (2, keys)) if with_documents else None
    slots = torch.randint(-1, keys, (2, queries)) if with_slots else None
    rule = CausalMask(start, slots, window, valid, documents)
    table = rule.table(range(queries), range(keys), torch.device("cpu"))
    table = table.expand(2, 1, queries, keys)
    for row in range(2):
        for i in range(queries):
            s = start + i if slots is None else int(slots[row, i])
            for j in range(keys):
                sees = j <= s
                if window is not None:
                    between = s - j  # of real tokens, where a row has holes
                    if valid is not None and slots is None:
                        between = int(valid[row, : s + 1].sum() - valid[row, : j + 1].sum())
                    sees = sees and between < window
                if valid is not None:
                    sees = sees and bool(valid[row, j])
                if documents is not None:
                    sees = sees and bool(documents[row, j] == documents[row, i])
                assert bool(table[row, 0, i, j]) == sees
                if sees:
                    assert j in rule.visible_keys(range(i, i + 1), keys)


# Rotary


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_rotates_each_pair_as_a_complex_number(layout):
    x, angle = randn(2, 5, 8, dtype=F64), randn(5, 4, dtype=F64)
    rotated = reference.rope(x, angle.cos(), angle.sin(), layout)
    if layout == "interleaved":
        pairs, result = x.unflatten(-1, (4, 2)), rotated.unflatten(-1, (4, 2))
    else:
        pairs, result = (y.unflatten(-1, (2, 4)).transpose(-1, -2) for y in (x, rotated))
    expected = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    torch.testing.assert_close(torch.view_as_complex(result.contiguous()), expected)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rope_gradient(layout):
    x, angle = randn(2, 3, 4, dtype=F64, grad=True), randn(3, 2, dtype=F64)
    assert gradcheck(lambda y: reference.rope(y, angle.cos(), angle.sin(), layout), (x,))


# Mixture of experts


def naive_moe(x, router, w1, w2, w3, k, renormalize):
    """One token at a time, one expert at a time."""
    out = torch.zeros_like(x)
    for t, token in enumerate(x):
        p = F.softmax(router @ token, dim=-1)
        chosen = p.argsort(descending=True)[:k]
        total = p[chosen].sum() if renormalize else 1.0
        for e in chosen:
            hidden = F.silu(w1[e] @ token) * (w3[e] @ token)
            out[t] += p[e] / total * (w2[e] @ hidden)
    return out


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_moe_equals_the_naive_loop(k, renormalize):
    x, router = randn(11, 6, dtype=F64), randn(4, 6, dtype=F64)
    w1, w2, w3 = randn(4, 8, 6, dtype=F64), randn(4, 6, 8, dtype=F64), randn(4, 8, 6, dtype=F64)
    ours = reference.moe(x, router, w1, w2, w3, k, renormalize).output
    torch.testing.assert_close(ours, naive_moe(x, router, w1, w2, w3, k, renormalize))


def test_moe_gradient():
    shapes = [(5, 4), (3, 4), (3, 6, 4), (3, 4, 6), (3, 6, 4)]
    arguments = tuple(randn(*shape, dtype=F64, grad=True) for shape in shapes)
    assert gradcheck(lambda *a: reference.moe(*a, 2).output, arguments)


def test_load_balancing_loss_is_one_when_even_and_e_when_one_expert_takes_all():
    even = torch.full((8, 4), 0.25)
    assert load_balancing_loss(even, torch.arange(8)[:, None] % 4) == 1.0
    greedy = torch.eye(4)[torch.zeros(8, dtype=torch.long)]
    assert load_balancing_loss(greedy, torch.zeros(8, 1, dtype=torch.long)) == 4.0
