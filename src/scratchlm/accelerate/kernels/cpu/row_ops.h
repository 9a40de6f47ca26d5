// What is computed row by row: norms, activations, rotations.
//
// A row's numbers depend on that row alone, and are computed in vectors from its first number on,
// the last vector filled up with zeros: so a number is the same wherever its row stands.

#pragma once

#include <cmath>

#include "dot_tiles.h"

namespace {

constexpr float LOG2_E = 1.44269504088896341f;

// x in the first `count` lanes, 0 in the others.
inline Vec keep(Vec x, long count) {
    if (count >= LANES) return x;
    Vec kept{};
    std::memcpy(&kept, &x, count * sizeof(float));
    return kept;
}

inline Vec inverse(Vec x) { return all(1.0f) / x; }
inline Vec magnitude(Vec x) { return x < 0.0f ? -x : x; }

// Norms

enum NormKind { NO_NORM, RMS_NORM, LAYER_NORM };

struct Norm {
    const float *weight, *bias;
    float eps;
};

// x / sqrt(mean(x²) + ε) · g
inline void rms_norm(const Norm& norm, const float* x, float* y, long d) {
    Vec squares{};
    for (long i = 0; i < d; i += LANES) {
        Vec v = load(x + i, d - i);
        squares = fma(v, v, squares);
    }
    float by = 1.0f / std::sqrt(lane_sum(squares) / (float)d + norm.eps);
    for (long i = 0; i < d; i += LANES)
        store(y + i, load(x + i, d - i) * by * load(norm.weight + i, d - i), d - i);
}

// (x − mean) / sqrt(var + ε) · g + b
inline void layer_norm(const Norm& norm, const float* x, float* y, long d) {
    Vec sum{}, squares{};
    for (long i = 0; i < d; i += LANES) sum += load(x + i, d - i);
    float mean = lane_sum(sum) / (float)d;
    for (long i = 0; i < d; i += LANES) {
        Vec v = keep(load(x + i, d - i) - mean, d - i);
        squares = fma(v, v, squares);
    }
    float by = 1.0f / std::sqrt(lane_sum(squares) / (float)d + norm.eps);
    for (long i = 0; i < d; i += LANES) {
        Vec bias = norm.bias == nullptr ? Vec{} : load(norm.bias + i, d - i);
        Vec v = (load(x + i, d - i) - mean) * by;
        store(y + i, fma(v, load(norm.weight + i, d - i), bias), d - i);
    }
}

inline void apply_norm(int64_t kind, const Norm& norm, const float* x, float* y, long d) {
    if (kind == RMS_NORM) return rms_norm(norm, x, y, d);
    if (kind == LAYER_NORM) return layer_norm(norm, x, y, d);
    std::memcpy(y, x, d * sizeof(float));
}

// Where the largest number is, the first of several; NOTHING where it is infinite, or one is a NaN.
constexpr long NOTHING = -1;
inline long argmax(const float* x, long count) {
    Vec top = all(-INFINITY);
    Ints at{}, nan{};
    for (long i = 0; i < count; i += LANES) {
        Vec v = load(x + i, count - i);
        if (count - i < LANES)
            for (long l = count - i; l < LANES; ++l) v[l] = -INFINITY;
        at = v > top ? Ints{} + (int32_t)i : at;
        top = v > top ? v : top;
        nan |= v != v;
    }
    float most = largest(top);
    long found = count;
    for (int l = 0; l < LANES; ++l) {
        if (nan[l] != 0) return NOTHING;
        if (top[l] == most) found = std::min(found, (long)at[l] + l);
    }
    return std::isinf(most) ? NOTHING : found;
}

// Activations

enum Activation { SILU, GELU, GELU_TANH, RELU };

// 1 / (1 + e⁻ˣ), by the exponential that cannot overflow.
inline Vec sigmoid(Vec x) {
    Vec e = exp2(magnitude(x) * -LOG2_E);
    Vec small = e * inverse(1.0f + e);
    return x < 0.0f ? small : 1.0f - small;
}

// The normal distribution function. Abramowitz and Stegun, 7.1.26: within 10⁻⁷.
inline Vec normal_cdf(Vec x) {
    Vec z = magnitude(x) * 0.707106781186547524f;
    Vec t = inverse(1.0f + 0.3275911f * z);
    Vec p = all(1.061405429f);
    p = fma(p, t, all(-1.453152027f));
    p = fma(p, t, all(1.421413741f));
    p = fma(p, t, all(-0.284496736f));
    p = fma(p, t, all(0.254829592f));
    Vec tail = 0.5f * p * t * exp2(z * z * -LOG2_E);
    return x < 0.0f ? tail : 1.0f - tail;
}

inline Vec activate(int64_t kind, Vec x) {
    switch (kind) {
        case SILU: return x * sigmoid(x);
        case GELU: return x * normal_cdf(x);
        case GELU_TANH:  // ½ (1 + tanh z) = σ(2z)
            return x * sigmoid(1.595769121605731f * fma(0.044715f * x * x, x, x));
        default: return x < 0.0f ? Vec{} : x;
    }
}

// RoPE

enum Rope { NO_ROPE, INTERLEAVED, HALVES };

// Rotate each pair of channels by its angle: (a, b) → (a cos − b sin, a sin + b cos).
inline void rotate(int64_t layout, float* x, const float* cos, const float* sin, long half) {
    long step = layout == HALVES ? 1 : 2, other = layout == HALVES ? half : 1;
    for (long i = 0; i < half; ++i) {
        float a = x[i * step], b = x[i * step + other];
        x[i * step] = __builtin_fmaf(a, cos[i], -(b * sin[i]));
        x[i * step + other] = __builtin_fmaf(a, sin[i], b * cos[i]);
    }
}

}  // namespace
