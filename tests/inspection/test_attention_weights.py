"""The attention weights of every head at once."""

import pytest
import torch

from inference.tiny import tiny_model
from scratchlm.inspect import attention_weights
from tiny_models import FAMILIES, build


@pytest.mark.parametrize("family", ["plain", "llama", "qwen3", "gpt2", "mistral"])
def test_attention_weights_are_causal_sum_to_one_and_give_the_layers_output(family):
    model = build(FAMILIES[family])
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    seen = []
    first = model.layers[0].attn
    hook = first.output_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    values = []
    other = first.v_proj.register_forward_hook(lambda _, __, out: values.append(out))
    with torch.no_grad():
        model(torch.tensor([ids]))
    hook.remove(), other.remove()
    weights = attention_weights(model, ids)
    config = model.config
    assert weights.shape == (config.num_layers, config.num_heads, 8, 8)
    assert torch.allclose(weights.sum(-1), torch.ones((), dtype=weights.dtype), atol=1e-5)
    assert not weights.triu(1).any()
    if config.attention.sliding_window:
        assert not weights.tril(-config.attention.sliding_window).any()
    value = values[0].view(8, config.num_kv_heads, config.d_head).transpose(0, 1)
    value = value.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0)
    mixed = (weights[0].double() @ value).transpose(0, 1).reshape(8, -1)
    assert torch.allclose(mixed, seen[0][0], atol=1e-5)


def test_attention_weights_leaves_the_model_unchanged():
    model = tiny_model()
    ops = [layer.attn.ops for layer in model.layers]
    weight = model.lm_head.weight.data_ptr()
    attention_weights(model, [1, 2, 3])
    assert all(layer.attn.ops is op for layer, op in zip(model.layers, ops, strict=True))
    assert model.lm_head.weight.data_ptr() == weight
