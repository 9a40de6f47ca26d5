"""The definitions a learner's functions are held against, under the names of the CS336 course.

A set of functions is an object, and a function made of others calls them through `self`: whoever
replaces one (`Functions(run_softmax=mine)`) finds it used in attention, block and language model.
Every formula is that of `scratchlm.ops.reference`, `training` or `tokenizer`; nothing is defined
here but the order of arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scratchlm.model.rotary import RotaryEmbedding
from scratchlm.ops import reference
from scratchlm.tokenizer import Tokenizer
from scratchlm.tokenizer.naive import train_bpe_naive
from scratchlm.training import AdamW, clip_grad_norm, cosine_schedule

EPS = 1e-5  # of the norms in a block and a language model
Weights = Mapping[str, Tensor]
Pair = tuple[bytes, bytes]


@lru_cache(maxsize=16)
def _rotary(theta: float, d_k: int, max_seq_len: int) -> RotaryEmbedding:
    return RotaryEmbedding(theta, d_k, max_seq_len, ops="reference")


class Functions:
    """All functions, as they are defined; keywords replace some of them."""

    def __init__(self, **own: Callable[..., Any]) -> None:
        self.__dict__.update(own)

    # Layers

    def run_linear(self, d_in: int, d_out: int, weights: Tensor, in_features: Tensor) -> Tensor:
        """W x."""
        return reference.linear(in_features, weights)

    def run_embedding(
        self, vocab_size: int, d_model: int, weights: Tensor, token_ids: Tensor
    ) -> Tensor:
        """The rows of the table."""
        return reference.embedding(token_ids, weights)

    def run_softmax(self, in_features: Tensor, dim: int) -> Tensor:
        """exp(x) / Σ exp(x)."""
        return reference.softmax(in_features, dim)

    def run_silu(self, in_features: Tensor) -> Tensor:
        """x · σ(x)."""
        return reference.silu(in_features)

    def run_rmsnorm(self, d_model: int, eps: float, weights: Tensor, in_features: Tensor) -> Tensor:
        """x / sqrt(mean(x²) + ε) · g."""
        return reference.rms_norm(in_features, weights, eps)

    def run_rope(
        self,
        d_k: int,
        theta: float,
        max_seq_len: int,
        in_query_or_key: Tensor,
        token_positions: Tensor,
    ) -> Tensor:
        """Rotate neighbouring channels by their angle."""
        return _rotary(theta, d_k, max_seq_len)(in_query_or_key, token_positions)

    def run_scaled_dot_product_attention(
        self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """softmax(Q Kᵀ / √d_k) V, by this set's softmax."""
        if "run_softmax" not in self.__dict__:
            return reference.scaled_dot_product_attention(Q, K, V, mask)
        own = reference.ReferenceOps().replace(softmax=self.run_softmax)
        return own.scaled_dot_product_attention(Q, K, V, mask)

    def run_swiglu(
        self,
        d_model: int,
        d_ff: int,
        w1_weight: Tensor,
        w2_weight: Tensor,
        w3_weight: Tensor,
        in_features: Tensor,
    ) -> Tensor:
        """W2(SiLU(W1 x) ⊙ W3 x)."""
        gate = self.run_silu(self.run_linear(d_model, d_ff, w1_weight, in_features))
        hidden = gate * self.run_linear(d_model, d_ff, w3_weight, in_features)
        return self.run_linear(d_ff, d_model, w2_weight, hidden)

    # Attention, block, model

    def run_multihead_self_attention(
        self,
        d_model: int,
        num_heads: int,
        q_proj_weight: Tensor,
        k_proj_weight: Tensor,
        v_proj_weight: Tensor,
        o_proj_weight: Tensor,
        in_features: Tensor,
    ) -> Tensor:
        """Causal attention of several heads, without positions."""
        projections = q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight
        return self._attend(d_model, num_heads, projections, in_features, lambda x: x)

    def run_multihead_self_attention_with_rope(
        self,
        d_model: int,
        num_heads: int,
        max_seq_len: int,
        theta: float,
        q_proj_weight: Tensor,
        k_proj_weight: Tensor,
        v_proj_weight: Tensor,
        o_proj_weight: Tensor,
        in_features: Tensor,
        token_positions: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of several heads, queries and keys rotated by their position."""
        if token_positions is None:
            token_positions = torch.arange(in_features.shape[-2])
        positions = token_positions

        def rotate(x: Tensor) -> Tensor:
            return self.run_rope(d_model // num_heads, theta, max_seq_len, x, positions)

        projections = q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight
        return self._attend(d_model, num_heads, projections, in_features, rotate)

    def _attend(
        self,
        d_model: int,
        num_heads: int,
        projections: Sequence[Tensor],
        x: Tensor,
        rotate: Callable[[Tensor], Tensor],
    ) -> Tensor:
        *qkv, output = projections
        q, k, v = (
            self.run_linear(d_model, d_model, weight, x)
            .unflatten(-1, (num_heads, -1))
            .transpose(-3, -2)
            for weight in qkv
        )  # each (…, heads, seq, d_head)
        q, k = rotate(q), rotate(k)
        seen = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
        heads = self.run_scaled_dot_product_attention(q, k, v, seen)
        return self.run_linear(d_model, d_model, output, heads.transpose(-3, -2).flatten(-2))

    def run_transformer_block(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        max_seq_len: int,
        theta: float,
        weights: Weights,
        in_features: Tensor,
    ) -> Tensor:
        """y = x + Attn(Norm(x)); z = y + FFN(Norm(y))."""
        names = [f"attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "output_proj")]
        normed = self.run_rmsnorm(d_model, EPS, weights["ln1.weight"], in_features)
        q, k, v, o = (weights[name] for name in names)
        y = in_features + self.run_multihead_self_attention_with_rope(
            d_model, num_heads, max_seq_len, theta, q, k, v, o, normed
        )
        normed = self.run_rmsnorm(d_model, EPS, weights["ln2.weight"], y)
        w1, w2, w3 = (weights[f"ffn.{name}.weight"] for name in ("w1", "w2", "w3"))
        return y + self.run_swiglu(d_model, d_ff, w1, w2, w3, normed)

    def run_transformer_lm(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float,
        weights: Weights,
        in_indices: Tensor,
    ) -> Tensor:
        """Embedding, blocks, final norm, head: the logits."""
        x = self.run_embedding(vocab_size, d_model, weights["token_embeddings.weight"], in_indices)
        for layer in range(num_layers):
            own = layer_weights(weights, layer)
            sizes = d_model, num_heads, d_ff, context_length, rope_theta
            x = self.run_transformer_block(*sizes, own, x)
        x = self.run_rmsnorm(d_model, EPS, weights["ln_final.weight"], x)
        return self.run_linear(d_model, vocab_size, weights["lm_head.weight"], x)

    # Training

    def run_cross_entropy(
        self, inputs: Tensor, targets: Tensor, ignore_index: int = -100
    ) -> Tensor:
        """Mean of log Σ exp(logits) − logits[target] over the targets that count."""
        return reference.cross_entropy(inputs, targets, ignore_index=ignore_index)

    def get_adamw_cls(self) -> Callable[..., torch.optim.Optimizer]:
        """The class of the optimizer."""
        return AdamW

    def run_get_lr_cosine_schedule(
        self,
        it: int,
        max_learning_rate: float,
        min_learning_rate: float,
        warmup_iters: int,
        cosine_cycle_iters: int,
    ) -> float:
        """Warm up linearly, fall along a cosine, stay."""
        return cosine_schedule(
            it, max_learning_rate, min_learning_rate, warmup_iters, cosine_cycle_iters
        )

    def run_gradient_clipping(self, parameters: Iterable[Tensor], max_l2_norm: float) -> None:
        """Scale all gradients, in place, to a norm of at most `max_l2_norm` together."""
        clip_grad_norm(parameters, max_l2_norm)

    # Text

    def run_train_bpe(
        self, input_path: str | os.PathLike[str], vocab_size: int, special_tokens: list[str]
    ) -> tuple[dict[int, bytes], list[Pair]]:
        """Learn a vocabulary and merges from a file."""
        text = Path(input_path).read_bytes().decode("utf-8")
        return train_bpe_naive(text, vocab_size, special_tokens)

    def get_tokenizer(
        self,
        vocab: dict[int, bytes],
        merges: list[Pair],
        special_tokens: list[str] | None = None,
    ) -> Any:
        """An object with encode, encode_iterable and decode."""
        return Tokenizer(vocab, merges, special_tokens)


DEFINITIONS = Functions()


def layer_weights(weights: Weights, layer: int) -> Weights:
    """Return one layer's weights, under the names of a block."""
    prefix = f"layers.{layer}."
    return {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
