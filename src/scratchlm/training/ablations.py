"""Ablations: the same model with one component changed or removed."""

from __future__ import annotations

from collections.abc import Callable

from scratchlm.config import MLP, ModelConfig, NoNorm, NoPositions, SwiGLU


def _silu(config: ModelConfig) -> ModelConfig:
    """W2 SiLU(W1 x) has two matrices where SwiGLU has three: 3/2 the width, as many parameters."""
    if not isinstance(config.ffn, SwiGLU):
        raise ValueError(f"the silu ablation needs a SwiGLU feed-forward; got {config.ffn}")
    return config.replace(ffn=MLP("silu", bias=config.ffn.bias), d_ff=round(1.5 * config.d_ff))


ABLATIONS: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "no-rope": lambda config: config.replace(positions=NoPositions()),
    "no-norm": lambda config: config.replace(norm=NoNorm()),
    "post-norm": lambda config: config.replace(norm_placement="post"),
    "silu": _silu,
    "tied-embeddings": lambda config: config.replace(tie_embeddings=True),
}


def is_ablated(config: ModelConfig, name: str) -> bool:
    """Return whether a config is already the result of this ablation."""
    if name == "silu":
        return isinstance(config.ffn, MLP) and config.ffn.activation == "silu"
    return name in ABLATIONS and ABLATIONS[name](config) == config


def ablate(config: ModelConfig, name: str) -> ModelConfig:
    """Apply one ablation to a config."""
    if name not in ABLATIONS:
        raise ValueError(f"ablation must be one of {', '.join(ABLATIONS)}; got {name!r}")
    changed = ABLATIONS[name](config)
    if changed == config:
        raise ValueError(f"the {name} ablation changes nothing: the model already has it")
    return changed
