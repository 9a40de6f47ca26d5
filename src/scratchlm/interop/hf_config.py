"""config.json → `ModelConfig`, for each supported `model_type`.

A key that is not in config.json has the value transformers' class for the family gives it; sizes
must be there. Every key is either read, known not to affect the forward pass, or refused: an
unknown key may change the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    SwiGLU,
)
from scratchlm.config.heads import TaskHead
from scratchlm.interop.heads import family_with
from scratchlm.interop.hf_rope import read_rope
from scratchlm.interop.keys import FAMILIES
from scratchlm.interop.neutral import NEUTRAL_KEYS, NEUTRAL_PREFIXES
from scratchlm.untrusted import listed, shown

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_ACTIVATIONS |= {"relu": "relu", "silu": "silu", "swish": "silu"}


class _Reader:
    """A config.json that records which of its keys were read."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table
        self.seen = {"model_type", "architectures"}

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return self.table.get(key, default)

    def need(self, key: str) -> Any:
        """Return a value that must be there."""
        value = self.get(key)
        if value is None:
            raise ValueError(f"{key} is missing")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise TypeError(f"{key} must be true or false; got {shown(value)}")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but these; a key that is not there has the first of them."""
        value = self.get(key, allowed[0])
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            words = " or ".join(map(str, allowed))
            raise ValueError(f"{key} must be {words}, the only case there is; got {shown(value)}")

    def finish(self) -> None:
        """Refuse keys that were neither read nor known not to affect the forward pass."""
        unknown = [
            key
            for key, value in self.table.items()
            if value is not None
            and key not in self.seen
            and key not in NEUTRAL_KEYS
            and not key.startswith(NEUTRAL_PREFIXES)
        ]
        if unknown:
            raise ValueError(f"keys that may change the model and are not known: {listed(unknown)}")


def from_hf_config(table: Any, head: TaskHead | None = None) -> ModelConfig:
    """Read a config.json, of a language model or with a head; what is unsupported is refused."""
    if not isinstance(table, Mapping):
        raise TypeError(f"config.json must be a table; got {type(table).__name__}")
    model_type, architectures = table.get("model_type"), table.get("architectures")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type must be one of {', '.join(FAMILIES)}; got {shown(model_type)}"
        )
    family = family_with(model_type, head)
    if architectures is not None and architectures != [family.architecture]:
        raise ValueError(
            f"architectures must be [{family.architecture!r}] for model_type {model_type}; "
            f"got {shown(architectures)}"
        )
    reader = _Reader(table)
    reader.only("quantization_config", None)
    reader.only("auto_map", None)  # custom code
    reader.only("is_encoder_decoder", False)
    reader.only("add_cross_attention", False)
    for pruned in ("pruned_heads", "sub_configs"):
        if reader.get(pruned):
            raise ValueError(f"{pruned} must be empty; got {shown(reader.get(pruned))}")
    config = _READERS[model_type](reader)
    reader.finish()
    return config


# Reading


def _read_llama_like(
    reader: _Reader,
    *,
    attention: Attention,
    ffn: FeedForward | None = None,
    d_ff_key: str = "intermediate_size",
    default_eps: float | None = 1e-6,
    default_theta: float = 10_000.0,
    default_d_head: int | None = None,
    needs_kv_heads: bool = True,
) -> ModelConfig:
    """Read what Llama and those after it have in common; `default_eps` None: OLMo's LayerNorm.

    The classes' own defaults for sizes each fit one model only, so sizes are required.
    """
    reader.only("hidden_act", "silu", "swish")
    context_length = reader.need("max_position_embeddings")
    rotary = read_rope(reader.table, context_length, default_theta)
    reader.seen |= {"rope_theta", "rope_scaling", "rope_parameters"}
    reader.only("partial_rotary_factor", 1.0, 1, None)
    d_ff = reader.need(d_ff_key)
    reader.get("intermediate_size")  # a mixture of experts has it too, but unused
    kv_heads = reader.get("num_key_value_heads")  # null: as many as query heads
    if kv_heads is None and needs_kv_heads and "num_key_value_heads" not in reader.table:
        raise ValueError("num_key_value_heads is missing")
    eps = 1e-5 if default_eps is None else reader.get("rms_norm_eps", default_eps)
    return ModelConfig(
        vocab_size=reader.need("vocab_size"),
        context_length=context_length,
        d_model=reader.need("hidden_size"),
        num_layers=reader.need("num_hidden_layers"),
        num_heads=reader.need("num_attention_heads"),
        num_kv_heads=kv_heads,
        d_head=reader.get("head_dim", default_d_head),
        d_ff=d_ff,
        positions=rotary,
        ffn=ffn or SwiGLU(),
        norm=LayerNorm(eps, bias=False) if default_eps is None else RMSNorm(eps),
        attention=attention,
        tie_embeddings=reader.flag("tie_word_embeddings", False),
    )


def _read_llama(reader: _Reader) -> ModelConfig:
    reader.only("sliding_window", None)
    reader.only("rope_interleaved", False, None)
    _refuse_layer_types(reader, "full_attention")
    return _read_llama_like(
        reader,
        attention=Attention(bias=_bias(reader)),
        ffn=SwiGLU(bias=reader.flag("mlp_bias", False)),
        needs_kv_heads=False,
    )


def _read_olmo(reader: _Reader) -> ModelConfig:
    reader.only("clip_qkv", None)
    return _read_llama_like(
        reader, attention=Attention(bias=_bias(reader)), default_eps=None, needs_kv_heads=False
    )


def _read_mistral(reader: _Reader) -> ModelConfig:
    window = reader.get("sliding_window", 4096)
    _refuse_layer_types(reader, "full_attention" if window is None else "sliding_attention")
    return _read_llama_like(reader, attention=Attention(sliding_window=window))


def _read_mixtral(reader: _Reader) -> ModelConfig:
    window = reader.get("sliding_window")
    return _read_llama_like(
        reader,
        attention=Attention(sliding_window=window),
        ffn=_experts(reader, renormalize=True),
        default_eps=1e-5,
        default_theta=1_000_000.0,
    )


def _read_qwen2(reader: _Reader) -> ModelConfig:
    return _read_llama_like(reader, attention=Attention(bias="qkv", sliding_window=_window(reader)))


def _read_qwen3(reader: _Reader) -> ModelConfig:
    attention = Attention(qk_norm=True, bias=_bias(reader), sliding_window=_window(reader))
    return _read_llama_like(reader, attention=attention, default_d_head=128)


def _read_qwen3_moe(reader: _Reader) -> ModelConfig:
    reader.only("decoder_sparse_step", 1)
    reader.only("mlp_only_layers", [], None)
    window = _window(reader, from_layer=False)
    attention = Attention(qk_norm=True, bias=_bias(reader), sliding_window=window)
    return _read_llama_like(
        reader,
        attention=attention,
        ffn=_experts(reader, renormalize=reader.flag("norm_topk_prob", False)),
        d_ff_key="moe_intermediate_size",
    )


def _read_gpt2(reader: _Reader) -> ModelConfig:
    reader.only("scale_attn_weights", True)
    reader.only("scale_attn_by_inverse_layer_idx", False)
    reader.only("reorder_and_upcast_attn", False)
    word = reader.get("activation_function", "gelu_new")
    if not isinstance(word, str) or word not in _ACTIVATIONS:
        words = ", ".join(_ACTIVATIONS)
        raise ValueError(f"activation_function must be one of {words}; got {shown(word)}")
    d_model, context_length = reader.need("n_embd"), reader.need("n_positions")
    reader.only("n_ctx", context_length, None)
    d_ff = reader.get("n_inner")
    return ModelConfig(
        vocab_size=reader.need("vocab_size"),
        context_length=context_length,
        d_model=d_model,
        num_layers=reader.need("n_layer"),
        num_heads=reader.need("n_head"),
        d_ff=4 * d_model if d_ff is None and isinstance(d_model, int) else d_ff,
        positions=Learned(),
        ffn=MLP(_ACTIVATIONS[word], bias=True),  # type: ignore[arg-type]
        norm=LayerNorm(reader.get("layer_norm_epsilon", 1e-5)),
        attention=Attention(bias="all"),
        tie_embeddings=reader.flag("tie_word_embeddings", True),
    )


_READERS: dict[str, Callable[[_Reader], ModelConfig]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "mixtral": _read_mixtral,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "qwen3_moe": _read_qwen3_moe,
    "olmo": _read_olmo,
    "gpt2": _read_gpt2,
}


def _bias(reader: _Reader) -> Any:
    return "all" if reader.flag("attention_bias", False) else "none"


def _experts(reader: _Reader, renormalize: bool) -> MoE:
    counts = [reader.get(key) for key in ("num_experts", "num_local_experts")]
    given = [count for count in counts if count is not None]
    if not given or any(count != given[0] for count in given):
        raise ValueError(f"num_experts (or num_local_experts) must be one number; got {counts}")
    weight = reader.get("router_aux_loss_coef", 0.001)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise TypeError(f"router_aux_loss_coef must be a number; got {shown(weight)}")
    return MoE(given[0], reader.need("num_experts_per_tok"), renormalize, weight)


def _refuse_layer_types(reader: _Reader, kind: str) -> None:
    kinds, layers = reader.get("layer_types"), reader.get("num_hidden_layers")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != layers or any(k != kind for k in kinds):
        raise ValueError(f"layer_types must be {kind} for each of {layers}; got {shown(kinds)}")


def _window(reader: _Reader, from_layer: bool = True) -> int | None:
    """Read Qwen's sliding window, which all of its layers must share, or none have.

    Dense models window the layers from `max_window_layers` on; sparse ones have no such key.
    """
    reader.only("use_mrope", False)
    used, window = reader.flag("use_sliding_window", False), reader.get("sliding_window", 4096)
    first = reader.get("max_window_layers", 28 if from_layer else 0)
    kinds, layers = reader.get("layer_types"), reader.get("num_hidden_layers")
    if type(first) is not int or type(layers) is not int:
        raise TypeError(f"max_window_layers must be a whole number; got {shown(first)}")
    if kinds is None:
        none = from_layer and first >= layers
    else:
        none = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if not used or window is None or none:
        _refuse_layer_types(reader, "full_attention")
        return None
    if kinds is None and first != 0:
        raise ValueError(
            "all layers must have the sliding window, or none; "
            f"got max_window_layers={first} of {layers}"
        )
    _refuse_layer_types(reader, "sliding_attention")
    return window
