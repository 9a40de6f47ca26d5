// What a step is told: `cpu_runner.py` fills these structures, field by field as they stand here.

#pragma once

#include "quantized_dots.h"

namespace {

struct Linear {
    const void* weight;  // (out, in)
    const float* bias;   // may be missing
    int64_t format;      // of the weight: panels of bytes, unless it is wide
};

struct Layer {
    Norm norm1;
    Linear q, k, v;
    Norm q_norm, k_norm;  // without a weight: none
    Linear out;
    Norm norm2;
    Linear router;          // of a mixture of experts, whose matrices lie one after the other
    Linear up, gate, down;  // without a gate: an MLP
    uint8_t *keys, *values;             // (pages, kv_heads, page_size, d_head), of `kv_kind`
    float *key_scales, *value_scales;   // (pages, kv_heads, page_size), of codes
    int64_t window;         // 0: all of the past
};

struct Model {
    int64_t num_layers, d_model, num_heads, num_kv_heads, d_head, d_ff, vocab, context;
    int64_t norm_kind, activation, rope;
    int64_t num_pages, page_size, kv_kind;
    int64_t num_experts, experts_per_token, renormalize;  // without experts: 0
    int64_t dtype, positions_dtype;  // of what is wide: matrices, norms, biases; of `positions`
    Linear embeddings;
    const void* positions;
    const float *cos, *sin;
    const Layer* layers;
    Norm norm;
    Linear head;
};

struct Step {
    int64_t rows, num_slots, max_pages, table_stride;
    const int64_t *tokens, *counts, *starts, *slots;
    const int64_t* num_logits;  // of each row: after how many of its newest tokens
    const int32_t* tables;
    int64_t* last;
    float* logits;
    int64_t* greedy;  // where not missing: each row's likeliest token, which `last` gets too
};

enum Result { DONE, NO_MEMORY, WRONG_TOKEN, WRONG_POSITION, WRONG_SLOT, WRONG_PAGE };

}  // namespace
