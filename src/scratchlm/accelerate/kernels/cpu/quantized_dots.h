// Products of rows rounded to 8 bits with matrices stored in 4 to 8 bits.
//
//     y[m, n] = Σ_blocks d_w · d_x · Σ_k q_w[n, k] · q_x[m, k]     (− m_w · d_x · Σ_k q_x[m, k])
//
// The inner sums are of whole numbers, hence exact; the outer sum goes block by block, in order.
// So an output is the same whatever is computed beside it. Matrices lie in panels of 16 rows
// (`quantization/layouts.py`): each vector holds four numbers of each row, and meets four numbers
// of x, the same for all lanes.

#pragma once

#include "row_ops.h"

namespace {

constexpr long PANEL_ROWS = 16;
constexpr long GROUP = 32;  // numbers of x with one scale
#if defined(__AVX512F__)
constexpr int DOWN_ROWS = 4;  // of x with a panel at a time: as many as registers allow
#else
constexpr int DOWN_ROWS = 2;
#endif

typedef uint8_t Bytes __attribute__((vector_size(64), may_alias));
typedef uint8_t AnyBytes __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t Pairs __attribute__((vector_size(64), may_alias));
typedef int32_t Sums __attribute__((vector_size(64), may_alias));
typedef float Floats __attribute__((vector_size(64), may_alias));
typedef float AnyFloats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint8_t Small __attribute__((vector_size(16), may_alias));
typedef uint8_t AnySmall __attribute__((vector_size(16), aligned(1), may_alias));
typedef int8_t Signed __attribute__((vector_size(16), may_alias));

enum WeightFormat { WIDE_WEIGHTS, Q8_0, Q4_0, Q4_K, Q6_K };

inline long block_size(int64_t format) { return format == Q8_0 || format == Q4_0 ? 32 : 256; }
inline long block_bytes(int64_t format) {
    return format == Q8_0 ? 34 : format == Q4_0 ? 18 : format == Q4_K ? 144 : 210;
}
inline long panel_bytes(int64_t format, long depth) {
    return PANEL_ROWS * (depth / block_size(format)) * block_bytes(format);
}

#if defined(__AVX2__)
union Halves {  // of a vector, for processors whose vectors are half as long
    __m256i of_sums[2];
    __m256 of_floats[2];
    Sums sums;
    Floats floats;
    Bytes bytes;
};
#endif

inline Bytes bytes_at(const uint8_t* from) { return *(const AnyBytes*)from; }
// Bits that cross from one byte into the next must be masked away: there are no shifts of bytes.
inline Bytes left(Bytes x, int by) { return (Bytes)((Pairs)x << by); }
inline Bytes right(Bytes x, int by) { return (Bytes)((Pairs)x >> by); }
inline Small small_at(const uint8_t* from) { return *(const AnySmall*)from; }
inline Floats to_floats(Sums x) { return __builtin_convertvector(x, Floats); }
// GCC would convert bytes one by one, and take long over it.
inline Floats to_floats(Small x) {
#if defined(__AVX512F__)
    return to_floats((Sums)_mm512_cvtepu8_epi32((__m128i)x));
#elif defined(__AVX2__)
    __m128i low = (__m128i)x, high = _mm_srli_si128((__m128i)x, 8);
    return to_floats(Halves{{_mm256_cvtepu8_epi32(low), _mm256_cvtepu8_epi32(high)}}.sums);
#else
    return to_floats(__builtin_convertvector(x, Sums));
#endif
}
inline Floats to_floats(Signed x) {
#if defined(__AVX512F__)
    return to_floats((Sums)_mm512_cvtepi8_epi32((__m128i)x));
#elif defined(__AVX2__)
    __m128i low = (__m128i)x, high = _mm_srli_si128((__m128i)x, 8);
    return to_floats(Halves{{_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high)}}.sums);
#else
    return to_floats(__builtin_convertvector(x, Sums));
#endif
}

