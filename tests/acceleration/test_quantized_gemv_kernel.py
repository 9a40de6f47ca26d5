"""Quantised products of few rows on a GPU: Triton's kernels, interpreted where there is none."""

import pytest
import torch

from acceleration.as_gpu import DEVICE
from acceleration.gpu import compiled_lines
from acceleration.test_gpu_runner import Pool, expected_after, texts
from quantization.test_quantize_model import model_of
from scratchlm import ModelConfig, acceleration
from scratchlm import config as c
from scratchlm.accelerate import decoding, quantized
from scratchlm.accelerate.decoding import why_not_layout
from scratchlm.accelerate.kernels.triton import quantized_gemv as kernels
from scratchlm.accelerate.recorded_step import RecordedStep
from scratchlm.ops.quantized import quantize, quantize_activations, quantized_linear
from scratchlm.paged import PagedCache
from scratchlm.quantization.convert import quantize_model
from scratchlm.quantization.layers import QuantizedLayer
from scratchlm.quantization.layouts import PLANES, to_layout

FORMATS = ("q8_0", "q4_0", "q4_k", "q6_k", "int8", "fp8")


def matrix(name, width=11, depth=768):
    weight = torch.randn(width, depth, generator=torch.Generator().manual_seed(0)) * 0.05
    packed = quantize(weight, name).to(DEVICE)
    return packed, kernels.planes_of(to_layout(packed, name, PLANES), name, width)


def rows_of(count, depth=768, dtype=torch.float32):
    x = torch.randn(count, depth, generator=torch.Generator().manual_seed(1))
    x[0, 32:64] = 0
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_the_formula_s(name, bias):
    packed, planes = matrix(name)
    x, beside = rows_of(2), torch.arange(11.0, device=DEVICE) if bias else None
    expected = quantized_linear(x.double(), packed, name, beside)
    found = kernels.quantized_gemv(planes, name, x, beside)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["q4_0", "int8"])
def test_low_precision_rows_are_widened(name):
    packed, planes = matrix(name)
    x = rows_of(1, dtype=torch.float16)
    found = kernels.quantized_gemv(planes, name, x)
    assert found.dtype == torch.float16
    expected = quantized_linear(x.float(), packed, name)
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=2e-3)


def test_rows_are_rounded_as_the_formula_says():
    x = rows_of(3)
    words, scales = kernels.round_rows(x)
    q, expected = quantize_activations(x)
    assert torch.equal(words.view(torch.int8), q)
    torch.testing.assert_close(scales, expected)
    x[1, 5] = torch.nan
    assert kernels.round_rows(x)[1][1, 0].isnan()


def test_kernels_compile_for_a_gpu_and_multiply_four_bytes_at_once():
    """On a machine without one: 16-byte loads of weights, and dp4a where numbers are whole."""
    lines = {name: counts for name, *counts in map(str.split, compiled_lines("compile_gemv.py"))}
    assert set(lines) == set(FORMATS)
    for name, (loads, dots) in lines.items():
        assert int(loads) > 0, name
        assert (int(dots) > 0) == name.startswith("q"), name


@pytest.mark.parametrize("to", ["q8_0", "q4_k", "int8"])
def test_a_model_on_a_gpu_decodes_by_the_kernels(to, monkeypatch):
    """Few rows by kernels, many with the wide matrix: the same logits, to rounding."""
    config = ModelConfig(64, 16, 256, 1, 4, d_ff=256, tie_embeddings=to == "q8_0")
    model, ids = model_of(config), torch.tensor([[5, 7]])
    quantize_model(model, to)
    expected = model(ids)
    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", 256)  # few programs: each is slow, interpreted
    monkeypatch.setattr(quantized, "native", None)
    monkeypatch.setattr(quantized, "launches_for", lambda x: True)
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer):
            layer.lay_out(quantized._layout_for(layer, torch.device("cuda")))
            assert layer.layout == PLANES
    acceleration.accelerate(model)
    calls = []
    monkeypatch.setattr(
        kernels, "round_rows", lambda x, own=kernels.round_rows: calls.append(len(x)) or own(x)
    )
    found = model.to(DEVICE)(ids.to(DEVICE)).cpu()
    assert (found - expected).norm() < 0.01 * expected.norm()
    assert to == "int8" or set(calls) == {2}
    monkeypatch.setattr(quantized, "FEW_ROWS", 1)
    calls.clear()
    again = model(ids.to(DEVICE)).cpu()
    assert (again - expected).norm() < 0.01 * expected.norm()
    assert not calls


