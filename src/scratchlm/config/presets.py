"""Models by name.

`gpt2…` are the models that were released (LayerNorm, learned positions, biases, tanh-GELU, tied);
`cs336-gpt2…` are their sizes in the architecture of Stanford's course CS336 (SwiGLU of width
4·d_model, RoPE, RMSNorm, untied).
"""

from __future__ import annotations

import warnings
from typing import Any

from scratchlm.config.model import ModelConfig
from scratchlm.config.parts import (
    MLP,
    Attention,
    LayerNorm,
    Learned,
    Llama3Scaling,
    MoE,
    RMSNorm,
    Rotary,
)
from scratchlm.errors import did_you_mean

_GPT2_SIZES = {  # d_model, num_layers, num_heads
    "gpt2": (768, 12, 12),
    "gpt2-medium": (1024, 24, 16),
    "gpt2-large": (1280, 36, 20),
    "gpt2-xl": (1600, 48, 25),
}


def _gpt2(d_model: int, num_layers: int, num_heads: int, **parts: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=50_257,
        context_length=1_024,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=4 * d_model,
        **parts,
    )


_RELEASED_GPT2: dict[str, Any] = {
    "positions": Learned(),
    "norm": LayerNorm(),
    "ffn": MLP("gelu_tanh", bias=True),
    "attention": Attention(bias="all"),
    "tie_embeddings": True,
}


def _qwen3(d_model: int, num_layers: int, num_heads: int, d_ff: int, **parts: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=151_936,
        context_length=40_960,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=d_ff,
        d_head=128,
        positions=Rotary(1_000_000.0, layout="half"),
        norm=RMSNorm(1e-6),
        attention=Attention(qk_norm=True),
        **parts,
    )


def _llama3(**sizes: Any) -> ModelConfig:
    return ModelConfig(vocab_size=128_256, num_kv_heads=8, norm=RMSNorm(1e-5), **sizes)


PRESETS: dict[str, ModelConfig] = {
    **{name: _gpt2(*size, **_RELEASED_GPT2) for name, size in _GPT2_SIZES.items()},
    **{f"cs336-{name}": _gpt2(*size) for name, size in _GPT2_SIZES.items()},
    "llama3-8b": _llama3(
        context_length=8_192,
        d_model=4_096,
        num_layers=32,
        num_heads=32,
        d_ff=14_336,
        positions=Rotary(500_000.0, layout="half"),
    ),
    "llama3.2-1b": _llama3(
        context_length=131_072,
        d_model=2_048,
        num_layers=16,
        num_heads=32,
        d_ff=8_192,
        positions=Rotary(500_000.0, layout="half", scaling=Llama3Scaling(32.0, 8_192)),
        tie_embeddings=True,
    ),
    "qwen3-0.6b": _qwen3(1_024, 28, 16, 3_072, num_kv_heads=8, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(2_048, 28, 16, 6_144, num_kv_heads=8, tie_embeddings=True),
    "qwen3-4b": _qwen3(2_560, 36, 32, 9_728, num_kv_heads=8, tie_embeddings=True),
    "qwen3-8b": _qwen3(4_096, 36, 32, 12_288, num_kv_heads=8),
    "qwen3-30b-a3b": _qwen3(
        2_048, 48, 32, 768, num_kv_heads=4, ffn=MoE(128, 8, load_balance_weight=0.001)
    ),
    # `scratchlm demo`: a story of its world fits in the context, its words in the vocabulary.
    "demo": ModelConfig(640, 72, d_model=64, num_layers=3, num_heads=4),
}


RENAMED = {f"openai-{name}": name for name in _GPT2_SIZES}  # since 0.3; for one version


def preset(name: str) -> ModelConfig:
    """Return a model by name; for an unknown name, suggest the closest one."""
    if name in RENAMED:
        warnings.warn(
            f"the preset {name} is now called {RENAMED[name]}", FutureWarning, stacklevel=2
        )
        name = RENAMED[name]
    if name in PRESETS:
        return PRESETS[name]
    near = did_you_mean(name, PRESETS) or f"; there are {', '.join(PRESETS)}"
    raise ValueError(f"unknown preset {name!r}{near}")