inline Floats fma16(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    Halves x{.floats = a}, y{.floats = b}, z{.floats = c};
    for (int i = 0; i < 2; ++i) z.of_floats[i] = _mm256_fmadd_ps(x.of_floats[i], y.of_floats[i],
                                                                 z.of_floats[i]);
    return z.floats;
#else
    for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

inline float half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, rest = bits & 1023;
    if (exponent == 0) {
        float value = (float)rest * 5.9604644775390625e-8f;  // 2⁻²⁴
        return sign != 0 ? -value : value;
    }
    uint32_t wide = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | rest << 13;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// 16 numbers of float16.
inline Floats halves_at(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i* at = (const __m128i*)from;
    Halves found;
    for (int i = 0; i < 2; ++i) found.of_floats[i] = _mm256_cvtph_ps(_mm_loadu_si128(at + i));
    return found.floats;
#else
    Floats found;
    for (int i = 0; i < 16; ++i) found[i] = half_at(from + 2 * i);
    return found;
#endif
}

// sum[n] += Σ_{i < 4} w[n, i] · x[i], exact: w in 0 … MOST, x in −127 … 127.
template <int MOST>
inline __attribute__((always_inline)) Sums add_four(Sums sum, Bytes w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
    return (Sums)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
    Halves weights{.bytes = w}, sums{.sums = sum};
    __m256i ones = _mm256_set1_epi16(1), by = _mm256_set1_epi32(four);
    for (int i = 0; i < 2; ++i) {
        // Sums of two products are of 16 bits: only weights below 128 are sure to fit
        __m256i low = _mm256_and_si256(weights.of_sums[i], _mm256_set1_epi8(127));
        __m256i pairs = _mm256_maddubs_epi16(MOST < 128 ? weights.of_sums[i] : low, by);
        sums.of_sums[i] = _mm256_add_epi32(sums.of_sums[i], _mm256_madd_epi16(pairs, ones));
        if (MOST < 128) continue;
        __m256i top = _mm256_and_si256(_mm256_srli_epi16(weights.of_sums[i], 7), _mm256_set1_epi8(1));
        __m256i of_top = _mm256_madd_epi16(_mm256_maddubs_epi16(top, by), ones);
        sums.of_sums[i] = _mm256_add_epi32(sums.of_sums[i], _mm256_slli_epi32(of_top, 7));
    }
    return sums.sums;
#else
    for (int n = 0; n < 16; ++n)
        for (int i = 0; i < 4; ++i) sum[n] += (int32_t)w[4 * n + i] * x[i];
    return sum;
#endif
}

// Rows of x in 8 bits

struct Rounded {
    int8_t* q;      // (rows, depth)
    float* scale;   // (rows, depth / 32)
    int32_t* sums;  // (rows, depth / 16): of q
    long depth;

    static long numbers(long rows, long depth) {  // of 4 bytes: the room that rows take
        return rows * (depth / 4 + depth / GROUP + depth / 16) + 48;
    }
    Rounded(float* room, long rows, long depth) : depth(depth) {
        q = (int8_t*)room;
        scale = room + round_up(rows * depth / 4, 16);
        sums = (int32_t*)(scale + round_up(rows * (depth / GROUP), 16));
    }
    const int8_t* q_at(long row) const { return q + row * depth; }
    const float* scale_at(long row) const { return scale + row * (depth / GROUP); }
    const int32_t* sums_at(long row) const { return sums + row * (depth / 16); }

    // Round each 32 numbers to scale · q, halves to even. A NaN or infinity makes the scale NaN.
    void round_row(const float* x, long row) const {
        constexpr float WHOLE = 12582912.0f;  // 1.5 · 2²³: adding it rounds to whole numbers
        int8_t* to = q + row * depth;
        for (long k = 0; k < depth; k += GROUP) {
            Vec top{}, odd{};
            for (long i = 0; i < GROUP; i += LANES) {
                Vec v = load(x + k + i);
                top = larger(magnitude(v), top);
                odd += v * 0.0f;
            }
            float most = largest(top), by = most > 0 ? 127.0f / most : 0.0f;
            scale[row * (depth / GROUP) + k / GROUP] = most / 127.0f + lane_sum(odd);
            for (long i = 0; i < GROUP; i += LANES) {
                Vec scaled = in_register(load(x + k + i) * by);
                Ints whole = (Ints)(scaled + WHOLE) - (Ints)all(WHOLE);
#if defined(__AVX512F__)
                _mm_storeu_si128((__m128i*)(to + k + i), _mm512_cvtepi32_epi8((__m512i)whole));
#else
                for (int lane = 0; lane < LANES; ++lane) to[k + i + lane] = (int8_t)whole[lane];
#endif
            }
            for (long part = k; part < k + GROUP; part += 16) {
                int32_t sum = 0;
                for (long i = part; i < part + 16; ++i) sum += to[i];
                sums[row * (depth / 16) + part / 16] = sum;
            }
        }
    }
};

// One panel with R rows of x

template <int R>
struct Tile16 {
    const int8_t* q[R];
    const float* scale[R];
    const int32_t* sums[R];
    Floats total[R];

    Tile16(const Rounded& x, long first) {
        for (int r = 0; r < R; ++r) {
            q[r] = x.q_at(first + r);
            scale[r] = x.scale_at(first + r);
            sums[r] = x.sums_at(first + r);
            total[r] = Floats{};
        }
    }
    int32_t sum32(int r, long block) const { return sums[r][2 * block] + sums[r][2 * block + 1]; }
    template <int MOST>
    void add(Sums* to, Bytes w, long k) const {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) to[r] = add_four<MOST>(to[r], w, q[r] + k);
    }
    // total += d_w · d_x · sums, where x belongs to one group
    void scaled(const Sums* of, Floats by, long group) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            total[r] = fma16(to_floats(of[r]), by * scale[r][group], total[r]);
    }
    void minus(Floats offset, long group) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            total[r] = fma16(-offset, Floats{} + scale[r][group] * sum32(r, group), total[r]);
    }
};

