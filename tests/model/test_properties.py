"""What must hold for every architecture, checked over families and shapes.

float64 throughout: a difference is a fault in the logic, not rounding.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from scratchlm import TransformerLM
from scratchlm import config as c
from scratchlm.model import RotaryEmbedding
from tiny_models import FAMILIES, PLAIN, build, families, ids

TIGHT = {"atol": 1e-12, "rtol": 1e-11}
implementations = st.sampled_from(["fast", "reference"])


@given(config=families, ops=implementations, seq=st.integers(2, 20), data=st.data())
def test_changing_the_future_leaves_the_past_untouched(config, ops, seq, data):
    model, tokens = build(config, ops), ids(2, seq)
    change_at = data.draw(st.integers(1, seq - 1))
    changed = tokens.clone()
    changed[:, change_at:] = (changed[:, change_at:] + 1) % config.vocab_size
    before, after = model(tokens), model(changed)
    if isinstance(config.ffn, c.MoE) and ops == "fast":  # tokens are summed in another order
        torch.testing.assert_close(after[:, :change_at], before[:, :change_at], **TIGHT)
    else:
        assert torch.equal(after[:, :change_at], before[:, :change_at])  # 0, not small
    assert not torch.equal(after[:, change_at:], before[:, change_at:])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_past_reaches_the_present(family):
    """A model that sees nothing would be causal too: the last token must hear the first."""
    config = FAMILIES[family]
    model, tokens = build(config), ids(1, 4)
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % config.vocab_size
    assert (model(tokens)[0, -1] - model(changed)[0, -1]).abs().max() > 1e-6


@given(config=families, ops=implementations, seq=st.integers(1, 20), data=st.data())
def test_cached_in_chunks_equals_the_full_forward(config, ops, seq, data):
    model, tokens = build(config, ops), ids(2, seq)
    cache = model.new_cache(batch_size=2, capacity=seq)
    outputs, done = [], 0
    while done < seq:
        step = data.draw(st.integers(1, seq - done))
        outputs.append(model(tokens[:, done : done + step], cache=cache))
        done += step
    assert cache.length == seq
    torch.testing.assert_close(torch.cat(outputs, dim=1), model(tokens), **TIGHT)


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (0, 1, 0), (1,)], ids=str)
def test_cached_equals_the_full_forward_however_layers_were_arranged(order):
    """Shared, exchanged, repeated, dropped: keys lie where the layer runs."""
    model, tokens = build(PLAIN), ids(2, 9)
    model.layers = torch.nn.ModuleList(model.layers[i] for i in order)
    cache = model.new_cache(2)
    parts = [model(part, cache=cache) for part in tokens.split([4, 1, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), **TIGHT)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_token_by_token_equals_the_full_forward(family):
    model, tokens = build(FAMILIES[family]), ids(3, 12)
    cache = model.new_cache(batch_size=3)
    steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(12)]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(tokens), **TIGHT)


@given(config=families, batch=st.integers(2, 4), seq=st.integers(1, 12))
def test_a_batch_row_equals_the_same_row_alone(config, batch, seq):
    model, tokens = build(config), ids(batch, seq)
    together = model(tokens)
    for row in range(batch):
        alone = model(tokens[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, **TIGHT)


def padded(rows, side):
    """Put rows of different lengths in one batch."""
    width = max(len(row) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), None) if side == "left" else slice(0, len(row))
        tokens[i, place], mask[i, place] = row, True
    return tokens, mask


@given(
    config=families,
    ops=implementations,
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    side=st.sampled_from(["left", "right"]),
    with_cache=st.booleans(),
)
def test_padding_changes_nothing(config, ops, lengths, side, with_cache):
    model = build(config, ops)
    rows = [ids(1, n, seed=n)[0] for n in lengths]
    tokens, mask = padded(rows, side)
    cache = model.new_cache(len(rows)) if with_cache else None
    together = model(tokens, attention_mask=mask, cache=cache)
    assert together.isfinite().all()
    for i, row in enumerate(rows):
        torch.testing.assert_close(together[i, mask[i]], model(row[None])[0], **TIGHT)
    if cache is not None:  # and go on: rows of different lengths, a chunk and a token at a time
        assert cache.lengths.tolist() == lengths
        for step, more in enumerate((ids(len(rows), 3, seed=7), ids(len(rows), 1, seed=8))):
            logits = model(more, cache=cache)
            rows = [torch.cat([row, new]) for row, new in zip(rows, more, strict=True)]
            for i, row in enumerate(rows):
                alone = model(row[None])[0, -more.shape[1] :]
                torch.testing.assert_close(logits[i], alone, **TIGHT, msg=f"step {step} row {i}")


def test_a_cache_that_lost_its_longest_row_has_room_again():
    model = build(PLAIN)
    tokens, mask = padded([ids(1, 6)[0], ids(1, 2, seed=3)[0]], "left")
    cache = model.new_cache(2, capacity=6)
    model(tokens, attention_mask=mask, cache=cache)
    cache.select_rows(torch.tensor([1, 1]))
    assert (cache.length, cache.lengths.tolist()) == (2, [2, 2])
    more = ids(1, 4, seed=5)
    alone = model(torch.cat([ids(1, 2, seed=3), more], dim=1))[:, -4:]
    torch.testing.assert_close(model(more.repeat(2, 1), cache=cache), alone.repeat(2, 1, 1))


@given(config=families, ops=implementations, lengths=st.lists(st.integers(1, 7), min_size=1))
def test_packed_documents_equal_separate_documents(config, ops, lengths):
    lengths = lengths[:3]
    model = build(config, ops)
    documents = [ids(1, n, seed=i) for i, n in enumerate(lengths)]
    marks = torch.cat([torch.full((1, n), 5 - i) for i, n in enumerate(lengths)], dim=1)
    together = model(torch.cat(documents, dim=1), document_ids=marks)
    for document, part in zip(documents, together.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(part, model(document), **TIGHT)


@given(
    layout=st.sampled_from(["interleaved", "half"]),
    shift=st.integers(0, 500),
    d=st.integers(1, 8).map(lambda n: 2 * n),
)
def test_rope_products_depend_only_on_distance(layout, shift, d):
    rope = RotaryEmbedding(10_000.0, d, 1024, layout)
    q, k = torch.randn(2, 6, d, dtype=torch.float64).unbind(0)
    here = torch.arange(6)
    scores = rope(q, here) @ rope(k, here).T
    shifted = rope(q, here + shift) @ rope(k, here + shift).T
    torch.testing.assert_close(shifted, scores, atol=2e-4, rtol=1e-4)  # tables are float32


@pytest.mark.parametrize("family", ["plain", "llama", "qwen3", "scaled", "mistral"])
def test_a_rotary_model_does_not_see_where_the_text_starts(family):
    model, tokens = build(FAMILIES[family]), ids(1, 6)
    moved = model(tokens, positions=torch.arange(6) + 10)
    torch.testing.assert_close(moved, model(tokens), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "sinusoidal"])
def test_an_absolute_model_does(family):
    model, tokens = build(FAMILIES[family]), ids(1, 6)
    assert (model(tokens, positions=torch.arange(6) + 10) - model(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_said_aloud_equal_positions_left_out(family):
    model, tokens = build(FAMILIES[family]), ids(2, 6)
    assert torch.equal(model(tokens, positions=torch.arange(6)), model(tokens))
    batched = torch.arange(6).expand(2, 6)
    torch.testing.assert_close(model(tokens, positions=batched), model(tokens), **TIGHT)


def test_grouped_heads_equal_full_heads_with_repeated_weights():
    grouped = build(PLAIN.replace(num_kv_heads=2))
    full = TransformerLM(PLAIN, dtype=torch.float64)
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            state[name] = weight.view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16)
    full.load_state_dict(state)
    torch.testing.assert_close(full(ids(2, 9)), grouped(ids(2, 9)), **TIGHT)


@pytest.mark.parametrize("ops", ["fast", "reference"])
def test_moe_with_one_expert_equals_the_dense_layer(ops):
    dense = build(PLAIN, ops)
    moe = TransformerLM(PLAIN.replace(ffn=c.MoE(1, 1)), ops=ops, dtype=torch.float64)
    state = dense.state_dict()
    for name in list(state):
        if ".ffn." in name:
            state[name] = state[name][None]
            state[name.split(".ffn.")[0] + ".ffn.router.weight"] = torch.randn(1, 16)
    moe.load_state_dict(state)
    torch.testing.assert_close(moe(ids(2, 9)), dense(ids(2, 9)), **TIGHT)


def test_a_window_as_long_as_the_text_hides_nothing():
    tokens = ids(1, 9)
    wide = build(PLAIN.replace(attention=c.Attention(sliding_window=9)))
    narrow = build(PLAIN.replace(attention=c.Attention(sliding_window=8)))
    plain = build(PLAIN)(tokens)
    torch.testing.assert_close(wide(tokens), plain, **TIGHT)
    torch.testing.assert_close(narrow(tokens)[:, :8], plain[:, :8], **TIGHT)
    assert (narrow(tokens)[:, 8] - plain[:, 8]).abs().max() > 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_fast_equals_reference(family):
    config = FAMILIES[family]
    slow, quick, tokens = build(config, "reference"), build(config), ids(2, 9)
    losses = [model.loss(tokens, tokens.roll(-1, 1)) for model in (slow, quick)]
    torch.testing.assert_close(*losses, **TIGHT)
    torch.testing.assert_close(slow(tokens), quick(tokens), **TIGHT)
    for loss in losses:
        loss.backward()
    for (name, ours), theirs in zip(slow.named_parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **TIGHT, msg=name)


@pytest.mark.parametrize("ops", ["fast", "reference"])
@pytest.mark.parametrize("family", ["plain", "gpt2", "mixtral"])
def test_gradients_of_a_whole_model(family, ops):
    config = FAMILIES[family].replace(d_model=8, num_heads=2, num_layers=1, d_ff=4, vocab_size=5)
    model, tokens = build(config, ops), ids(1, 4, config)
    names = [name for name, _ in model.named_parameters()]

    def loss(*weights):
        named = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(model, named, (tokens,)).logsumexp(-1).sum()

    assert gradcheck(loss, tuple(model.parameters()), fast_mode=True)


def test_low_precision_stays_near_float64():
    for family in ("plain", "qwen3", "gpt2"):
        config, tokens = FAMILIES[family], ids(2, 9)
        exact = build(config)(tokens)
        for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
            ours = build(config).to(dtype)(tokens)
            assert ours.dtype == dtype
            error = (ours.double() - exact).norm() / exact.norm()
            assert error < allowed, (family, dtype, float(error))
