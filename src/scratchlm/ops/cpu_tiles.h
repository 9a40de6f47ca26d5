// Sums of products in registers, and the packing of what they read: for `attention.cpp`.
//
// A tile is ROWS × PANEL sums, added up by `multiply` from a matrix A, read number by number, and a
// matrix B, packed in panels of PANEL columns. Vectors are the compiler's own, as wide as the
// processor has them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#if !defined(__FP_FAST_FMAF) && !defined(__FMA__)
#error "without fused multiply-add, torch's own attention is faster"
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

typedef float Vec __attribute__((vector_size(BYTES), may_alias));
typedef int32_t Ints __attribute__((vector_size(BYTES)));
typedef float AnyVec __attribute__((vector_size(BYTES), aligned(4), may_alias));  // at any address

constexpr int LANES = BYTES / 4;
constexpr int ROWS = 6;  // 6 × 2 sums, two of B and one of A fit into 16 registers
constexpr int PANEL = 2 * LANES;
constexpr int BLOCK = 96;  // queries, or keys, at a time: whole tiles and panels

inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

inline Vec all(float x) { return Vec{} + x; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float largest(Vec x) {
    float top = x[0];
    for (int i = 1; i < LANES; ++i) top = x[i] > top ? x[i] : top;
    return top;
}

inline float total(Vec x) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; ++i) sum += x[i];
    return sum;
}

// 2ˣ for x ≤ 0 (and a rounding above): 2ⁿ · 2ᶠ, n whole, |f| ≤ ½. Below 2⁻¹²⁶ it is 0.
inline Vec exp2(Vec x) {
    constexpr float WHOLE = 12582912.0f + 127;  // 1.5 · 2²³: adding it rounds to whole numbers
    Vec t = x + WHOLE;
    Vec f = x - (t - WHOLE);
    Vec p = all(1.3264727e-3f);  // the fifth degree, within 10⁻⁷ of 2ᶠ
    p = p * f + 9.671513e-3f;
    p = p * f + 5.5507336e-2f;
    p = p * f + 2.4022242e-1f;
    p = p * f + 6.931470e-1f;
    p = p * f + 1.0f;
    Vec y = p * (Vec)((Ints)t << 23);  // the low bits of t are n + 127, an exponent
    return x < -126.0f ? Vec{} : y;    // a NaN is not below, and stays
}

// A sum of products

template <int R>
struct Tile {
    Vec at[R][2];

    void load(const float* from, long stride) {
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < 2; ++c) at[r][c] = *(const Vec*)(from + r * stride + c * LANES);
    }
    void store(float* to, long stride) const {
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < 2; ++c) *(Vec*)(to + r * stride + c * LANES) = at[r][c];
    }
};

template <int R>
inline __attribute__((always_inline)) void add(Tile<R>& sum, int r, float a, const float* b) {
    sum.at[r][0] += a * *(const Vec*)b;
    sum.at[r][1] += a * *(const Vec*)(b + LANES);
}

// sum[r] += Σ_k a[r, k] · b[k]; a is stored by rows, or by columns.
template <bool BY_ROWS, int R>
inline __attribute__((always_inline)) void multiply(
    Tile<R>& sum, const float* a, long stride, const float* b, long count) {
#pragma GCC unroll 2
    for (long k = 0; k < count; ++k, b += PANEL) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) add(sum, r, BY_ROWS ? a[r * stride + k] : a[k * stride + r], b);
    }
}

// The end of a query's sum over keys: sum[r] += Σ_{k ≤ r} a[r, k] · b[k].
template <int R>
inline void up_to_self(Tile<R>& sum, const float* a, long stride, const float* b) {
#pragma GCC unroll 8
    for (int k = 0; k < R; ++k)
#pragma GCC unroll 8
        for (int r = k; r < R; ++r) add(sum, r, a[r * stride + k], b + k * PANEL);
}

// The beginning of a key's sum over queries: sum[r] += Σ_{r ≤ k} a[k, r] · b[k].
template <int R>
inline void from_self_on(Tile<R>& sum, const float* a, long stride, const float* b) {
#pragma GCC unroll 8
    for (int k = 0; k < R; ++k)
#pragma GCC unroll 8
        for (int r = 0; r <= k; ++r) add(sum, r, a[k * stride + r], b + k * PANEL);
}

