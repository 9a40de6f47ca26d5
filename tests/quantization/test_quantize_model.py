"""Quantised models: the rule, the layers, the file, the commands."""

import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inference.tiny import byte_tokenizer
from scratchlm import ModelConfig, TransformerLM, account, generate, load_model
from scratchlm.accounting import Setup
from scratchlm.checkpoint import read_manifest, write_checkpoint
from scratchlm.config import MoE, Rotary
from scratchlm.errors import ScratchLMError
from scratchlm.inference import GREEDY
from scratchlm.interop import write_hf
from scratchlm.ops.quantized import FORMATS, dequantize
from scratchlm.quantization import layouts
from scratchlm.quantization.convert import held_bytes, quantize_model
from scratchlm.quantization.layers import QuantizedLayer
from scratchlm.quantization.layouts import PANELS, PLANES, ROWS, from_layout, to_layout
from scratchlm.quantization.rule import (
    BLOCKS,
    TARGETS,
    bytes_per_row,
    choose,
    described,
    fits,
    stored_bytes,
)
from serve.tiny_server import ask, tiny_server

SIZES = {"vocab_size": 257, "context_length": 64, "d_model": 256, "num_heads": 4, "d_ff": 512}
PLAIN = ModelConfig(**SIZES, num_layers=2, num_kv_heads=2)
TIED = ModelConfig(**SIZES, num_layers=2, tie_embeddings=True)
EXPERTS = ModelConfig(**SIZES, num_layers=1, ffn=MoE(num_experts=4, experts_per_token=2))
IDS = torch.tensor([[5, 7, 9, 100, 2, 250, 31]])


def model_of(config: ModelConfig) -> TransformerLM:
    """Draw a model whose gains are not all 1, as those of a trained one."""
    model = TransformerLM(config)
    generator = torch.Generator().manual_seed(0)
    model.reset_parameters(generator)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "ln" in name:
                weight.normal_(1.0, 0.2, generator=generator)
    return model.eval().requires_grad_(False)


