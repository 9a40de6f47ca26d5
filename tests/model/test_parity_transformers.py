"""The same weights in `transformers` and here give the same logits."""

import pytest
import torch
import transformers as hf

from scratchlm import TransformerLM
from scratchlm import config as c

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
OURS = {
    "vocab_size": 61,
    "context_length": 64,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_ff": 48,
}
HALF = c.Rotary(10_000.0, "half")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

FAMILIES = {
    "llama": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, rms_norm_eps=1e-5)),
        c.ModelConfig(**OURS, positions=HALF),
    ),
    "llama3 scaling, tied, biases": (
        lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                **SIZES | {"rope_parameters": LLAMA3_ROPE},
                rms_norm_eps=1e-5,
                tie_word_embeddings=True,
                attention_bias=True,
                mlp_bias=True,
            )
        ),
        c.ModelConfig(
            **OURS,
            positions=c.Rotary(10_000.0, "half", c.Llama3Scaling(4.0, 16)),
            attention=c.Attention(bias="all"),
            ffn=c.SwiGLU(bias=True),
            tie_embeddings=True,
        ),
    ),
    "mistral": (
        lambda: hf.MistralForCausalLM(
            hf.MistralConfig(**SIZES, rms_norm_eps=1e-5, sliding_window=6)
        ),
        c.ModelConfig(**OURS, positions=HALF, attention=c.Attention(sliding_window=6)),
    ),
    "qwen2": (
        lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, rms_norm_eps=1e-6)),
        c.ModelConfig(
            **OURS, positions=HALF, norm=c.RMSNorm(1e-6), attention=c.Attention(bias="qkv")
        ),
    ),
    "qwen3": (
        lambda: hf.Qwen3ForCausalLM(
            hf.Qwen3Config(**SIZES, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=True)
        ),
        c.ModelConfig(
            **OURS,
            d_head=16,
            positions=HALF,
            norm=c.RMSNorm(1e-6),
            attention=c.Attention(qk_norm=True),
            tie_embeddings=True,
        ),
    ),
    "qwen3-moe": (
        lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(
                **SIZES,
                head_dim=16,
                rms_norm_eps=1e-6,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=48,
                norm_topk_prob=False,
            )
        ),
        c.ModelConfig(
            **OURS,
            d_head=16,
            positions=HALF,
            norm=c.RMSNorm(1e-6),
            attention=c.Attention(qk_norm=True),
            ffn=c.MoE(4, 2, renormalize=False),
        ),
    ),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**SIZES, rms_norm_eps=1e-5, num_local_experts=4, num_experts_per_tok=2)
        ),
        c.ModelConfig(**OURS, positions=HALF, ffn=c.MoE(4, 2)),
    ),
    "gpt2": (
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, n_inner=48)
        ),
        c.ModelConfig(
            **OURS | {"num_kv_heads": 4},
            positions=c.Learned(),
            norm=c.LayerNorm(),
            ffn=c.MLP("gelu_tanh", bias=True),
            attention=c.Attention(bias="all"),
            tie_embeddings=True,
        ),
    ),
}

LLAMA_NAMES = {
    "model.embed_tokens": "token_embeddings",
    "model.norm": "ln_final",
    "model.layers": "layers",
    "self_attn.o_proj": "attn.output_proj",
    "self_attn": "attn",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "mlp.gate_proj": "ffn.w1",
    "mlp.up_proj": "ffn.w3",
    "mlp.down_proj": "ffn.w2",
    "mlp.gate.": "ffn.router.",
}


def ours_from_llama(state):
    """Rename, and cut the experts' fused gate and up matrices."""
    out = {}
    for name, weight in state.items():
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            out[f"layers.{layer}.ffn.w1.weight"], out[f"layers.{layer}.ffn.w3.weight"] = (
                weight.chunk(2, dim=1)
            )
            continue
        if name.endswith("experts.down_proj"):
            out[f"layers.{name.split('.')[2]}.ffn.w2.weight"] = weight
            continue
        for theirs, ours in LLAMA_NAMES.items():
            name = name.replace(theirs, ours)
        out[name] = weight
    return out


def ours_from_gpt2(state):
    """Rename, transpose, and cut the fused query, key and value."""
    out = {
        "token_embeddings.weight": state["transformer.wte.weight"],
        "position_embeddings.weight": state["transformer.wpe.weight"],
        "ln_final.weight": state["transformer.ln_f.weight"],
        "ln_final.bias": state["transformer.ln_f.bias"],
    }
    for i in range(2):
        there, here = f"transformer.h.{i}.", f"layers.{i}."
        for kind in ("weight", "bias"):
            out[f"{here}ln1.{kind}"] = state[f"{there}ln_1.{kind}"]
            out[f"{here}ln2.{kind}"] = state[f"{there}ln_2.{kind}"]
            qkv = state[f"{there}attn.c_attn.{kind}"].chunk(3, dim=-1)
            for name, part in zip(("q_proj", "k_proj", "v_proj"), qkv, strict=True):
                out[f"{here}attn.{name}.{kind}"] = part.T if kind == "weight" else part
            for theirs, ours in (
                ("attn.c_proj", "attn.output_proj"),
                ("mlp.c_fc", "ffn.w1"),
                ("mlp.c_proj", "ffn.w2"),
            ):
                weight = state[f"{there}{theirs}.{kind}"]
                out[f"{here}{ours}.{kind}"] = weight.T if kind == "weight" else weight
    return out


def pair(family):
    make, config = FAMILIES[family]
    theirs = make().eval()
    with torch.no_grad():
        for p in theirs.parameters():  # norms and biases too
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5 + (p.ndim == 1))
    state = theirs.state_dict()
    state = ours_from_gpt2(state) if family == "gpt2" else ours_from_llama(state)
    if config.tie_embeddings:
        state.pop("lm_head.weight", None)
    ours = TransformerLM(config)
    ours.load_state_dict(state, strict=True)
    return theirs, ours


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family):
    theirs, ours = pair(family)
    tokens = torch.randint(61, (2, 20))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2"])
def test_left_padded_logits_equal_those_of_transformers(family):
    theirs, ours = pair(family)
    tokens = torch.randint(61, (2, 20))
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :7] = False
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=mask.long(), position_ids=positions).logits
        got = ours(tokens, attention_mask=mask)
    torch.testing.assert_close(got[mask], expected[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_gradients_equal_those_of_transformers(family):
    theirs, ours = pair(family)
    tokens = torch.randint(61, (2, 20))
    theirs(tokens, labels=tokens).loss.backward()
    targets = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    ours.ops.cross_entropy(ours(tokens), targets).backward()
    name = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    expected = dict(theirs.named_parameters())[name].grad
    torch.testing.assert_close(ours.token_embeddings.weight.grad, expected, atol=1e-5, rtol=1e-4)
