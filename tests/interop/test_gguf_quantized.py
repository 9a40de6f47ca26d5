"""Quantised GGUF files: ours and llama.cpp's, read as bytes or widened, and run by both."""

import gguf
import numpy as np
import pytest
import torch

from interop.llama_cpp import WHEELS, ask, quantize_with_llama_cpp
from interop.test_gguf_llama_cpp import greedy, kl, plain_tokens
from scratchlm import ModelConfig, TransformerLM, load_model
from scratchlm import config as c
from scratchlm.checkpoint import read_tensors, write_checkpoint
from scratchlm.errors import ScratchLMError
from scratchlm.interop import read_gguf, write_gguf
from scratchlm.interop.gguf_file import read_gguf_file
from scratchlm.interop.gguf_writing import QUANTIZED
from scratchlm.quantization.convert import quantize_model
from tiny_models import build
from tokenizer.texts import SPECIALS, prose_tokenizer

LLAMA = ModelConfig(448, 64, d_model=256, num_layers=1, num_heads=4, num_kv_heads=2, d_ff=512)
GPT2 = LLAMA.replace(
    num_kv_heads=4,
    positions=c.Learned(),
    norm=c.LayerNorm(),
    ffn=c.MLP("gelu_tanh", bias=True),
    attention=c.Attention(bias="all"),
    tie_embeddings=True,
)
MOE = LLAMA.replace(ffn=c.MoE(2, 1), d_ff=256)
HALF = c.Rotary(layout="half")
QWEN2 = LLAMA.replace(positions=HALF, attention=c.Attention(bias="qkv"))
QWEN3 = LLAMA.replace(positions=HALF, attention=c.Attention(qk_norm=True))
CONFIGS = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "gpt2": GPT2, "moe": MOE}
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def models():
    """Models that say only what is text: llama.cpp's server waits for the rest of a character."""
    plain, made = set(plain_tokens(prose_tokenizer())), {}
    for name, config in CONFIGS.items():
        made[name] = build(config, dtype=torch.float32)
        head = made[name].token_embeddings if config.tie_embeddings else made[name].lm_head
        with torch.no_grad():
            head.weight[[i for i in range(config.vocab_size) if i not in plain]] = 0
    return made


@pytest.fixture(scope="module")
def quantized(models, tmp_path_factory):
    """Give the file of a model in a format; searching for scales takes a while."""
    folder = tmp_path_factory.mktemp("quantized")

    def file(name, format):
        path = folder / f"{name}-{format}.gguf"
        return path if path.exists() else write(path, models[name], quantize=format)

    return file


def write(path, model, **options):
    tokenizer = prose_tokenizer()
    eos = [tokenizer.special_tokens[SPECIALS[0]]]
    state = model.state_dict()
    return write_gguf(path, model.config, state, tokenizer, eos_token_ids=eos, **options)