def written(path, config=PLAIN):
    tokenizer = byte_tokenizer().save(path / "tok")
    return write_checkpoint(
        path / "wide",
        model=model_of(config).state_dict(),
        config=config,
        tokenizer_file=tokenizer,
        metadata={"eos_token_ids": [256]},
    )


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Write a checkpoint once, for tests that only read it."""
    return written(tmp_path_factory.mktemp("quantize"))


@pytest.fixture(scope="module")
def quantized(wide):
    """Quantise it once for each format, for tests that leave the model as it is."""
    return cache(lambda to: load_model(wide, quantize=to))


@pytest.fixture
def run_cli(cli):
    """Run a command; return what it printed."""

    def command(*words, code=0):
        status, out, err = cli(*words)
        assert status == code, err
        return out if code == 0 else err

    return command


# The rule


@pytest.mark.parametrize("name", FORMATS)
def test_the_rule_knows_the_sizes_of_the_formats(name):
    kind = FORMATS[name]
    assert BLOCKS[name] == (kind.block_size, kind.block_bytes)
    for d_in in (32, 64, 256, 1600, 1024, 100):
        assert fits(name, d_in) == kind.fits(d_in)
        if fits(name, d_in):
            assert bytes_per_row(name, d_in) == kind.bytes_per_row(d_in)


def formats_of(config, to):
    return {choice.name: choice.format for choice in choose(config, to)}


def test_norms_biases_router_and_positions_stay_wide():
    found = formats_of(EXPERTS, "q4_k")
    assert found["layers.0.ffn.router.weight"] is None
    assert found["layers.0.ln1.weight"] is None
    assert found["ln_final.weight"] is None
    assert found["layers.0.ffn.w1.weight"] == "q4_k"


def test_the_head_has_more_bits_than_four_whether_tied_or_not():
    assert formats_of(PLAIN, "q4_k")["lm_head.weight"] == "q6_k"
    assert formats_of(PLAIN, "q4_k")["token_embeddings.weight"] == "q4_k"
    assert formats_of(TIED, "q4_0")["token_embeddings.weight"] == "q6_k"
    assert formats_of(PLAIN, "q8_0")["lm_head.weight"] == "q8_0"


def test_rows_that_are_not_whole_blocks_take_the_next_format():
    odd = ModelConfig(vocab_size=64, context_length=8, d_model=96, num_layers=1, num_heads=2)
    assert formats_of(odd, "q4_k")["layers.0.attn.q_proj.weight"] == "q4_0"
    assert formats_of(odd, "q6_k")["layers.0.attn.q_proj.weight"] == "q8_0"
    odder = ModelConfig(vocab_size=64, context_length=8, d_model=36, num_layers=1, num_heads=2)
    assert formats_of(odder, "q4_k")["layers.0.attn.q_proj.weight"] is None
    assert formats_of(odder, "int8")["layers.0.attn.q_proj.weight"] == "int8"


def test_every_weight_is_named_once_by_what_is_printed():
    lines = list(described(choose(PLAIN, "q4_k_m")))
    counts = [int(line.split()[1].replace(",", "")) for line in lines]
    assert sum(counts) == sum(p.numel() for p in TransformerLM(PLAIN).parameters())
    assert [line.split()[0] for line in lines] == ["q4_k", "q6_k", "wide"]


# Layouts


@pytest.mark.parametrize("layout", [ROWS, PANELS, PLANES])
@pytest.mark.parametrize("name", FORMATS)
def test_a_layout_is_the_same_bytes_in_another_order(name, layout, monkeypatch):
    if layout == PANELS and BLOCKS[name][0] == 0:
        pytest.skip("a row of any length is no sequence of blocks")
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 256, (37, bytes_per_row(name, 512)), generator=generator)
    rows = rows.to(torch.uint8)
    stored = to_layout(rows, name, layout)
    assert stored.numel() == (48 if layout == PANELS else 37) * rows.shape[1]
    assert torch.equal(from_layout(stored, name, layout, 37), rows)
    chosen = torch.tensor([36, 0, 15, 16, 16])
    assert torch.equal(from_layout(stored, name, layout, 37, chosen), rows[chosen])
    monkeypatch.setattr(layouts, "_AT_ONCE", 1)  # panel by panel
    filled = torch.zeros_like(stored)
    layouts.copy_into(filled, rows, name, layout)
    assert torch.equal(filled, stored)


# Models


@pytest.mark.parametrize("config", [PLAIN, TIED, EXPERTS], ids=["plain", "tied", "experts"])
@pytest.mark.parametrize("to", TARGETS)
def test_a_quantised_model_computes_with_the_matrices_its_bytes_stand_for(config, to):
    model, wide = model_of(config), model_of(config)
    choices = quantize_model(model, to)
    state = wide.state_dict()
    for choice in choices:
        if choice.format is not None:
            layer = model.get_submodule(choice.name.removesuffix(".weight"))
            packed = layer.packed.flatten(0, -2)
            state[choice.name].copy_(dequantize(packed, choice.format).view(choice.shape))
            assert torch.equal(layer.weight + 0, state[choice.name])
    found, expected = model(IDS), wide(IDS)
    error = (found - expected).norm() / expected.norm()
    assert error < (1e-5 if to in ("int8", "fp8") else 0.02)  # activations have 8 bits


def test_bytes_follow_a_model_through_state_dict_dtype_and_copy():
    model = model_of(TIED)
    names = [choice.stored_name for choice in quantize_model(model, "q4_k")]
    state = model.state_dict()
    assert set(state) == set(names)
    other = model_of(TIED)
    quantize_model(other, "q4_k")
    for layer in other.modules():
        if isinstance(layer, QuantizedLayer):
            layer.stored.zero_()
    assert not torch.equal(other(IDS), model(IDS))
    other.load_state_dict(state)
    assert torch.equal(other(IDS), model(IDS))
    assert other.to(torch.bfloat16)(IDS).dtype == torch.bfloat16
    assert (other(IDS).float() - model(IDS)).norm() < 0.05 * model(IDS).norm()


def test_a_gradient_passes_through_quantised_layers():
    model = model_of(PLAIN)
    quantize_model(model, "q8_0")
    x = torch.randn(3, 256, requires_grad=True)
    layer = model.layers[0].attn.q_proj
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantized().sum(0).expand(3, -1))


def test_a_model_is_not_quantised_twice():
    model = model_of(PLAIN)
    quantize_model(model, "q8_0")
    with pytest.raises(ValueError, match="quantised already, to q8_0"):
        quantize_model(model, "q4_k")


# Loading


@pytest.mark.parametrize("to", TARGETS)
def test_a_checkpoint_keeps_quantised_tensors(tmp_path, quantized, to):
    loaded = quantized(to)
    assert loaded.is_quantized
    kept = write_checkpoint(tmp_path / "kept", model=loaded.model.state_dict(), config=PLAIN)
    again = load_model(kept)
    assert torch.equal(again.model(IDS), loaded.model(IDS))
    plain = load_model(kept, accelerate=False)
    assert (plain.model(IDS) - again.model(IDS)).norm() < 5e-3 * again.model(IDS).norm()


def test_a_hugging_face_directory_is_quantised_as_it_is_read(tmp_path):
    config = replace(PLAIN, positions=Rotary(layout="half"))
    write_hf(tmp_path / "hf", config, dict(model_of(config).state_dict()), None)
    found = load_model(tmp_path / "hf", quantize="q4_k", accelerate=False).model
    expected = model_of(config)
    quantize_model(expected, "q4_k")
    assert torch.equal(found(IDS), expected(IDS))


def test_what_cannot_be_loaded_is_one_line(tmp_path, wide, quantized):
    state = quantized("q8_0").model.state_dict()
    kept = write_checkpoint(tmp_path / "kept", model=state, config=PLAIN)
    with pytest.raises(ScratchLMError, match="quantised already"):
        load_model(kept, quantize="q4_0")
    with pytest.raises(ValueError, match="quantize to one of q8_0"):
        load_model(wide, quantize="q3")


@pytest.mark.parametrize("damage", ["rows", "bytes", "dtype", "both", "format", "norm"])
def test_a_hostile_file_of_bytes_is_refused_by_name(tmp_path, quantized, damage):
    state = dict(quantized("q8_0").model.state_dict())
    name = "layers.0.attn.q_proj.weight_q8_0"
    if damage == "rows":
        state[name] = state[name][1:]
    elif damage == "bytes":
        state[name] = state[name][:, 1:]
    elif damage == "dtype":
        state[name] = state[name].float()
    elif damage == "both":
        state["layers.0.attn.q_proj.weight"] = torch.zeros(256, 256)
    elif damage == "format":
        state["layers.0.attn.q_proj.weight_q3_k"] = state.pop(name)
    else:
        state["ln_final.weight_q8_0"] = torch.zeros(1, 272, dtype=torch.uint8)
        del state["ln_final.weight"]
    kept = write_checkpoint(tmp_path / "kept", model=state, config=PLAIN)
    with pytest.raises(ScratchLMError, match=r"misshapen|must be U8|not those of the config"):
        load_model(kept)


def test_random_bytes_give_numbers_or_nan_and_never_fault(tmp_path, quantized):
    source = quantized("q4_k_m")
    generator = torch.Generator().manual_seed(0)
    kept = write_checkpoint(tmp_path / "kept", model=source.model.state_dict(), config=PLAIN)
    state = load_file(kept / "model.safetensors")
    for name, tensor in state.items():
        if tensor.dtype == torch.uint8:
            noise = torch.randint(0, 256, tensor.shape, generator=generator)
            state[name] = noise.to(torch.uint8)
    noisy = write_checkpoint(tmp_path / "noisy", model=state, config=PLAIN)
    for accelerate in (True, False):
        assert load_model(noisy, accelerate=accelerate).model(IDS).shape == (1, 7, 257)


# The account


@pytest.mark.parametrize("to", TARGETS)
def test_the_account_is_what_is_held(quantized, to):
    held = held_bytes(quantized(to).model)
    serving = account(PLAIN, Setup(precision="fp32", quantize=to)).memory.serving
    predicted = next(part for part in serving.children if part.name == "weights").value
    assert abs(predicted - held) <= 0.02 * held
    assert predicted == stored_bytes(choose(PLAIN, to))


LARGER = ModelConfig(16_000, 64, d_model=1024, num_layers=6, num_heads=16, d_ff=4096)
# In a process of its own, which has loaded a small one before: what is imported is not the model's.
MEMORY = """
import ctypes, gc, sys
from scratchlm import load_model

