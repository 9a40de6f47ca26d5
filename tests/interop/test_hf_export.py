"""Models that a Hugging Face family can represent are exported, others refused with the reason."""

import json
import os

import pytest
import torch

from interop.hf_models import (
    assert_same_bytes,
    load_with_transformers,
    logits_of,
    token_ids,
    weights,
)
from scratchlm import config as c
from scratchlm.errors import ScratchLMError
from scratchlm.interop import read_hf, to_hf_config, write_hf
from scratchlm.interop.writing import half_layout, interleaved_layout
from tiny_models import FAMILIES, PLAIN, build

INTERLEAVED_QWEN3 = FAMILIES["qwen3"].replace(positions=c.Rotary(1e6, "interleaved"))
EXPRESSIBLE = {
    **{name: FAMILIES[name] for name in FAMILIES if not name.startswith(("no ", "post", "sinus"))},
    "interleaved qwen3": INTERLEAVED_QWEN3,
    "interleaved biases": PLAIN.replace(
        attention=c.Attention(bias="all"), ffn=c.SwiGLU(bias=True), num_kv_heads=2
    ),
    "windowed qwen3": INTERLEAVED_QWEN3.replace(
        attention=c.Attention(qk_norm=True, sliding_window=5)
    ),
    "windowed qwen2": PLAIN.replace(attention=c.Attention(bias="qkv", sliding_window=5)),
    "qwen3 moe": INTERLEAVED_QWEN3.replace(ffn=c.MoE(4, 2, renormalize=False)),
    "ntk": PLAIN.replace(positions=c.Rotary(1e4, "interleaved", c.NTKScaling(4.0))),
    "linear": PLAIN.replace(positions=c.Rotary(1e4, "half", c.LinearScaling(2.0))),
    "llama3": PLAIN.replace(positions=c.Rotary(5e5, "half", c.Llama3Scaling(8.0, 12))),
    "odd heads": PLAIN.replace(num_heads=3, d_head=8, num_kv_heads=3),
    "gelu": FAMILIES["gpt2"].replace(ffn=c.MLP("gelu", bias=True), d_ff=40),
}
INEXPRESSIBLE = {
    "sinusoidal": (FAMILIES["sinusoidal"], "Sinusoidal"),
    "no positions": (FAMILIES["no positions"], "NoPositions"),
    "post-norm": (FAMILIES["post-norm"], "norm_placement is 'post'"),
    "no norm": (FAMILIES["no norm"], "NoNorm"),
    "gpt2 with a window": (
        FAMILIES["gpt2"].replace(attention=c.Attention(bias="all", sliding_window=4)),
        "GPT-2's attention is plain",
    ),
    "gpt2 with grouped heads": (FAMILIES["gpt2"].replace(num_kv_heads=2), "num_kv_heads"),
    "mixtral with biases": (
        FAMILIES["mixtral"].replace(attention=c.Attention(bias="all")),
        "experts and",
    ),
    "raw experts": (FAMILIES["mixtral"].replace(ffn=c.MoE(4, 2, renormalize=False)), "qk_norm"),
    "biases and a window": (
        PLAIN.replace(attention=c.Attention(bias="all", sliding_window=4)),
        "sliding window",
    ),
    "qkv biases and qk_norm": (
        PLAIN.replace(attention=c.Attention(bias="qkv", qk_norm=True)),
        "qk_norm and biases",
    ),
}


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_an_exported_model_gives_our_logits_in_transformers(name, tmp_path):
    config = EXPRESSIBLE[name]
    ours = build(config, dtype=torch.float32).eval()
    write_hf(tmp_path / "out", config, ours.state_dict())
    theirs = load_with_transformers(tmp_path / "out")
    ids = token_ids(seq=24, vocab=29)
    torch.testing.assert_close(logits_of(theirs, ids), logits_of(ours, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_the_exported_config_is_the_config_in_the_half_layout(name, tmp_path):
    config = EXPRESSIBLE[name]
    if name == "ntk":  # a scaling without a word of its own: the base says it
        return
    write_hf(tmp_path / "out", config, build(config, dtype=torch.float32).state_dict())
    if isinstance(config.positions, c.Rotary):
        positions = c.Rotary(config.positions.theta, "half", config.positions.scaling)
        config = config.replace(positions=positions, rope_theta=positions.theta)
    assert read_hf(tmp_path / "out").config == config


@pytest.mark.parametrize("name", INEXPRESSIBLE)
def test_a_model_no_family_can_represent_is_refused_with_the_reason(name, tmp_path):
    config, reason = INEXPRESSIBLE[name]
    with pytest.raises(ScratchLMError, match=reason):
        write_hf(tmp_path / "out", config, build(config).state_dict())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("here", "there", "change"),
    [("interleaved", "half", half_layout), ("half", "interleaved", interleaved_layout)],
)
def test_queries_and_keys_in_the_other_layout_give_the_same_model(here, there, change):
    config = PLAIN.replace(num_kv_heads=2, positions=c.Rotary(layout=here))
    model, ids = build(config), token_ids(seq=9, vocab=29)
    state = model.state_dict()
    for name in state:
        if "q_proj" in name or "k_proj" in name:
            state[name] = change(state[name], config.d_head)
    other = build(config.replace(positions=c.Rotary(layout=there)))
    other.load_state_dict(state)
    torch.testing.assert_close(other(ids), model(ids), atol=1e-12, rtol=1e-11)


def test_olmo_is_exported_only_with_norm_weights_of_one(tmp_path):
    config = PLAIN.replace(norm=c.LayerNorm(1e-5, bias=False))
    model = build(config, dtype=torch.float32)
    with pytest.raises(ScratchLMError, match=r"layers\.0\.ln1\.weight is not all ones"):
        write_hf(tmp_path / "no", config, model.state_dict())
    for name, tensor in model.state_dict().items():
        if ".ln" in f".{name}":
            tensor.fill_(1)
    write_hf(tmp_path / "out", config, model.state_dict())
    ids = token_ids(seq=24, vocab=29)
    theirs = load_with_transformers(tmp_path / "out")
    torch.testing.assert_close(logits_of(theirs, ids), logits_of(model, ids), rtol=1e-5, atol=1e-5)


def test_export_rounds_once_when_converting_the_dtype(tmp_path):
    model = build(PLAIN, dtype=torch.float32)
    write_hf(tmp_path / "out", PLAIN, model.state_dict(), dtype=torch.bfloat16)
    stored = weights(tmp_path / "out")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert torch.equal(stored["lm_head.weight"], model.lm_head.weight.bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_values_that_overflow_the_dtype_are_not_written(tmp_path):
    state = build(PLAIN, dtype=torch.float32).state_dict()
    state["lm_head.weight"][0, 0] = 1e6
    with pytest.raises(ScratchLMError, match=r"lm_head\.weight holds NaN or infinite"):
        write_hf(tmp_path / "out", PLAIN, state, dtype=torch.float16)
    assert not list(tmp_path.iterdir())


def test_tensors_that_are_not_the_configs_are_named(tmp_path):
    state = build(PLAIN, dtype=torch.float32).state_dict()
    head = state.pop("lm_head.weight")
    with pytest.raises(ValueError, match=r"missing 'lm_head\.weight'"):
        write_hf(tmp_path / "out", PLAIN, state)
    with pytest.raises(ValueError, match="unexpected 'extra'"):
        write_hf(tmp_path / "out", PLAIN, {**state, "lm_head.weight": head, "extra": head})
    with pytest.raises(ValueError, match=r"lm_head\.weight must be \[29, 16\]; got \[28, 16\]"):
        write_hf(tmp_path / "out", PLAIN, {**state, "lm_head.weight": head[1:]})


def test_an_existing_directory_is_not_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ScratchLMError, match="exists already"):
        write_hf(tmp_path / "out", PLAIN, build(PLAIN).state_dict())
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_a_crash_while_writing_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    state = build(PLAIN, dtype=torch.float32).state_dict()
    calls, real = [], os.fsync

    def fails_at_the_third(handle):
        calls.append(handle)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(handle)

    monkeypatch.setattr(os, "fsync", fails_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        write_hf(tmp_path / "out", PLAIN, state)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    write_hf(tmp_path / "out", PLAIN, state)
    assert_same_bytes(
        weights(tmp_path / "out"), weights(write_hf(tmp_path / "again", PLAIN, state))
    )


def test_a_tensor_larger_than_a_shard_has_one_to_itself(tmp_path):
    state = build(PLAIN, dtype=torch.float32).state_dict()
    write_hf(tmp_path / "out", PLAIN, state, max_shard_bytes=1)
    files = list((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) == len(index["weight_map"]) == len(state)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())
    load_with_transformers(tmp_path / "out")


def test_presets_have_a_family():
    families = {name: to_hf_config(config)["model_type"] for name, config in c.PRESETS.items()}
    assert families["gpt2"] == "gpt2"
    assert families["cs336-gpt2"] == families["llama3-8b"] == "llama"
    assert families["qwen3-0.6b"] == "qwen3"
    assert families["qwen3-30b-a3b"] == "qwen3_moe"
