"""A step of a batch, and one of a quantised model, through their kernels: the model's numbers."""

import pytest
import torch

from scratchlm.accelerate import gpu_decode_quantized
from scratchlm.accelerate.gpu_decode_batch import (
    GEMM_TILES,
    GemmTile,
    GPUBatchStep,
    batch_kv_splits,
)
from scratchlm.accelerate.gpu_decode_quantized import (
    GPUQuantizedStep,
    blocks_tile,
    row_scale_tile,
    why_not_quantized,
)
from scratchlm.accelerate.kernels.triton.decode_tiles import Tile, power_of_two
from scratchlm.paged import PagedCache
from scratchlm.quantization.convert import quantize_model
from scratchlm.quantization.layers import QuantizedLayer
from scratchlm.quantization.layouts import PLANES
from tiny_models import FAMILIES, build

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PAGE, PAGES = 16, 2


def decoded(step, ids):
    """Read tokens (rows, count) one after the other; return the logits after the last."""
    rows = len(ids)
    order = torch.randperm(rows * PAGES, generator=torch.Generator().manual_seed(1))
    step.tables.copy_(order.view(rows, PAGES))
    with torch.inference_mode():
        for i, tokens in enumerate(ids.T):
            step.ids.copy_(tokens)
            step.lengths.fill_(i)
            step.run()
    return step.logits.float()


def pages_of(model, rows):
    dtype = model.token_embeddings.weight.dtype
    return PagedCache(model.config, rows * PAGES, PAGE, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize(
    ("family", "rows"), [("llama", 5), ("qwen3", 17), ("gpt2", 5), ("mistral", 2)]
)
def test_a_batch_has_the_models_numbers(family, rows):
    config = FAMILIES[family].replace(num_layers=1, context_length=PAGE * PAGES)
    model = build(config, dtype=torch.float32).to(DEVICE)
    tiles = {kernel: GemmTile(16, 16, 4, 2) for kernel in ("qkv", "out", "up", "down")}
    step = GPUBatchStep(
        model, pages_of(model, rows), rows=rows, max_kv_len=PAGE * PAGES, gemm_tiles=tiles
    )
    ids = torch.randint(config.vocab_size, (rows, 2), generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        expected = model(ids.to(DEVICE))[:, -1]
    torch.testing.assert_close(decoded(step, ids), expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("to", ["int8", "fp8", "q8_0", "q4_0", "q4_k"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_quantised_row_has_the_models_numbers(family, to, monkeypatch):
    # The interpreter takes milliseconds for each program; 16 rows, then others, some too many.
    monkeypatch.setattr(gpu_decode_quantized, "row_scale_tile", lambda *_: Tile(16, 4, 3))
    monkeypatch.setattr(gpu_decode_quantized, "blocks_tile", lambda *_: Tile(16, 4, 3))
    width = 256 if to == "q4_k" else 64
    sizes = {"d_model": width, "d_ff": width, "vocab_size": 32, "num_layers": 1}
    config = FAMILIES[family].replace(context_length=PAGE * PAGES, **sizes)
    model = build(config, dtype=torch.float32).to(DEVICE).requires_grad_(False)
    quantize_model(model, to)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    assert to in {layer.format.name for layer in layers}
    ids = torch.randint(32, (1, 2), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with torch.inference_mode():
        expected = model(ids)[:, -1]
    assert why_not_quantized(model) == "layer 0 with matrices in None"  # laid out otherwise
    for layer in layers:
        layer.lay_out(PLANES)
    assert why_not_quantized(model) is None
    got = decoded(GPUQuantizedStep(model, pages_of(model, 1), max_kv_len=PAGE * PAGES), ids)
    # Where a number lies between two whole ones, rounding may go either way.
    atol = 2e-2 if to.startswith("q") else 2e-5
    torch.testing.assert_close(got, expected, atol=atol, rtol=2e-4)


def test_sizes_are_those_the_kernels_take():
    for tile in GEMM_TILES.values():
        for width in (768, 1024, 1600, 2752, 6400):
            piece = tile.piece(4096, width, 2)
            assert piece % 16 == 0
            assert piece in (0, tile.block_n * width * 2 // (32 * tile.warps))
        assert tile.piece(tile.block_n - 1, 1024, 2) == 0  # it would read beyond the matrix
    for rows, heads, d_head, keys in ((8, 16, 64, 512), (32, 12, 80, 4096), (5, 2, 6, 16)):
        splits = batch_kv_splits(keys, heads, rows, d_head)
        assert splits.block_keys == power_of_two(splits.block_keys)
        assert 1 <= splits.num_splits <= 64
        assert not splits.deferred_combine
    assert blocks_tile(6400, 1600, 1, 32) == Tile(8, 4, 3)
    assert blocks_tile(100, 1600, 1, 32) == Tile(1, 4)
    assert row_scale_tile("gate", 11_008, 4096) == Tile(2, 4, 8)
    assert row_scale_tile("down", 4096, 11_008) == Tile(2, 8, 4, quarters=3)
