// Numbers of a model's dtype: float32, or 16 bits that are widened as they are read.
//
// Widening is exact. So a product with weights of 16 bits is that with the same numbers in float32,
// to the bit.

#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu_tiles.h"

namespace {

enum DType { FLOAT32, BFLOAT16, FLOAT16 };

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// Call work(address) with an address of the dtype's own numbers.
template <class Work>
inline void with_numbers(int64_t dtype, const void* at, Work work) {
    switch (dtype) {
        case BFLOAT16: return work((const BFloat16*)at);
        case FLOAT16: return work((const Float16*)at);
        default: return work((const float*)at);
    }
}
template <class Work>
inline void with_numbers(int64_t dtype, void* at, Work work) {
    with_numbers(dtype, (const void*)at, [&](auto* numbers) {
        work(const_cast<std::remove_const_t<std::remove_pointer_t<decltype(numbers)>>*>(numbers));
    });
}

// One number

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float widen(Float16 x) {
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16;
    uint32_t exponent = x.bits >> 10 & 31, rest = x.bits & 1023;
    if (exponent == 0) {
        float value = (float)rest * 0x1p-24f;
        return sign != 0 ? -value : value;
    }
    uint32_t wide = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | rest << 13;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// To the nearest, ties to even.
inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, BFloat16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to.bits = x != x ? 0x7FC0 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline void narrow(float x, Float16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000)
        bits = 0x7E00;  // not a number
    else if (bits >= 0x47800000)
        bits = 0x7C00;  // infinite, from 2¹⁶ on
    else if (bits < 0x38800000)
        bits = (uint32_t)std::nearbyintf(std::fabs(x) * 0x1p24f);  // subnormal, below 2⁻¹⁴
    else
        bits = ((bits + 0xFFF + (bits >> 13 & 1)) >> 13) - (112 << 10);
    to.bits = sign | bits;
}

// LANES numbers

typedef uint16_t Words __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(BYTES), may_alias));

inline Vec load(const float* from) { return *(const AnyVec*)from; }
inline Vec load(const BFloat16* from) {
    return (Vec)(__builtin_convertvector(*(const Words*)from, Bits) << 16);
}
inline Vec load(const Float16* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX__) && defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Vec x;
    for (int i = 0; i < LANES; ++i) x[i] = widen(from[i]);
    return x;
#endif
}

// The first `count` numbers, and 0 in the other lanes.
template <class Number>
inline Vec load(const Number* from, long count) {
    if (count >= LANES) return load(from);
    Number some[LANES] = {};
    std::memcpy(some, from, count * sizeof(Number));
    return load(some);
}

inline void store(float* to, Vec x) { *(AnyVec*)to = x; }
inline void store(float* to, Vec x, long count) {
    if (count >= LANES) return store(to, x);
    std::memcpy(to, &x, count * sizeof(float));
}

// Rows

template <class Number>
inline void widen_row(const Number* from, long count, float* to) {
    for (long i = 0; i < count; i += LANES) store(to + i, load(from + i, count - i), count - i);
}

}  // namespace
