"""One decoding step on a CPU, written out flat: the model's formulas with nothing between them.

    decoder = CPUDecoder(model, cache)
    logits = decoder.step(tokens)          one token of every row, as `model(...)` with the cache

For one token a small model is bound not by arithmetic but by the Python between the operations:
modules, checks, tables that every layer derives anew. Here a layer is a tuple of weights, and what
all layers share is made once per step. `tests/acceleration/test_cpu_decode.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from scratchlm.accelerate.conditions import joined_bias
from scratchlm.accelerate.decoding import Unchanged, model_step, why_not_cpu
from scratchlm.model.attention import MultiHeadSelfAttention
from scratchlm.model.block import TransformerBlock
from scratchlm.model.cache import KVCache
from scratchlm.model.layers import MLP, LayerNorm, Linear, RMSNorm, SwiGLU
from scratchlm.model.rotary import RotaryEmbedding
from scratchlm.model.transformer import TransformerLM
from scratchlm.ops import OPS

Map = Callable[[Tensor], Tensor]
_fast = OPS["fast"]


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


class CPUDecoder:
    """The step of one model over the rows of one cache."""

    def __init__(self, model: TransformerLM, cache: KVCache) -> None:
        reason = why_not_cpu(model)
        if reason is not None:
            raise ValueError(f"the CPU decoder does not take {reason}")
        self.model, self.cache, config = model, cache, model.config
        self.heads, self.kv_heads, self.d_head = (
            config.num_heads,
            config.num_kv_heads,
            config.d_head,
        )
        self.grouped = self.heads != self.kv_heads
        self.rotate = _rotation(model.rope, min(cache.capacity, config.context_length))
        self.norm = _norm(model.ln_final)
        head: Any = model.lm_head
        self.head = partial(_fast.linear, weight=head.weight)
        self._memory: tuple[int, int] = (0, 0)
        self._unchanged = Unchanged(model)
        self.layers: list[_Layer] = []

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Float[Tensor, "batch vocab"]:
        """Read one more token of every row; return the logits after it."""
        model, cache = self.model, self.cache
        if not self._unchanged:
            return model_step(model, torch.tensor(tokens), cache)
        cache.reserve(1)
        model.check_length(cache.reserved_length)
        if self._memory != (cache.keys.data_ptr(), cache.values.data_ptr()):
            self._bind()  # rows have gone, and the cache with them
        rows, stop = len(tokens), cache.reserved_length
        positions, mask, index = self._positions(stop)
        x = model.token_embeddings(torch.tensor(tokens))
        if model.position_embeddings is not None:
            x = x + model.position_embeddings(positions).view(-1, x.shape[-1])
        rotate = None if self.rotate is None else self.rotate(positions)
        num_rotated = self.heads + self.kv_heads
        for layer in self.layers:
            heads = layer.qkv(layer.norm1(x)).view(rows, -1, self.d_head)
            rotated = heads.narrow(1, 0, num_rotated)
            if layer.norm_heads is not None:
                rotated = layer.norm_heads(rotated)
            if rotate is not None:
                rotated = rotate(rotated)
            q, k = rotated.split((self.heads, self.kv_heads), dim=1)
            v = heads.narrow(1, num_rotated, self.kv_heads)
            if index is None:
                layer.keys.select(2, stop - 1).copy_(k)
                layer.values.select(2, stop - 1).copy_(v)
            else:
                layer.keys.scatter_(2, index, k.unsqueeze(2))
                layer.values.scatter_(2, index, v.unsqueeze(2))
            attn_out = F.scaled_dot_product_attention(
                q.unsqueeze(2),
                layer.keys.narrow(2, 0, stop),
                layer.values.narrow(2, 0, stop),
                attn_mask=mask,
                enable_gqa=self.grouped,
            )
            x = x + layer.out(attn_out.reshape(rows, -1))
            x = x + layer.down(layer.activate(layer.up(layer.norm2(x))))
        cache.advance()
        return self.head(self.norm(x))

    def _positions(self, stop: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the tokens' positions, what each row sees, and where its key is written."""
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
    activate: Map = _gate if isinstance(ffn, SwiGLU) else getattr(_fast, ffn.activation)
    up = [ffn.w1, ffn.w3] if isinstance(ffn, SwiGLU) else [ffn.w1]
    return _Layer(
        norm1=_norm(layer.ln1),
        qkv=_joined([attn.q_proj, attn.k_proj, attn.v_proj]),
        norm_heads=_qk_norm(attn),
        out=_joined([attn.output_proj]),
        norm2=_norm(layer.ln2),
        up=_joined(up),
        activate=activate,
        down=_joined([ffn.w2]),
        keys=keys,
        values=values,
    )


