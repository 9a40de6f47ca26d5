"""Products with quantised matrices in C++: the formula's numbers, whatever is computed beside them.

One product is compared with the formula to rounding. Whole steps of the CPU runner are compared to
the bit with themselves in other company; with the model only roughly, because a last bit may decide
to which side an activation is rounded.
"""

import ctypes
from functools import cache

import pytest
import torch

from acceleration.test_cpu_runner import Pool, in_chunks, prompt
from quantization.test_quantize_model import model_of
from scratchlm import ModelConfig, acceleration, generate
from scratchlm import config as c
from scratchlm.accelerate import explain, plain, quantized
from scratchlm.accelerate.decoding import why_not_runner
from scratchlm.accelerate.quantized import (
    CPU_FORMATS,
    SOURCE,
    AcceleratedQuantizedExpertLinear,
    AcceleratedQuantizedLinear,
)
from scratchlm.ops import get_ops, native
from scratchlm.ops.quantized import quantize, quantized_linear
from scratchlm.quantization.convert import quantize_model
from scratchlm.quantization.layouts import PANELS, ROWS

SIZES = {"vocab_size": 301, "context_length": 96, "d_model": 256, "num_heads": 8, "d_ff": 512}
SHAPES = {
    "gated": ModelConfig(**SIZES, num_layers=2, num_kv_heads=2),
    "tied": ModelConfig(**SIZES, num_layers=2, tie_embeddings=True),
    "biased": ModelConfig(
        **SIZES,
        num_layers=1,
        ffn=c.MLP("gelu", bias=True),
        norm=c.LayerNorm(),
        positions=c.Learned(),
        attention=c.Attention(bias="all"),
    ),
    "experts": ModelConfig(**{**SIZES, "d_ff": 256}, num_layers=2, ffn=c.MoE(5, 2)),
    "some wide": ModelConfig(**{**SIZES, "d_ff": 100}, num_layers=1),
}


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def layer_of(name, width=75, depth=512, bias=False):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: threads would only wait for each other
    made = _layer_of(name, width, depth, bias)
    torch.set_num_threads(threads)
    return made


@cache
def _layer_of(name, width, depth, bias):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(width, depth, generator=generator) * 0.02
    weight[0, ::40] *= 30
    beside = torch.nn.Parameter(torch.randn(width, generator=generator)) if bias else None
    packed = quantize(weight, name)
    layer = AcceleratedQuantizedLinear(
        packed, name, beside, dtype=torch.float32, ops=get_ops("fast")
    )
    layer.lay_out(PANELS)
    return layer.requires_grad_(False), packed


def rows_of(count, depth=512):
    x = torch.randn(count, depth, generator=torch.Generator().manual_seed(4))
    x[0, :32] = 0
    return x


# One product


@pytest.mark.parametrize("name", CPU_FORMATS)
@pytest.mark.parametrize("count", [1, 3, 70])
def test_a_product_is_the_formula_s(name, count, threads):
    layer, packed = layer_of(name, bias=count == 3)
    x = rows_of(count)
    expected = quantized_linear(x.double(), packed, name, layer.bias)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", CPU_FORMATS)
def test_a_row_is_the_same_to_the_bit_alone_and_among_others(name, threads):
    layer, _ = layer_of(name)
    x = rows_of(70)
    together = layer(x)
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), together)
    assert torch.equal(layer(x[3:9]), together[3:9])


@pytest.mark.parametrize("name", CPU_FORMATS)
def test_a_nan_or_infinity_stays_in_its_row(name):
    layer, _ = layer_of(name)
    x = rows_of(6)
    expected = layer(x)
    x[1, 40], x[4, 500] = torch.nan, torch.inf
    found = layer(x)
    assert found[1].isnan().all()
    assert found[4].isnan().all()
    kept = [0, 2, 3, 5]
    assert torch.equal(found[kept], expected[kept])


def test_low_precision_rows_and_no_rows():
    layer, _ = layer_of("q4_k")
    x = rows_of(4).bfloat16()
    assert layer(x).dtype == torch.bfloat16
    torch.testing.assert_close(layer(x).float(), layer(x.float()), rtol=1e-2, atol=1e-2)
    assert layer(rows_of(1)[:0]).shape == (0, 75)
    assert layer(rows_of(6).view(2, 3, 512)).shape == (2, 3, 75)


@pytest.mark.parametrize(
    ("name", "value", "scales"),
    [("q8_0", 0x80, [0]), ("q4_0", 0x00, [0]), ("q6_k", 0x00, [208]), ("q4_k", 0xFF, [0, 2])],
)
def test_largest_numbers_do_not_overflow(name, value, scales):
    """Every product at its extreme, −128 · 127 for q8_0, in each of 4,096 terms."""
    layer, packed = _layer_of.__wrapped__(name, 16, 4096, False)
    blocks = packed.view(16, -1, layer.format.block_bytes)
    blocks[:] = value
    for at in scales:
        blocks[..., at], blocks[..., at + 1] = 0x00, 0x3C  # 1 in float16
    if name == "q6_k":
        blocks[..., 192:208] = 0x80
    layer.fill(packed)
    x = torch.full((2, 4096), -3.0)
    expected = quantized_linear(x.double(), packed, name)
    assert expected.abs().min() > 0
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("-mavx2", "-mfma", "-mf16c"), id="avx2"),
        pytest.param(("-mfma",), id="sse", marks=pytest.mark.slow),
    ],
)
def test_other_processors_compute_the_same(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(native, "_tuning", lambda compiler: iter(flags))
    (tmp_path / "cache").mkdir(mode=0o700)
    library = ctypes.CDLL(str(native.built(tmp_path / "cache", SOURCE)))
    monkeypatch.setattr(quantized.native, "library", lambda source: library)
    for name in CPU_FORMATS:
        layer, packed = layer_of(name)
        for count in (1, 70):
            x = rows_of(count)
            expected = quantized_linear(x.double(), packed, name)
            torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=2e-5)


