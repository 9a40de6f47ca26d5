"""Every key of a config, with its type, default and meaning: `scratchlm config --train`.

The meaning of a field is the comment behind it in the code, or the sentence here.
"""

from __future__ import annotations

import ast
import inspect
import io
import tokenize
from dataclasses import MISSING, dataclass, fields
from typing import Any

MEANINGS = {
    "train.steps": "updates to make",
    "train.seed": "of the first weights and the order of the data",
    "train.optimizer": "adamw, or muon for the matrices",
    "train.lr": "the highest learning rate",
    "train.betas": "decay of AdamW's two moments",
    "train.eps": "added to AdamW's denominator",
    "train.weight_decay": "of matrices; norms and biases have none",
    "train.schedule": "of the learning rate: cosine, wsd (warm up, stay, decay) or constant",
    "train.z_loss": "weight of the squared log-partition, which keeps logits small",
    "train.precision": "fp32, bf16-mixed, bf16-residual or fp8; as suits: bf16-mixed on a GPU, "
    "fp32 elsewhere",
    "train.compile": "off, block or model: what torch.compile takes",
    "train.checkpointing": "what is computed again in the backward pass instead of kept: none, "
    "attention, ffn, selective or block",
    "train.keep_last": "checkpoints to keep, beside the best",
    "model.vocab_size": "tokens in the vocabulary; that of the data",
    "model.context_length": "the longest sequence",
    "model.d_model": "width of the residual stream",
    "model.num_layers": "Transformer blocks",
    "model.num_heads": "query heads",
    "model.rope_theta": "the same as model.positions.theta",
    "model.positions": "a table: type rotary, learned, sinusoidal or none",
    "model.ffn": "a table: type swiglu, mlp or moe",
    "model.norm": "a table: type rmsnorm, layernorm or none",
    "model.attention": "a table, see below",
    "model.norm_placement": "pre or post",
    "model.tie_embeddings": "the head is the embedding, transposed",
    "model.positions.theta": "base of the rotary frequencies",
    "model.positions.layout": "which channels are rotated together: interleaved or half",
    "model.positions.scaling": "a table: type linear, ntk, yarn or llama3",
    "model.positions.scaling.factor": "how much longer the context becomes",
    "model.positions.scaling.original_context_length": "the context the model was trained with",
    "model.positions.scaling.beta_fast": "rotations from which a frequency stays",
    "model.positions.scaling.beta_slow": "rotations up to which a frequency is scaled",
    "model.positions.scaling.low_freq_factor": "where scaling begins to fade",
    "model.positions.scaling.high_freq_factor": "where it has faded",
    "model.ffn.bias": "a bias in every matrix",
    "model.ffn.activation": "gelu, gelu_tanh, silu or relu",
    "model.ffn.num_experts": "experts of a mixture",
    "model.ffn.experts_per_token": "experts a token passes through",
    "model.norm.eps": "added to the variance",
    "model.norm.bias": "of a LayerNorm",
    "model.attention.bias": "none, qkv or all",
    "data.train": "the token file to train on",
    "data.val": "the token file held out",
    "data.tokenizer": "tokenizer.json of both",
}


@dataclass(frozen=True)
class Key:
    """One key of a config."""

    name: str
    kind: str
    default: str
    meaning: str


def train_keys() -> list[Key]:
    """Describe every `train.` key."""
    from scratchlm.training.settings import TrainConfig

    return _keys("train.", TrainConfig)


def model_keys() -> list[Key]:
    """Describe every `model.` key, those of the parts after the sizes."""
    from scratchlm.config.files import _KINDS
    from scratchlm.config.model import ModelConfig

    found = _keys("model.", ModelConfig)
    places = {"scaling": "model.positions.scaling."}
    for field, kinds in _KINDS.items():
        for kind in kinds.values():
            names = {key.name for key in found}
            own = _keys(places.get(field, f"model.{field}."), kind)
            found += [key for key in own if key.name not in names]
    return found


def data_keys() -> list[Key]:
    """Describe every `data.` key."""
    from scratchlm.training.plan import DataFiles

    return _keys("data.", DataFiles)


def _keys(prefix: str, cls: type[Any]) -> list[Key]:
    comments = _comments(cls)
    return [
        Key(
            f"{prefix}{field.name}",
            _kind(str(field.type)),
            _default(field.default),
            MEANINGS.get(f"{prefix}{field.name}")
            or comments.get(field.name, "").replace("None: ", "as suits: "),
        )
        for field in fields(cls)
    ]


def _comments(cls: type[Any]) -> dict[str, str]:
    """Return the comment behind each field in the source of a dataclass."""
    source = inspect.getsource(cls)
    lines = {
        node.lineno: node.target.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        lines[token.start[0]]: token.string.lstrip("# ")
        for token in tokens
        if token.type == tokenize.COMMENT and token.start[0] in lines
    }


def _kind(annotation: str) -> str:
    words = {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}
    first = annotation.partition(" | ")[0]
    if first.startswith("Literal"):
        return "text"
    if first.startswith("tuple"):
        return "two numbers"
    if first == "Path":
        return "file"
    if first == "Activation":  # names too
        return "text"
    return words.get(first, "table" if first[:1].isupper() else first)


def _default(value: Any) -> str:
    if value is MISSING:
        return "required"
    if value is None:
        return "as suits"
    if value == "":
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, str)):
        return str(value)
    if isinstance(value, tuple):
        return str(list(value))
    return type(value).__name__.lower()
