"""GGUF's keys: what is written is read again; what is not known, or cannot be said, is refused."""

import pytest
import torch

from interop.gguf_damage import ARRAY, BOOL, F32, STRING, U32, join, key_bytes, skip_value, split
from scratchlm import ModelConfig
from scratchlm import config as c
from scratchlm.errors import ScratchLMError
from scratchlm.interop import read_gguf, write_gguf
from scratchlm.interop.gguf_config import shortest
from scratchlm.model.rotary import rotary_frequencies
from scratchlm.tokenizer import Tokenizer
from scratchlm.tokenizer.chat_template import ChatTemplate
from tiny_models import build
from tokenizer.texts import SPECIALS, prose_tokenizer

LLAMA = ModelConfig(29, 64, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=24)
HALF = LLAMA.replace(positions=c.Rotary(1e6, "half"), norm=c.RMSNorm(1e-6))
QK_NORM = c.Attention(qk_norm=True)
CONFIGS = {
    "llama": LLAMA,
    "llama tied, wide heads": LLAMA.replace(tie_embeddings=True, d_head=10),
    "llama biases": LLAMA.replace(attention=c.Attention(bias="all"), ffn=c.SwiGLU(bias=True)),
    "linear": LLAMA.replace(positions=c.Rotary(1e4, scaling=c.LinearScaling(4.0))),
    "yarn": LLAMA.replace(positions=c.Rotary(1e4, scaling=c.YarnScaling(4.0, 16, 16.0, 2.0))),
    "llama3": LLAMA.replace(positions=c.Rotary(5e5, scaling=c.Llama3Scaling(8.0, 16))),
    "llama3, other ramp": LLAMA.replace(
        positions=c.Rotary(5e5, scaling=c.Llama3Scaling(8.0, 128, 2.0, 9.0))
    ),
    "window as long as the context": LLAMA.replace(attention=c.Attention(sliding_window=64)),
    "mixtral": LLAMA.replace(ffn=c.MoE(4, 2)),
    "qwen2": HALF.replace(attention=c.Attention(bias="qkv")),
    "qwen3": HALF.replace(attention=QK_NORM, d_head=8, tie_embeddings=True),
    "qwen3 moe": HALF.replace(attention=QK_NORM, ffn=c.MoE(4, 2)),
    "olmo": LLAMA.replace(norm=c.LayerNorm(1e-5, bias=False)),
    "gpt2": LLAMA.replace(
        num_kv_heads=4,
        positions=c.Learned(),
        norm=c.LayerNorm(1e-5),
        ffn=c.MLP("gelu_tanh", bias=True),
        attention=c.Attention(bias="all"),
        tie_embeddings=True,
    ),
}


def model_of(config):
    model = build(config, dtype=torch.float32)
    if config.norm == c.LayerNorm(1e-5, bias=False):  # OLMo has no weights in its norms
        for name, parameter in model.named_parameters():
            if ".ln" in f".{name}":
                parameter.data.fill_(1)
    return model


def written(path, config):
    write_gguf(path, config, model_of(config).state_dict())
    return path


