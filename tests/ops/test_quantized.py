"""Formats of few bits: bytes and values equal GGUF's, errors stay within half a step."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGUFType

from scratchlm.ops.quantized import (
    FORMATS,
    NF4_TABLE,
    dequantize,
    get_format,
    quantize,
    quantize_activations,
    quantized_linear,
)

GGUF = {
    "q8_0": GGUFType.Q8_0,
    "q4_0": GGUFType.Q4_0,
    "q4_k": GGUFType.Q4_K,
    "q6_k": GGUFType.Q6_K,
}


def weights(rows: int = 96, d_in: int = 768) -> torch.Tensor:
    """Draw rows of many sizes: zeros, outliers, all of one sign, one value, tiny and large."""
    w = torch.randn(rows, d_in, generator=torch.Generator().manual_seed(0)) * 0.02
    w[0] = 0
    w[1, ::50] *= 40
    w[2] = w[2].abs()
    w[3] = -w[3].abs()
    w[4] = 0.25
    w[5] *= 1e-6
    w[6] *= 1e4
    w[7, :32] = 0
    w[8, ::2], w[8, 1::2] = 0.5, -0.5  # a tie of the largest
    return w


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_bytes_equal_those_of_gguf(name: str) -> None:
    w = weights()
    expected = gguf.quants.quantize(w.numpy(), GGUF[name])
    assert np.array_equal(quantize(w, name).numpy(), expected)


@pytest.mark.parametrize("name", GGUF)
def test_any_bytes_stand_for_the_weights_gguf_reads(name: str) -> None:
    kind = FORMATS[name]
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (64, kind.bytes_per_row(512)), generator=generator)
    packed = packed.to(torch.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(packed.numpy(), GGUF[name])
    assert np.array_equal(dequantize(packed, name).numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_a_stored_matrix_is_stored_again_to_nearly_itself(name: str) -> None:
    w = weights()[9:]
    once = dequantize(quantize(w, name), name)
    twice = dequantize(quantize(once, name), name)
    bound = {"q4_k": 0.03, "q6_k": 0.01}.get(name, 1e-3)
    assert (once - twice).norm() <= bound * once.norm()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *(("q8_0", 7e-3), ("q6_k", 0.022), ("q4_k", 0.078), ("q4_0", 0.095)),
        *(("nf4", 0.097), ("int8", 0.012), ("fp8", 0.03)),
    ],
)
def test_the_error_of_normal_weights_is_as_the_bits_promise(name: str, error: float) -> None:
    w = torch.randn(64, 1024, generator=torch.Generator().manual_seed(2))
    found = (dequantize(quantize(w, name), name) - w).norm() / w.norm()
    assert 0.5 * error < found < error


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros_and_nothing_becomes_nan(name: str) -> None:
    found = dequantize(quantize(weights(), name), name)
    assert torch.isfinite(found).all()
    assert (found[0] == 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_per_row_are_those_of_the_bytes(name: str) -> None:
    packed = quantize(weights(), name)
    kind = FORMATS[name]
    assert packed.dtype == torch.uint8
    assert packed.shape == (96, kind.bytes_per_row(768))
    assert kind.weights_per_row(packed.shape[1]) == 768


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_one_row_of_any_width_is_read(name: str) -> None:
    packed = quantize(weights()[9:12, :37], name)
    whole = dequantize(packed, name)
    for i in range(3):  # rows of 41 bytes: none lies where a float32 may
        assert torch.equal(dequantize(packed[i : i + 1], name), whole[i : i + 1])


def test_more_bits_are_nearer() -> None:
    w = weights()[9:]
    errors = {name: (dequantize(quantize(w, name), name) - w).norm() for name in FORMATS}
    assert errors["q8_0"] < errors["q6_k"] < errors["q4_k"] < errors["q4_0"]


def llama_cpp_bytes(w: torch.Tensor, name: str) -> torch.Tensor:
    """Return what llama.cpp's own quantiser gives, out of a wheel that carries it."""
    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    library = next(Path(spec.submodule_search_locations[0]).glob("xllamacpp*.so"))
    chunk = ctypes.CDLL(str(library)).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    out = torch.empty(len(w), FORMATS[name].bytes_per_row(w.shape[1]), dtype=torch.uint8)
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (w, out)]
    sizes = [ctypes.c_int64(n) for n in (0, *w.shape)]
    assert chunk(int(GGUF[name]), *addresses, *sizes, None) == out.numel()
    return out


