// Products of rows with rows, each sum in one fixed order: whatever is computed beside it.
//
//     y[m, n] = Σ_k x[m, k] · w[n, k]
//
// The sum over k is cut into blocks of DEPTH, counted from 0. In a block, lane i adds up the k with
// k mod LANES = i, in order; the lanes are added by halves; then the blocks, in order. Neither the
// number of rows nor the tile a row is in changes that.

#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu_tiles.h"

namespace {

constexpr int ACROSS = 4;                       // rows of w in a tile
constexpr int DOWN = LANES == 16 ? 4 : 2;       // rows of x in a tile
constexpr long DEPTH = 1024;                    // of k at a time

inline Vec load(const float* from) { return *(const AnyVec*)from; }
inline void store(float* to, Vec x) { *(AnyVec*)to = x; }

// The first `count` numbers, and 0 in the other lanes.
inline Vec load(const float* from, long count) {
    if (count >= LANES) return load(from);
    Vec x{};
    std::memcpy(&x, from, count * sizeof(float));
    return x;
}
inline void store(float* to, Vec x, long count) {
    if (count >= LANES) return store(to, x);
    std::memcpy(to, &x, count * sizeof(float));
}

// a · b + c, rounded once: never left to the compiler, who might decide differently tile by tile.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Both vectors hold sums in SEGMENT lanes each; add the halves of every segment, a's first.
template <int SEGMENT, int... I>
inline Vec fold(Vec a, Vec b, std::integer_sequence<int, I...>) {
    constexpr int HALF = SEGMENT / 2;
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, (I / HALF * SEGMENT + I % HALF)...) +
           __builtin_shufflevector(a, b, (I / HALF * SEGMENT + I % HALF + HALF)...);
#else
    return __builtin_shuffle(a, b, Ints{(I / HALF * SEGMENT + I % HALF)...}) +
           __builtin_shuffle(a, b, Ints{(I / HALF * SEGMENT + I % HALF + HALF)...});
#endif
}

// The sum over the lanes of each of LANES vectors.
template <int SEGMENT = LANES>
inline __attribute__((always_inline)) Vec lane_sums(Vec* x) {
    if constexpr (SEGMENT == 1) {
        return x[0];
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < SEGMENT / 2; ++i)
            x[i] = fold<SEGMENT>(x[2 * i], x[2 * i + 1], std::make_integer_sequence<int, LANES>{});
        return lane_sums<SEGMENT / 2>(x);
    }
}

inline float lane_sum(Vec x) {
    Vec all[LANES] = {x};
    return lane_sums(all)[0];
}

// R rows of x with ACROSS rows of w: to[r · stride + c] = Σ_k, or += with ADD.
template <int R, bool ADD>
inline __attribute__((always_inline)) void dot_tile(const float* x, long x_stride,
                                                    const float* const* w, long count, float* to,
                                                    long stride, long columns,
                                                    const float* ahead) {
    constexpr int VECTORS = (R * ACROSS + LANES - 1) / LANES * LANES;
    Vec sum[VECTORS] = {};
    const float *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
    long k = 0;
    for (; k + LANES <= count; k += LANES) {
        __builtin_prefetch(ahead + k);
        Vec b[ACROSS] = {load(w0 + k), load(w1 + k), load(w2 + k), load(w3 + k)};
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            Vec a = load(x + r * x_stride + k);
#pragma GCC unroll 4
            for (int c = 0; c < ACROSS; ++c) sum[r * ACROSS + c] = fma(a, b[c], sum[r * ACROSS + c]);
        }
    }
    if (k < count) {
        for (int r = 0; r < R; ++r) {
            Vec a = load(x + r * x_stride + k, count - k);
            for (int c = 0; c < ACROSS; ++c)
                sum[r * ACROSS + c] = fma(a, load(w[c] + k, count - k), sum[r * ACROSS + c]);
        }
    }
    alignas(BYTES) float sums[VECTORS];
    for (int v = 0; v < VECTORS; v += LANES) *(Vec*)(sums + v) = lane_sums(sum + v);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < columns; ++c) {
            float* at = to + r * stride + c;
            *at = ADD ? *at + sums[r * ACROSS + c] : sums[r * ACROSS + c];
        }
}

template <bool ADD>
inline void dot_column(const float* x, long x_stride, long rows, const float* const* w, long count,
                       float* to, long stride, long columns, const float* ahead,
                       long w_stride) {
    long r = 0;
    for (; r + DOWN <= rows; r += DOWN)
        dot_tile<DOWN, ADD>(x + r * x_stride, x_stride, w, count, to + r * stride, stride, columns,
                            ahead + r / DOWN % ACROSS * w_stride);
    x += r * x_stride, to += r * stride;
    switch (rows - r) {
        case 3: return dot_tile<3, ADD>(x, x_stride, w, count, to, stride, columns, ahead);
        case 2: return dot_tile<2, ADD>(x, x_stride, w, count, to, stride, columns, ahead);
        case 1: return dot_tile<1, ADD>(x, x_stride, w, count, to, stride, columns, ahead);
        default: return;
    }
}

// to[m, n] = Σ_k x[m, k] · w[n, k] for all rows of x and `columns` rows of w.
inline void dots(const float* x, long x_stride, long rows, const float* w, long w_stride,
                 long columns, long count, float* to, long stride) {
    for (long first = 0; first < count; first += DEPTH) {
        long depth = std::min(DEPTH, count - first);
        for (long n = 0; n < columns; n += ACROSS) {
            const float* at[ACROSS];  // past the end the last row again, and its sums go nowhere
            for (int c = 0; c < ACROSS; ++c)
                at[c] = w + std::min(n + c, columns - 1) * w_stride + first;
            long here = std::min<long>(ACROSS, columns - n);
            if (first == 0)
                dot_column<false>(x, x_stride, rows, at, depth, to + n, stride, here, at[0] + ACROSS * w_stride, w_stride);
            else
                dot_column<true>(x + first, x_stride, rows, at, depth, to + n, stride, here, at[0] + ACROSS * w_stride, w_stride);
        }
    }
}

}  // namespace
