"""The contract of each module: shapes, initialisation, names, dtypes."""

import math

import pytest
import torch
import torch.nn.functional as F

from scratchlm import ModelConfig, TransformerLM, config
from scratchlm.model import (
    MLP,
    Embedding,
    LayerNorm,
    Linear,
    MoE,
    MultiHeadSelfAttention,
    RMSNorm,
    RotaryEmbedding,
    SinusoidalPositions,
    SwiGLU,
    TransformerBlock,
    rotary_frequencies,
)
from scratchlm.ops import OPS, Ops


def test_linear_weights_are_a_truncated_normal():
    weight = Linear(300, 200).weight.detach()
    std = math.sqrt(2 / 500)
    assert weight.shape == (200, 300)
    assert weight.abs().max() <= 3 * std
    assert weight.abs().max() > 2.5 * std
    assert abs(float(weight.mean())) < 0.02 * std
    assert float(weight.std()) == pytest.approx(0.9867 * std, rel=0.02)  # N(0,1) cut at ±3


def test_embedding_weights_are_a_truncated_normal():
    weight = Embedding(300, 200).weight.detach()
    assert weight.abs().max() <= 3
    assert float(weight.std()) == pytest.approx(0.9867, rel=0.02)


def test_linear_has_no_bias_unless_asked():
    assert list(Linear(3, 2).state_dict()) == ["weight"]
    assert list(Linear(3, 2, bias=True).state_dict()) == ["weight", "bias"]


MODULES = {
    "Linear": lambda **kw: Linear(8, 6, **kw),
    "Linear with bias": lambda **kw: Linear(8, 6, True, **kw),
    "RMSNorm": lambda **kw: RMSNorm(8, **kw),
    "LayerNorm": lambda **kw: LayerNorm(8, **kw),
    "SwiGLU": lambda **kw: SwiGLU(8, **kw),
    "MLP": lambda **kw: MLP(8, **kw),
    "MoE": lambda **kw: MoE(8, 16, 3, 2, **kw),
    "attention": lambda **kw: MultiHeadSelfAttention(8, 2, **kw),
}


@pytest.mark.parametrize("ops", ["fast", "reference"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_take_any_leading_dimensions(name, ops):
    module = MODULES[name](dtype=torch.float64, ops=ops)
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    together = module(x)
    assert together.shape[:-1] == x.shape[:-1]
    for i in range(2):
        torch.testing.assert_close(together[i, 1], module(x[i, 1]))
    torch.testing.assert_close(together[1], module(x[1]))


@pytest.mark.parametrize("name", [*MODULES, "Embedding", "RotaryEmbedding"])
def test_modules_take_device_and_dtype(name):
    makers = MODULES | {
        "Embedding": lambda **kw: Embedding(5, 4, **kw),
        "RotaryEmbedding": lambda **kw: RotaryEmbedding(1e4, 4, 8, **kw),
    }
    module = makers[name](device="meta", dtype=torch.bfloat16)
    assert all(p.device.type == "meta" and p.dtype == torch.bfloat16 for p in module.parameters())


def test_swiglu_default_width_is_eight_thirds_rounded_up_to_64():
    for d_model, d_ff in ((512, 1408), (768, 2048), (1024, 2752), (1600, 4288), (24, 64)):
        assert SwiGLU(d_model, device="meta").w1.weight.shape == (d_ff, d_model)
        assert config.default_d_ff(d_model) == d_ff


# Positions


def test_rope_at_position_zero_is_identity():
    x = torch.randn(2, 3, 1, 8)
    for layout in ("interleaved", "half"):
        assert torch.equal(RotaryEmbedding(1e4, 8, 4, layout)(x, torch.tensor([0])), x)


def test_rope_positions_broadcast_over_heads():
    rope, x = RotaryEmbedding(1e4, 8, 32), torch.randn(2, 3, 5, 8)
    positions = torch.randint(32, (2, 5))
    turned = rope(x, positions)
    for row in range(2):
        for head in range(3):
            torch.testing.assert_close(turned[row, head], rope(x[row, head], positions[row]))


def test_rope_tables_stay_float32_and_survive_meta():
    model = TransformerLM(ModelConfig(32, 16, 8, 1, 2), device="meta")
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    fresh = RotaryEmbedding(1e4, 4, 16)
    assert model.rope.cos.dtype == torch.float32
    assert torch.equal(model.rope.cos, fresh.cos)
    assert torch.equal(model.layers[0].attn.rope.sin, fresh.sin)


def test_tables_that_all_layers_share_are_computed_once_where_a_model_is_moved(monkeypatch):
    model, built = TransformerLM(ModelConfig(32, 16, 8, 5, 2), device="meta"), []
    build = RotaryEmbedding._build
    monkeypatch.setattr(
        RotaryEmbedding, "_build", lambda self, device: (built.append(device), build(self, device))
    )
    model.to_empty(device="cpu")
    assert [device.type for device in built] == ["cpu"]
    model.to_empty(device="meta")
    assert [device.type for device in built][1:] == ["meta"] * 5  # those have no values to keep


@pytest.mark.parametrize("positions", [config.Rotary(), config.Sinusoidal()], ids=repr)
def test_a_model_emptied_and_filled_is_the_same_model(positions):
    cfg = ModelConfig(32, 16, 8, 3, 2, positions=positions)
    model, tokens = TransformerLM(cfg), torch.randint(32, (2, 7))
    other = TransformerLM(cfg, device="meta").to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens), model(tokens))


