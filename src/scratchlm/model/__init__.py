"""The model: modules that own weights, and call their submodules and ops."""

from scratchlm.model.attention import ForwardContext, MultiHeadSelfAttention
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
    TiedHead,
)
from scratchlm.model.moe import ExpertLinear, MoE
from scratchlm.model.rotary import RotaryEmbedding, rotary_frequencies
from scratchlm.model.transformer import Transformer, TransformerLM

__all__ = [
    "Linear",
    "Embedding",
    "TiedHead",
    "RMSNorm",
    "LayerNorm",
    "SwiGLU",
    "MLP",
    "RotaryEmbedding",
    "rotary_frequencies",
    "SinusoidalPositions",
    "MultiHeadSelfAttention",
    "ForwardContext",
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