template <int R>
inline void panel_q8_0(Tile16<R>& tile, const uint8_t* w, long depth) {
    for (long k = 0; k < depth; k += 32, w += 16 * 34) {
        Sums sums[R];
        for (int r = 0; r < R; ++r) sums[r] = Sums{} - 128 * tile.sum32(r, k / 32);
#pragma GCC unroll 8
        for (long g = 0; g < 8; ++g)
            tile.template add<255>(sums, bytes_at(w + 32 + 64 * g), k + 4 * g);
        tile.scaled(sums, halves_at(w), k / 32);
    }
}

template <int R>
inline void panel_q4_0(Tile16<R>& tile, const uint8_t* w, long depth) {
    for (long k = 0; k < depth; k += 32, w += 16 * 18) {
        Sums sums[R];
        for (int r = 0; r < R; ++r) sums[r] = Sums{} - 8 * tile.sum32(r, k / 32);
#pragma GCC unroll 4
        for (long g = 0; g < 4; ++g) {
            Bytes both = bytes_at(w + 32 + 64 * g);
            tile.template add<15>(sums, both & 15, k + 4 * g);
            tile.template add<15>(sums, right(both, 4) & 15, k + 16 + 4 * g);
        }
        tile.scaled(sums, halves_at(w), k / 32);
    }
}

// Scales s and t of sub-block j, of 6 bits each, in 12 bytes.
inline void scales_q4_k(const uint8_t* from, int j, Small& s, Small& t) {
    if (j < 4) {
        s = small_at(from + 16 * j) & 63;
        t = small_at(from + 16 * (j + 4)) & 63;
    } else {
        Small both = small_at(from + 16 * (j + 4));
        s = (both & 15) | (small_at(from + 16 * (j - 4)) >> 6 << 4);
        t = (both >> 4) | (small_at(from + 16 * j) >> 6 << 4);
    }
}

template <int R>
inline void panel_q4_k(Tile16<R>& tile, const uint8_t* w, long depth) {
    for (long k = 0; k < depth; k += 256, w += 16 * 144) {
        Floats d = halves_at(w), m = halves_at(w + 32);
        for (int pair = 0; pair < 4; ++pair) {
            Sums sums[2][R] = {};
            long at = k + 64 * pair;
#pragma GCC unroll 8
            for (long g = 0; g < 8; ++g) {
                Bytes both = bytes_at(w + 256 + 64 * (8 * pair + g));
                tile.template add<15>(sums[0], both & 15, at + 4 * g);
                tile.template add<15>(sums[1], right(both, 4) & 15, at + 32 + 4 * g);
            }
            for (int i = 0; i < 2; ++i) {
                Small s, t;
                scales_q4_k(w + 64, 2 * pair + i, s, t);
                tile.scaled(sums[i], d * to_floats(s), at / 32 + i);
                tile.minus(m * to_floats(t), at / 32 + i);
            }
        }
    }
}

// The first or the second 16 of each 32 of half a block.
template <int PART, int R>
inline __attribute__((always_inline)) void q6_k_part(Tile16<R>& tile, const uint8_t* w, Floats d,
                                                     long k, int half) {
    const uint8_t *low = w + 64 * 16 * half, *high = w + 16 * 128 + 64 * 8 * half;
    long sub = k / 16 + 8 * half + PART;
    Sums sums[4][R];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[i][r] = Sums{} - 32 * tile.sums[r][sub + 2 * i];
#pragma GCC unroll 4
    for (long g = 4 * PART; g < 4 * PART + 4; ++g) {
        Bytes a = bytes_at(low + 64 * g), b = bytes_at(low + 64 * (8 + g));
        Bytes two = bytes_at(high + 64 * g);
        long at = k + 128 * half + 4 * g;
        tile.template add<63>(sums[0], (a & 15) | (left(two, 4) & 48), at);
        tile.template add<63>(sums[1], (b & 15) | (left(two, 2) & 48), at + 32);
        tile.template add<63>(sums[2], (right(a, 4) & 15) | (two & 48), at + 64);
        tile.template add<63>(sums[3], (right(b, 4) & 15) | (right(two, 2) & 48), at + 96);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const uint8_t* s = w + 16 * (192 + 8 * half + 2 * i + PART);
        tile.scaled(sums[i], d * to_floats((Signed)small_at(s)), k / 32 + 4 * half + i);
    }
}

