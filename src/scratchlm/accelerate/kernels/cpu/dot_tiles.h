// Products of rows with rows, each sum in one fixed order: whatever is computed beside it.
//
//     y[m, n] = Σ_k x[m, k] · w[n, k]
//
// The sum over k is cut into blocks of DEPTH, counted from 0. In a block, lane i adds up the k with
// k mod LANES = i, in order; the lanes are added by halves; then the blocks, in order. Neither the
// number of rows nor the tile a row is in changes that.

#pragma once

#include "numbers.h"

namespace {

constexpr int ACROSS = 4;                  // rows of w in a tile
constexpr int DOWN = LANES == 16 ? 6 : 3;  // rows of x in it: as many as registers allow
constexpr int WIDE = LANES;                // rows of w where there are few of x
constexpr int WIDE_16 = LANES < 8 ? LANES : 8;  // the same of 16 bits: shorter streams from memory
constexpr long DEPTH = 1024;  // of k at a time

// Loaded once: GCC would read it again with every product, and reads are what limits a tile.
inline __attribute__((always_inline)) Vec in_register(Vec x) {
#if defined(__x86_64__)
    asm("" : "+v"(x));
#endif
    return x;
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

// sum[r, c] += x[r] · w[c] for one vector of each row: the fewer stay, the more pass by.
template <int STAY, int PASS, class Stays, class Passes, class Index>
inline __attribute__((always_inline)) void add_products(Vec* sum, const Stays* stays,
                                                        long stays_stride, const Passes* passes,
                                                        long stride, Index index) {
    Vec a[STAY];
#pragma GCC unroll 8
    for (int i = 0; i < STAY; ++i) a[i] = load(stays + i * stays_stride);
#pragma GCC unroll 16
    for (int j = 0; j < PASS; ++j) {
        Vec b = load(passes + j * stride);
        if (STAY > 1) b = in_register(b);
#pragma GCC unroll 8
        for (int i = 0; i < STAY; ++i) sum[index(i, j)] = fma(a[i], b, sum[index(i, j)]);
    }
}
template <int R, int C, class Number>
inline __attribute__((always_inline)) void add_products(Vec* sum, const float* x, long x_stride,
                                                        const Number* w, long w_stride) {
    if constexpr (R <= C)
        add_products<R, C>(sum, x, x_stride, w, w_stride, [](int i, int j) { return i * C + j; });
    else
        add_products<C, R>(sum, w, w_stride, x, x_stride, [](int i, int j) { return j * C + i; });
}

// R rows of x with C rows of w: to[r · stride + c] = Σ_k, or += with ADD. Fetch `ahead` meanwhile.
template <int R, int C, bool ADD, class Number>
inline __attribute__((always_inline)) void dot_tile(const float* x, long x_stride, const Number* w,
                                                    long w_stride, long count, float* to,
                                                    long stride, const Number* ahead) {
    constexpr int VECTORS = (R * C + LANES - 1) / LANES * LANES;
    constexpr int LINE = LANES * sizeof(float) / sizeof(Number);  // of the cache
    // Rows of `ahead`. Of one row's products in 16 bits no other tile fetches the rest.
    constexpr int AHEAD = R == 1 && LINE > LANES ? C : std::min(C, 2);
    Vec sum[VECTORS] = {};
    long k = 0;
    for (; k + LINE <= count; k += LINE) {
#pragma GCC unroll 16
        for (int c = 0; c < AHEAD; ++c) __builtin_prefetch(ahead + c * w_stride + k, 0, 1);
#pragma GCC unroll 2
        for (long i = 0; i < LINE; i += LANES)
            add_products<R, C>(sum, x + k + i, x_stride, w + k + i, w_stride);
    }
    for (; k + LANES <= count; k += LANES)
        add_products<R, C>(sum, x + k, x_stride, w + k, w_stride);
    if (k < count) {
        for (int r = 0; r < R; ++r) {
            Vec a = load(x + r * x_stride + k, count - k);
            for (int c = 0; c < C; ++c)
                sum[r * C + c] = fma(a, load(w + c * w_stride + k, count - k), sum[r * C + c]);
        }
    }
    alignas(BYTES) float sums[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v += LANES) *(Vec*)(sums + v) = lane_sums(sum + v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            float* at = to + r * stride + c;
            *at = ADD ? *at + sums[r * C + c] : sums[r * C + c];
        }
}

// All rows of x with C rows of w, R of x at a time, then less.
template <int R, int C, bool ADD, class Number>
inline void dot_columns(const float* x, long x_stride, long rows, const Number* w, long w_stride,
                        long count, float* to, long stride, long tile = 0) {
    long r = 0;
    for (; r + R <= rows; r += R, ++tile)  // each tile fetches two of the next rows of w
        dot_tile<R, C, ADD>(x + r * x_stride, x_stride, w, w_stride, count, to + r * stride, stride,
                            w + (C + 2 * tile % C) * w_stride);
    constexpr int LESS = R > 4 ? 4 : R == 3 ? 2 : R / 2;
    if constexpr (LESS > 0)
        if (r < rows)
            dot_columns<LESS, C, ADD>(x + r * x_stride, x_stride, rows - r, w, w_stride, count,
                                      to + r * stride, stride, tile);
}

template <bool ADD, class Number>
inline void dot_block(const float* x, long x_stride, long rows, const Number* w, long w_stride,
                      long columns, long count, float* to, long stride) {
    long n = 0;
    constexpr int C = sizeof(Number) == 2 ? WIDE_16 : WIDE;
    if (rows < ACROSS)
        for (; n + C <= columns; n += C)
            dot_columns<1, C, ADD>(x, x_stride, rows, w + n * w_stride, w_stride, count, to + n,
                                   stride);
    for (; n + ACROSS <= columns; n += ACROSS)
        dot_columns<DOWN, ACROSS, ADD>(x, x_stride, rows, w + n * w_stride, w_stride, count, to + n,
                                       stride);
    for (; n < columns; ++n)
        dot_columns<DOWN, 1, ADD>(x, x_stride, rows, w + n * w_stride, w_stride, count, to + n,
                                  stride);
}

// to[m, n] = Σ_k x[m, k] · w[n, k] for all rows of x and `columns` rows of w.
template <class Number>
inline void dots(const float* x, long x_stride, long rows, const Number* w, long w_stride,
                 long columns, long count, float* to, long stride) {
    dot_block<false>(x, x_stride, rows, w, w_stride, columns, std::min(count, DEPTH), to, stride);
    for (long k = DEPTH; k < count; k += DEPTH)
        dot_block<true>(x + k, x_stride, rows, w + k, w_stride, columns, std::min(count - k, DEPTH),
                        to, stride);
}

}  // namespace