def _gate(joined: Tensor) -> Tensor:
    a, b = joined.chunk(2, dim=-1)
    return F.silu(a).mul_(b)


def _joined(linears: Sequence[Linear]) -> Map:
    """Return [W₁ x + b₁; W₂ x + b₂; …] as one function of x."""
    weights, biases = [m.weight for m in linears], [m.bias for m in linears]
    whole = as_one_matrix(weights)
    bias = joined_bias(weights, biases)
    if whole is not None:
        return partial(_fast.linear, weight=whole, bias=bias)

    def one_by_one(x: Tensor) -> Tensor:
        y = torch.cat([_fast.linear(x, weight) for weight in weights], dim=-1)
        return y if bias is None else y + bias

    return one_by_one


def _norm(module: torch.nn.Module) -> Map:
    if isinstance(module, RMSNorm):
        return partial(_fast.rms_norm, weight=module.weight, eps=module.eps)
    if isinstance(module, LayerNorm):
        return partial(_fast.layer_norm, weight=module.weight, bias=module.bias, eps=module.eps)
    return module  # the identity


def _qk_norm(attn: MultiHeadSelfAttention) -> Map | None:
    if attn.q_norm is None or attn.k_norm is None:
        return None
    q_gain = attn.q_norm.weight.expand(attn.num_heads, -1)
    gains = torch.cat((q_gain, attn.k_norm.weight.expand(attn.num_kv_heads, -1)))
    return partial(_fast.rms_norm, weight=gains, eps=attn.q_norm.eps)


def _rotation(rope: RotaryEmbedding | None, capacity: int) -> Callable[[Tensor], Map] | None:
    """Return what rotates (batch, heads, d_head), given positions; tables are joined once."""
    if rope is None:
        return None
    half = rope.d_k // 2
    cos, sin = rope.tables(range(capacity))
    if rope.layout == "half":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

        def halves(positions: Tensor) -> Map:
            c, s = cos[positions][:, None], sin[positions][:, None]
            return lambda x: torch.addcmul(x * c, x.roll(half, -1), s)

        return halves
    angle = torch.complex(cos, sin)

    def pairs(positions: Tensor) -> Map:
        by = angle[positions][:, None]

        def rotate(x: Tensor) -> Tensor:
            z = torch.view_as_complex(x.reshape(*x.shape[:-1], half, 2))
            return torch.view_as_real(z * by).flatten(-2)

        return rotate

    return pairs


# Weights side by side in memory


def join_weights(model: TransformerLM) -> None:
    """Lay weights that multiply one input one after the other in memory: they read as one matrix.

    Values and names stay.
    """
    for layer in model.layers:
        assert isinstance(layer, TransformerBlock)
        attn, ffn = layer.attn, layer.ffn
        _lay_side_by_side([attn.q_proj, attn.k_proj, attn.v_proj])
        if isinstance(ffn, SwiGLU):
            _lay_side_by_side([ffn.w1, ffn.w3])


def _lay_side_by_side(linears: Sequence[Linear]) -> None:
    weights = [m.weight for m in linears]
    sizes = [len(weight) for weight in weights]
    block = weights[0].data.new_empty(sum(sizes), weights[0].shape[1])
    for weight, part in zip(weights, block.split(sizes), strict=True):
        part.copy_(weight.data)
        weight.data = part


def as_one_matrix(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the matrix that these are the row blocks of, if they lie so in memory."""
    first = weights[0]
    address, rows = first.data_ptr(), 0
    for weight in weights:
        if weight.data_ptr() != address or not weight.is_contiguous():
            return None
        address += weight.nbytes
        rows += len(weight)
    end = (first.storage_offset() + rows * first.shape[1]) * first.element_size()
    if first.untyped_storage().nbytes() < end:  # neighbours by chance
        return None
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
