"""Tiny models of every family, and hypothesis strategies over their configs."""

import torch
from hypothesis import strategies as st

from scratchlm import ModelConfig, TransformerLM
from scratchlm import config as c

PLAIN = ModelConfig(vocab_size=29, context_length=24, d_model=16, num_layers=2, num_heads=4)

FAMILIES = {
    "plain": PLAIN,
    "llama": PLAIN.replace(num_kv_heads=2, positions=c.Rotary(5e5, "half"), d_ff=24),
    "qwen3": PLAIN.replace(
        num_kv_heads=2,
        d_head=8,
        positions=c.Rotary(1e6, "half"),
        norm=c.RMSNorm(1e-6),
        attention=c.Attention(qk_norm=True),
        tie_embeddings=True,
    ),
    "qwen2": PLAIN.replace(num_kv_heads=1, attention=c.Attention(bias="qkv")),
    "gpt2": PLAIN.replace(
        positions=c.Learned(),
        norm=c.LayerNorm(),
        ffn=c.MLP("gelu_tanh", bias=True),
        attention=c.Attention(bias="all"),
        tie_embeddings=True,
    ),
    "mistral": PLAIN.replace(num_kv_heads=2, attention=c.Attention(sliding_window=5)),
    "mixtral": PLAIN.replace(ffn=c.MoE(4, 2), d_ff=16),
    "sinusoidal": PLAIN.replace(positions=c.Sinusoidal(), ffn=c.MLP("silu")),
    "no positions": PLAIN.replace(positions=c.NoPositions(), ffn=c.SwiGLU(bias=True)),
    "post-norm": PLAIN.replace(norm_placement="post"),
    "no norm": PLAIN.replace(norm=c.NoNorm()),
    "scaled": PLAIN.replace(positions=c.Rotary(1e4, "half", c.YarnScaling(4.0, 8))),
}


def build(config, ops="fast", dtype=torch.float64, seed=0):
    """Make a model whose every parameter, norms and biases too, is random."""
    model = TransformerLM(config, ops=ops, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            width = parameter.shape[-1] if parameter.ndim > 1 else 16
            parameter.copy_(noise / width**0.5 + (parameter.ndim == 1))
    return model


families = st.sampled_from(sorted(FAMILIES)).map(FAMILIES.__getitem__)


def ids(batch, seq, config=PLAIN, seed=0):
    """Draw token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, seq), generator=generator)