def with_keys(path, *keys, without=()):
    """Rewrite a file with more keys, or without some."""
    data = path.read_bytes()
    header, _ = split(data)
    num_tensors = int.from_bytes(data[8:16], "little")
    kept, tensors = _parts(data, header)
    kept = [key for name, key in kept.items() if name not in without]
    body = data[-(-header // 32) * 32 :]
    path.write_bytes(
        join([*kept, *keys], tensors, body, counts=(num_tensors, len(kept) + len(keys)))
    )
    return path


def _parts(data, header):
    """Cut a header into its keys by name, and the table of tensors."""
    at, keys = 24, {}
    for _ in range(int.from_bytes(data[16:24], "little")):
        begin, at = at, skip_value(data, STRING, at)
        name = data[begin + 8 : at].decode()
        kind = int.from_bytes(data[at : at + 4], "little")
        at = skip_value(data, kind, at + 4)
        keys[name] = data[begin:at]
    return keys, [data[at:header]]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_and_its_weights_come_back(name, tmp_path):
    config = CONFIGS[name]
    found = read_gguf(written(tmp_path / "m.gguf", config))
    expected = config
    if config.attention.sliding_window is not None:  # which changes nothing, and is not written
        expected = config.replace(attention=c.Attention())
    if isinstance(found.config.ffn, c.MoE):  # the weight of a loss is not in it
        expected = expected.replace(ffn=found.config.ffn)
    assert found.config == expected
    assert found.eos_token_ids == ()
    for key, tensor in model_of(config).state_dict().items():
        assert torch.equal(dict(found)[key], tensor), key


def test_a_qwen2_whose_heads_are_not_as_wide_as_the_model_is_refused(tmp_path):
    """llama.cpp knows no width of a head but d_model / num_heads there, and would not load it."""
    bias = c.Attention(bias="qkv")
    config = HALF.replace(d_head=6, attention=bias)
    with pytest.raises(ScratchLMError, match="no qwen2 whose num_heads · d_head is not d_model"):
        written(tmp_path / "m.gguf", config)
    assert not list(tmp_path.iterdir())
    assert read_gguf(written(tmp_path / "n.gguf", HALF.replace(attention=bias))).config.d_head == 4


def test_the_parameters_of_llama_3_are_found_from_its_divisors(tmp_path):
    """A file by others has no keys for them."""
    for number, (length, low, high) in enumerate(
        [(8192, 1.0, 4.0), (128, 2.0, 9.0), (40, 1.0, 2.0)]
    ):
        positions = c.Rotary(5e5, scaling=c.Llama3Scaling(8.0, length, low, high))
        config = LLAMA.replace(d_head=64, positions=positions)
        path = written(tmp_path / f"{number}.gguf", config)
        own = [f"scratchlm.rope.{word}" for word in ("factor", "low_freq", "high_freq")]
        with_keys(path, without=(*own, "llama.rope.scaling.original_context_length"))
        scaling = read_gguf(path).config.positions.scaling
        if length == 8192:
            assert scaling == positions.scaling
        expected = rotary_frequencies(64, 5e5, positions.scaling)
        torch.testing.assert_close(rotary_frequencies(64, 5e5, scaling), expected)


def test_other_divisors_are_refused(tmp_path):
    path = written(tmp_path / "m.gguf", CONFIGS["llama3"])
    place = read_gguf(path).stored["rope_freqs.weight"].start
    data = bytearray(path.read_bytes())
    data[place : place + 4] = data[place + 4 : place + 8]
    path.write_bytes(bytes(data))
    with pytest.raises(ScratchLMError, match="not Llama 3's"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (key_bytes("llama.logit_scale", F32, 2.0), "are not known: 'llama.logit_scale'"),
        (key_bytes("llama.attention.clamp_kqv", F32, 8.0), "clamp_kqv must be 0.0; got"),
        (key_bytes("llama.expert_weights_norm", BOOL, 0), "expert_weights_norm must be True"),
        (key_bytes("llama.expert_shared_count", U32, 1), "expert_shared_count must be 0"),
        (key_bytes("llama.attention.causal", BOOL, 0), "attention.causal must be True"),
        (key_bytes("llama.rope.scaling.type", STRING, "longrope"), "none, linear or yarn"),
        (key_bytes("llama.rope.scaling.attn_factor", F32, 2.0), "attn_factor is for YaRN"),
        (key_bytes("general.type_", STRING, "x"), None),
        (key_bytes("somebody.note", STRING, "x"), None),
        (key_bytes("split.count", U32, 3), "split over several files"),
        (key_bytes("llama.attention.sliding_window", U32, 8), None),
    ],
)
def test_a_key_is_read_known_or_refused(key, message, tmp_path):
    path = with_keys(written(tmp_path / "m.gguf", LLAMA), key)
    if message is None:
        assert read_gguf(path).config.d_model == 16
    else:
        with pytest.raises(ScratchLMError, match=message):
            read_gguf(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("general.architecture", (STRING, "mamba"), "must be one of llama, qwen2"),
        ("general.type", (STRING, "adapter"), "general.type must be model"),
        ("general.quantization_version", (U32, 1), "quantization_version must be 2; got '1'"),
        ("llama.block_count", (STRING, "2"), "block_count must be a whole number"),
        ("llama.block_count", (U32, 2**31), "num_layers must lie between"),
        ("llama.block_count", (U32, 3), "missing 'blk.2.attn_norm.weight'"),
        ("llama.embedding_length", (U32, 32), "misshapen"),
        ("llama.attention.head_count", (U32, 0), "num_heads must lie between"),
        ("llama.attention.head_count_kv", (ARRAY, (U32, [2, 2])), "must be a whole number"),
        ("llama.attention.layer_norm_rms_epsilon", (F32, float("nan")), "eps must be finite"),
        ("llama.rope.freq_base", (F32, float("inf")), "must be finite"),
        ("llama.rope.dimension_count", (U32, 2), "dimension_count must be 4; got '2'"),
    ],
)
def test_a_value_that_cannot_be_is_named(name, value, message, tmp_path):
    path = written(tmp_path / "m.gguf", LLAMA)
    with_keys(path, key_bytes(name, *value), without=(name,))
    with pytest.raises(ScratchLMError, match=message):
        read_gguf(path)


def test_a_missing_size_is_named(tmp_path):
    path = written(tmp_path / "m.gguf", LLAMA)
    with_keys(path, without=("llama.context_length",))
    with pytest.raises(ScratchLMError, match=r"llama\.context_length is missing"):
        read_gguf(path)


