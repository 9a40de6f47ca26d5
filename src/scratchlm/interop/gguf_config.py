"""GGUF's keys ↔ `ModelConfig`, architecture by architecture.

Keys of the architecture are read, known to change nothing, or refused: an unknown one may change
the model. Whether there are biases, and an output matrix of its own, the tensors say.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scratchlm.config import (
    MLP,
    Attention,
    FeedForward,
    LayerNorm,
    Learned,
    ModelConfig,
    MoE,
    RMSNorm,
    Rotary,
    SwiGLU,
)
from scratchlm.errors import ScratchLMError
from scratchlm.interop.gguf_names import ARCHITECTURES, GGUF_FAMILIES, INTERLEAVED
from scratchlm.interop.gguf_rope import read_rope, write_rope
from scratchlm.interop.gguf_types import FLOAT32, UINT32
from scratchlm.interop.hf_config_writing import family_of
from scratchlm.interop.shapes import Shape
from scratchlm.untrusted import listed, shown

# Key -> (the type's number, value), in the order in which they are written.
Keys = dict[str, tuple[int, Any]]
# Keys of an architecture that do not affect the forward pass.
_NEUTRAL = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type"}


class KeyReader:
    """The keys of one architecture, which records which of them were read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata, self.prefix = metadata, f"{architecture}."
        self.table = {
            key.removeprefix(self.prefix): value
            for key, value in metadata.items()
            if key.startswith(self.prefix)
        }
        self.seen = set(_NEUTRAL)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default where the key is missing."""
        self.seen.add(key)
        return self.table.get(key, default)

    def whole(self, key: str, default: int | None = None) -> Any:
        """Return a whole number, which must be there if there is no default."""
        value = self.get(key, default)
        if type(value) is not int:
            what = "is missing" if value is None else f"must be a whole number; got {shown(value)}"
            raise ValueError(f"{self.prefix}{key} {what}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number, in the decimals that a float32 stands for."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            what = "is missing" if value is None else f"must be a number; got {shown(value)}"
            raise ValueError(f"{self.prefix}{key} {what}")
        return shortest(value)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but these; a key that is not there has the first of them."""
        value = self.get(key, allowed[0])
        if isinstance(value, float):
            value = shortest(value)
        if not any(value == choice and isinstance(value, type(choice)) for choice in allowed):
            words = " or ".join(map(str, allowed))
            raise ValueError(f"{self.prefix}{key} must be {words}; got {shown(value)}")

    def finish(self) -> None:
        """Refuse keys that were neither read nor known to change nothing."""
        unknown = [self.prefix + key for key in self.table if key not in self.seen]
        if unknown:
            raise ValueError(f"keys that may change the model and are not known: {listed(unknown)}")


def shortest(value: float) -> float:
    """Return the fewest decimals that are this number in float32: 1e-05, not 9.99999974e-06."""
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", short) == struct.pack("<f", value):
                return short
        except OverflowError:
            break
    return float(value)


# Reading


