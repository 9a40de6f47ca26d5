"""Tiny random models of every family, made by transformers and saved by it."""

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from scratchlm import TransformerLM
from scratchlm.interop import read_hf

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
}
_GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 10}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _llama(**changes):
    return transformers.LlamaConfig(**{**_SIZES, **changes})


def _rope(**parameters):
    return _llama(rope_parameters=parameters)


HF_CONFIGS = {
    "llama 2": lambda: _llama(num_key_value_heads=4),
    "llama 3": lambda: _rope(rope_type="default", rope_theta=5e5),
    "llama 3.1": lambda: _llama(rope_parameters=dict(_LLAMA3)),
    "llama 3.2": lambda: _llama(rope_parameters=dict(_LLAMA3), tie_word_embeddings=True),
    "llama linear": lambda: _rope(rope_type="linear", rope_theta=1e4, factor=4.0),
    "llama dynamic": lambda: _rope(rope_type="dynamic", rope_theta=1e4, factor=4.0),
    "llama yarn": lambda: _llama(rope_parameters=dict(_YARN)),
    "llama yarn options": lambda: _llama(
        rope_parameters={**_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.7}
    ),
    "llama yarn mscale": lambda: _llama(
        rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}
    ),
    "llama biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama head_dim": lambda: _llama(head_dim=16),
    "smollm": lambda: _llama(
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-5
    ),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=7),
    "mistral full": lambda: transformers.MistralConfig(**_SIZES, sliding_window=None),
    "mixtral": lambda: transformers.MixtralConfig(**_SIZES, **_EXPERTS),
    "mixtral window": lambda: transformers.MixtralConfig(**_SIZES, **_EXPERTS, sliding_window=7),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "qwen2 window": lambda: transformers.Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=0
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3 biases": lambda: transformers.Qwen3Config(**_SIZES, head_dim=16, attention_bias=True),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, **_QWEN_MOE, head_dim=16, norm_topk_prob=True
    ),
    "qwen3 moe raw": lambda: transformers.Qwen3MoeConfig(**_SIZES, **_QWEN_MOE, head_dim=16),
    "qwen3 moe window": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, **_QWEN_MOE, head_dim=16, use_sliding_window=True, sliding_window=7
    ),
    "gpt2": lambda: transformers.GPT2Config(**_GPT2),
    "gpt2 n_inner": lambda: transformers.GPT2Config(
        **_GPT2, n_inner=56, activation_function="relu", layer_norm_epsilon=1e-3
    ),
    "gpt2 untied": lambda: transformers.GPT2Config(**_GPT2, tie_word_embeddings=False),
    "olmo": lambda: transformers.OlmoConfig(**_SIZES),
    "olmo tied": lambda: transformers.OlmoConfig(
        **_SIZES, attention_bias=True, tie_word_embeddings=True
    ),
}


def hf_model(family, dtype=torch.float32, seed=1):
    """Build a family's model with every parameter random: norms and biases too."""
    config = HF_CONFIGS[family]()
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            width = parameter.shape[-1] if parameter.ndim > 1 else 16
            parameter.copy_(noise / width**0.5 + (parameter.ndim == 1))
    return model.to(dtype)


def load_with_transformers(directory, dtype=torch.float32):
    """Load a directory the way a user of transformers would; nothing may be left over."""
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def token_ids(batch=3, seq=23, vocab=61, seed=0):
    return torch.randint(0, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def import_model(directory, dtype=None):
    """Bring a directory in as a model of ours."""
    checkpoint = read_hf(directory)
    model = TransformerLM(checkpoint.config, dtype=dtype or checkpoint.dtype)
    model.load_state_dict(dict(checkpoint.tensors(dtype=dtype)), strict=True)
    return model.eval()


def weights(directory):
    """All tensors of a directory, read by the safetensors library."""
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_bytes(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


@torch.no_grad()
def logits_of(model, ids, mask=None):
    if isinstance(model, TransformerLM):
        return model(ids, attention_mask=mask)
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    kwargs = {} if mask is None else {"attention_mask": mask.long(), "position_ids": positions}
    return model(ids, use_cache=False, **kwargs).logits
