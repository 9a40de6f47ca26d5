// Keys and values as they are stored: in float32, in 16 bits, or in 8 with a scale for each row, as
// `ops/quantized_cache.py` defines them, bit for bit.
//
//     s = max |x| / M        c = round(x / s)        x̂ = c · s
//
// Rows are widened to float32 before they are used: sums have the order they have in float32.

#pragma once

#include <limits>

#include "numbers.h"

namespace {

// The first three are dtypes; fp8 is e4m3: 1 sign, 4 exponent, 3 mantissa bits.
enum KVKind { KV_FLOAT32, KV_BFLOAT16, KV_FLOAT16, KV_INT8, KV_FP8 };

inline bool is_code(long kind) { return kind == KV_INT8 || kind == KV_FP8; }
inline long kv_bytes(long kind) { return kind == KV_FLOAT32 ? 4 : is_code(kind) ? 1 : 2; }

inline uint8_t fp8_code(float x) {  // |x| ≤ 448 and a little, to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 24 & 0x80;
    float size = std::fabs(x);
    if (!(size >= 0x1p-6f)) return sign | (uint8_t)std::nearbyintf(size * 0x1p9f);  // subnormal
    bits &= 0x7FFFFFFF;
    bits += 0x7FFFF + (bits >> 20 & 1);
    return sign | (uint8_t)((bits >> 20) - (120 << 3));
}

// By bits, without a branch, so that it is done for a vector at a time.
inline __attribute__((always_inline)) float fp8_number(uint8_t code) {
    uint32_t size = code & 0x7F, is_small = size < 8 ? ~0u : 0u;  // small: without a leading one
    uint32_t bits = ((size | (is_small & 8)) << 20) + (120u << 23), one = is_small & (121u << 23);
    float x, excess;
    std::memcpy(&x, &bits, 4);
    std::memcpy(&excess, &one, 4);  // 2⁻⁶ or 0
    x -= excess;
    std::memcpy(&bits, &x, 4);
    bits |= (uint32_t)(code & 0x80) << 24;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Write the codes of one row, and return its scale.
inline float write_codes(long kind, const float* from, long width, uint8_t* to) {
    float top = 0;
    bool is_nan = false;
    for (long d = 0; d < width; ++d) {
        float size = std::fabs(from[d]);
        is_nan |= size != size;
        top = size > top ? size : top;
    }
    if (is_nan) top = std::numeric_limits<float>::quiet_NaN();
    float scale = top / (kind == KV_INT8 ? 127.0f : 448.0f);
    for (long d = 0; d < width; ++d) {
        float x = from[d] / scale;
        if (!(std::fabs(x) < 449.0f)) x = 0;  // of a row of zeros, or of one that is not finite
        to[d] = kind == KV_INT8 ? (uint8_t)(int8_t)std::nearbyintf(x) : fp8_code(x);
    }
    return scale;
}

// Write one row; the scale of a row of codes goes to `scale`.
inline void write_row(long kind, const float* from, long width, uint8_t* to, float* scale) {
    if (is_code(kind)) {
        *scale = write_codes(kind, from, width, to);
        return;
    }
    with_numbers(kind, to, [&](auto* numbers) {
        for (long d = 0; d < width; ++d) narrow(from[d], numbers[d]);
    });
}

// Widen `rows` rows.
inline void read_rows(long kind, const uint8_t* codes, const float* scales, long rows, long width,
                      float* to) {
    if (!is_code(kind))
        return with_numbers(kind, codes,
                            [&](auto* numbers) { widen_row(numbers, rows * width, to); });
    for (long r = 0; r < rows; ++r, codes += width, to += width) {
        float scale = scales[r];
        if (kind == KV_INT8)
            for (long d = 0; d < width; ++d) to[d] = (float)(int8_t)codes[d] * scale;
        else
            for (long d = 0; d < width; ++d) to[d] = fp8_number(codes[d]) * scale;
    }
}

}  // namespace
