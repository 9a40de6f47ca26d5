"""One decoding step of a few rows through a whole model, in a few kernels per layer.

    step = GPUStep(model, cache, rows=1, max_kv_len=1024)
    step.ids, step.lengths, step.tables    filled: the tokens, their positions, the page tables
    step.run()                             step.logits; step.lengths has grown by 1

Everything lives in buffers that stay where they are, so that the launches can be recorded once as
a CUDA graph and replayed. Weights are read where the model keeps them; nothing is copied. The
formulas are `ops/reference.py`'s, the kernels `kernels/triton/decode.py`'s: matrix times vector,
for up to `MAX_ROWS` rows; more go through `gpu_decode_batch.py`. The residual stream is kept in
float32, so a low-precision model loses a little less here than in its own forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scratchlm.accelerate import hopper
from scratchlm.accelerate.decoding import why_not_model
from scratchlm.accelerate.kernels.triton.decode_tiles import (
    CLUSTER_HEAD,
    CLUSTER_KEYS,
    CLUSTER_WIDTH,
    MAX_CLUSTERS,
    MAX_ROWS,
    KVSplits,
    Tile,
    choose_tile,
    kv_splits_for,
    power_of_two,
)
from scratchlm.model.attention import MultiHeadSelfAttention
from scratchlm.model.layers import (
    MLP,
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
    SinusoidalPositions,
    SwiGLU,
)
from scratchlm.model.transformer import TransformerLM
from scratchlm.paged import PagedCache

GREEDY_PARTS = 32  # programs per row that look for the largest logit


class GPUStep:
    """The buffers and the launches of one step for `rows` rows of up to `max_kv_len` keys."""

    max_rows = MAX_ROWS

    def __init__(
        self,
        model: TransformerLM,
        cache: PagedCache,
        *,
        rows: int,
        max_kv_len: int,
        pdl: bool = False,
        greedy: bool = False,
        tiles: Mapping[str, Tile] | None = None,
        kv_splits: KVSplits | None = None,
    ) -> None:
        reason = why_not_model(model)
        if reason is not None:
            raise ValueError(f"the GPU decoder does not take {reason}")
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"the GPU decoder takes 1 to {self.max_rows} rows; got {rows}")
        self.model, self.cache, self.greedy = model, cache, greedy
        self.rows, self.max_kv_len, self.page_size = rows, max_kv_len, cache.page_size
        self.tiles = dict(tiles or {})
        self.layers: list[Any] = list(model.layers)  # blocks, to a type checker plain modules
        first, last = self.layers[0], self.layers[-1]
        self._watched = model.token_embeddings, first.attn.q_proj, last.ffn.w2, self._head()
        config, weight = model.config, model.token_embeddings.weight
        self.dtype, device = weight.dtype, weight.device
        wide: dict[str, Any] = {"dtype": torch.float32, "device": device}
        own: dict[str, Any] = {"dtype": self.dtype, "device": device}
        d_kv = config.num_kv_heads * config.d_head
        self.kv_splits = kv_splits or kv_splits_for(
            max_kv_len, config.num_heads, rows, config.d_head
        )
        if self.kv_splits.deferred_combine and config.d_head != power_of_two(config.d_head):
            raise ValueError("deferred combine is for heads of a power of two")
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self.previous_ids = torch.zeros_like(self.ids)  # that a greedy step has read
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        pages = -(-max_kv_len // cache.page_size)
        self.tables = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        self.logits = torch.zeros(rows, config.vocab_size, **wide)
        self.x = torch.zeros(2, rows, config.d_model, **wide)  # one is read, the other written
        self.q = torch.zeros(rows, config.num_heads * config.d_head, **wide)
        self.k, self.v = torch.zeros(rows, d_kv, **wide), torch.zeros(rows, d_kv, **wide)
        shares, splits = self.kv_splits.deferred_splits, self.kv_splits.num_splits
        self.a = torch.zeros(shares * rows, config.num_heads * config.d_head, **own)
        self.sums = torch.zeros(shares, rows, config.num_heads, **wide)
        self.u = torch.zeros(rows, config.d_ff, **own)
        partial = rows * config.num_heads * splits * (config.d_head + 2)
        self.partial = torch.zeros(partial, **wide)
        self.tickets = torch.zeros(rows * config.num_heads, dtype=torch.int32, device=device)
        self.best = torch.zeros(rows * GREEDY_PARTS * 2, **wide)
        # They need triton: only here.
        from scratchlm.accelerate.kernels.triton import argmax, decode, decode_attention

        self.kernels, self.attention = decode, decode_attention
        self.argmax = argmax.argmax
        self.interpreted = not isinstance(decode.embed, decode.triton.JITFunction)  # in tests
        self.pdl = pdl and not self.interpreted
        self.has_clusters = (
            kv_splits is None and weight.is_cuda and hopper.is_hopper(weight.get_device())
        )

    def run(self) -> None:
        """Read `ids` into the cache at `lengths`; write `logits`, and the next ids if greedy."""
        self._embed()
        for layer in self.layers:
            self._layer(layer)
        self._project_few(
            "head", self.x[0], self.model.ln_final, [self._head()], [self.logits], advance=True
        )
        if self.greedy:
            self._choose_argmax()

    def weight_addresses(self) -> tuple[int, ...]:
        """Return addresses that change when the model is moved, cast or filled anew."""
        return tuple(module.weight.data_ptr() for module in self._watched)

    def _head(self) -> Any:
        return self.model.lm_head

    # Launching

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *args: Any,
        warps: int = 4,
        first: bool = False,
        **more: int,
    ) -> None:
        options: dict[str, Any] = {}
        if not self.interpreted:
            # A kernel that starts before the one ahead has ended; the first of a step does not,
            # so that it sees all that anybody wrote before the step.
            options = {"num_warps": warps, "launch_pdl": self.pdl and not first, **more}
        kernel[grid](*args, **options)

    def _embed(self) -> None:
        config, positions = self.model.config, self.model.position_embeddings
        table: Tensor | None = None
        if isinstance(positions, SinusoidalPositions):
            table = positions.table
        elif positions is not None:
            table = positions.weight
        block = min(1024, power_of_two(config.d_model))
        self._launch(
            self.kernels.embed,
            (self.rows, -(-config.d_model // block)),
            self.ids,
            self.model.token_embeddings.weight,
            table,
            self.lengths,
            self.x[0],
            config.vocab_size,
            config.d_model,
            block,
            self.pdl,
            first=True,
        )

    def _choose_argmax(self) -> None:
        vocab = self.model.config.vocab_size
        part = -(-vocab // GREEDY_PARTS)
        self._launch(
            self.argmax,
            (GREEDY_PARTS, self.rows),
            self.logits,
            self.best,
            self.tickets,
            self.ids,
            self.previous_ids,
            vocab,
            part,
            power_of_two(part),
            GREEDY_PARTS,
            self.pdl,
        )

    def _layer(self, layer: Any) -> None:
        attn, ffn, (x, y) = layer.attn, layer.ffn, self.x
        projections, shares = [attn.q_proj, attn.k_proj, attn.v_proj], 1
        if self._supports_clusters(attn, layer.ln1):
            self._qkv_attention(x, layer.ln1, projections, attn)
        else:
            self._project_few("qkv", x, layer.ln1, projections, [self.q, self.k, self.v])
            self._attend(attn, self.q, self.k, self.v)
            shares = self.kv_splits.deferred_splits
        self._project_add("out", x, self.a, attn.output_proj, y, shares)
        self._norm_gate(y, layer.ln2, ffn)
        self._project_add("down", y, self.u, ffn.w2, x)

    def _supports_clusters(self, attn: MultiHeadSelfAttention, norm: nn.Module) -> bool:
        """Whether `decode_qkv_attention` is for this layer, and for rows of this length."""
        plain = isinstance(norm, RMSNorm) and attn.q_proj.bias is None and attn.q_norm is None
        small = attn.num_heads <= MAX_CLUSTERS and attn.q_proj.weight.shape[1] <= CLUSTER_WIDTH
        return (
            (self.has_clusters and plain and small)
            and (self.rows == 1 and self.dtype.itemsize == 2 and self.max_kv_len <= CLUSTER_KEYS)
            and (attn.d_head == CLUSTER_HEAD and attn.num_kv_heads == attn.num_heads)
            and attn.sliding_window is None
        )

    def _qkv_attention(
        self, x: Tensor, norm: nn.Module, linears: Sequence[Linear], attn: MultiHeadSelfAttention
    ) -> None:
        from scratchlm.accelerate.kernels.hopper import (
            decode_qkv_attention as kernel,  # Gluon: only on Hopper
        )

        cache, width = self.cache, linears[0].weight.shape[1]
        _, gain, _, eps = self._norm(norm)
        rope, cos, sin = self._rotation(attn)
        self._launch(
            kernel.decode_qkv_attention,
            (attn.num_heads,),
            *(x, gain, *(linear.weight for linear in linears), cos, sin),
            *(cache.keys[attn.layer], cache.values[attn.layer], self.lengths, self.tables, self.a),
            *(width, power_of_two(width), attn.num_heads, self.page_size),
            kernel.keys_per_warp(self.max_kv_len),
            *(eps, rope, attn.d_head**-0.5, self.pdl),
            warps=kernel.WARPS,
            num_ctas=kernel.CTAS,
        )

    def _matrix(self, linear: Any) -> tuple[Tensor, Tensor | None]:
        """Return a layer's matrix as the kernels read it, and a scale for each of its rows."""
        return linear.weight, None

    def _tile(self, kernel: str, rows: int, width: int) -> Tile:
        size = self.dtype.itemsize
        return self.tiles.get(kernel) or choose_tile(kernel, rows, width, size)

    def _project_few(
        self,
        kernel: str,
        x: Tensor,
        norm: nn.Module,
        linears: Sequence[Embedding | Linear],
        outputs: list[Tensor],
        advance: bool = False,
    ) -> None:
        weights, scales = map(list, zip(*map(self._matrix, linears), strict=True))
        biases = [getattr(linear, "bias", None) for linear in linears]
        sizes, width = [len(weight) for weight in weights], weights[0].shape[1]
        tile = self._tile(kernel, sum(sizes), width)
        blocks = sum(-(-size // tile.rows) for size in sizes)
        absent = 3 - len(linears)
        kind, gain, shift, eps = self._norm(norm)
        self._launch(
            self.kernels.norm_project,
            (-(-blocks // tile.tiles),),
            *(x, gain, shift),
            *(*weights, *[None] * absent),
            *(*biases, *[None] * absent),
            *(*scales, *[None] * absent),
            *(*outputs, *[None] * absent),
            self.lengths if advance else None,
            *(sizes + [0] * absent),
            width,
            eps,
            kind,
            biases[0] is not None,
            self.rows,
            tile.rows,
            power_of_two(width),
            tile.tiles,
            self.pdl,
            warps=tile.warps,
        )

    def _project_add(
        self,
        kernel: str,
        x: Tensor,
        v: Tensor,
        linear: Linear,
        y: Tensor,
        shares: int = 1,
    ) -> None:
        weight, scales = self._matrix(linear)
        rows, width = weight.shape
        tile = self._tile(kernel, rows, width)
        parts, part = tile.k_chunks(width)
        self._launch(
            self.kernels.project_add,
            (-(-rows // (tile.rows * tile.tiles)),),
            *(x, v, self.sums if shares > 1 else None, weight, linear.bias, scales, y),
            *(rows, width, self.model.config.d_head, shares),
            *(self.rows, tile.rows, part, parts, tile.tiles, self.pdl),
            warps=tile.warps,
        )

    def _norm_gate(self, x: Tensor, norm: nn.Module, ffn: SwiGLU | MLP) -> None:
        w1, s1 = self._matrix(ffn.w1)
        w3, s3 = self._matrix(ffn.w3) if isinstance(ffn, SwiGLU) else (None, None)
        b3 = ffn.w3.bias if isinstance(ffn, SwiGLU) else None
        rows, width = w1.shape
        tile = self._tile("gate" if isinstance(ffn, SwiGLU) else "up", rows, width)
        kind, gain, shift, eps = self._norm(norm)
        self._launch(
            self.kernels.norm_up,
            (-(-rows // (tile.rows * tile.tiles)),),
            *(x, gain, shift, w1, w3, ffn.w1.bias, b3, s1, s3, self.u),
            *(rows, width, eps, kind, self._activation(ffn), self.rows),
            *(tile.rows, power_of_two(width), tile.tiles, self.pdl),
            warps=tile.warps,
        )

    def _activation(self, ffn: SwiGLU | MLP) -> int:
        name = ffn.activation if isinstance(ffn, MLP) else "silu"
        return self.kernels.ACTIVATIONS[name]

    def _norm(self, norm: nn.Module) -> tuple[int, Tensor | None, Tensor | None, float]:
        if isinstance(norm, RMSNorm):
            return self.kernels.RMS_NORM, norm.weight, None, norm.eps
        if isinstance(norm, LayerNorm):
            return self.kernels.LAYER_NORM, norm.weight, norm.bias, norm.eps
        return self.kernels.NO_NORM, None, None, 0.0

    def _rotation(self, attn: MultiHeadSelfAttention) -> tuple[int, Tensor | None, Tensor | None]:
        if attn.rope is None:
            return self.attention.NO_ROPE, None, None
        halves = attn.rope.layout == "half"
        rope = self.attention.HALF if halves else self.attention.INTERLEAVED
        return rope, attn.rope.cos, attn.rope.sin

    def _attend(self, attn: MultiHeadSelfAttention, q: Tensor, k: Tensor, v: Tensor) -> None:
        cache, kv_splits = self.cache, self.kv_splits
        q_norm, k_norm = attn.q_norm, attn.k_norm
        rope, cos, sin = self._rotation(attn)
        self._launch(
            self.attention.decode_attention,
            (attn.num_heads, kv_splits.num_splits, self.rows),
            *(q, k, v),
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            *(cos, sin, cache.keys[attn.layer], cache.values[attn.layer]),
            *(self.lengths, self.tables),
            *(
                self.partial,
                self.tickets,
                self.a,
                self.sums if kv_splits.deferred_combine else None,
            ),
            *(self.page_size, self.tables.shape[1], self.max_kv_len),
            *(attn.num_heads, attn.num_kv_heads),
            *(attn.d_head, power_of_two(attn.d_head), kv_splits.block_keys),
            *(kv_splits.num_splits, power_of_two(kv_splits.num_splits)),
            0.0 if q_norm is None else q_norm.eps,
            q_norm is not None,
            rope,
            attn.sliding_window or 0,
            attn.d_head**-0.5,
            self.pdl,
            warps=kv_splits.warps,
        )