template <int R>
inline void panel_q6_k(Tile16<R>& tile, const uint8_t* w, long depth) {
    for (long k = 0; k < depth; k += 256, w += 16 * 210) {
        Floats d = halves_at(w + 16 * 208);
        for (int half = 0; half < 2; ++half) {
            q6_k_part<0>(tile, w, d, k, half);
            q6_k_part<1>(tile, w, d, k, half);
        }
    }
}

template <int R>
__attribute__((noinline)) void panel_rows(int64_t format, const uint8_t* w, const Rounded& x, long first, float* to,
                       long stride) {
    Tile16<R> tile(x, first);
    switch (format) {
        case Q8_0: panel_q8_0(tile, w, x.depth); break;
        case Q4_0: panel_q4_0(tile, w, x.depth); break;
        case Q4_K: panel_q4_k(tile, w, x.depth); break;
        default: panel_q6_k(tile, w, x.depth);
    }
    for (int r = 0; r < R; ++r) *(AnyFloats*)(to + r * stride) = tile.total[r];
}

// to[r, c] for `rows` rows of x from `first` on, and `panels` panels of a matrix.
inline void multiply_panels(int64_t format, const uint8_t* w, const Rounded& x, long first,
                            long rows, long panels, float* to, long stride) {
    long size = panel_bytes(format, x.depth);
    for (long p = 0; p < panels; ++p, w += size, to += PANEL_ROWS) {
        long r = 0;
        for (; r + DOWN_ROWS <= rows; r += DOWN_ROWS)
            panel_rows<DOWN_ROWS>(format, w, x, first + r, to + r * stride, stride);
        for (; r < rows; ++r) panel_rows<1>(format, w, x, first + r, to + r * stride, stride);
    }
}

// One row of a matrix

inline uint8_t cell_byte(const uint8_t* panel_block, long before, long cell, long byte, long row) {
    long at = byte - before;  // in a segment of cells that begins after `before` bytes of a row
    return panel_block[16 * before + at / cell * 16 * cell + row * cell + at % cell];
}

inline void dequantize_row(int64_t format, const uint8_t* w, long row, long depth, float* to) {
    w += row / PANEL_ROWS * panel_bytes(format, depth);
    row %= PANEL_ROWS;
    long size = block_size(format), bytes = PANEL_ROWS * block_bytes(format);
    for (long k = 0; k < depth; k += size, w += bytes, to += size)
        for (long i = 0; i < size; ++i) {
            if (format == Q8_0) {
                to[i] = half_at(w + 2 * row) * ((int)cell_byte(w, 2, 4, 2 + i, row) - 128);
            } else if (format == Q4_0) {
                int both = cell_byte(w, 2, 4, 2 + i % 16, row);
                to[i] = half_at(w + 2 * row) * ((i < 16 ? both & 15 : both >> 4) - 8);
            } else if (format == Q4_K) {
                Small s, t;
                scales_q4_k(w + 64, (int)(i / 32), s, t);
                int both = cell_byte(w, 16, 4, 16 + i / 64 * 32 + i % 32, row);
                int q = i % 64 < 32 ? both & 15 : both >> 4;
                float by = half_at(w + 2 * row) * s[row], less = half_at(w + 32 + 2 * row) * t[row];
                float product = by * (float)q;
                to[i] = product - less;
            } else {
                long half = i / 128, quarter = i % 128 / 32, at = i % 32;
                int low = cell_byte(w, 0, 4, 64 * half + quarter % 2 * 32 + at, row);
                int two = cell_byte(w, 0, 4, 128 + 32 * half + at, row) >> 2 * quarter & 3;
                int q = (quarter < 2 ? low & 15 : low >> 4) | two << 4;
                float by = half_at(w + 16 * 208 + 2 * row) *
                           (int8_t)cell_byte(w, 192, 1, 192 + i / 16, row);
                to[i] = by * (float)(q - 32);
            }
        }
}

}  // namespace
