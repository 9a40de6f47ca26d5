"""The peers of the GPU benchmarks: `transformers`' model of the same sizes, on the GPU."""

from __future__ import annotations

from typing import Any

import torch

from scratchlm import ModelConfig


def hugging_face(config: ModelConfig, device: str = "cuda", **more: Any) -> torch.nn.Module:
    """Build a random Qwen3 where queries and keys have a norm, else a Llama."""
    import transformers

    kind = "Qwen3" if config.attention.qk_norm else "Llama"
    made = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.d_ff,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.d_head,
        max_position_embeddings=config.context_length,
        tie_word_embeddings=config.tie_embeddings,
        **more,
    )
    with torch.device(device):
        model: torch.nn.Module = getattr(transformers, f"{kind}ForCausalLM")(made)
    return model
