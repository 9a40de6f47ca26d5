"""Holes inside an attention mask, and how far a NaN reaches: what is promised holds."""

import pytest
import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm.accelerate import accelerate
from scratchlm.config import Attention

SIZES = {"vocab_size": 17, "context_length": 80, "d_model": 16, "num_layers": 2, "num_heads": 4}


def build(ops="fast", window=None, num_kv_heads=2):
    torch.manual_seed(0)
    config = ModelConfig(
        **SIZES, num_kv_heads=num_kv_heads, attention=Attention(sliding_window=window)
    )
    return TransformerLM(config, ops=ops).eval()


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("ops", ["fast", "reference"])
def test_with_holes_in_the_mask_cached_equals_uncached(ops, window):
    """A window counts real tokens, as positions do, wherever the padding lies."""
    model = build(ops, window)
    generator = torch.Generator().manual_seed(1)
    for seq in (1, 7, 20):
        tokens = torch.randint(17, (6, seq), generator=generator)
        mask = torch.rand(6, seq, generator=generator) < 0.6
        mask[0], mask[1, seq // 2 :] = True, False
        with torch.no_grad():
            plain = model(tokens, attention_mask=mask)
            cached = model(tokens, attention_mask=mask, cache=model.new_cache(6))
            torch.testing.assert_close(plain[mask], cached[mask], atol=2e-5, rtol=1e-4)
            for row in range(6):  # and equals the row without its holes
                if mask[row].any():
                    alone = model(tokens[row][mask[row]][None])[0]
                    torch.testing.assert_close(plain[row][mask[row]], alone, atol=2e-5, rtol=1e-4)


def test_a_long_sequence_with_holes_is_attended_in_chunks_as_at_once(monkeypatch):
    from scratchlm.ops import attention

    model = build(window=5)
    tokens, mask = torch.randint(17, (3, 60)), torch.rand(3, 60) < 0.5
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask)
        monkeypatch.setattr(attention, "QUERY_CHUNK", 16)
        parts = model(tokens, attention_mask=mask)
    torch.testing.assert_close(whole[mask], parts[mask], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seq", [6, 47, 48, 70])
@pytest.mark.parametrize("ops", ["fast", "reference"])
@pytest.mark.parametrize("accelerated", [False, True])
def test_a_nan_stays_in_its_own_row_of_a_batch(ops, seq, accelerated):
    """It may reach earlier tokens of that row: weights of 0 times NaN are NaN."""
    model = build(ops)
    if accelerated:
        accelerate(model)
    model.token_embeddings.weight.data[3] = torch.nan
    tokens = torch.randint(4, 17, (3, seq))
    with torch.no_grad():
        before = model(tokens)
        tokens[1, -1] = 3
        after = model(tokens)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert after[1, -1].isnan().all()  # and is never lost


@pytest.mark.parametrize("seq", [6, 47, 48, 70])
@pytest.mark.parametrize("ops", ["fast", "reference"])
def test_a_large_finite_future_never_changes_the_past(ops, seq):
    model = build(ops)
    tokens = torch.randint(4, 17, (2, seq))
    model.token_embeddings.weight.data[3] = 1e15
    with torch.no_grad():
        before = model(tokens)
        tokens[:, -1] = 3
        after = model(tokens)
    assert torch.equal(before[:, :-1], after[:, :-1])