// Call work(first row, rows as a constant) for tiles that cover `rows`.
template <class Work>
inline void for_tiles(long first, long rows, Work work) {
    long r = first;
    for (; r + ROWS <= rows; r += ROWS) work(r, std::integral_constant<int, ROWS>{});
    switch (rows - r) {
        case 5: return work(r, std::integral_constant<int, 5>{});
        case 4: return work(r, std::integral_constant<int, 4>{});
        case 3: return work(r, std::integral_constant<int, 3>{});
        case 2: return work(r, std::integral_constant<int, 2>{});
        case 1: return work(r, std::integral_constant<int, 1>{});
        default: return;
    }
}

// Packing: what is missing in a panel is 0

struct Sizes {
    int64_t batch, heads, key_heads, seq, width;
    long panels() const { return round_up(width, PANEL) / PANEL; }
    long packed() const { return panels() * PANEL; }  // channels of a packed row
    long padded() const { return round_up(seq, PANEL); }
    long of_panel(long channel) const { return std::min<long>(PANEL, width - channel); }
};

struct View {  // of (batch, head, seq, channel), channels one after the other
    float* data;
    int64_t batch, head, row;
    float* of(long b, long h) const { return data + b * batch + h * head; }
};

// to = from · by, and 0 from `count` to `room`.
inline void copy(float* to, const float* from, long count, long room, float by) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) *(AnyVec*)(to + i) = *(const AnyVec*)(from + i) * by;
    for (; i < count; ++i) to[i] = from[i] * by;
    for (; i < room; ++i) to[i] = 0.0f;
}

inline float dot(const float* a, const float* b, long count) {
    Vec sum{};
    long i = 0;
    for (; i + LANES <= count; i += LANES) sum += *(const AnyVec*)(a + i) * *(const AnyVec*)(b + i);
    float rest = total(sum);
    for (; i < count; ++i) rest += a[i] * b[i];
    return rest;
}

// As rows: to[row, channel].
void pack_rows(float* to, const float* from, long stride, long rows, const Sizes& n, float by) {
    for (long r = 0; r < rows; ++r)
        copy(to + r * n.packed(), from + r * stride, n.width, n.packed(), by);
}

// To be summed over rows: to[panel, row, channel in panel]; a panel has room for `height` rows.
void pack_channels(
    float* to, const float* from, long stride, long rows, long height, const Sizes& n, float by) {
    for (long c = 0; c < n.width; c += PANEL, to += height * PANEL)
        for (long r = 0; r < rows; ++r)
            copy(to + r * PANEL, from + r * stride + c, n.of_panel(c), PANEL, by);
}

void unpack_channels(
    float* to, const float* from, long stride, long rows, long height, const Sizes& n, float by) {
    for (long c = 0; c < n.width; c += PANEL, from += height * PANEL)
        for (long r = 0; r < rows; ++r)
            copy(to + r * stride + c, from + r * PANEL, n.of_panel(c), 0, by);
}

template <int HALF, int... I>
inline Vec zip(Vec a, Vec b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, (HALF * LANES / 2 + I / 2 + I % 2 * LANES)...);
#else
    return __builtin_shuffle(a, b, Ints{(HALF * LANES / 2 + I / 2 + I % 2 * LANES)...});
#endif
}

// Transpose a square: each round interleaves the rows of its halves, and log₂ LANES rounds do it.
inline void transpose(Vec (&x)[LANES]) {
    constexpr std::make_integer_sequence<int, LANES> lanes;
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
        Vec y[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; ++i) {
            y[2 * i] = zip<0>(x[i], x[i + LANES / 2], lanes);
            y[2 * i + 1] = zip<1>(x[i], x[i + LANES / 2], lanes);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) x[i] = y[i];
    }
}

// To be summed over channels: to[panel, channel, row in panel].
void pack_transposed(float* to, const float* from, long stride, const Sizes& n) {
    for (long first = 0; first < n.padded(); first += LANES) {
        float* panel = to + first / PANEL * PANEL * n.width + first % PANEL;
        long rows = std::clamp<long>(n.seq - first, 0, LANES), c = 0;
        for (; c + LANES <= n.width && rows == LANES; c += LANES) {
            Vec square[LANES];
            for (int r = 0; r < LANES; ++r)
                square[r] = *(const AnyVec*)(from + (first + r) * stride + c);
            transpose(square);
            for (int r = 0; r < LANES; ++r) *(Vec*)(panel + (c + r) * PANEL) = square[r];
        }
        for (; c < n.width; ++c)
            for (int r = 0; r < LANES; ++r)
                panel[c * PANEL + r] = r < rows ? from[(first + r) * stride + c] : 0.0f;
    }
}

}  // namespace
