"""What a user can get wrong: one clear line each, and nothing else happens."""

import re

import pytest
import torch

from scratchlm import ModelConfig, TransformerLM, config
from scratchlm.model import (
    Embedding,
    KVCache,
    Linear,
    MoE,
    MultiHeadSelfAttention,
    QuestionAnswering,
    RMSNorm,
    RotaryEmbedding,
    SequenceClassifier,
    SinusoidalPositions,
)
from scratchlm.ops import OPS
from tiny_models import PLAIN, build, ids

SIZES = {"vocab_size": 32, "context_length": 16, "d_model": 8, "num_layers": 1, "num_heads": 2}


def model():
    return build(PLAIN, dtype=torch.float32)


def tables():
    return torch.randn(1, 2, 3, 4)


CASES = {
    # Sizes and choices of a config
    "heads": (
        lambda: ModelConfig(**SIZES | {"d_model": 100, "num_heads": 3}),
        ValueError,
        "d_model must be divisible by num_heads; got d_model=100, num_heads=3",
    ),
    "kv heads": (
        lambda: ModelConfig(**SIZES | {"num_heads": 4, "num_kv_heads": 3}),
        ValueError,
        "num_heads must be divisible by num_kv_heads; got num_heads=4, num_kv_heads=3",
    ),
    "odd rope": (
        lambda: ModelConfig(**SIZES, d_head=3),
        ValueError,
        "d_head must be even to rotate pairs of channels; got d_head=3",
    ),
    "odd sinusoid": (
        lambda: ModelConfig(**SIZES | {"d_model": 9}, d_head=4, positions=config.Sinusoidal()),
        ValueError,
        "d_model must be even for sinusoidal positions; got d_model=9",
    ),
    **{
        f"{name} {value!r}": (
            lambda name=name, value=value: ModelConfig(**SIZES | {name: value}),
            error,
            rf"{name} must .*; got {name}={re.escape(repr(value))}",
        )
        for name in (*SIZES, "d_ff", "num_kv_heads", "d_head")
        for value, error in (
            (0, ValueError),
            (-4, ValueError),
            (2**40, ValueError),
            (2.5, TypeError),
            (True, TypeError),
            ("8", TypeError),
        )
    },
    "theta": (
        lambda: ModelConfig(**SIZES, rope_theta=float("nan")),
        ValueError,
        "rope_theta must be finite and greater than 0; got rope_theta=nan",
    ),
    "two thetas": (
        lambda: ModelConfig(**SIZES, rope_theta=5.0, positions=config.Rotary(7.0)),
        ValueError,
        "rope_theta and positions.theta must agree; got rope_theta=5.0, positions.theta=7.0",
    ),
    "ffn kind": (
        lambda: ModelConfig(**SIZES, ffn="swiglu"),
        TypeError,
        "ffn must be one of SwiGLU, MLP, MoE; got 'swiglu'",
    ),
    "placement": (
        lambda: ModelConfig(**SIZES, norm_placement="middle"),
        ValueError,
        "norm_placement must be one of pre, post; got norm_placement='middle'",
    ),
    "experts": (
        lambda: config.MoE(num_experts=2, experts_per_token=3),
        ValueError,
        "experts_per_token must not exceed num_experts; got experts_per_token=3, num_experts=2",
    ),
    "activation": (
        lambda: config.MLP("swish"),
        ValueError,
        "activation must be one of silu, gelu, gelu_tanh, relu; got activation='swish'",
    ),
    "unknown key": (
        lambda: config.from_dict(SIZES | {"dropout": 0.1}),
        ValueError,
        "unknown config key: dropout",
    ),
    "unknown nested key": (
        lambda: config.from_dict(SIZES | {"ffn": {"type": "mlp", "width": 3}}),
        ValueError,
        "unknown config key: ffn.width",
    ),
    "missing key": (
        lambda: config.from_dict({"vocab_size": 3}),
        ValueError,
        "missing config key: context_length, d_model, num_layers, num_heads",
    ),
    "unknown type": (
        lambda: config.from_dict(SIZES | {"norm": {"type": "batchnorm"}}),
        ValueError,
        "norm.type must be one of rmsnorm, layernorm, none; got 'batchnorm'",
    ),
    "replace": (lambda: PLAIN.replace(width=3), ValueError, "unknown config key: width"),
    "preset": (
        lambda: config.preset("gpt2-xxl"),
        ValueError,
        "unknown preset 'gpt2-xxl'; did you mean 'gpt2-xl'?",
    ),
    # Calling the model
    "too long": (
        lambda: model()(ids(1, 25)),
        ValueError,
        "the sequence must not exceed context_length=24; got 25 tokens",
    ),
    "id too large": (
        lambda: model()(torch.tensor([[3, 29]])),
        ValueError,
        re.escape("token id must lie in [0, 29); got 29"),
    ),
    "id negative": (
        lambda: model()(torch.tensor([[3, -1]])),
        ValueError,
        re.escape("token id must lie in [0, 29); got -1"),
    ),
    "ids not whole": (
        lambda: model()(torch.zeros(1, 3)),
        TypeError,
        "token ids must be whole numbers, int64 or int32; got torch.float32",
    ),
    "ids shape": (
        lambda: model()(torch.zeros(3, dtype=torch.long)),
        ValueError,
        re.escape("token_ids must be (batch, seq); got shape (3,)"),
    ),
    "position too large": (
        lambda: model()(ids(1, 2), positions=torch.tensor([0, 24])),
        ValueError,
        re.escape("position must lie in [0, 24); got 24"),
    ),
    "positions shape": (
        lambda: model()(ids(2, 3), positions=torch.zeros(4, dtype=torch.long)),
        ValueError,
        re.escape("positions must be (seq,) or (batch, seq) = (2, 3); got shape (4,)"),
    ),
    "mask dtype": (
        lambda: model()(ids(1, 3), attention_mask=torch.ones(1, 3)),
        TypeError,
        re.escape("attention_mask must be boolean (True = a real token); got torch.float32"),
    ),
    "mask shape": (
        lambda: model()(ids(1, 3), attention_mask=torch.ones(1, 4, dtype=torch.bool)),
        ValueError,
        re.escape("attention_mask must have the shape of token_ids, (1, 3); got (1, 4)"),
    ),
    "documents shape": (
        lambda: model()(ids(1, 3), document_ids=torch.ones(2, 3, dtype=torch.long)),
        ValueError,
        re.escape("document_ids must have the shape of token_ids, (1, 3); got (2, 3)"),
    ),
    "documents and cache": (
        lambda: (m := model())(ids(1, 3), document_ids=ids(1, 3), cache=m.new_cache(1)),
        ValueError,
        "document_ids and cache cannot be used together",
    ),
    "cache rows": (
        lambda: (m := model())(ids(1, 3), cache=m.new_cache(2)),
        ValueError,
        "the cache holds 2 rows; got a batch of 1",
    ),
    "cache room": (
        lambda: (m := model())(ids(1, 5), cache=m.new_cache(1, capacity=4)),
        ValueError,
        "the cache has room for 4 tokens; got 0 kept and 5 new",
    ),
    "cache size": (
        lambda: KVCache(PLAIN, 0),
        ValueError,
        "batch_size and capacity must be at least 1; got batch_size=0, capacity=24",
    ),
    "cache past the context": (
        lambda: (m := model())(ids(1, 25), cache=m.new_cache(1, capacity=40)),
        ValueError,
        "the sequence must not exceed context_length=24; got 25 tokens",
    ),
    "temperature": (
        lambda: model().next_token_probabilities(ids(1, 3), temperature=0.0),
        ValueError,
        "temperature must be greater than 0; got 0.0",
    ),
    "ops": (
        lambda: TransformerLM(PLAIN, ops="faster"),
        ValueError,
        "ops must be a set of ops or one of reference, fast; got 'faster'",
    ),
    # Modules
    "linear width": (
        lambda: Linear(4, 2)(torch.randn(2, 5)),
        ValueError,
        re.escape("Linear: the last dimension must be 4; got shape (2, 5)"),
    ),
    "norm width": (
        lambda: RMSNorm(4)(torch.randn(2, 5)),
        ValueError,
        re.escape("RMSNorm: the last dimension must be 4; got shape (2, 5)"),
    ),
    "attention width": (
        lambda: MultiHeadSelfAttention(8, 2)(torch.randn(1, 3, 6)),
        ValueError,
        re.escape("attention: the last dimension must be 8; got shape (1, 3, 6)"),
    ),
    "attention heads": (
        lambda: MultiHeadSelfAttention(10, 3),
        ValueError,
        "d_model must be divisible by num_heads; got d_model=10, num_heads=3",
    ),
    "attention kv heads": (
        lambda: MultiHeadSelfAttention(8, 4, 3),
        ValueError,
        "num_heads must be divisible by num_kv_heads; got num_heads=4, num_kv_heads=3",
    ),
    "attention rope width": (
        lambda: MultiHeadSelfAttention(8, 2, rope=RotaryEmbedding(1e4, 6, 8)),
        ValueError,
        "RoPE's width must be d_head=4; got d_k=6",
    ),
    "attention too long": (
        lambda: MultiHeadSelfAttention(8, 2, rope=RotaryEmbedding(1e4, 4, 8))(torch.randn(9, 8)),
        ValueError,
        "the sequence must not exceed 8 tokens; got 9",
    ),
    "embedding id": (
        lambda: Embedding(4, 2)(torch.tensor([4])),
        ValueError,
        re.escape("token id must lie in [0, 4); got 4"),
    ),
    "embedding padding": (
        lambda: Embedding(4, 2, padding_id=4),
        ValueError,
        re.escape("padding_id must lie in [0, 4); got padding_id=4"),
    ),
    "rope odd": (
        lambda: RotaryEmbedding(1e4, 5, 8),
        ValueError,
        "d_k must be even to rotate pairs of channels; got d_k=5",
    ),
    "rope layout": (
        lambda: RotaryEmbedding(1e4, 4, 8, layout="pairs"),
        ValueError,
        "layout must be one of interleaved, half; got layout='pairs'",
    ),
    "rope width": (
        lambda: RotaryEmbedding(1e4, 4, 8)(torch.randn(3, 6), torch.arange(3)),
        ValueError,
        "RoPE: the last dimension must be 4; got 6",
    ),
    "rope position": (
        lambda: RotaryEmbedding(1e4, 4, 8)(torch.randn(3, 4), torch.arange(3) + 6),
        ValueError,
        re.escape("position must lie in [0, 8); got 8"),
    ),
    "rope positions": (
        lambda: RotaryEmbedding(1e4, 4, 8)(torch.randn(3, 4), torch.arange(2)),
        ValueError,
        "token_positions must name one position per element; got 2 for",
    ),
    "sinusoid odd": (
        lambda: SinusoidalPositions(8, 5),
        ValueError,
        "d_model must be even for sinusoidal positions; got 5",
    ),
    "moe experts": (
        lambda: MoE(8, 16, 2, 3),
        ValueError,
        "experts_per_token must lie between 1 and num_experts; got experts_per_token=3",
    ),
    "labels": (
        lambda: SequenceClassifier(PLAIN, 1),
        ValueError,
        "num_labels must be at least 2; got num_labels=1",
    ),
    "question too long": (
        lambda: QuestionAnswering(PLAIN)(ids(1, 25)),
        ValueError,
        "the sequence must not exceed context_length=24; got 25 tokens",
    ),
    # Attention itself
    **{
        f"{name} {what}": (lambda f=f, a=a: f(*a()), error, line)
        for name, f in ((name, ops.scaled_dot_product_attention) for name, ops in OPS.items())
        for what, a, error, line in (
            (
                "mask",
                lambda: (tables(), tables(), tables(), torch.ones(3, 3)),
                TypeError,
                re.escape("mask must be boolean (True = attend); got torch.float32"),
            ),
            (
                "widths",
                lambda: (tables(), torch.randn(1, 2, 3, 5), tables()),
                ValueError,
                "query and key must have one width; got 4 and 5",
            ),
            (
                "lengths",
                lambda: (tables(), tables(), torch.randn(1, 2, 4, 4)),
                ValueError,
                "key and value must have one length; got 3 and 4",
            ),
            (
                "batches",
                lambda: (tables(), torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4)),
                ValueError,
                "query, key and value must have the same leading dimensions; got",
            ),
        )
    },
    **{
        f"{name} target": (
            lambda ops=ops: ops.cross_entropy(torch.randn(2, 5), torch.tensor([0, 5])),
            ValueError,
            re.escape("target must lie in [0, 5); got 5"),
        )
        for name, ops in OPS.items()
    },
    **{
        f"{name} targets shape": (
            lambda ops=ops: ops.cross_entropy(torch.randn(2, 5), torch.tensor([0, 1, 2])),
            ValueError,
            re.escape("targets must have the shape of the logits without the last dimension, (2,)"),
        )
        for name, ops in OPS.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_gives_one_clear_line(name):
    call, error, line = CASES[name]
    with pytest.raises(error, match=line) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_refused_call_leaves_the_cache_as_it_was():
    m = model()
    cache = m.new_cache(1, capacity=4)
    m(ids(1, 2), cache=cache)
    with pytest.raises(ValueError):
        m(ids(1, 3), cache=cache)
    with pytest.raises(ValueError):
        m(torch.tensor([[99]]), cache=cache)
    assert cache.length == 2
    m(ids(1, 2), cache=cache)
    assert cache.length == 4


def test_where_ids_cannot_be_checked_they_give_nan_and_no_fault():
    """On an accelerator, or compiled, a wrong id must not reach the lookup; it must not pass
    unseen either."""
    compiled = torch.compile(model(), fullgraph=True, backend="aot_eager")
    logits = compiled(torch.tensor([[3, 29, 4], [1, 2, 3]]))
    assert logits[0, 1:].isnan().all()
    assert logits[1].isfinite().all()
    misplaced = compiled(ids(1, 2), positions=torch.tensor([[0, 24]]))
    assert misplaced[0, 1].isnan().all()
