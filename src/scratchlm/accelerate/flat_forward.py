"""The forward of a whole model over new tokens of many rows, laid end to end, on a GPU.

    logits = FlatForward(model, cache).run(tokens)

Between torch's matrix products stand a few kernels per layer (`decode_batch.py`,
`paged_attention.py`); keys and values are read where they lie, in pages. What a run needs to know
is in device memory, so that it can be recorded as a CUDA graph. The residual stream is float32.
With `exact`, no sum depends on what else is in the step (`invariant_linear.py`). Quantised layers
are called as they are: their products of few rows are kernels (`accelerate/quantized.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scratchlm.accelerate.conditions import joined_bias
from scratchlm.accelerate.joined_weights import as_one_matrix
from scratchlm.accelerate.kernels.triton.decode_tiles import power_of_two
from scratchlm.model.attention import MultiHeadSelfAttention
from scratchlm.model.layers import MLP, LayerNorm, RMSNorm, SinusoidalPositions, SwiGLU
from scratchlm.model.transformer import TransformerLM
from scratchlm.paged import PagedCache
from scratchlm.quantization.layers import QuantizedEmbedding, QuantizedWeight

FULL = 4224  # programs that keep a large GPU busy to the end, though rows differ in length
PROMPT_PROGRAMS = 2048  # enough for prompts, whose programs all have much to do
PROMPT_KEYS = 512  # that one program takes of a prompt's, at least
FEW_TOKENS = 192
SPLIT_KEYS = 128, 1024  # that one program takes of a row's, at least and at most


class Tiles(NamedTuple):
    """New tokens as attention takes them: consecutive ones of one row."""

    table: Tensor  # (3, tiles) int32: the row, the first token, how many
    block_q: int
    splits: int = 1
    split_keys: int = 0


@dataclass
class FlatTokens:
    """New tokens of several rows, on the device."""

    ids: Tensor  # (tokens,) int32 or int64
    positions: Tensor  # (tokens,) int32; −1: not there
    rows: Tensor  # (tokens,) int32: lines of `tables`
    tables: Tensor  # (rows, pages) int32
    tiles: list[Tiles]
    choosing: Tensor | None = None  # tokens whose logits are wanted; None: all


class _Layer(NamedTuple):
    attn: MultiHeadSelfAttention
    norm1: nn.Module
    qkv: _Products
    out: _Products
    norm2: nn.Module
    up: _Products
    down: _Products
    activation: int


class FlatForward:
    """Reads new tokens of any rows into the pages of one cache."""

    def __init__(self, model: TransformerLM, cache: PagedCache, *, exact: bool = False) -> None:
        # They need triton: only here.
        from scratchlm.accelerate.kernels.triton import decode, decode_batch, paged_attention

        self.embed, self.elementwise, self.attention = decode.embed, decode_batch, paged_attention
        self.norms, self.activations = decode, decode.ACTIVATIONS
        self.interpreted = not isinstance(decode.embed, decode.triton.JITFunction)  # in tests
        self.model, self.cache, self.exact = model, cache, exact
        config = model.config
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.d_head, self.group = config.d_head, config.num_heads // config.num_kv_heads
        self.dtype = model.token_embeddings.weight.dtype
        self.head = _products([model.lm_head], exact)
        self.layers = [self._layer(layer) for layer in model.layers]

    def _layer(self, layer: Any) -> _Layer:
        attn, ffn = layer.attn, layer.ffn
        is_gated = isinstance(ffn, SwiGLU)
        return _Layer(
            attn=attn,
            norm1=layer.ln1,
            qkv=_products([attn.q_proj, attn.k_proj, attn.v_proj], self.exact),
            out=_products([attn.output_proj], self.exact),
            norm2=layer.ln2,
            up=_products([ffn.w1, ffn.w3] if is_gated else [ffn.w1], self.exact),
            down=_products([ffn.w2], self.exact),
            activation=self.activations[ffn.activation if isinstance(ffn, MLP) else "silu"],
        )

    # How attention is cut

    def block_q(self, tokens: int) -> int:
        """New tokens of one row that a tile of a prompt takes, in a step of so many."""
        lines = 128
        if tokens <= FEW_TOKENS or self.dtype.itemsize == 4:
            lines = 64 if self.dtype.itemsize == 2 else 32
        return max(1, (16 if self.exact else lines) // power_of_two(self.group))

    def prompt_tiles(self, table: Tensor, tokens: int, max_kv_len: int) -> Tiles:
        """Return tiles of a prompt; where they are few and their keys many, these are split."""
        block_q = self.block_q(tokens)
        programs = max(1, tokens // block_q) * self.kv_heads
        splits = min(-(-max_kv_len // PROMPT_KEYS), PROMPT_PROGRAMS // programs)
        if self.exact or splits < 2:
            return Tiles(table, block_q)
        keys = -(-max_kv_len // splits // 64) * 64
        return Tiles(table, block_q, -(-max_kv_len // keys), keys)

    def decoding_tiles(self, table: Tensor, max_kv_len: int) -> Tiles:
        """Return tiles of one token each, their keys split so that the GPU is full."""
        if self.exact:
            return Tiles(table, self.block_q(table.shape[1]))
        programs = table.shape[1] * self.kv_heads
        least, most = SPLIT_KEYS
        keys = max(least, min(most, power_of_two(-(-max_kv_len * programs // FULL))))
        splits = -(-max_kv_len // keys)
        return Tiles(table, 1, splits, keys) if splits > 1 else Tiles(table, 1)

    # A run

    def run(self, tokens: FlatTokens, logits: Tensor | None = None) -> Tensor:
        """Write keys and values of the tokens; return logits of those that choose."""
        x, delta = self._embed(tokens), None
        count = len(x)
        h = torch.empty(count, x.shape[1], dtype=self.dtype, device=x.device)
        q = torch.empty(count, self.heads * self.d_head, dtype=self.dtype, device=x.device)
        attn_out = torch.zeros_like(q)  # so that tokens that are not there have finite numbers
        for layer in self.layers:
            self._add_norm(x, delta, layer.norm1, h)
            self._norm_rope_write(layer.attn, layer.qkv(h), q, tokens)
            for tiles in tokens.tiles:
                self._attend(layer.attn, q, attn_out, tokens, tiles)
            (delta,) = layer.out(attn_out)
            self._add_norm(x, delta, layer.norm2, h)
            (delta,) = layer.down(self._gate(layer, h))
        if tokens.choosing is not None:
            x, h = x[tokens.choosing], h[: len(tokens.choosing)]
            delta = None if delta is None else delta[tokens.choosing]
        self._add_norm(x, delta, self.model.ln_final, h)
        (found,) = self.head(h, logits)
        return found

    def _launch(
        self, kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, **more: int
    ) -> None:
        options = {} if self.interpreted else {"num_warps": warps, **more}
        kernel[grid](*args, **options)

    def _embed(self, tokens: FlatTokens) -> Tensor:
        config, positions = self.model.config, self.model.position_embeddings
        table: Tensor | None = None
        if isinstance(positions, SinusoidalPositions):
            table = positions.table
        elif positions is not None:
            table = positions.weight
        if isinstance(self.model.token_embeddings, QuantizedEmbedding):
            x = self.model.token_embeddings(tokens.ids).float()
            return x if table is None else x + table[tokens.positions.clamp(min=0)]
        weight, count = self.model.token_embeddings.weight, len(tokens.ids)
        x = torch.empty(count, config.d_model, dtype=torch.float32, device=weight.device)
        block = min(1024, power_of_two(config.d_model))
        self._launch(
            self.embed,
            (count, -(-config.d_model // block)),
            *(tokens.ids, weight, table, tokens.positions, x),
            *(config.vocab_size, config.d_model, block, False),
        )
        return x

    def _add_norm(self, x: Tensor, delta: Tensor | None, norm: nn.Module, h: Tensor) -> None:
        kind, gain, shift, eps = self.norms.NO_NORM, None, None, 0.0
        if isinstance(norm, RMSNorm):
            kind, gain, eps = self.norms.RMS_NORM, norm.weight, norm.eps
        elif isinstance(norm, LayerNorm):
            kind, gain, shift, eps = self.norms.LAYER_NORM, norm.weight, norm.bias, norm.eps
        width = x.shape[1]
        self._launch(
            self.elementwise.add_norm,
            (len(x),),
            *(x, delta, gain, shift, h, width, eps, kind, power_of_two(width)),
        )

    def _gate(self, layer: _Layer, h: Tensor) -> Tensor:
        up, *factors = layer.up(h)
        factor = factors[0] if factors else None
        u = torch.empty(up.shape, dtype=self.dtype, device=h.device)
        width = up.shape[1]
        self._launch(
            self.elementwise.gate,
            (len(up), -(-width // 1024)),
            *(up, factor, u, width, up.stride(0), layer.activation, 1024),
        )
        return u

    def _norm_rope_write(
        self,
        attn: MultiHeadSelfAttention,
        qkv: Sequence[Tensor],
        queries: Tensor,
        tokens: FlatTokens,
    ) -> None:
        q, k, v = qkv
        cache, q_norm, k_norm = self.cache, attn.q_norm, attn.k_norm
        rope, cos, sin = 0, None, None
        if attn.rope is not None:
            rope, cos, sin = 1 if attn.rope.layout == "half" else 2, attn.rope.cos, attn.rope.sin
        self._launch(
            self.attention.norm_rope_write,
            (len(q),),
            *(q, k, v, queries, cache.keys[attn.layer], cache.values[attn.layer]),
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            *(cos, sin, tokens.positions, tokens.rows, tokens.tables),
            *(q.stride(0), k.stride(0), v.stride(0), tokens.tables.stride(0)),
            *(cache.page_size, self.heads, self.kv_heads, self.d_head),
            *(power_of_two(n) for n in (self.heads, self.kv_heads, self.d_head)),
            *(0.0 if q_norm is None else q_norm.eps, q_norm is not None, rope),
        )

    def _attend(
        self,
        attn: MultiHeadSelfAttention,
        q: Tensor,
        out: Tensor,
        tokens: FlatTokens,
        tiles: Tiles,
    ) -> None:
        cache, splits, count = self.cache, tiles.splits, tiles.table.shape[1]
        partial: Tensor | None = None
        lse: Tensor | None = None
        if splits > 1:
            wide: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
            partial = torch.empty(len(q), self.heads, splits, self.d_head, **wide)
            lse = torch.empty(len(q), self.heads, splits, **wide)
        group, d = power_of_two(self.group), max(16, power_of_two(self.d_head))
        group = max(group, 16 // tiles.block_q)  # a product takes 16 lines at least
        lines = group * tiles.block_q
        self._launch(
            self.attention.paged_attention,
            (count, self.kv_heads, splits),
            *(q, cache.keys[attn.layer], cache.values[attn.layer], out, partial, lse),
            *(tiles.table[0], tiles.table[1], tiles.table[2], tokens.positions, tokens.tables),
            *(tokens.tables.stride(0), splits, tiles.split_keys),
            *(cache.page_size, self.heads, self.kv_heads, self.d_head, d),
            *(tiles.block_q, group, block_keys(cache.page_size), splits > 1),
            *(attn.sliding_window or 0, self.d_head**-0.5, 3 if lines <= 16 else 2),
            warps=8 if lines > 64 else 4,
        )
        if partial is not None:
            self._launch(
                self.attention.combine_splits,
                (count * tiles.block_q, self.heads),
                *(partial, lse, out, tiles.table[1], tiles.table[2]),
                *(splits, self.heads, self.d_head, d, power_of_two(splits), tiles.block_q),
            )


def block_keys(page_size: int) -> int:
    """Return how many keys attention takes at a time: a power of two that divides a page."""
    return min(64, page_size & -page_size)


_Products = Callable[..., Sequence[Tensor]]  # (x, out=None) -> [W₁ x + b₁, W₂ x + b₂, …]


def _products(linears: Sequence[Any], exact: bool) -> _Products:
    if any(isinstance(linear.weight, QuantizedWeight) for linear in linears):
        return _LayerByLayer(linears)
    return _Product(linears, exact)


class _LayerByLayer:
    """The layers themselves."""

    def __init__(self, linears: Sequence[Any]) -> None:
        self.linears = linears

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Sequence[Tensor]:
        parts = [linear(x) for linear in self.linears]
        return parts if out is None else [out.copy_(parts[0])]


class _Product:
    """One product where the weights lie side by side in memory."""

    def __init__(self, linears: Sequence[Any], exact: bool) -> None:
        self.exact = exact
        weights = [linear.weight for linear in linears]
        self.sizes = [len(weight) for weight in weights]
        whole = as_one_matrix(weights)
        biases = [getattr(linear, "bias", None) for linear in linears]
        self.weights, self.biases = weights, biases
        if whole is not None:
            self.weights, self.biases = [whole], [joined_bias(weights, biases)]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Sequence[Tensor]:
        parts = [
            self._linear(x, weight, bias, out)
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        return parts if len(parts) == len(self.sizes) else parts[0].split(self.sizes, dim=1)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        if self.exact:
            from scratchlm.accelerate.kernels.triton.invariant_linear import invariant_linear

            return invariant_linear(x, weight, bias, out)
        if out is not None:
            return torch.mm(x, weight.t(), out=out)
        return F.linear(x, weight, bias)
