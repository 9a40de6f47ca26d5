"""Keys and values in 8 bits: the formula in both runners, the bytes predicted, little lost."""

import math
import random
import struct

import pytest
import torch

from inference.test_engine import check_empty, said
from inference.tiny import tiny_model
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accelerate.cpu_runner import CPURunner
from scratchlm.accounting.pool import SCALE, bytes_per_page
from scratchlm.data.stories.source import StorySource
from scratchlm.inference import GREEDY, Engine, Sampling, generate
from scratchlm.inference.plain_runner import PlainRunner
from scratchlm.inference.pool_memory import check_kv_dtype
from scratchlm.ops.quantized_cache import DTYPES, dequantize_rows, quantize_rows
from scratchlm.paged import PagedCache, Step
from tiny_models import FAMILIES, build

KINDS = ["int8", "fp8"]
TAKEN = [name for name in FAMILIES if name != "post-norm"]
FP8 = sorted(  # e4m3, written out: every number that is not negative
    {(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** max(e - 7, -6) for e in range(16) for m in range(8)}
    - {480.0}
)


def naive(row, kind):
    """Return the codes' numbers and the scale, number by number, in float32."""

    def rounded(x):
        return struct.unpack("f", struct.pack("f", x))[0]

    largest = 127.0 if kind == "int8" else 448.0
    scale = rounded(max(abs(x) for x in row) / largest)
    codes = []
    for x in row:
        x = rounded(x / scale) if scale else 0.0
        if kind == "int8":
            codes.append(round(x))  # ties to even
        else:
            near = sorted(FP8, key=lambda code, x=x: abs(code - abs(x)))[:2]
            tie = abs(near[0] - abs(x)) == abs(near[1] - abs(x))
            even = [code for code in near if FP8.index(code) % 2 == 0]
            codes.append(math.copysign(even[0] if tie else near[0], x))
    return codes, scale


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_formula(kind):
    rows = torch.randn(40, 10, generator=torch.Generator().manual_seed(0)) * 3
    rows[0] = 0
    rows[1] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 3, 4, 5])  # ties of int8
    rows[2] = torch.tensor([448.0, 17, 19, 1.0625, 1.1875, -17, 2**-9, 2**-10, 3 * 2**-10, 9])
    codes, scales = quantize_rows(rows, DTYPES[kind])
    for row, code, scale in zip(rows.tolist(), codes.float().tolist(), scales, strict=True):
        assert (code, scale) == naive(row, kind)
    error = (dequantize_rows(codes, scales) - rows).abs()
    if kind == "int8":
        assert (error <= scales[:, None] * 0.5001).all()
    else:
        assert (error <= (rows.abs() / 16).maximum(scales[:, None] * 2**-10) * 1.0001).all()


def an_engine(model, **options):
    return Engine(model, **{"num_pages": 60, "page_size": 4, "max_rows": 4, **options})


