"""Adapters beside joined products: the same numbers as layer by layer, where they may join."""

import pytest
import torch

from scratchlm.accelerate import accelerate, plain
from scratchlm.accelerate.attention import QKV_JOINED, QKV_ROPE_ATTENTION
from scratchlm.accelerate.joined_weights import join_weights
from scratchlm.accelerate.layers import SWIGLU_GATE, SWIGLU_GEMM, SWIGLU_JOINED
from scratchlm.accelerate.shadow_weights import ShadowWeights
from scratchlm.config.lora import LoRA
from scratchlm.training.lora import apply_lora
from tiny_models import FAMILIES, build, ids


def adapted(lora, dtype=torch.float32, family="qwen3"):
    """A model with random adapters, its weights side by side."""
    model = build(FAMILIES[family], dtype=dtype)
    join_weights(model)
    apply_lora(model, lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return model


def join(model):
    """Let the layers read their joined matrices, as on a GPU that trains."""
    for layer in model.layers:
        attn, ffn = layer.attn, layer.ffn
        attn.shadow = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])
        ffn.shadow = torch.cat([ffn.w1.weight, ffn.w3.weight])


def loss_and_gradients(model):
    model.zero_grad(set_to_none=True)
    loss = model.loss(ids(2, 9), ids(2, 9).roll(1, dims=1))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "targets", [(), ("q_proj", "v_proj"), ("k_proj", "w3"), ("layers.0.attn.q_proj",)]
)
def test_joined_equals_layer_by_layer(targets, ran):
    model = adapted(LoRA(4, targets=targets))
    expected, alone = loss_and_gradients(model)
    accelerate(model)
    join(model)
    loss, fused = loss_and_gradients(model)
    assert set(ran) >= {"qkv_joined", "swiglu_joined"}
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    assert fused.keys() == alone.keys()
    for name, gradient in alone.items():
        torch.testing.assert_close(fused[name], gradient, atol=1e-5, rtol=1e-4)


def test_a_fresh_adapter_beside_a_joined_product_changes_no_bit():
    model = accelerate(build(FAMILIES["qwen3"], dtype=torch.float32))
    join(model)
    before = model(ids(2, 9))
    plain(model)
    apply_lora(model, LoRA(4))
    accelerate(model)
    join(model)
    assert torch.equal(model(ids(2, 9)), before)


@pytest.mark.parametrize("lora", [LoRA(4, dora=True), LoRA(4, dropout=0.5)])
def test_what_does_more_than_add_is_called_layer_by_layer(lora, ran):
    model = accelerate(adapted(lora)).train()
    join(model)
    model(ids(2, 9))
    assert set(ran).isdisjoint({"qkv_joined", "swiglu_joined"})


def test_fusions_that_know_no_adapters_do_not_run():
    model = accelerate(adapted(LoRA(4)))
    attn, ffn = model.layers[0].attn, model.layers[0].ffn
    x = torch.zeros(1, 4, model.config.d_model)
    for fusion, module in ((QKV_ROPE_ATTENTION, attn), (SWIGLU_GEMM, ffn)):
        assert "adapted" in fusion.why_not(module, x, None)
    join(model)
    for fusion, module in ((QKV_JOINED, attn), (SWIGLU_JOINED, ffn)):
        assert fusion.why_not(module, x, None) is None
    assert "adapted" not in SWIGLU_GATE.why_not(ffn, x, None)
    attn.q_proj.register_forward_hook(lambda *_: None)
    assert "q_proj is hooked" in QKV_JOINED.why_not(attn, x, None)


def test_a_frozen_base_is_read_as_it_lies_in_memory():
    model = accelerate(adapted(LoRA(4), dtype=torch.bfloat16))
    shadow = ShadowWeights(model)
    assert not shadow.groups
    assert len(shadow.frozen) == 2 * len(model.layers)
    attn = model.layers[0].attn
    with shadow.visible(), torch.autocast("cpu", torch.bfloat16):
        assert attn.shadow.data_ptr() == attn.q_proj.weight.data_ptr()
        assert attn.shadow.shape[0] == sum(
            len(m.weight) for m in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        model.loss(ids(2, 9), ids(2, 9)).backward()
    assert attn.shadow is None
    learnt = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learnt == {name for name, _ in model.named_parameters() if "lora_" in name}
