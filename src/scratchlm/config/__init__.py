"""Model configs: sizes and architecture choices, validated.

The default architecture needs only sizes:

    ModelConfig(vocab_size=10_000, context_length=256, d_model=512, num_layers=4, num_heads=16)

is a pre-norm RMSNorm / RoPE / SwiGLU decoder without biases. Where a model differs, one composed
field says so: `positions`, `ffn`, `norm`, `attention`. Precision, device and the choice of ops are
not part of the config: they are arguments of whatever runs it.
"""

from scratchlm.config.files import from_dict, load_config, to_dict, to_json, to_toml, toml_text
from scratchlm.config.model import ModelConfig, default_d_ff
from scratchlm.config.parts import (
    MLP,
    Attention,
    FeedForward,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    MoE,
    NoNorm,
    NoPositions,
    Norm,
    NTKScaling,
    Positions,
    RMSNorm,
    RopeScaling,
    Rotary,
    Sinusoidal,
    SwiGLU,
    YarnScaling,
)
from scratchlm.config.presets import PRESETS, preset

__all__ = [
    "ModelConfig",
    "Positions",
    "Rotary",
    "Learned",
    "Sinusoidal",
    "NoPositions",
    "RopeScaling",
    "LinearScaling",
    "NTKScaling",
    "YarnScaling",
    "Llama3Scaling",
    "FeedForward",
    "SwiGLU",
    "MLP",
    "MoE",
    "Norm",
    "RMSNorm",
    "LayerNorm",
    "NoNorm",
    "Attention",
    "PRESETS",
    "preset",
    "default_d_ff",
    "to_dict",
    "from_dict",
    "to_json",
    "to_toml",
    "toml_text",
    "load_config",
]
