"""Our tensor names and GGUF's, architecture by architecture.

llama.cpp's `llama` (Llama, Mistral, Mixtral) and `olmo` rotate the pairs (0,1), (2,3), …: our
"interleaved" layout. The others rotate (i, i + d/2): our "half". Files hold the rows of queries and
keys in their architecture's order, so they are read as they are.
"""

from __future__ import annotations

from scratchlm.interop.keys import NORMS_OF_ONES, Family, Key, Table
from scratchlm.interop.links import third_of_rows

ROPE_FREQS = "rope_freqs.weight"
_BLOCK = "blk.{i}"


def _with_bias(ours: str, theirs: str) -> Table:
    return (Key(f"{ours}.weight", f"{theirs}.weight"), Key(f"{ours}.bias", f"{theirs}.bias"))


_OUTSIDE: Table = (
    Key("token_embeddings.weight", "token_embd.weight"),
    Key("lm_head.weight", "output.weight"),
)
_ATTENTION: Table = (
    *_with_bias("layers.{i}.attn.q_proj", f"{_BLOCK}.attn_q"),
    *_with_bias("layers.{i}.attn.k_proj", f"{_BLOCK}.attn_k"),
    *_with_bias("layers.{i}.attn.v_proj", f"{_BLOCK}.attn_v"),
    *_with_bias("layers.{i}.attn.output_proj", f"{_BLOCK}.attn_output"),
    Key("layers.{i}.attn.q_norm.weight", f"{_BLOCK}.attn_q_norm.weight"),
    Key("layers.{i}.attn.k_norm.weight", f"{_BLOCK}.attn_k_norm.weight"),
)
_NORMS: Table = (
    *_with_bias("layers.{i}.ln1", f"{_BLOCK}.attn_norm"),
    *_with_bias("layers.{i}.ln2", f"{_BLOCK}.ffn_norm"),
    *_with_bias("ln_final", "output_norm"),
)
_DENSE: Table = (
    *_with_bias("layers.{i}.ffn.w1", f"{_BLOCK}.ffn_gate"),
    *_with_bias("layers.{i}.ffn.w3", f"{_BLOCK}.ffn_up"),
    *_with_bias("layers.{i}.ffn.w2", f"{_BLOCK}.ffn_down"),
)
_EXPERTS: Table = (
    Key("layers.{i}.ffn.router.weight", f"{_BLOCK}.ffn_gate_inp.weight"),
    Key("layers.{i}.ffn.w1.weight", f"{_BLOCK}.ffn_gate_exps.weight"),
    Key("layers.{i}.ffn.w3.weight", f"{_BLOCK}.ffn_up_exps.weight"),
    Key("layers.{i}.ffn.w2.weight", f"{_BLOCK}.ffn_down_exps.weight"),
)
_GPT2: Table = (
    Key("position_embeddings.weight", "position_embd.weight"),
    *(
        Key(f"layers.{{i}}.attn.{ours}.{part}", f"{_BLOCK}.attn_qkv.{part}", third_of_rows(k))
        for k, ours in enumerate(("q_proj", "k_proj", "v_proj"))
        for part in ("weight", "bias")
    ),
    *_with_bias("layers.{i}.attn.output_proj", f"{_BLOCK}.attn_output"),
    *_with_bias("layers.{i}.ffn.w1", f"{_BLOCK}.ffn_up"),
    *_with_bias("layers.{i}.ffn.w2", f"{_BLOCK}.ffn_down"),
)

_PLAIN = _OUTSIDE + _ATTENTION + _NORMS + _DENSE
_SPARSE = _OUTSIDE + _ATTENTION + _NORMS + _EXPERTS


def _family(name: str, table: Table, description: str) -> Family:
    return Family(name, (table,), description, head="output.weight", recomputed=(ROPE_FREQS,))


# By the `model_type` that represents a model; `architecture` is GGUF's word.
GGUF_FAMILIES: dict[str, Family] = {
    "llama": _family("llama", _PLAIN, "Llama, and others of its class"),
    "mistral": _family("llama", _PLAIN, "Mistral, without a sliding window"),
    "mixtral": _family("llama", _SPARSE, "Mixtral"),
    "qwen2": _family("qwen2", _PLAIN, "Qwen2, Qwen2.5"),
    "qwen3": _family("qwen3", _PLAIN, "Qwen3"),
    "qwen3_moe": _family("qwen3moe", _SPARSE, "Qwen3-MoE"),
    "olmo": _family("olmo", _OUTSIDE + _ATTENTION + NORMS_OF_ONES + _DENSE, "OLMo (not OLMo 2)"),
    "gpt2": _family("gpt2", _OUTSIDE + _NORMS + _GPT2, "GPT-2"),
}
ARCHITECTURES = tuple(dict.fromkeys(family.architecture for family in GGUF_FAMILIES.values()))
# The architectures that rotate (0,1), (2,3), …
INTERLEAVED = ("llama", "olmo")