def test_sinusoidal_positions_follow_the_formula():
    table = SinusoidalPositions(20, 6)(torch.arange(20))
    for p in range(20):
        for i in range(3):
            angle = p / 10_000 ** (2 * i / 6)
            assert float(table[p, 2 * i]) == pytest.approx(math.sin(angle), abs=1e-5)
            assert float(table[p, 2 * i + 1]) == pytest.approx(math.cos(angle), abs=1e-5)


SCALINGS = {
    "none": (None, {"rope_type": "default"}),
    "linear": (config.LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        config.YarnScaling(4.0, 64),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "yarn, all said": (
        config.YarnScaling(8.0, 128, 24.0, 2.0, 1.3, truncate=False),
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
            "truncate": False,
        },
    ),
    "llama3": (
        config.Llama3Scaling(8.0, 64, 1.0, 4.0),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scalings_equal_those_of_transformers(name):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling, theirs = SCALINGS[name]
    hf = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10_000.0, **theirs},
    )
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.arange(256)[None])
    ours = RotaryEmbedding(10_000.0, 32, 256, "half", scaling)
    # A frequency off by its last bit is an angle off by 3e-5 at position 255.
    torch.testing.assert_close(ours.cos, cos[0, :, :16], atol=5e-5, rtol=0)
    torch.testing.assert_close(ours.sin, sin[0, :, :16], atol=5e-5, rtol=0)


def test_ntk_scaling_keeps_the_fastest_pair_and_stretches_the_slowest_by_the_factor():
    plain = rotary_frequencies(32, 1e4)
    stretched = rotary_frequencies(32, 1e4, config.NTKScaling(4.0))
    assert float(stretched[0]) == float(plain[0]) == 1.0
    assert float(plain[-1] / stretched[-1]) == pytest.approx(4.0, rel=1e-5)


# Attention and block


def test_attention_equals_torchs_multi_head_attention():
    ours = MultiHeadSelfAttention(16, 4, bias="all", dtype=torch.float64)
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_()
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        theirs.out_proj.weight.copy_(ours.output_proj.weight)
        theirs.out_proj.bias.copy_(ours.output_proj.bias)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=hidden, need_weights=False)
    torch.testing.assert_close(ours(x), expected)


