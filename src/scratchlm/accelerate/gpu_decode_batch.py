"""One decoding step of a batch of rows through a whole model, in five kernels per layer.

    step = GPUBatchStep(model, cache, rows=8, max_kv_len=1024)

What `gpu_decode.py` does for one row, with skinny GEMMs on tensor cores
(`kernels/triton/decode_gemm.py`) in place of matrix times vector. The LM head is torch's product:
it is large enough that nothing is lost between kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scratchlm.accelerate.gpu_decode import GPUStep
from scratchlm.accelerate.kernels.triton.decode_tiles import KVSplits, power_of_two
from scratchlm.model.layers import MLP, Embedding, Linear, SwiGLU
from scratchlm.model.transformer import TransformerLM
from scratchlm.paged import PagedCache

MAX_BATCH = 32  # larger ones gain nothing over torch's products
ATTENTION_PROGRAMS = 512


class GemmTile(NamedTuple):
    """One program: `block_n` rows of a matrix, `block_k` columns at a time."""

    block_n: int
    block_k: int
    warps: int
    stages: int

    def piece(self, matrix_rows: int, width: int, element_size: int) -> int:
        """Return the bytes of which a thread asks for in the L2 cache at once; 0: of none."""
        each, rest = divmod(self.block_n * width * element_size, 32 * self.warps)
        return each if rest == 0 and each % 16 == 0 and matrix_rows >= self.block_n else 0


# Measured on an H200 inside whole steps; (kernel, more than 16 rows) -> GemmTile
GEMM_TILES = {
    ("qkv", False): GemmTile(32, 256, 2, 5),
    ("out", False): GemmTile(32, 256, 2, 5),
    ("up", False): GemmTile(32, 128, 2, 5),
    ("down", False): GemmTile(32, 256, 4, 5),
    ("qkv", True): GemmTile(16, 128, 2, 5),
    ("out", True): GemmTile(16, 256, 2, 5),
    ("up", True): GemmTile(32, 128, 2, 5),
    ("down", True): GemmTile(32, 256, 4, 5),
}


def batch_kv_splits(max_kv_len: int, heads: int, rows: int, d_head: int) -> KVSplits:
    """Return how attention of a batch is split: small programs, about four on each SM."""
    keys = max(16, min(8192 // power_of_two(d_head), power_of_two(max_kv_len)))
    splits = max(1, ATTENTION_PROGRAMS // (heads * rows))
    return KVSplits(keys, 2, min(-(-max_kv_len // keys), splits, 64))


class GPUBatchStep(GPUStep):
    """The buffers and the launches of one step for `rows` rows of up to `max_kv_len` keys."""

    max_rows = MAX_BATCH

    def __init__(
        self,
        model: TransformerLM,
        cache: PagedCache,
        *,
        rows: int,
        max_kv_len: int,
        pdl: bool = False,
        greedy: bool = False,
        gemm_tiles: dict[str, GemmTile] | None = None,
        kv_splits: KVSplits | None = None,
    ) -> None:
        config = model.config
        kv_splits = kv_splits or batch_kv_splits(max_kv_len, config.num_heads, rows, config.d_head)
        super().__init__(
            *(model, cache),
            rows=rows,
            max_kv_len=max_kv_len,
            pdl=pdl,
            greedy=greedy,
            kv_splits=kv_splits,
        )
        from scratchlm.accelerate.kernels.triton import decode_batch, decode_gemm

        self.gemms, self.elementwise = decode_gemm, decode_batch
        self.gemm_tiles = dict(gemm_tiles or {})
        self.block_m = max(16, power_of_two(rows))
        self.h = torch.zeros(rows, config.d_model, dtype=self.dtype, device=self.ids.device)
        self.logits = torch.zeros(rows, config.vocab_size, dtype=self.dtype, device=self.ids.device)

    def run(self) -> None:
        """Read `ids` into the cache at `lengths`; write `logits`, and the next ids if greedy."""
        self._embed()
        for layer in self.layers:
            self._layer(layer)
        kind, gain, shift, eps = self._norm(self.model.ln_final)
        width = self.model.config.d_model
        self._launch(
            self.elementwise.add_norm,
            (self.rows,),
            *(self.x[0], None, gain, shift, self.h, width, eps, kind, power_of_two(width)),
            first=True,
        )
        torch.mm(self.h, self._head().weight.t(), out=self.logits)
        if self.greedy:
            self.lengths.add_(1)
            self._choose_argmax()

    def _gemm_tile(self, kernel: str) -> GemmTile:
        return self.gemm_tiles.get(kernel) or GEMM_TILES[kernel, self.rows > 16]

    def _sizes(self, tile: GemmTile, matrix_rows: int, width: int) -> tuple[Any, ...]:
        piece = tile.piece(matrix_rows, width, self.dtype.itemsize) if self.pdl else 0
        return (
            *(self.rows, self.block_m, tile.block_n, tile.block_k),
            *(piece, tile.stages, self.pdl),
        )

    def _project_few(
        self,
        kernel: str,
        x: Tensor,
        norm: nn.Module,
        linears: Sequence[Embedding | Linear],
        outputs: list[Tensor],
        advance: bool = False,
    ) -> None:
        weights = [linear.weight for linear in linears]
        biases = [getattr(linear, "bias", None) for linear in linears]
        sizes, width = [len(weight) for weight in weights], weights[0].shape[1]
        tile = self._gemm_tile(kernel)
        kind, gain, shift, eps = self._norm(norm)
        self._launch(
            self.gemms.norm_project_batch,
            (sum(-(-size // tile.block_n) for size in sizes),),
            *(x, gain, shift, *weights, *biases, *outputs, *sizes, width, eps, kind),
            *(biases[0] is not None, *self._sizes(tile, min(sizes), width)),
            warps=tile.warps,
        )

    def _project_add(
        self, kernel: str, x: Tensor, v: Tensor, linear: Linear, y: Tensor, shares: int = 1
    ) -> None:
        rows, width = linear.weight.shape
        tile = self._gemm_tile(kernel)
        self._launch(
            self.gemms.project_add_batch,
            (-(-rows // tile.block_n),),
            *(x, v, linear.weight, linear.bias, y, rows, width, *self._sizes(tile, rows, width)),
            warps=tile.warps,
        )

    def _norm_gate(self, x: Tensor, norm: nn.Module, ffn: SwiGLU | MLP) -> None:
        rows, width = ffn.w1.weight.shape
        tile = self._gemm_tile("up")
        kind, gain, shift, eps = self._norm(norm)
        w3, b3 = (ffn.w3.weight, ffn.w3.bias) if isinstance(ffn, SwiGLU) else (None, None)
        self._launch(
            self.gemms.norm_up_batch,
            (-(-rows // tile.block_n),),
            *(x, gain, shift, ffn.w1.weight, w3, ffn.w1.bias, b3, self.u),
            *(rows, width, eps, kind, self._activation(ffn), *self._sizes(tile, rows, width)),
            warps=tile.warps,
        )
