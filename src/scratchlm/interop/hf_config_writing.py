"""`ModelConfig` → config.json: the family that can represent a model, or why none can."""

from __future__ import annotations

from typing import Any

from scratchlm.config import (
    MLP,
    LayerNorm,
    Learned,
    ModelConfig,
    MoE,
    RMSNorm,
    Rotary,
    SwiGLU,
)
from scratchlm.errors import ScratchLMError
from scratchlm.interop.hf_rope import write_rope
from scratchlm.interop.keys import FAMILIES

_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}
# The epsilon of OLMo's norm, which its config does not hold.
_OLMO_EPS = 1e-5


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of the family that can represent this model; refuse if none can."""
    model_type = family_of(config)
    table = {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if model_type == "gpt2":
        return table | _gpt2_fields(config)
    return table | _llama_fields(config) | _family_fields(config, model_type)


def family_of(config: ModelConfig) -> str:
    """Return the `model_type` that can represent this model, or raise the reason why none can."""
    if config.norm_placement != "pre":
        raise _no_family(f"norm_placement is {config.norm_placement!r}")
    match config.positions, config.norm, config.ffn:
        case Learned(), LayerNorm(bias=True), MLP(bias=True):
            return _gpt2(config)
        case Rotary(), RMSNorm(), SwiGLU():
            return _dense(config)
        case Rotary(), RMSNorm(), MoE():
            return _sparse(config)
        case Rotary(), LayerNorm(bias=False, eps=eps), SwiGLU(bias=False) if eps == _OLMO_EPS:
            return _olmo(config)
    parts = ", ".join(repr(part) for part in (config.positions, config.norm, config.ffn))
    raise _no_family(f"none combines {parts}")


def _gpt2(config: ModelConfig) -> str:
    attention = config.attention
    if attention.bias != "all" or attention.qk_norm or attention.sliding_window is not None:
        raise _no_family(f"GPT-2's attention is plain, with all biases; this is {attention}")
    if (
        config.num_kv_heads != config.num_heads
        or config.num_heads * config.d_head != config.d_model
    ):
        raise _no_family(
            "GPT-2 has num_heads = num_kv_heads and num_heads · d_head = d_model; this has "
            f"{config.num_heads} and {config.num_kv_heads} heads of {config.d_head}"
        )
    return "gpt2"


def _dense(config: ModelConfig) -> str:
    assert isinstance(config.ffn, SwiGLU)
    attention = config.attention
    windowed = attention.sliding_window is not None
    if config.ffn.bias and (attention.qk_norm or attention.bias == "qkv" or windowed):
        raise _no_family(f"none has biases in its SwiGLU and {attention}")
    if attention.qk_norm:
        if attention.bias == "qkv":
            raise _no_family("none has qk_norm and biases on query, key and value only")
        return "qwen3"
    if attention.bias == "qkv":
        return "qwen2"
    # Llama's class wants d_model to be a multiple of num_heads even when d_head is given.
    plain = attention.bias == "none" and not config.ffn.bias
    if windowed or config.d_model % config.num_heads:
        if not plain:
            raise _no_family(
                "none has biases and a sliding window or a d_model that num_heads does not divide"
            )
        return "mistral"
    return "llama"


def _sparse(config: ModelConfig) -> str:
    assert isinstance(config.ffn, MoE)
    attention = config.attention
    if attention.qk_norm and attention.bias != "qkv":
        return "qwen3_moe"
    if attention.qk_norm or attention.bias != "none":
        raise _no_family(f"none has experts and {attention}")
    if not config.ffn.renormalize:
        raise _no_family("experts without renormalisation need qk_norm (Qwen3-MoE)")
    return "mixtral"


def _olmo(config: ModelConfig) -> str:
    attention = config.attention
    if attention.qk_norm or attention.bias == "qkv" or attention.sliding_window is not None:
        raise _no_family(f"OLMo's attention is plain; this is {attention}")
    if config.num_heads * config.d_head != config.d_model:
        raise _no_family("OLMo has num_heads · d_head = d_model")
    return "olmo"


def _no_family(why: str) -> ScratchLMError:
    return ScratchLMError(f"no Hugging Face family can represent this model: {why}")


def _gpt2_fields(config: ModelConfig) -> dict[str, Any]:
    assert isinstance(config.ffn, MLP)
    assert isinstance(config.norm, LayerNorm)
    return {
        "n_positions": config.context_length,
        "n_embd": config.d_model,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.d_ff,
        "activation_function": _ACTIVATIONS[config.ffn.activation],
        "layer_norm_epsilon": config.norm.eps,
    }


def _llama_fields(config: ModelConfig) -> dict[str, Any]:
    fields = {
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.d_head,
        "hidden_act": "silu",
        **write_rope(config),
    }
    if isinstance(config.norm, RMSNorm):
        fields["rms_norm_eps"] = config.norm.eps
    return fields


def _family_fields(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Write the fields that only some families have."""
    attention, fields = config.attention, dict[str, Any]()
    if model_type in ("llama", "olmo", "qwen3", "qwen3_moe"):
        fields["attention_bias"] = attention.bias == "all"
    if model_type == "llama":
        assert isinstance(config.ffn, SwiGLU)
        fields["mlp_bias"] = config.ffn.bias
    if model_type in ("mistral", "mixtral"):
        fields["sliding_window"] = attention.sliding_window
    if model_type in ("qwen2", "qwen3", "qwen3_moe"):
        fields["use_sliding_window"] = attention.sliding_window is not None
        fields["sliding_window"] = attention.sliding_window
        fields["max_window_layers"] = 0 if fields["use_sliding_window"] else config.num_layers
    if isinstance(config.ffn, MoE):
        count = "num_local_experts" if model_type == "mixtral" else "num_experts"
        fields[count] = config.ffn.num_experts
        fields["num_experts_per_tok"] = config.ffn.experts_per_token
        fields["router_aux_loss_coef"] = config.ffn.load_balance_weight
    if model_type == "qwen3_moe":
        assert isinstance(config.ffn, MoE)
        fields["moe_intermediate_size"] = config.d_ff
        fields["norm_topk_prob"] = config.ffn.renormalize
        fields["decoder_sparse_step"], fields["mlp_only_layers"] = 1, []
    return fields