def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for itself
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous"))

small, before = load_model(sys.argv[1]), held()
large = load_model(sys.argv[2])
print(held() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="needs Linux, which says what is held",
)
def test_the_account_is_what_a_process_holds(tmp_path):
    paths = []
    for name, config in (("small", PLAIN), ("large", LARGER)):
        kept = {
            choice.stored_name: torch.zeros(
                choice.stored_shape, dtype=torch.uint8 if choice.format else torch.float32
            )
            for choice in choose(config, "q4_k")
        }
        paths.append(write_checkpoint(tmp_path / name, model=kept, config=config))
    command = [sys.executable, "-c", MEMORY, *map(str, paths)]
    held = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    serving = account(LARGER, Setup(precision="fp32", quantize="q4_k")).memory.serving
    predicted = next(part for part in serving.children if part.name == "weights").value
    assert predicted > 75e6
    assert abs(held - predicted) <= 0.02 * predicted


def test_an_account_of_shares_is_refused():
    with pytest.raises(ValueError, match="whole on each GPU"):
        Setup(quantize="q4_k", parallel="tp", gpus=2)


# The command


def test_quantize_writes_a_checkpoint_that_every_command_takes(tmp_path, run_cli):
    source = written(tmp_path)
    out = tmp_path / "small"
    told = run_cli("quantize", source, "--to", "q4_k", "--out", out)
    assert "q6_k" in told
    assert "wide" in told
    assert "bits a weight" in told
    assert read_manifest(out)["metadata"] == {"quantization": "q4_k", "eos_token_ids": [256]}
    size = (out / "model.safetensors").stat().st_size
    assert size < (source / "model.safetensors").stat().st_size / 6.5
    assert run_cli("generate", out, "-p", "Hi", "--temperature", 0, "--max-new-tokens", 4)
    assert run_cli("next", out, "--prompt", "Hi")
    assert run_cli("inspect", out, "--prompt", "Hi there")
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 20)
    wide = json.loads(run_cli("evaluate", source, text, "--json"))
    small = json.loads(run_cli("evaluate", out, text, "--json"))
    assert small["loss"] == pytest.approx(wide["loss"], rel=0.05)
    assert small["loss"] != wide["loss"]


