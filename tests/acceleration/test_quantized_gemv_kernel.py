"""Quantised products of few rows on a GPU: Triton's kernels, interpreted where there is none."""

import pytest
import torch

from acceleration.as_gpu import DEVICE
from acceleration.gpu import compiled_lines
from quantization.test_quantize_model import model_of
from scratchlm import ModelConfig, acceleration
from scratchlm.accelerate import quantized
from scratchlm.accelerate.kernels.triton import quantized_gemv as kernels
from scratchlm.ops.quantized import quantize, quantize_activations, quantized_linear
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
    monkeypatch.setattr(kernels, "ROWS_AT_ONCE", 64)  # few programs: each is slow, interpreted
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
