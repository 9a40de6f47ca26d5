"""config.json ↔ ModelConfig: published configs mean what they mean; what we cannot do is named."""

import pytest
import torch
from hypothesis import given

from interop.hf_models import HF_CONFIGS
from scratchlm import TransformerLM
from scratchlm import config as c
from scratchlm.interop import from_hf_config, to_hf_config
from scratchlm.interop.keys import FAMILIES as FAMILY_TABLES
from scratchlm.interop.shapes import parameter_shapes
from tiny_models import FAMILIES, families

_COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "transformers_version": "4.40.1",
    "use_cache": True,
}
# As the models' authors published them, by transformers 4.
PUBLISHED = {
    "llama3-8b": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "llama3.2-1b": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "qwen3-0.6b": {
        **_COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gpt2": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
}
SMOLLM = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset_of_its_name(name):
    assert from_hf_config(PUBLISHED[name]) == c.PRESETS[name]


def test_smollm_is_a_llama_of_its_sizes():
    config = from_hf_config(SMOLLM)
    assert (config.d_model, config.num_heads, config.num_kv_heads, config.d_head) == (576, 9, 3, 64)
    assert config.positions == c.Rotary(100_000.0, "half")
    assert sum(torch.Size(shape).numel() for _, shape in parameter_shapes(config)) == 134_515_008


@pytest.mark.parametrize("family", HF_CONFIGS)
def test_missing_keys_have_the_defaults_of_transformers(family):
    full = HF_CONFIGS[family]().to_dict()
    sparse = HF_CONFIGS[family]().to_diff_dict()
    sizes = {
        "vocab_size",
        "num_key_value_heads",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "num_experts_per_tok",
        "num_local_experts",
        "n_embd",
        "n_layer",
        "n_head",
        "n_positions",
    }
    sparse |= {key: value for key, value in full.items() if key in sizes}
    sparse = {key: value for key, value in sparse.items() if not key.startswith("rope_theta")}
    assert from_hf_config(sparse) == from_hf_config(full)


@given(families)
def test_the_shapes_are_those_of_the_model(config):
    model = TransformerLM(config, device="meta").state_dict()
    assert dict(parameter_shapes(config)) == {n: tuple(t.shape) for n, t in model.items()}


UNSAYABLE = {"sinusoidal", "no positions", "post-norm", "no norm"}


@pytest.mark.parametrize("name", [*c.PRESETS, *sorted(FAMILIES.keys() - UNSAYABLE)])
def test_a_config_written_and_read_is_the_config(name):
    config = c.PRESETS.get(name) or FAMILIES[name]
    table = to_hf_config(config)
    if isinstance(config.positions, c.Rotary):
        positions = c.Rotary(config.positions.theta, "half", config.positions.scaling)
        config = config.replace(positions=positions, rope_theta=positions.theta)
    assert from_hf_config(table) == config


LLAMA, QWEN3, GPT2 = (PUBLISHED[name] for name in ("llama3-8b", "qwen3-0.6b", "gpt2"))
MOE = PUBLISHED["qwen3-30b-a3b"]
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        (LLAMA, {"model_type": "gemma"}, "model_type must be one of .* got 'gemma'"),
        (LLAMA, {"model_type": "olmo2"}, "model_type must be one of .* got 'olmo2'"),
        (LLAMA, {"model_type": None}, "model_type must be one of"),
        (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures must be"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config must be None"),
        (LLAMA, {"auto_map": {"AutoModel": "x.Y"}}, "auto_map must be None"),
        (LLAMA, {"logit_softcap": 30.0}, "not known: 'logit_softcap'"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act must be silu or swish"),
        (LLAMA, {"attention_bias": 1}, "attention_bias must be true or false"),
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"hidden_size": 4097}, "d_model must be divisible by num_heads"),
        (LLAMA, {"num_key_value_heads": 5}, "num_heads must be divisible by num_kv_heads"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_layers must lie between 1 and"),
        (LLAMA, {"vocab_size": -1}, "vocab_size must lie between"),
        (LLAMA, {"head_dim": 63}, "d_head must be even"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved must be False"),
        (LLAMA, {"sliding_window": 4}, "sliding_window must be None"),
        (LLAMA, {"rope_theta": "big"}, "rope_theta must be a number"),
        (LLAMA, {"rope_theta": -1.0}, "theta must be finite and greater than 0"),
        (LLAMA, {"rope_scaling": {"type": "longrope"}}, "rope_type must be one of .*'longrope'"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_type linear needs factor"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, "linear: x"),
        (LLAMA, {"rope_scaling": {"full_attention": {}}}, "one flat table for all layers"),
        (LLAMA, {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta must be the same"),
        (LLAMA, {"layer_types": ["sliding_attention"] * 32}, "layer_types must be"),
        (MOE, {"use_sliding_window": True, "sliding_window": 9}, "got max_window_layers=48 of 48"),
        (
            QWEN3,
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
            "all layers must have the sliding window, or none",
        ),
        (QWEN3, {"layer_types": ["full_attention"] * 27}, "layer_types must be"),
        (MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step must be 1"),
        (MOE, {"mlp_only_layers": [0]}, "mlp_only_layers must be"),
        (MOE, {"num_local_experts": 64}, "must be one number"),
        (MOE, {"num_experts_per_tok": 129}, "experts_per_token must not exceed"),
        (MISTRAL, {"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        (GPT2, {"activation_function": "gelu_10"}, "activation_function must be one of"),
        (GPT2, {"n_ctx": 512}, "n_ctx must be 1024"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention must be False"),
        (GPT2, {"n_head": 7}, "d_model must be divisible by num_heads"),
    ],
)
def test_unsupported_settings_that_change_the_model_are_named(table, change, message):
    changed = {k: v for k, v in {**table, **change}.items() if v is not ...}
    with pytest.raises((ValueError, TypeError), match=message):
        from_hf_config(changed)


def test_a_window_that_begins_after_the_last_layer_is_none():
    config = from_hf_config({**QWEN3, "use_sliding_window": True, "sliding_window": 9})
    assert config == c.PRESETS["qwen3-0.6b"]


def test_every_family_is_tried_against_transformers():
    tried = {config().model_type for config in HF_CONFIGS.values()}
    assert tried == set(FAMILY_TABLES)
