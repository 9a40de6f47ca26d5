"""The model: modules that own weights and call one op each."""

from scratchlm.model.attention import MultiHeadSelfAttention, Scene
from scratchlm.model.block import TransformerBlock
from scratchlm.model.cache import KVCache
from scratchlm.model.heads import QuestionAnswering, SequenceClassifier, SpanLogits
from scratchlm.model.layers import (
    MLP,
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
    SinusoidalPositions,
    SwiGLU,
)
from scratchlm.model.moe import ExpertLinear, MoE
from scratchlm.model.rotary import (
    RotaryEmbedding,
    Rotation,
    change_rope_layout,
    rotary_frequencies,
)
from scratchlm.model.transformer import Transformer, TransformerLM

__all__ = [
    "Linear",
    "Embedding",
    "RMSNorm",
    "LayerNorm",
    "SwiGLU",
    "MLP",
    "RotaryEmbedding",
    "Rotation",
    "rotary_frequencies",
    "change_rope_layout",
    "SinusoidalPositions",
    "MultiHeadSelfAttention",
    "Scene",
    "MoE",
    "ExpertLinear",
    "KVCache",
    "TransformerBlock",
    "Transformer",
    "TransformerLM",
    "SequenceClassifier",
    "QuestionAnswering",
    "SpanLogits",
]