@pytest.mark.parametrize("name", GGUF)
def test_bytes_are_llama_cpps_or_nearer_to_the_weights(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(24, 512, generator=generator) * 0.02
    for w in (normal, normal**3 * 2500, normal.abs(), normal + 0.01):
        packed, expected = quantize(w, name), llama_cpp_bytes(w, name)
        if name in ("q8_0", "q4_0"):
            assert torch.equal(packed, expected)
            continue
        ours, theirs = ((dequantize(found, name) - w).norm() for found in (packed, expected))
        assert ours < 0.998 * theirs


def test_each_weight_takes_the_nearest_level_before_levels_are_stretched() -> None:
    w = weights()[9:20].unflatten(1, (-1, 32))
    found = dequantize(quantize(w.flatten(1), "q4_k"), "q4_k").unflatten(1, (-1, 32))
    to_every_level = (w[..., :, None] - found[..., None, :]).abs().amin(dim=-1)
    stretch = 0.02 * found.abs().amax(dim=-1, keepdim=True)
    assert ((w - found).abs() <= to_every_level + stretch).all()


def test_a_matrix_is_not_made_shorter_by_q4_k() -> None:
    """Plain least squares would make it shorter by the square of the error, half a percent."""
    w = weights()[9:].unflatten(1, (-1, 256))
    found = dequantize(quantize(w.flatten(1), "q4_k"), "q4_k").view_as(w)
    along = (w * found).sum(-1) / w.square().sum(-1)
    assert (along - 1).abs().max() < 2e-3
    assert (along.mean() - 1).abs() < 2e-4


def test_nf4_takes_the_nearest_quantile() -> None:
    w = weights()[9:20]
    scale = w.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True).half().float()
    levels = scale[..., None] * NF4_TABLE
    nearest = (w.unflatten(1, (-1, 64))[..., None] - levels).abs().argmin(-1)
    expected = (scale * NF4_TABLE[nearest]).flatten(1)
    torch.testing.assert_close(dequantize(quantize(w, "nf4"), "nf4"), expected)


def test_activations_are_rounded_to_the_nearest_of_255_steps() -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x[0, :32] = 0
    q, scale = quantize_activations(x.float())
    largest = x.unflatten(-1, (-1, 32)).abs().amax(-1)
    torch.testing.assert_close(scale.double(), largest / 127, rtol=1e-6, atol=0)
    wide = (q.unflatten(-1, (-1, 32)) * scale[..., None]).flatten(-2)
    assert ((wide - x).abs() <= 0.5001 * scale.repeat_interleave(32, -1)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_the_product_is_that_of_the_weights_and_activations_stored(name: str) -> None:
    w, generator = weights(32, 512)[9:], torch.Generator().manual_seed(4)
    x, bias = torch.randn(3, 512, generator=generator), torch.randn(23, generator=generator)
    packed = quantize(w, name)
    found = quantized_linear(x, packed, name, bias)
    wide = x.double()
    if FORMATS[name].int8_activations:
        q, scale = quantize_activations(x)
        wide = (q.double().unflatten(-1, (-1, 32)) * scale.double()[..., None]).flatten(-2)
    expected = wide @ dequantize(packed, name).double().T + bias
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(ValueError, match="q4_k takes rows of 256 weights; got 96"):
        quantize(torch.zeros(2, 96), "q4_k")
    with pytest.raises(ValueError, match="must be finite"):
        quantize(torch.full((2, 256), torch.nan), "q8_0")
    with pytest.raises(ValueError, match="exceeds float16"):
        quantize(torch.full((2, 256), 1e30), "q8_0")
    with pytest.raises(ValueError, match="a format is one of q8_0, q4_0"):
        get_format("q5_1")
