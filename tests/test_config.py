"""Configs: what is derived, what travels through files, what is refused."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratchlm import config as c

SIZES = {"vocab_size": 32, "context_length": 16, "d_model": 8, "num_layers": 1, "num_heads": 2}

positions = st.one_of(
    st.builds(
        c.Rotary,
        theta=st.floats(1.0, 1e7),
        layout=st.sampled_from(["interleaved", "half"]),
        scaling=st.one_of(
            st.none(),
            st.builds(c.LinearScaling, factor=st.floats(1.0, 64.0)),
            st.builds(c.NTKScaling, factor=st.floats(1.0, 64.0)),
            st.builds(
                c.YarnScaling,
                factor=st.floats(1.0, 64.0),
                original_context_length=st.integers(1, 10_000),
                attention_factor=st.none() | st.floats(0.1, 4.0),
            ),
            st.builds(
                c.Llama3Scaling,
                factor=st.floats(1.0, 64.0),
                original_context_length=st.integers(1, 10_000),
            ),
        ),
    ),
    st.builds(c.Learned),
    st.builds(c.Sinusoidal),
    st.builds(c.NoPositions),
)
models = st.builds(
    c.ModelConfig,
    vocab_size=st.integers(1, 10**6),
    context_length=st.integers(1, 10**6),
    d_model=st.integers(1, 64).map(lambda n: 8 * n),
    num_layers=st.integers(1, 99),
    num_heads=st.just(4),
    num_kv_heads=st.sampled_from([None, 1, 2, 4]),
    d_head=st.sampled_from([None, 2, 128]),
    positions=st.none() | positions,
    ffn=st.one_of(
        st.builds(c.SwiGLU, bias=st.booleans()),
        st.builds(c.MLP, activation=st.sampled_from(["silu", "gelu", "relu"]), bias=st.booleans()),
        st.builds(c.MoE, st.integers(4, 9), st.integers(1, 4), renormalize=st.booleans()),
    ),
    norm=st.one_of(
        st.builds(c.RMSNorm, eps=st.floats(1e-8, 1e-2)),
        st.builds(c.LayerNorm, bias=st.booleans()),
        st.builds(c.NoNorm),
    ),
    attention=st.builds(
        c.Attention,
        qk_norm=st.booleans(),
        sliding_window=st.none() | st.integers(1, 99),
        bias=st.sampled_from(["none", "qkv", "all"]),
    ),
    norm_placement=st.sampled_from(["pre", "post"]),
    tie_embeddings=st.booleans(),
)


@given(models)
def test_a_config_round_trips_through_toml_and_json(config):
    assert c.from_dict(tomllib.loads(c.to_toml(config))) == config
    assert c.from_dict(json.loads(c.to_json(config))) == config


def test_a_default_config_has_no_tables():
    config = c.ModelConfig(**SIZES, rope_theta=500.0)
    assert config.positions == c.Rotary(500.0, "interleaved")
    assert (config.ffn, config.norm, config.norm_placement) == (c.SwiGLU(), c.RMSNorm(), "pre")
    assert (config.d_ff, config.num_kv_heads, config.d_head) == (64, 2, 4)
    assert not config.tie_embeddings


def test_replace_derives_anew_what_was_derived():
    config = c.ModelConfig(**SIZES)
    wider = config.replace(d_model=512, num_heads=8)
    assert (wider.d_ff, wider.num_kv_heads, wider.d_head) == (1408, 8, 64)
    chosen = c.ModelConfig(**SIZES, d_ff=100, d_head=6, num_kv_heads=1).replace(d_model=512)
    assert (chosen.d_ff, chosen.num_kv_heads, chosen.d_head) == (100, 1, 6)


def test_replace_keeps_rope_theta_and_positions_in_step():
    config = c.ModelConfig(**SIZES, positions=c.Rotary(77.0, "half"))
    assert config.rope_theta == 77.0
    assert config.replace(rope_theta=5.0).positions == c.Rotary(5.0, "half")
    assert config.replace(positions=c.Rotary(9.0)).rope_theta == 9.0
    assert config.replace(positions=c.Learned()).rope_theta == c.ModelConfig(**SIZES).rope_theta
    with pytest.raises(ValueError, match="rope_theta is for Rotary positions, not for Learned"):
        c.ModelConfig(**SIZES, positions=c.Learned(), rope_theta=500.0)


def test_files_are_read_and_faults_are_named_with_the_file(tmp_path):
    good = tmp_path / "model.toml"
    good.write_text(c.to_toml(c.PRESETS["qwen3-30b-a3b"]))
    assert c.load_config(good) == c.PRESETS["qwen3-30b-a3b"]
    for name, text, fault in (
        ("broken.toml", "vocab_size = ", "broken.toml: not valid TOML"),
        ("broken.json", "{", "broken.json: not valid JSON"),
        ("list.json", "[]", "list.json: a JSON object was expected; got list"),
        ("typo.toml", c.to_toml(c.PRESETS["gpt2"]) + "\n[atention]\n", "unknown config key: ate"),
        ("model.yaml", "", "a config file must end in .toml or .json"),
        ("binary.json", b"\xff\xfe", "binary.json: not valid JSON"),
    ):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=fault.replace(".", r"\.")) as caught:
            c.load_config(path)
        assert "\n" not in str(caught.value)


def test_an_invalid_table_is_refused():
    for bad in (None, 3, [], "x"):
        with pytest.raises(TypeError, match="a model config must be a table"):
            c.from_dict(bad)
    with pytest.raises(TypeError, match="ffn must be a table; got 'moe'"):
        c.from_dict(SIZES | {"ffn": "moe"})