def test_a_float32_is_read_as_the_decimals_it_stands_for():
    for value in (1e-5, 1e-6, 10_000.0, 500_000.0, 1.1, 0.25, 3.4e38):
        assert shortest(torch.tensor(value, dtype=torch.float32).item()) == value
    assert shortest(0.0) == 0.0
    assert shortest(float("inf")) == float("inf")


# Tokenizers


def tokens_of(tokenizer, path, **options):
    config = LLAMA.replace(vocab_size=450)
    write_gguf(path, config, build(config, dtype=torch.float32).state_dict(), tokenizer, **options)
    return read_gguf(path).tokens


def prose(pattern="gpt2", **options):
    plain = prose_tokenizer(pattern)
    return Tokenizer(plain.vocab, plain.merges, plain.special_tokens, pattern, **options)


@pytest.mark.parametrize("pattern", ["gpt2", "llama3", "qwen2"])
@pytest.mark.parametrize("normalization", [None, "NFC"])
def test_a_tokenizer_comes_back(pattern, normalization, tmp_path):
    end, start = (prose_tokenizer(pattern).special_tokens[word] for word in ("<s>", "<s >"))
    tokenizer = prose(
        pattern,
        normalization=normalization,
        added_tokens={"<tool>": prose_tokenizer(pattern).vocab_size},
        template=((start,), (end,)),
    )
    found = tokens_of(tokenizer, tmp_path / "m.gguf", eos_token_ids=[300])
    assert found.problem == ""
    assert found.tokenizer.fingerprint() == tokenizer.fingerprint()
    assert found.tokenizer.template == tokenizer.template
    assert found.eos_token_ids == (end, 300)


def test_files_by_others_of_qwen_normalise(tmp_path):
    tokens_of(prose("qwen2"), tmp_path / "m.gguf", eos_token_ids=[300])
    path = with_keys(tmp_path / "m.gguf", without=("scratchlm.tokenizer.normalization",))
    assert read_gguf(path).tokens.tokenizer.normalization == "NFC"


def test_ignore_merges_is_written_where_it_makes_no_difference(tmp_path):
    tokenizer = prose("gpt2", ignore_merges=True)
    assert tokens_of(tokenizer, tmp_path / "m.gguf", eos_token_ids=[300]).problem == ""
    lame = Tokenizer(tokenizer.vocab, tokenizer.merges[:-9], SPECIALS, "gpt2", ignore_merges=True)
    with pytest.raises(ScratchLMError, match="no pre-tokenizer with the pattern 'gpt2' and ignore"):
        tokens_of(lame, tmp_path / "n.gguf", eos_token_ids=[300])


def test_chat_templates_come_back(tmp_path):
    template = ChatTemplate({"default": "{{ bos_token }}é", "tool_use": "{{ tools }}"})
    found = tokens_of(prose(), tmp_path / "m.gguf", eos_token_ids=[300], chat_template=template)
    assert found.chat_template.templates == template.templates
    assert found.chat_template.special_tokens.keys() == {"bos_token", "eos_token"}


@pytest.mark.parametrize(
    ("tokenizer", "eos", "message"),
    [
        (prose(), [], "no tokenizer without an end-of-text token"),
        (prose(), [1, 2, 3, 4], "more than 3 tokens that end a text"),
        (prose("gpt4"), [300], "no pre-tokenizer with the pattern 'gpt4'"),
        (prose(template=((1, 2), ())), [300], "more than one token before or after"),
    ],
)
def test_a_tokenizer_that_gguf_cannot_say_is_refused(tokenizer, eos, message, tmp_path):
    with pytest.raises(ScratchLMError, match=message):
        tokens_of(tokenizer, tmp_path / "m.gguf", eos_token_ids=eos)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("model", (STRING, "llama"), "'llama' is not supported; only gpt2"),
        ("pre", (STRING, "deepseek-llm"), "pre must be one of gpt-2"),
        ("merges", (ARRAY, (STRING, ["a"])), "a merge must be two tokens"),
        ("add_bos_token", (U32, 1), "must be true or false"),
    ],
)
def test_a_tokenizer_we_do_not_have_leaves_the_model(name, value, problem, tmp_path):
    tokens_of(prose(), tmp_path / "m.gguf", eos_token_ids=[300])
    key = f"tokenizer.ggml.{name}"
    path = with_keys(tmp_path / "m.gguf", key_bytes(key, *value), without=(key,))
    found = read_gguf(path)
    assert found.tokens.tokenizer is None
    assert problem in found.tokens.problem
    assert found.config.vocab_size == 450


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the tokenizer has 420 ids, the model only 29"):
        write_gguf(
            tmp_path / "m.gguf",
            LLAMA,
            build(LLAMA, dtype=torch.float32).state_dict(),
            prose(),
            eos_token_ids=[300],
        )
