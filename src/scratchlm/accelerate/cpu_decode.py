"""One decoding step on a CPU, written out flat: the model's formulas with nothing between them.

    step = FlatStep(model, cache)
    logits = step(tokens)                  one token of every row, as `model(...)` with the cache

For one token a small model is bound not by arithmetic but by the Python between the operations:
modules, checks, tables that every layer derives anew. Here a layer is a tuple of weights, and what
all layers share is made once per step. `tests/model/test_flat.py` holds it to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from scratchlm.model.attention import MultiHeadSelfAttention
from scratchlm.model.block import TransformerBlock
from scratchlm.model.cache import KVCache
from scratchlm.model.fused import why_not_fused
from scratchlm.model.layers import MLP, LayerNorm, Linear, RMSNorm, SwiGLU
from scratchlm.model.rotary import RotaryEmbedding
from scratchlm.model.transformer import TransformerLM
from scratchlm.ops import fast

Map = Callable[[Tensor], Tensor]


def why_not_flat(model: TransformerLM) -> str | None:
    """Return why this model cannot take the flat step, or None when it can."""
    if model.token_embeddings.weight.device.type != "cpu":
        return "a model that is not on a CPU"
    if model.token_embeddings.weight.dtype != torch.float32:
        return "weights that are not float32"
    if model.config.attention.sliding_window is not None:
        return "a sliding window"
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return "a model with hooks"
    return why_not_fused(model)


class _Layer(NamedTuple):
    norm1: Map
    qkv: Map
    norm_heads: Map | None  # over the channels of each query and key head
    out: Map
    norm2: Map
    up: Map  # W1 x, or [W1 x; W3 x]
    activate: Map
    down: Map
    keys: Tensor  # (batch, kv_heads, capacity, d_head)
    values: Tensor


class FlatStep:
    """The step of one model over the rows of one cache."""

    def __init__(self, model: TransformerLM, cache: KVCache) -> None:
        reason = why_not_flat(model)
        if reason is not None:
            raise ValueError(f"the flat step does not take {reason}")
        self.model, self.cache, config = model, cache, model.config
        self.heads, self.kv_heads, self.d_head = (
            config.num_heads,
            config.num_kv_heads,
            config.d_head,
        )
        self.grouped = self.heads != self.kv_heads
        self.turn = _turning(model.rope)
        self.norm = _norm(model.ln_final)
        head = model.token_embeddings if model.lm_head is None else model.lm_head
        self.head = partial(fast.linear, weight=head.weight)
        self._memory: tuple[int, int] = (0, 0)
        self.layers: list[_Layer] = []

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> Float[Tensor, "batch vocab"]:
        """Read one more token of every row; return the logits after it."""
        model, cache = self.model, self.cache
        cache.reserve(1)
        model._check_length(cache.reserved_length)
        if self._memory != (cache.keys.data_ptr(), cache.values.data_ptr()):
            self._bind()  # rows have gone, and the cache with them
        rows, stop = len(tokens), cache.reserved_length
        places, mask, index = self._places(stop)
        x = model.token_embeddings(torch.tensor(tokens))
        if model.position_embeddings is not None:
            x = x + model.position_embeddings(places).view(-1, x.shape[-1])
        turn = None if self.turn is None else self.turn(places)
        num_turned = self.heads + self.kv_heads
        for layer in self.layers:
            heads = layer.qkv(layer.norm1(x)).view(rows, -1, self.d_head)
            turned = heads.narrow(1, 0, num_turned)
            if layer.norm_heads is not None:
                turned = layer.norm_heads(turned)
            if turn is not None:
                turned = turn(turned)
            q, k = turned.split((self.heads, self.kv_heads), dim=1)
            v = heads.narrow(1, num_turned, self.kv_heads)
            if index is None:
                layer.keys.select(2, stop - 1).copy_(k)
                layer.values.select(2, stop - 1).copy_(v)
            else:
                layer.keys.scatter_(2, index, k.unsqueeze(2))
                layer.values.scatter_(2, index, v.unsqueeze(2))
            mixed = F.scaled_dot_product_attention(
                q.unsqueeze(2),
                layer.keys.narrow(2, 0, stop),
                layer.values.narrow(2, 0, stop),
                attn_mask=mask,
                enable_gqa=self.grouped,
            )
            x = x + layer.out(mixed.reshape(rows, -1))
            x = x + layer.down(layer.activate(layer.up(layer.norm2(x))))
        cache.advance()
        return self.head(self.norm(x))

    def _places(self, stop: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return where the tokens stand, what each row sees, and where its key is written."""
        slots = self.cache.mask.slots
        if slots is None:
            return torch.tensor([stop - 1]), None, None
        seen = torch.arange(stop) <= slots  # (batch, key)
        index = slots[:, None, :, None].expand(-1, self.kv_heads, 1, self.d_head)
        return slots[:, 0], seen[:, None, None, :], index

    def _bind(self) -> None:
        cache = self.cache
        self._memory = cache.keys.data_ptr(), cache.values.data_ptr()
        self.layers = [
            _flatten(layer, cache.keys[i], cache.values[i])
            for i, layer in enumerate(self.model.layers)
            if isinstance(layer, TransformerBlock)
        ]