def raw(path):
    """Every tensor's type and bytes, as the gguf package reads them."""
    return {t.name: (t.tensor_type.name, t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
def test_bytes_are_those_of_the_gguf_package(format, models, quantized):
    path = quantized("llama", format)
    kind = gguf.GGMLQuantizationType[format.upper()]
    weight = models["llama"].layers[0].ffn.w2.weight.detach().numpy()
    expected = gguf.quants.quantize(weight, kind)
    assert raw(path)["blk.0.ffn_down.weight"] == (kind.name, expected.tobytes())


@pytest.mark.parametrize("format", QUANTIZED)
def test_weights_are_widened_as_the_gguf_package_does(format, quantized):
    path = quantized("llama", format)
    found = dict(read_gguf(path))
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "blk.0.ffn_up.weight":
            theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    np.testing.assert_allclose(found["layers.0.ffn.w3.weight"].numpy(), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantised_file_is_loaded_without_widening(name, models, quantized, tmp_path):
    """The same bytes in memory as the same model quantised here, and the same logits."""
    write(tmp_path / "wide.gguf", models[name])
    loaded = load_model(quantized(name, "q8_0"))
    here = load_model(tmp_path / "wide.gguf", quantize="q8_0")
    assert loaded.is_quantized
    ours, theirs = here.model.state_dict(), loaded.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert any(key.endswith("_q8_0") for key in theirs)
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids), here.model(ids))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantised_checkpoint_is_exported_as_the_bytes_it_has(name, models, tmp_path):
    model = TransformerLM(models[name].config)
    model.load_state_dict(models[name].state_dict())
    quantize_model(model, "q4_0")
    write_checkpoint(tmp_path / "small", model=model.state_dict(), config=model.config)
    tensors = read_tensors(tmp_path / "small")
    write_gguf(tmp_path / "packed.gguf", model.config, tensors)
    write_gguf(tmp_path / "direct.gguf", model.config, models[name].state_dict(), quantize="q4_0")
    assert raw(tmp_path / "packed.gguf") == raw(tmp_path / "direct.gguf")
    with pytest.raises(ValueError, match="quantised already"):
        write_gguf(tmp_path / "again.gguf", model.config, tensors, quantize="q8_0")


def test_formats_that_gguf_lacks_are_refused(models, tmp_path):
    model = TransformerLM(LLAMA)
    quantize_model(model, "nf4")
    with pytest.raises(ScratchLMError, match="GGUF has no nf4"):
        write_gguf(tmp_path / "m.gguf", LLAMA, model.state_dict())
    with pytest.raises(ValueError, match="GGUF has the formats"):
        write_gguf(tmp_path / "m.gguf", LLAMA, models["llama"].state_dict(), quantize="fp8")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_written_read_and_run(dtype, models, tmp_path):
    path = write(tmp_path / "m.gguf", models["moe"], dtype=dtype)
    word = {torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    types = {name: kind for name, (kind, _) in raw(path).items()}
    assert types["blk.0.attn_q.weight"] == types["blk.0.ffn_up_exps.weight"] == word
    assert types["blk.0.attn_norm.weight"] == types["blk.0.ffn_gate_inp.weight"] == "F32"
    source = read_gguf(path)
    assert source.dtype == dtype
    for name, tensor in source.tensors(dtype=torch.float32):
        wide = models["moe"].state_dict()[name]
        narrow = "norm" in name or "ln" in name or "router" in name
        assert torch.equal(tensor, wide if narrow else wide.to(dtype).float()), name
    assert load_model(path).model.lm_head.weight.dtype == dtype
    ours = greedy(load_model(path, dtype=torch.float32).model, PROMPT, 1)[1]
    (answer,) = ask("cyllama", [{"model": str(path), "prompt": PROMPT, "steps": 1}])
    assert kl(ours, torch.tensor(answer["logprobs"], dtype=torch.float64)) < 1e-3


RUN = [*(("llama", format) for format in QUANTIZED), ("gpt2", "q4_k_m"), ("moe", "q8_0")]
RUN += [("qwen2", "q8_0"), ("qwen3", "q8_0")]


@pytest.mark.parametrize("wheel", WHEELS)
def test_llama_cpp_runs_our_quantised_files(wheel, quantized):
    """It rounds activations in blocks of its own: near, not the same."""
    paths = [quantized(*one) for one in RUN]
    jobs = [{"model": str(path), "prompt": PROMPT, "steps": 1} for path in paths]
    for path, answer in zip(paths, ask(wheel, jobs), strict=True):
        found = torch.tensor(answer["logprobs"], dtype=torch.float64)
        assert kl(greedy(load_model(path).model, PROMPT, 1)[1], found) < 1e-3, path


def test_a_file_that_llama_cpp_quantised_is_read(models, tmp_path):
    write(tmp_path / "wide.gguf", models["llama"])
    wide = greedy(models["llama"], PROMPT, 1)[1]
    for number, types in ((15, {"Q4_K", "Q6_K"}), (7, {"Q8_0"}), (2, {"Q4_0", "Q6_K"})):
        path = tmp_path / f"{number}.gguf"
        quantize_with_llama_cpp(tmp_path / "wide.gguf", path, number)
        stored = read_gguf_file(path).tensors.values()
        assert {one.dtype for one in stored} == types | {"F32"}
        (answer,) = ask("cyllama", [{"model": str(path), "prompt": PROMPT, "steps": 1}])
        found = torch.tensor(answer["logprobs"], dtype=torch.float64)
        near = kl(greedy(load_model(path).model, PROMPT, 1)[1], found)
        assert near < 1e-3
        assert near < kl(wide, found) / 5


def test_an_infinite_scale_is_refused(models, tmp_path):
    path = write(tmp_path / "m.gguf", models["llama"], quantize="q8_0")
    place = read_gguf_file(path).tensors["blk.0.attn_q.weight"].start
    data = bytearray(path.read_bytes())
    data[place : place + 2] = b"\x00\x7c"
    path.write_bytes(bytes(data))
    with pytest.raises(ScratchLMError, match=r"'blk\.0\.attn_q\.weight' holds NaN or infinite"):
        load_model(path)
    with pytest.raises(ScratchLMError, match=r"'blk\.0\.attn_q\.weight' holds NaN or infinite"):
        dict(read_gguf(path))


def test_a_type_that_we_do_not_have_is_named(models, tmp_path):
    write(tmp_path / "wide.gguf", models["llama"])
    quantize_with_llama_cpp(tmp_path / "wide.gguf", tmp_path / "m.gguf", 17)  # Q5_K_M
    with pytest.raises(ScratchLMError, match=r"weights must be F32, F16, BF16, Q8_0.* is Q5_K"):
        load_model(tmp_path / "m.gguf")
