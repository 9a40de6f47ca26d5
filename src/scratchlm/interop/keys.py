"""Our tensor names and theirs, family by family.

`{i}` counts layers, `{e}` experts. A table lists every tensor a family can have; which of them a
model has follows from its config. Where a family has been stored in more than one way, each way is
a table of its own: a directory must fit one of them whole. The first is the one we write.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scratchlm.interop.links import How, half, one_per_expert, ones, same, third, transposed


@dataclass(frozen=True)
class Key:
    """Our name, their name, and how they map to each other."""

    ours: str
    theirs: str
    how: How = same


Table = tuple[Key, ...]


@dataclass(frozen=True)
class Family:
    """A `model_type`: its architecture's name, the ways it is stored, and what it need not store.

    `recomputed` are buffers that old files carry and every model rebuilds from its config.
    """

    architecture: str
    tables: tuple[Table, ...]
    description: str
    head: str = "lm_head.weight"
    recomputed: tuple[str, ...] = field(default=())


# Llama, and the families that share its names

_TRUNK: Table = (
    Key("token_embeddings.weight", "model.embed_tokens.weight"),
    Key("layers.{i}.attn.q_proj.weight", "model.layers.{i}.self_attn.q_proj.weight"),
    Key("layers.{i}.attn.k_proj.weight", "model.layers.{i}.self_attn.k_proj.weight"),
    Key("layers.{i}.attn.v_proj.weight", "model.layers.{i}.self_attn.v_proj.weight"),
    Key("layers.{i}.attn.output_proj.weight", "model.layers.{i}.self_attn.o_proj.weight"),
    Key("layers.{i}.attn.q_proj.bias", "model.layers.{i}.self_attn.q_proj.bias"),
    Key("layers.{i}.attn.k_proj.bias", "model.layers.{i}.self_attn.k_proj.bias"),
    Key("layers.{i}.attn.v_proj.bias", "model.layers.{i}.self_attn.v_proj.bias"),
    Key("layers.{i}.attn.output_proj.bias", "model.layers.{i}.self_attn.o_proj.bias"),
    Key("layers.{i}.attn.q_norm.weight", "model.layers.{i}.self_attn.q_norm.weight"),
    Key("layers.{i}.attn.k_norm.weight", "model.layers.{i}.self_attn.k_norm.weight"),
    Key("lm_head.weight", "lm_head.weight"),
)
_NORMS: Table = (
    Key("layers.{i}.ln1.weight", "model.layers.{i}.input_layernorm.weight"),
    Key("layers.{i}.ln2.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    Key("ln_final.weight", "model.norm.weight"),
)
NORMS_OF_ONES: Table = (
    Key("layers.{i}.ln1.weight", "", ones),
    Key("layers.{i}.ln2.weight", "", ones),
    Key("ln_final.weight", "", ones),
)
_DENSE: Table = (
    Key("layers.{i}.ffn.w1.weight", "model.layers.{i}.mlp.gate_proj.weight"),
    Key("layers.{i}.ffn.w3.weight", "model.layers.{i}.mlp.up_proj.weight"),
    Key("layers.{i}.ffn.w2.weight", "model.layers.{i}.mlp.down_proj.weight"),
    Key("layers.{i}.ffn.w1.bias", "model.layers.{i}.mlp.gate_proj.bias"),
    Key("layers.{i}.ffn.w3.bias", "model.layers.{i}.mlp.up_proj.bias"),
    Key("layers.{i}.ffn.w2.bias", "model.layers.{i}.mlp.down_proj.bias"),
)

# Mixtures of experts: as files have them, and as transformers 5 holds them in memory

_SPARSE = "model.layers.{i}.block_sparse_moe"
_MIXTRAL_EXPERTS: Table = (
    Key("layers.{i}.ffn.router.weight", f"{_SPARSE}.gate.weight"),
    Key("layers.{i}.ffn.w1.weight", f"{_SPARSE}.experts.{{e}}.w1.weight", one_per_expert),
    Key("layers.{i}.ffn.w3.weight", f"{_SPARSE}.experts.{{e}}.w3.weight", one_per_expert),
    Key("layers.{i}.ffn.w2.weight", f"{_SPARSE}.experts.{{e}}.w2.weight", one_per_expert),
)
_MLP = "model.layers.{i}.mlp"
_QWEN_EXPERTS: Table = (
    Key("layers.{i}.ffn.router.weight", f"{_MLP}.gate.weight"),
    Key("layers.{i}.ffn.w1.weight", f"{_MLP}.experts.{{e}}.gate_proj.weight", one_per_expert),
    Key("layers.{i}.ffn.w3.weight", f"{_MLP}.experts.{{e}}.up_proj.weight", one_per_expert),
    Key("layers.{i}.ffn.w2.weight", f"{_MLP}.experts.{{e}}.down_proj.weight", one_per_expert),
)
_FUSED_EXPERTS: Table = (
    Key("layers.{i}.ffn.router.weight", f"{_MLP}.gate.weight"),
    Key("layers.{i}.ffn.w1.weight", f"{_MLP}.experts.gate_up_proj", half(0)),
    Key("layers.{i}.ffn.w3.weight", f"{_MLP}.experts.gate_up_proj", half(1)),
    Key("layers.{i}.ffn.w2.weight", f"{_MLP}.experts.down_proj"),
)

# GPT-2, with and without the prefix its head's class puts before everything


def _gpt2(prefix: str) -> Table:
    block = prefix + "h.{i}"
    return (
        Key("token_embeddings.weight", f"{prefix}wte.weight"),
        Key("position_embeddings.weight", f"{prefix}wpe.weight"),
        Key("layers.{i}.ln1.weight", f"{block}.ln_1.weight"),
        Key("layers.{i}.ln1.bias", f"{block}.ln_1.bias"),
        Key("layers.{i}.attn.q_proj.weight", f"{block}.attn.c_attn.weight", third(0)),
        Key("layers.{i}.attn.k_proj.weight", f"{block}.attn.c_attn.weight", third(1)),
        Key("layers.{i}.attn.v_proj.weight", f"{block}.attn.c_attn.weight", third(2)),
        Key("layers.{i}.attn.q_proj.bias", f"{block}.attn.c_attn.bias", third(0)),
        Key("layers.{i}.attn.k_proj.bias", f"{block}.attn.c_attn.bias", third(1)),
        Key("layers.{i}.attn.v_proj.bias", f"{block}.attn.c_attn.bias", third(2)),
        Key("layers.{i}.attn.output_proj.weight", f"{block}.attn.c_proj.weight", transposed),
        Key("layers.{i}.attn.output_proj.bias", f"{block}.attn.c_proj.bias"),
        Key("layers.{i}.ln2.weight", f"{block}.ln_2.weight"),
        Key("layers.{i}.ln2.bias", f"{block}.ln_2.bias"),
        Key("layers.{i}.ffn.w1.weight", f"{block}.mlp.c_fc.weight", transposed),
        Key("layers.{i}.ffn.w1.bias", f"{block}.mlp.c_fc.bias"),
        Key("layers.{i}.ffn.w2.weight", f"{block}.mlp.c_proj.weight", transposed),
        Key("layers.{i}.ffn.w2.bias", f"{block}.mlp.c_proj.bias"),
        Key("ln_final.weight", f"{prefix}ln_f.weight"),
        Key("ln_final.bias", f"{prefix}ln_f.bias"),
        Key("lm_head.weight", "lm_head.weight"),
    )


_INV_FREQ = ("model.layers.{i}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
_GPT2_MASKS = tuple(
    f"{prefix}h.{{i}}.attn.{mask}"
    for prefix in ("transformer.", "")
    for mask in ("bias", "masked_bias")
)
_PLAIN = _TRUNK + _NORMS + _DENSE

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        (_PLAIN,),
        "Llama 2, 3, 3.x; SmolLM, SmolLM2; others of its class",
        recomputed=_INV_FREQ,
    ),
    "mistral": Family("MistralForCausalLM", (_PLAIN,), "Mistral", recomputed=_INV_FREQ),
    "mixtral": Family(
        "MixtralForCausalLM",
        (_TRUNK + _NORMS + _MIXTRAL_EXPERTS, _TRUNK + _NORMS + _FUSED_EXPERTS),
        "Mixtral, one tensor per expert or fused",
        recomputed=_INV_FREQ,
    ),
    "qwen2": Family("Qwen2ForCausalLM", (_PLAIN,), "Qwen2, Qwen2.5", recomputed=_INV_FREQ),
    "qwen3": Family("Qwen3ForCausalLM", (_PLAIN,), "Qwen3"),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (_TRUNK + _NORMS + _QWEN_EXPERTS, _TRUNK + _NORMS + _FUSED_EXPERTS),
        "Qwen3-MoE with every layer sparse, one tensor per expert or fused",
    ),
    "olmo": Family("OlmoForCausalLM", (_TRUNK + NORMS_OF_ONES + _DENSE,), "OLMo (not OLMo 2)"),
    "gpt2": Family(
        "GPT2LMHeadModel",
        (_gpt2("transformer."), _gpt2("")),
        "GPT-2, with or without the transformer. prefix",
        recomputed=_GPT2_MASKS,
    ),
}
