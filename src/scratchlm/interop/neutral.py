"""Keys of config.json that do not affect the forward pass.

Training (dropout, initial values, jitter), generation, bookkeeping, labels of other heads, and
storage. What is in no list and is not read is refused (see `hf_config`).
"""

from __future__ import annotations

NEUTRAL_PREFIXES = ("_", "summary_", "unsloth", "transformers.js")

NEUTRAL_KEYS = frozenset(
    """
    transformers_version name_or_path tokenizer_class model_max_length is_llama_config
    finetuning_task task_specific_params problem_type id2label label2id num_labels prefix
    dtype torch_dtype use_bfloat16 torchscript tf_legacy_loss tie_encoder_decoder is_decoder
    cross_attention_hidden_size chunk_size_feed_forward return_dict use_return_dict
    output_attentions output_hidden_states output_past output_router_logits output_scores
    return_dict_in_generate use_cache cache_implementation attn_implementation
    attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout dropout
    initializer_range initializer_cutoff_factor router_jitter_noise
    pretraining_tp gradient_checkpointing
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    remove_invalid_values exponential_decay_length_penalty
    """.split()  # noqa: SIM905 (more readable than a list of strings)
)