def test_the_block_is_its_two_lines():
    cfg = ModelConfig(32, 16, 8, 1, 2)
    x = torch.randn(2, 5, 8)
    pre = TransformerBlock(cfg)
    y = x + pre.attn(pre.ln1(x))
    torch.testing.assert_close(pre(x), y + pre.ffn(pre.ln2(y)))
    post = TransformerBlock(cfg.replace(norm_placement="post"))
    y = post.ln1(x + post.attn(x))
    torch.testing.assert_close(post(x), post.ln2(y + post.ffn(y)))
    bare = TransformerBlock(cfg.replace(norm=config.NoNorm()))
    y = x + bare.attn(x)
    torch.testing.assert_close(bare(x), y + bare.ffn(y))


def test_the_plain_model_has_exactly_the_names_of_the_design():
    cfg = ModelConfig(
        vocab_size=11, context_length=8, d_model=8, num_layers=2, num_heads=2, d_ff=20
    )
    shapes = {
        "token_embeddings.weight": (11, 8),
        "ln_final.weight": (8,),
        "lm_head.weight": (11, 8),
    }
    for i in range(2):
        shapes |= {f"layers.{i}.{ln}.weight": (8,) for ln in ("ln1", "ln2")}
        for name in ("q_proj", "k_proj", "v_proj", "output_proj"):
            shapes[f"layers.{i}.attn.{name}.weight"] = (8, 8)
        shapes |= {f"layers.{i}.ffn.{w}.weight": (20, 8) for w in ("w1", "w3")}
        shapes[f"layers.{i}.ffn.w2.weight"] = (8, 20)
    model = TransformerLM(cfg)
    assert {name: tuple(p.shape) for name, p in model.state_dict().items()} == shapes
    model.load_state_dict({name: torch.randn(shape) for name, shape in shapes.items()}, strict=True)


def test_a_tied_model_has_no_head_of_its_own_and_starts_with_sane_logits():
    cfg = ModelConfig(512, 16, 64, 1, 2, tie_embeddings=True)
    model = TransformerLM(cfg)
    assert "lm_head.weight" not in model.state_dict()
    loss = model.loss(torch.randint(512, (4, 16)), torch.randint(512, (4, 16)))
    assert float(loss.detach()) == pytest.approx(math.log(512), rel=0.2)


def test_weights_are_a_function_of_the_generator():
    one, two = (
        TransformerLM(ModelConfig(32, 16, 8, 2, 2)),
        TransformerLM(ModelConfig(32, 16, 8, 2, 2)),
    )
    one.reset_parameters(torch.Generator().manual_seed(5))
    two.reset_parameters(torch.Generator().manual_seed(5))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)


def test_next_token_probabilities_are_the_softmax_after_the_last_token():
    model, tokens = TransformerLM(ModelConfig(32, 16, 8, 1, 2)), torch.randint(32, (2, 5))
    probabilities = model.next_token_probabilities(tokens)
    torch.testing.assert_close(probabilities, F.softmax(model(tokens)[:, -1], dim=-1))
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    short = model.next_token_probabilities(tokens, attention_mask=mask)
    torch.testing.assert_close(short[1:], model.next_token_probabilities(tokens[1:, :3]))


def test_a_learner_can_bring_an_op_of_their_own():
    calls = []

    def my_norm(x, weight, eps):
        calls.append(x.shape)
        return OPS["reference"].rms_norm(x, weight, eps)

    mine = OPS["reference"].replace(rms_norm=my_norm)
    assert isinstance(mine, Ops)
    model = TransformerLM(ModelConfig(32, 16, 8, 2, 2), ops=mine)
    model.loss(torch.randint(32, (2, 5)), torch.randint(32, (2, 5))).backward()
    assert len(calls) == 5


@pytest.mark.parametrize("name", config.PRESETS)
def test_every_preset_builds_on_meta(name):
    model = TransformerLM(config.PRESETS[name], device="meta", dtype=torch.bfloat16)
    assert model(torch.zeros(1, 3, dtype=torch.long, device="meta")).shape == (
        1,
        3,
        config.PRESETS[name].vocab_size,
    )


# What the makers of the released models say they have.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "cs336-gpt2-xl": 2_127_057_600,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name):
    model = TransformerLM(config.PRESETS[name], device="meta")
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]