# Whole steps


def model_for(shape, to):
    model = model_of(SHAPES[shape])
    quantize_model(model, to)
    acceleration.lay_out(model, torch.device("cpu"))
    return acceleration.accelerate(model)


MODELS = [("gated", "q4_k_m"), ("tied", "q4_0"), ("biased", "q8_0"), ("some wide", "q6_k")]
MODELS += [("experts", "q4_k"), ("experts", "q8_0")]


@pytest.fixture(scope="module", params=MODELS, ids=" ".join)
def model(request):
    return model_for(*request.param)


def test_the_runner_takes_quantised_models(model):
    assert why_not_runner(model)["cpu_runner"] is None
    rows = {row.fusion: row.reason for row in explain(model, training=False)}
    assert rows["cpu_quantized_linear"] is None


def test_logits_are_the_model_s(model):
    tokens = prompt(60, vocab=301)
    pool = Pool(model)
    got = torch.cat([pool.read((1, [token], p)) for p, token in enumerate(tokens)])
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]))[0]
        by_formula = plain(model)(torch.tensor([tokens]))[0]
        acceleration.accelerate(model)
    # of most tokens: where two experts are nearly even, a last bit decides between them
    for other in (expected, by_formula):
        error = (got - other).norm(dim=-1) / other.norm(dim=-1)
        assert error.median() < 0.015


def test_company_chunks_and_threads_change_no_bit(model, threads):
    tokens, other = prompt(70, vocab=301), prompt(33, seed=1, vocab=301)
    wanted = Pool(model).read((0, tokens, 0))
    for size in (1, 7, 64):
        assert torch.equal(in_chunks(Pool(model), 2, tokens, size), wanted), size
    assert torch.equal(Pool(model).read((3, other, 0), (1, tokens, 0))[1:], wanted)


def test_bits_do_not_depend_on_the_number_of_threads():
    model, tokens, before = model_for("gated", "q4_k"), prompt(50, vocab=301), []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        before.append(Pool(model).read((0, tokens, 0)))
    torch.set_num_threads(threads)
    assert torch.equal(before[0], before[1])
    assert torch.equal(before[0], before[2])


def test_a_hooked_quantised_layer_is_called():
    model, seen = model_for("gated", "q8_0"), []
    with_runner = generate(model, [[1, 2, 3]], max_new_tokens=4, eos_ids=[])
    handle = model.layers[1].ffn.w2.register_forward_hook(lambda *_: seen.append(1))
    generate(model, [[1, 2, 3]], max_new_tokens=4, eos_ids=[])
    handle.remove()
    assert seen
    assert len(with_runner[0].token_ids) == 4


def test_a_table_whose_numbers_are_patched_is_what_a_tied_head_multiplies_by():
    model, tokens = model_for("tied", "q8_0"), torch.tensor([[1, 2, 3]])
    table = model.token_embeddings
    table.dequantized = lambda: type(table).dequantized(table) * 2
    with torch.inference_mode():
        got = model(tokens)
        torch.testing.assert_close(got, plain(model)(tokens), rtol=0, atol=0.02 * got.norm())


def test_derivatives_of_a_quantised_model_are_the_same_forward_and_backward(model):
    norms = {n: p.detach() for n, p in model.named_parameters() if n.endswith("ln2.weight")}
    along, tokens = {n: torch.randn_like(p) for n, p in norms.items()}, torch.tensor([[1, 2, 3]])

    def loss(norms):
        return torch.func.functional_call(model, norms, (tokens,)).logsumexp(-1).sum()

    gradients = torch.func.grad(loss)(norms)
    _, slope = torch.func.jvp(loss, (norms,), (along,))
    terms = torch.cat([along[n] * gradients[n] for n in norms])
    # what no gradient reaches is rounded where one goes backward, and not where one goes forward
    torch.testing.assert_close(slope, terms.sum(), rtol=0, atol=0.02 * terms.norm())


def test_formats_without_a_kernel_are_refused_by_name():
    model = model_for("gated", "int8")
    assert "in int8, not in panels" in why_not_runner(model)["cpu_runner"]
    assert len(generate(model, [[1, 2]], max_new_tokens=3, eos_ids=[])[0].token_ids) == 3


@pytest.mark.parametrize("name", ["q8_0", "q4_k"])
def test_each_expert_multiplies_its_own_rows(name):
    """Some without rows; rows of a panel are of one expert, or the bytes stay as in a file."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(4, 48, 256, generator=generator) * 0.02
    x, ends = rows_of(9, 256), torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    for width, layout in ((48, PANELS), (40, ROWS)):
        packed = torch.stack([quantize(weight[:width], name) for weight in weights])
        layer = AcceleratedQuantizedExpertLinear(packed, name, torch.float32, get_ops("fast"))
        model = torch.nn.ModuleList([layer])
        acceleration.lay_out(model, torch.device("cpu"))
        assert layer.layout == layout
        groups = zip(x.double().split([3, 0, 5, 1]), packed, strict=True)
        expected = torch.cat([quantized_linear(rows, own, name) for rows, own in groups])
        torch.testing.assert_close(layer(x, ends).double(), expected, rtol=1e-5, atol=2e-5)
        assert torch.equal(layer.packed, packed)