def read(model, prompt, **options):
    """Read a prompt; return the engine with its pages, and the log-probabilities after it."""
    engine = an_engine(model, **options)
    count = model.config.vocab_size
    piece = engine.submit(prompt, max_new_tokens=1, sampling=GREEDY, num_logprobs=count).result()
    best = dict(piece.logprobs[0].best)
    return engine, torch.tensor([best[i] for i in range(count)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TAKEN)
def test_the_cpu_runner_writes_the_formulas_codes_and_reads_what_they_stand_for(family, kind):
    model = build(FAMILIES[family], dtype=torch.float32)
    prompt = [random.Random(1).randrange(20) for _ in range(23)]
    exact, _ = read(model, prompt)
    fast, got = read(model, prompt, kv_dtype=kind)
    _, expected = read(model, prompt, kv_dtype=kind, accelerate=False)
    assert type(fast.runner).__name__ == "CPURunner"
    for kept, codes, scales in (
        (exact.cache.keys[0], fast.cache.keys[0], fast.cache.key_scales[0]),
        (exact.cache.values[0], fast.cache.values[0], fast.cache.value_scales[0]),
    ):  # of the first layer, which has read no code: to the bit
        formula, its_scales = quantize_rows(kept, DTYPES[kind])
        assert torch.equal(codes.view(torch.uint8), formula.view(torch.uint8))
        assert torch.equal(scales, its_scales)
        assert (scales > 0).sum() >= 23 * model.config.num_kv_heads
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("largest", [7, 126])
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_read_as_the_number_it_stands_for(kind, largest):
    """Random codes in the pages; up to 7 the numbers of fp8 have no leading one."""
    model = tiny_model(61, 48)
    generator = torch.Generator().manual_seed(largest)
    caches = [PagedCache(model.config, 12, 4, kv_dtype=kind) for _ in range(2)]
    for name in ("keys", "values"):
        kept = getattr(caches[0], name)
        codes = torch.randint(largest + 1, kept.shape, generator=generator)
        codes += 128 * torch.randint(2, kept.shape, generator=generator)
        number = (codes % 128).to(torch.uint8).view(DTYPES[kind]).float().max()
        for cache in caches:
            getattr(cache, name).view(torch.uint8).copy_(codes)
            getattr(cache, f"{name[:-1]}_scales").fill_(2 / number)
    step = Step([5], [1], [47], [0], [True])
    tables, last = torch.arange(12, dtype=torch.int32)[None], torch.zeros(1, dtype=torch.long)
    with torch.inference_mode():
        fast = CPURunner(model, caches[0]).run(step, tables, last)
        plain = PlainRunner(model, caches[1]).run(step, tables, last)
    torch.testing.assert_close(fast, plain, atol=2e-4, rtol=2e-4)
    assert torch.equal(caches[0].keys.view(torch.uint8)[0], caches[1].keys.view(torch.uint8)[0])


@pytest.mark.parametrize("accelerate", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_has_the_same_bits_alone_in_company_and_with_lookups(kind, accelerate):
    model, rng = tiny_model(61, 48), random.Random(kind)
    work = [
        {
            "prompt": [rng.randrange(2)] * rng.choice([0, 4, 9]) + [1, 2, 3] * 3,
            "max_new_tokens": rng.randrange(1, 25),
            "sampling": rng.choice([GREEDY, Sampling()]),
            "seed": i,
            "num_logprobs": 2,
        }
        for i in range(6)
    ]

    def run(requests, **options):
        engine = an_engine(model, kv_dtype=kind, accelerate=accelerate, **options)
        handles = [engine.submit(**one) for one in requests]
        engine.run()
        check_empty(engine)
        return [[said(piece) for piece in handle] for handle in handles], engine.scheduler

    expected = [run([one])[0][0] for one in work]
    assert run(work)[0] == expected
    assert run(work, speculate="lookup")[0] == expected
    few = {"num_pages": 13, "max_tokens_per_step": 9}
    got, scheduler = run(work, **few)
    assert got == expected
    assert scheduler.num_put_back


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_what_the_account_predicts(kind):
    model = tiny_model()
    engine = Engine(model, memory=100_000, page_size=8, kv_dtype=kind)
    page = bytes_per_page(model.config, 8, bytes_per_number=1, bytes_per_scale=SCALE)
    assert engine.cache.nbytes == page * engine.pool.num_pages
    assert 100_000 - page < engine.cache.nbytes <= 100_000
    wide = bytes_per_page(ModelConfig(99, 64, 512, 2, 4), 8, bytes_per_number=4)
    narrow = bytes_per_page(ModelConfig(99, 64, 512, 2, 4), 8, 1, SCALE)
    assert wide / narrow == 4 * 128 / (128 + 4)


def trained_model():
    """Train a small model on the demo's stories, word by word; return it and held-out text."""
    told = StorySource().stories("kv", 3000)
    words = [word for story in told for word in story]
    names = {word: i for i, word in enumerate(dict.fromkeys(words))}
    ids = torch.tensor([names[word] for word in words])
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(len(names), 64, 64, 2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        at = torch.randint(len(ids) - 2_000, (24,), generator=generator)
        batch = torch.stack([ids[i : i + 49] for i in at.tolist()])
        loss = torch.nn.functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), ids[-2_000:].tolist(), loss.item()


def test_a_trained_model_loses_little_and_int8_less_than_fp8():
    model, text, loss = trained_model()
    assert loss < 2  # it has learnt: a guess would be ln 150 = 5
    prompts = [text[i : i + 60] for i in range(0, 1_200, 60)]

    def distributions(kind):
        return torch.stack([read(model, prompt, kv_dtype=kind)[1] for prompt in prompts]).double()

    exact, kl = distributions(None), {}
    for kind in KINDS:
        kl[kind] = (exact.exp() * (exact - distributions(kind))).sum(dim=-1).mean().item()
    assert 0 < kl["int8"] < kl["fp8"]
    assert kl["int8"] < 5e-5
    assert kl["fp8"] < 5e-4


@pytest.mark.parametrize("accelerate", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_a_nan(kind, accelerate):
    model = TransformerLM(tiny_model().config).eval()
    with torch.no_grad():
        model.token_embeddings.weight[5] = torch.nan
    engine = an_engine(model, kv_dtype=kind, accelerate=accelerate)
    with pytest.raises(ValueError, match="nothing to choose from"):
        engine.submit([1, 5, 2, 3], max_new_tokens=2, seed=0).result()
    assert engine.submit([1, 2, 3], max_new_tokens=2, seed=0).result().token_ids


def test_what_cannot_be_is_one_line():
    model = tiny_model()
    with pytest.raises(ValueError, match="kv_dtype must be one of int8, fp8; got 'int4'"):
        an_engine(model, kv_dtype="int4")
    with pytest.raises(ValueError, match="kv_dtype='int8' needs the cache; got use_cache=False"):
        generate(model, [1], max_new_tokens=2, kv_dtype="int8", use_cache=False)
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match="kv_dtype='fp8' is not read by the kernels for a GPU"):
        check_kv_dtype("fp8", gpu, accelerate=True)
    check_kv_dtype("fp8", gpu, accelerate=False)
    check_kv_dtype(None, gpu, accelerate=True)
