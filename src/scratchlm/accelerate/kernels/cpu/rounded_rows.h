// Rows of x in 8 bits: each 32 numbers are scale · q, with q in −127 … 127.

#pragma once

#include "row_ops.h"

namespace {

constexpr long GROUP = 32;  // numbers of x with one scale

struct Rounded {
    int8_t* q;       // (rows, stride)
    float* scale;    // (rows, depth / 32)
    float* scaled;   // (rows, depth / 32): scale · Σ q
    int16_t* sums;   // (rows, depth / 16, 2): of q, of the first two of each four and of the others
    long depth, stride;

    // Rows of a power of two would all lie in the same few sets of the cache.
    static long stride_for(long depth) { return depth + 64; }
    static long numbers(long rows, long depth) {  // of 4 bytes: the room that rows take
        return rows * (stride_for(depth) / 4 + 2 * (depth / GROUP) + depth / 16) + 48;
    }
    Rounded(float* room, long rows, long depth) : depth(depth), stride(stride_for(depth)) {
        q = (int8_t*)room;
        scale = room + rows * stride / 4;
        scaled = scale + rows * (depth / GROUP);
        sums = (int16_t*)(scaled + rows * (depth / GROUP));
    }
    const int8_t* q_at(long row) const { return q + row * stride; }
    const float* scale_at(long row) const { return scale + row * (depth / GROUP); }
    const float* scaled_at(long row) const { return scaled + row * (depth / GROUP); }
    const int16_t* sums_at(long row) const { return sums + row * (depth / 8); }

    // Halves are rounded to even. A NaN or infinity makes the scale NaN.
    void round_row(const float* x, long row) const {
        for (long k = 0; k < depth; k += GROUP) {
            long group = row * (depth / GROUP) + k / GROUP;
            int16_t* sum = sums + 4 * group;
            scale[group] = round_group(x + k, q + row * stride + k);
            add_up(q + row * stride + k, sum);
            scaled[group] = scale[group] * (float)(sum[0] + sum[1] + sum[2] + sum[3]);
        }
    }

  private:
    static float round_group(const float* x, int8_t* to) {
        constexpr float WHOLE = 12582912.0f;  // 1.5 · 2²³: adding it rounds to whole numbers
        Vec top{}, odd{};
        for (long i = 0; i < GROUP; i += LANES) {
            Vec v = load(x + i);
            top = larger(magnitude(v), top);
            odd += v * 0.0f;
        }
        float most = largest_lane(top), by = most > 0 ? 127.0f / most : 0.0f;
        Ints whole[GROUP / LANES];
        for (long i = 0; i < GROUP; i += LANES) {
            Vec scaled = in_register(load(x + i) * by);
            whole[i / LANES] = (Ints)(scaled + WHOLE) - (Ints)all(WHOLE);
        }
#if defined(__AVX512F__)
        for (int i = 0; i < 2; ++i)
            _mm_storeu_si128((__m128i*)to + i, _mm512_cvtepi32_epi8((__m512i)whole[i]));
#elif defined(__AVX2__)
        __m256i low = _mm256_packs_epi32((__m256i)whole[0], (__m256i)whole[1]);
        __m256i high = _mm256_packs_epi32((__m256i)whole[2], (__m256i)whole[3]);
        __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        _mm256_storeu_si256((__m256i*)to, bytes);
#else
        for (long i = 0; i < GROUP; ++i) to[i] = (int8_t)whole[i / LANES][i % LANES];
#endif
        return most / 127.0f + lane_sum(odd);
    }
    static float largest_lane(Vec x) {
#if defined(__AVX512F__)
        return _mm512_reduce_max_ps(x);
#elif defined(__AVX2__)
        __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
#else
        return largest(x);
#endif
    }
    static void add_up(const int8_t* from, int16_t* to) {
#if defined(__AVX2__)
        __m256i bytes = _mm256_loadu_si256((const __m256i*)from);
        __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
        pairs = _mm256_add_epi16(pairs, _mm256_srli_si256(pairs, 8));
        pairs = _mm256_add_epi16(pairs, _mm256_srli_si256(pairs, 4));
        int32_t found[] = {_mm256_extract_epi32(pairs, 0), _mm256_extract_epi32(pairs, 4)};
        std::memcpy(to, found, sizeof found);
#else
        for (int i = 0; i < 4; ++i) to[i] = 0;
        for (long i = 0; i < GROUP; ++i) to[i / 16 * 2 + i % 4 / 2] += from[i];
#endif
    }
};

}  // namespace