@pytest.mark.parametrize("form", ["checkpoint", "gguf"])
def test_explain_and_account_know_how_a_model_is_stored(form, tmp_path, run_cli):
    small = tmp_path / "small"
    run_cli("quantize", written(tmp_path), "--to", "q4_k_m", "--out", small)
    if form == "gguf":
        run_cli("export", small, tmp_path / "small.gguf")
        small = tmp_path / "small.gguf"
    rows = json.loads(run_cli("explain", small, "--device", "cpu", "--no-training", "--json"))
    found = {(row["layer"], row["fusion"]): row["reason"] for row in rows}
    assert found["layers.*.attn.q_proj", "cpu_quantized_linear"] is None
    assert found["model", "cpu_runner"] is None
    told = run_cli("account", small, "--phase", "decode", "--dtype", "fp32")
    assert "weights in q4_k" in told
    assert told == run_cli("account", small, "--phase", "decode", "--dtype", "fp32",
                           "--quantize", "q4_k_m")  # fmt: skip
    assert "weights in int8" in run_cli("account", small, "--quantize", "int8")


def test_a_quantised_checkpoint_is_served(tmp_path, run_cli):
    run_cli("quantize", written(tmp_path), "--to", "q4_k", "--out", tmp_path / "small")
    loaded = load_model(tmp_path / "small")
    asked = {"prompt": "Hi", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    with tiny_server(loaded) as server:
        answer = ask(server, "/v1/completions", {**asked, "model": "small"})
    options = {"max_new_tokens": 6, "sampling": GREEDY, "eos_ids": []}
    (expected,) = generate(loaded.model, "Hi", tokenizer=loaded.tokenizer, **options)
    assert answer.json["choices"][0]["text"] == expected.text


@pytest.mark.parametrize("to", ["q8_0", "q4_k_m", "int8"])
def test_greedy_tokens_are_the_likeliest_by_the_formula(to, wide, quantized):
    model = quantized(to).model
    plain = load_model(wide, quantize=to, accelerate=False).model
    prompts, options = [[5, 7, 9] * 3, [1] * 20], {"sampling": GREEDY, "eos_ids": []}
    rows = generate(model, prompts, max_new_tokens=12, **options)
    for prompt, row in zip(prompts, rows, strict=True):
        assert len(row.token_ids) == 12
        logits = plain(torch.tensor([prompt + row.token_ids]))[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(row.token_ids)[:, None])[:, 0]
        # to rounding: a last bit decides to which side an activation is rounded
        assert (logits.amax(dim=1) - chosen).max() < 0.01 * logits.std()
    if to != "int8":  # which has no runner that verifies
        assert generate(model, prompts, max_new_tokens=12, speculate="lookup", **options) == rows


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("quantize", "wide", "--to", "q9", "--out", "o"), "quantize to one of"),
        (("quantize", "wide", "--to", "q8_0", "--out", "tok"), "exists already"),
        (("quantize", "small", "--to", "q8_0", "--out", "o"), "quantised already"),
        (("export", "small", "o"), "is quantised ('q8_0')"),
    ],
)
def test_what_the_commands_refuse_is_one_line(tmp_path, run_cli, arguments, words, monkeypatch):
    source = written(tmp_path)
    monkeypatch.chdir(tmp_path)
    run_cli("quantize", source, "--to", "q8_0", "--out", "small")
    told = run_cli(*arguments, code=2)
    assert words in told
    assert "Traceback" not in told