# The runner, whose steps are recorded on a GPU


def on_planes(to, monkeypatch, width=64, **more):
    """Return a quantised model as a GPU has it."""
    model = model_of(ModelConfig(64, 96, width, 1, 4, d_ff=width, **more))
    quantize_model(model, to)
    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", 256)
    monkeypatch.setattr(quantized, "launches_for", lambda x: True)
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer):
            layer.lay_out(quantized._layout_for(layer, torch.device("cuda")))
    return acceleration.accelerate(model).to(DEVICE)


BIASED = {
    "ffn": c.MLP("gelu", bias=True),
    "norm": c.LayerNorm(),
    "positions": c.Learned(),
    "attention": c.Attention(bias="all"),
}


@pytest.mark.parametrize(
    ("to", "more"),
    [("q4_k_m", {"width": 256}), ("q8_0", {"tie_embeddings": True}), ("int8", BIASED)],
    ids=["q4_k_m", "q8_0 tied", "int8 biased"],
)
def test_the_gpu_runner_reads_quantised_models(to, more, monkeypatch):
    """Prompts by the wide matrix, decoding rows by the kernels: the model's numbers."""
    model = on_planes(to, monkeypatch, **more)
    assert why_not_layout(model, PLANES) is None
    products, gemv = [], kernels.quantized_gemv
    monkeypatch.setattr(
        kernels, "quantized_gemv", lambda *a: products.append(len(a[2])) or gemv(*a)
    )
    pool, (one, two) = Pool(model, slots=3), texts(2, 15, vocab=64)
    pool.read((0, one[:-1], 0), (1, two[:-1], 0))
    assert set(products) == {2}  # of the head alone
    products.clear()
    found = pool.decode((0, one[-1], len(one) - 1), (1, two[-1], len(two) - 1))
    assert len(products) == (6 if "ffn" in more else 7) + 1
    for slot, tokens in enumerate((one, two)):
        logits, kept = expected_after(model, tokens)
        assert (found[slot] - logits).norm() < 0.01 * logits.norm()
        assert (pool.kept(slot, len(tokens)) - kept).norm() < 0.01 * kept.norm()


def test_the_gpu_runner_follows_bytes_that_are_moved(monkeypatch):
    model = on_planes("q8_0", monkeypatch)
    pool = Pool(model)
    before = pool.decode((0, 5, 0))
    model.lm_head.stored = model.lm_head.stored.clone()
    model.lm_head.stored[:64] ^= 0x80
    assert not torch.equal(pool.decode((0, 5, 0)), before)
    assert pool.runner._bound == pool.runner._addresses()


def test_formats_without_planes_and_exact_sums_are_left_to_the_model(monkeypatch):
    model = on_planes("nf4", monkeypatch)
    assert "in nf4, not in planes" in why_not_layout(model, PLANES)
    monkeypatch.setattr(decoding, "why_not_gpu", lambda model: None)
    monkeypatch.setattr(decoding, "why_not_cpu", lambda model: "taken for a GPU")
    wide = model_of(model.config).to(DEVICE)
    cache = PagedCache(model.config, 4, 16, device=DEVICE)
    for one, exact, taken in ((wide, True, True), (model, True, False), (model, False, True)):
        found = decoding.make_runner(one, cache, max_rows=2, exact=exact)
        assert (found is not None) == taken


def test_a_recording_that_fails_is_said_and_the_step_runs_kernel_by_kernel(monkeypatch):
    model = on_planes("q8_0", monkeypatch)
    pool, tried = Pool(model), []

    def fail(step, memory):
        tried.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RecordedStep, "record", fail)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    capture = pool.runner._capture

    def on_a_gpu(step):
        monkeypatch.setattr(pool.runner, "device", torch.device("cuda"))
        try:
            return capture(step)
        finally:
            monkeypatch.setattr(pool.runner, "device", torch.device(DEVICE))

    monkeypatch.setattr(pool.runner, "_capture", on_a_gpu)
    with pytest.warns(UserWarning, match="quantised steps run kernel by kernel: operation not"):
        pool.decode((0, 5, 0))
    found = pool.decode((0, 7, 1), (1, 3, 0))  # another bucket: not tried again, warned of once
    assert len(tried) == 1
    expected = expected_after(model, [5, 7])[0]
    assert (found[0] - expected).norm() < 0.01 * expected.norm()