def from_metadata(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Shape],
    rope_freqs: list[float] | None = None,
) -> tuple[str, ModelConfig]:
    """Read the `model_type` and the config of a file that holds these tensors."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        words = ", ".join(ARCHITECTURES)
        raise ValueError(f"general.architecture must be one of {words}; got {shown(architecture)}")
    if metadata.get("general.type", "model") != "model":
        raise ValueError(f"general.type must be model; got {shown(metadata['general.type'])}")
    if metadata.get("general.quantization_version", 2) != 2:
        version = metadata["general.quantization_version"]
        raise ValueError(f"general.quantization_version must be 2; got {shown(version)}")
    if metadata.get("split.count", 1) != 1:
        raise ValueError("the model is split over several files; merge them with llama-gguf-split")
    if "token_embd.weight" not in tensors:
        raise ValueError("missing 'token_embd.weight'")
    reader = KeyReader(metadata, architecture)
    experts = _experts(reader)
    if architecture == "gpt2":
        model_type, config = "gpt2", _read_gpt2(reader, tensors)
    else:
        model_type = _model_type(architecture, experts)
        config = _read_rotary(reader, model_type, experts, tensors, rope_freqs)
    reader.finish()
    return model_type, config


def _model_type(architecture: str, experts: MoE | None) -> str:
    model_type = {"llama": "mixtral" if experts else "llama", "qwen3moe": "qwen3_moe"}
    sparse = model_type.get(architecture, architecture) in ("mixtral", "qwen3_moe")
    if sparse != (experts is not None):
        raise ValueError(f"{architecture}.expert_count must be {'>= 1' if sparse else '0'}")
    return model_type.get(architecture, architecture)


def _experts(reader: KeyReader) -> MoE | None:
    count, used = reader.whole("expert_count", 0), reader.whole("expert_used_count", 0)
    reader.only("expert_shared_count", 0)
    reader.only("expert_group_count", 0, 1)
    reader.only("expert_group_used_count", 0, 1)
    reader.only("expert_gating_func", 1, 0)
    reader.only("expert_weights_norm", True)
    reader.only("expert_weights_scale", 1.0, 0.0)
    return MoE(count, used) if count else None


def _sizes(reader: KeyReader, tensors: Mapping[str, Shape]) -> dict[str, Any]:
    """Read what all architectures have."""
    heads = reader.whole("attention.head_count")
    reader.only("attention.causal", True)
    return {
        "vocab_size": tensors["token_embd.weight"][0],
        "context_length": reader.whole("context_length"),
        "d_model": reader.whole("embedding_length"),
        "num_layers": reader.whole("block_count"),
        "num_heads": heads,
        "num_kv_heads": reader.whole("attention.head_count_kv", heads),
        "tie_embeddings": "output.weight" not in tensors,
    }


def _read_gpt2(reader: KeyReader, tensors: Mapping[str, Shape]) -> ModelConfig:
    return ModelConfig(
        **_sizes(reader, tensors),
        d_ff=reader.whole("feed_forward_length"),
        positions=Learned(),
        ffn=MLP("gelu_tanh", bias=True),
        norm=LayerNorm(reader.number("attention.layer_norm_epsilon")),
        attention=Attention(bias="all"),
    )


def _read_rotary(
    reader: KeyReader,
    model_type: str,
    experts: MoE | None,
    tensors: Mapping[str, Shape],
    rope_freqs: list[float] | None,
) -> ModelConfig:
    sizes = _sizes(reader, tensors)
    d_head = reader.whole("attention.key_length", sizes["d_model"] // max(1, sizes["num_heads"]))
    reader.only("attention.value_length", d_head)
    reader.only("rope.dimension_count", d_head)
    reader.only("attention.clamp_kqv", 0.0)
    d_ff = reader.whole("feed_forward_length")
    if model_type == "qwen3_moe":
        d_ff = reader.whole("expert_feed_forward_length")
    rotary = read_rope(reader, sizes["context_length"], d_head, rope_freqs)
    if reader.prefix[:-1] in INTERLEAVED:
        rotary = replace(rotary, layout="interleaved")
    if model_type == "olmo":
        norm: Any = LayerNorm(reader.number("attention.layer_norm_epsilon"), bias=False)
    else:
        norm = RMSNorm(reader.number("attention.layer_norm_rms_epsilon"))
    ffn: FeedForward = experts or SwiGLU(bias="blk.0.ffn_gate.bias" in tensors)
    attention = Attention(
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        bias=_bias(tensors),
        sliding_window=reader.whole("attention.sliding_window", 0) or None,
    )
    return ModelConfig(
        **sizes,
        d_head=d_head,
        d_ff=d_ff,
        positions=rotary,
        ffn=ffn,
        norm=norm,
        attention=attention,
    )


def _bias(tensors: Mapping[str, Shape]) -> Any:
    if "blk.0.attn_output.bias" in tensors:
        return "all"
    return "qkv" if "blk.0.attn_q.bias" in tensors else "none"


# Writing


def to_metadata(config: ModelConfig) -> tuple[str, Keys]:
    """Write a config as the `model_type` that can represent it and GGUF's keys, or refuse it."""
    model_type = family_of(config)
    _refuse(config, model_type)
    architecture = GGUF_FAMILIES[model_type].architecture
    sizes: dict[str, int | float] = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "embedding_length": config.d_model,
        "block_count": config.num_layers,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
    }
    if isinstance(config.norm, RMSNorm):
        sizes["attention.layer_norm_rms_epsilon"] = float(config.norm.eps)
    elif isinstance(config.norm, LayerNorm):
        sizes["attention.layer_norm_epsilon"] = float(config.norm.eps)
    if isinstance(config.ffn, MoE):
        sizes["expert_count"] = config.ffn.num_experts
        sizes["expert_used_count"] = config.ffn.experts_per_token
    if model_type == "qwen3_moe":
        sizes["expert_feed_forward_length"] = config.d_ff
    if isinstance(config.positions, Rotary):
        sizes["attention.key_length"] = sizes["attention.value_length"] = config.d_head
        sizes["rope.dimension_count"] = config.d_head
    keys: Keys = {
        f"{architecture}.{key}": (FLOAT32 if isinstance(value, float) else UINT32, value)
        for key, value in sizes.items()
    }
    return model_type, keys | write_rope(config, architecture)


def _refuse(config: ModelConfig, model_type: str) -> None:
    """Refuse by name what llama.cpp's architecture does not have."""
    attention, window = config.attention, config.attention.sliding_window
    if window is not None and window < config.context_length:
        raise cannot_say(
            f"sliding window of {window} tokens in a context of {config.context_length}"
        )
    match config.ffn:
        case MoE(renormalize=False):
            raise cannot_say("experts whose weights are not renormalised")
        case MLP(activation=activation) if activation != "gelu_tanh":
            raise cannot_say(f"activation {activation}: its gpt2 has gelu_tanh")
    if model_type == "qwen2" and config.num_heads * config.d_head != config.d_model:
        raise cannot_say(
            "qwen2 whose num_heads · d_head is not d_model; "
            f"got {config.num_heads} · {config.d_head} and {config.d_model}"
        )
    if attention.bias == "all" and model_type in ("qwen3", "qwen3_moe", "olmo"):
        raise cannot_say(f"biases in the attention of {model_type}")


def cannot_say(what: str) -> ScratchLMError:
    """Return the error for what GGUF has no words for."""
    return ScratchLMError(f"GGUF cannot represent this model: it has no {what}")