def _flatten(layer: TransformerBlock, keys: Tensor, values: Tensor) -> _Layer:
    attn, ffn = layer.attn, layer.ffn
    assert isinstance(ffn, (SwiGLU, MLP))
    activate: Map = _gate if isinstance(ffn, SwiGLU) else fast.ACTIVATIONS[ffn.activation]
    up = [ffn.w1, ffn.w3] if isinstance(ffn, SwiGLU) else [ffn.w1]
    return _Layer(
        norm1=_norm(layer.ln1),
        qkv=_together([attn.q_proj, attn.k_proj, attn.v_proj]),
        norm_heads=_norm_of_heads(attn),
        out=_together([attn.output_proj]),
        norm2=_norm(layer.ln2),
        up=_together(up),
        activate=activate,
        down=_together([ffn.w2]),
        keys=keys,
        values=values,
    )


def _gate(joined: Tensor) -> Tensor:
    a, b = joined.chunk(2, dim=-1)
    return F.silu(a).mul_(b)


def _together(maps: Sequence[Linear]) -> Map:
    """Return [W₁ x + b₁; W₂ x + b₂; …] as one function of x."""
    weights, biases = [m.weight for m in maps], [m.bias for m in maps]
    whole = fast.as_one_matrix(weights)
    bias = None
    if any(b is not None for b in biases):
        parts = zip(weights, biases, strict=True)
        bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in parts])
    if whole is not None:
        return partial(fast.linear, weight=whole, bias=bias)

    def one_by_one(x: Tensor) -> Tensor:
        y = torch.cat([fast.linear(x, weight) for weight in weights], dim=-1)
        return y if bias is None else y + bias

    return one_by_one


def _norm(module: torch.nn.Module) -> Map:
    if isinstance(module, RMSNorm):
        return partial(fast.rms_norm, weight=module.weight, eps=module.eps)
    if isinstance(module, LayerNorm):
        return partial(fast.layer_norm, weight=module.weight, bias=module.bias, eps=module.eps)
    return module  # the identity


def _norm_of_heads(attn: MultiHeadSelfAttention) -> Map | None:
    if attn.q_norm is None or attn.k_norm is None:
        return None
    of_queries = attn.q_norm.weight.expand(attn.num_heads, -1)
    gains = torch.cat((of_queries, attn.k_norm.weight.expand(attn.num_kv_heads, -1)))
    return partial(fast.rms_norm, weight=gains, eps=attn.q_norm.eps)


def _turning(rope: RotaryEmbedding | None) -> Callable[[Tensor], Map] | None:
    """Return what turns (batch, heads, d_head), given the places; tables are joined once."""
    if rope is None:
        return None
    half = rope.d_k // 2
    if rope.layout == "half":
        cos, sin = torch.cat((rope.cos, rope.cos), -1), torch.cat((-rope.sin, rope.sin), -1)

        def halves(places: Tensor) -> Map:
            c, s = cos[places][:, None], sin[places][:, None]
            return lambda x: torch.addcmul(x * c, x.roll(half, -1), s)

        return halves
    angle = torch.complex(rope.cos, rope.sin)

    def pairs(places: Tensor) -> Map:
        by = angle[places][:, None]

        def turn(x: Tensor) -> Tensor:
            z = torch.view_as_complex(x.reshape(*x.shape[:-1], half, 2))
            return torch.view_as_real(z * by).flatten(-2)

        return turn

    return pairs
