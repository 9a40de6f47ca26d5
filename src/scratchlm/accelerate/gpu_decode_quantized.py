"""One decoding step of one row through a quantised model, in five kernels per layer.

    step = GPUQuantizedStep(model, cache, max_kv_len=1024)

What `gpu_decode.py` does, reading the bytes themselves: int8 and fp8 by the same kernels and one
scale a row (`kernels/triton/decode.py`), blocks of 32 by their own (`decode_quantized.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scratchlm.accelerate.gpu_decode import GPUStep
from scratchlm.accelerate.kernels.triton.decode_tiles import (
    TARGET_PROGRAMS,
    Tile,
    kv_splits_for,
    power_of_two,
)
from scratchlm.model.attention import MultiHeadSelfAttention
from scratchlm.model.layers import MLP, SinusoidalPositions, SwiGLU, TiedHead
from scratchlm.model.transformer import TransformerLM
from scratchlm.paged import PagedCache
from scratchlm.quantization.layers import QuantizedEmbedding, QuantizedLayer
from scratchlm.quantization.layouts import PLANES

ROW_SCALE = ("int8", "fp8")
BLOCKS = ("q8_0", "q4_0", "q4_k")


def why_not_quantized(model: TransformerLM) -> str | None:
    """Return which layer `GPUQuantizedStep` has no kernel for, or None."""
    for i, layer in enumerate(model.layers):
        attn: Any = layer.attn
        ffn: Any = layer.ffn
        groups: list[list[Any]] = [
            [attn.q_proj, attn.k_proj, attn.v_proj],
            [attn.output_proj],
            [ffn.w1, ffn.w3] if isinstance(ffn, SwiGLU) else [ffn.w1],
            [ffn.w2],
        ]
        for linears in groups:
            formats = {_format(linear) for linear in linears}
            if len(formats) > 1 or not formats <= {*ROW_SCALE, *BLOCKS}:
                return f"layer {i} with matrices in {', '.join(sorted(map(str, formats)))}"
    return None


def _format(module: Any) -> Any:
    is_read = isinstance(module, QuantizedLayer) and module.layout == PLANES
    return module.format.name if is_read else None


def persistent_tile(rows: int, loads_per_row: int, warps: int, programs: int) -> Tile:
    """Return the tile for `rows` rows of so many loads of 16 bytes a thread.

    A thread should have about 8 loads on their way, and there should be few programs on each SM, as
    each reads and rounds the vector anew: they take what is left one tile after the other.
    """
    block = 1
    while 2 * block * loads_per_row <= 8 and rows // (2 * block) >= TARGET_PROGRAMS:
        block *= 2
    return Tile(block, warps, max(1, min(8, round(rows / block / programs))))


def blocks_tile(rows: int, width: int, matrices: int, unit: int) -> Tile:
    """Return the tile of a program for `matrices` of `rows` rows, `unit` weights in 16 bytes."""
    units = power_of_two(width // unit)
    warps = 4 if units <= 256 else 8
    loads = max(1, matrices * units // (32 * warps))
    return persistent_tile(rows, loads, warps, TARGET_PROGRAMS)


def row_scale_tile(kernel: str, rows: int, width: int) -> Tile:
    """Return the tile for matrices of one byte a weight, one scale a row."""
    padded = power_of_two(width)
    warps = 4 if padded <= 4096 else 8
    loads = max(1, (2 if kernel == "gate" else 1) * padded // (512 * warps))
    tile = persistent_tile(rows, loads, warps, 2 * TARGET_PROGRAMS)
    fits_three_quarters = kernel == "down" and 4 * width <= 3 * padded
    return tile._replace(quarters=3) if fits_three_quarters else tile


class GPUQuantizedStep(GPUStep):
    """The buffers and the launches of one step of one row of up to `max_kv_len` keys."""

    max_rows = 1

    def __init__(
        self, model: TransformerLM, cache: PagedCache, *, max_kv_len: int, pdl: bool = False
    ) -> None:
        reason = why_not_quantized(model)
        if reason is not None:
            raise ValueError(f"the quantised GPU decoder does not take {reason}")
        config = model.config
        splits = kv_splits_for(max_kv_len, config.num_heads, 1, config.d_head)
        layers: list[Any] = list(model.layers)
        if any(_format(layer.attn.output_proj) in BLOCKS for layer in layers):
            splits = splits._replace(deferred_combine=False)
        super().__init__(model, cache, rows=1, max_kv_len=max_kv_len, pdl=pdl, kv_splits=splits)
        from scratchlm.accelerate.kernels.triton import decode_batch, decode_quantized

        self.blocks, self.elementwise = decode_quantized, decode_batch
        self.h = torch.zeros(1, config.d_model, dtype=self.dtype, device=self.ids.device)
        self._planes: dict[int, list[Tensor]] = {}

    def run(self) -> None:
        """Read `ids` into the cache at `lengths`; write `logits`."""
        self._embed()
        for layer in self.layers:
            self._layer(layer)
        head: Any = self.model.lm_head
        table = head.tied_to[0] if isinstance(head, TiedHead) else head
        if _format(table) in (*ROW_SCALE, *BLOCKS):
            self._project_few("head", self.x[0], self.model.ln_final, [table], [self.logits])
            return
        kind, gain, shift, eps = self._norm(self.model.ln_final)
        width = self.model.config.d_model
        self._launch(
            self.elementwise.add_norm,
            (1,),
            *(self.x[0], None, gain, shift, self.h, width, eps, kind, power_of_two(width)),
            first=True,
        )
        self.logits.copy_(head(self.h))

    def _embed(self) -> None:
        table: Any = self.model.token_embeddings
        if not isinstance(table, QuantizedEmbedding):
            super()._embed()
            return
        x, positions = table(self.ids).float(), self.model.position_embeddings
        if positions is not None:
            is_table = isinstance(positions, SinusoidalPositions)
            vectors: Any = positions.table if is_table else positions.weight
            x = x + vectors[self.lengths.clamp(min=0)]
        self.x[0].copy_(x)

    def _supports_clusters(self, attn: MultiHeadSelfAttention, norm: nn.Module) -> bool:
        return False

    def _of(self, linear: Any) -> list[Tensor]:
        """Return the planes of a layer."""
        from scratchlm.accelerate.kernels.triton.quantized_gemv import planes_of

        found = self._planes.get(id(linear))
        if found is None:
            found = planes_of(linear.stored, linear.format.name, linear.shape[0])
            self._planes[id(linear)] = found
        return found

    def _matrix(self, linear: Any) -> tuple[Tensor, Tensor | None]:
        weight, scales, *_ = self._of(linear)
        return weight, scales

    def _blocks_sizes(
        self, linear: Any, rows: int, matrices: int = 1
    ) -> tuple[Tile, tuple[Any, ...]]:
        name, width = linear.format.name, linear.shape[1]
        tile = blocks_tile(rows, width, matrices, self.blocks.UNIT[name])
        groups = max(2, power_of_two(width // 32))
        sizes = (self.blocks.FORMATS[name], tile.rows, groups, tile.tiles)
        return tile, (*sizes, not self.interpreted, self.pdl)

    def _project_few(
        self,
        kernel: str,
        x: Tensor,
        norm: nn.Module,
        linears: Sequence[Any],
        outputs: list[Tensor],
        advance: bool = False,
    ) -> None:
        if linears[0].format.name in ROW_SCALE:
            super()._project_few(kernel, x, norm, linears, outputs)
            return
        sizes, width = [linear.shape[0] for linear in linears], linears[0].shape[1]
        kind, gain, shift, eps = self._norm(norm)
        absent = [None] * (3 - len(linears))
        planes = [self._of(linear) for linear in linears]
        biases = [getattr(linear, "bias", None) for linear in linears] + absent
        weights, scales = ([plane[i] for plane in planes] + absent for i in (0, 1))
        tile, rest = self._blocks_sizes(linears[0], sum(sizes))
        packed = [plane[2] if len(plane) > 2 else None for plane in planes] + absent
        self._launch(
            self.blocks.norm_project_blocks,
            (-(-sum(-(-size // tile.rows) for size in sizes) // tile.tiles),),
            *(x, gain, shift, *weights, *scales, *packed, *biases, *outputs, *absent),
            *(*sizes, *[0] * len(absent), width, eps, kind, *rest),
            warps=tile.warps,
        )

    def _project_add(
        self, kernel: str, x: Tensor, v: Tensor, linear: Any, y: Tensor, shares: int = 1
    ) -> None:
        if linear.format.name in ROW_SCALE:
            super()._project_add(kernel, x, v, linear, y, shares)
            return
        (rows, width), (weight, scales, *packed) = linear.shape, self._of(linear)
        tile, rest = self._blocks_sizes(linear, rows)
        self._launch(
            self.blocks.project_add_blocks,
            (-(-rows // (tile.rows * tile.tiles)),),
            *(x, v, weight, scales, packed[0] if packed else None, linear.bias, y),
            *(rows, width, *rest),
            warps=tile.warps,
        )

    def _norm_gate(self, x: Tensor, norm: nn.Module, ffn: SwiGLU | MLP) -> None:
        w1: Any = ffn.w1
        if w1.format.name in ROW_SCALE:
            super()._norm_gate(x, norm, ffn)
            return
        w3: Any = ffn.w3 if isinstance(ffn, SwiGLU) else None
        (rows, width), (weight1, scales1, *packed1) = w1.shape, self._of(w1)
        weight3, scales3, *packed3 = self._of(w3) if w3 is not None else (None, None)
        kind, gain, shift, eps = self._norm(norm)
        biases = w1.bias, None if w3 is None else w3.bias
        tile, rest = self._blocks_sizes(w1, rows, 1 if w3 is None else 2)
        packed = (packed1[0] if packed1 else None), (packed3[0] if packed3 else None)
        self._launch(
            self.blocks.norm_up_blocks,
            (-(-rows // (tile.rows * tile.tiles)),),
            *(x, gain, shift, weight1, weight3, scales1, scales3, *packed, *biases, self.u),
            *(rows, width, eps, kind, self._activation(ffn), *rest),
            warps=tile.warps,
        )

    def _tile(self, kernel: str, rows: int, width: int) -> Tile:
        return row_scale_tile(kernel, rows, width)
