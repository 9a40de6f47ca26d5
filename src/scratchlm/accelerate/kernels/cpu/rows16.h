// Vectors that hold something of each of 16 rows: one register of AVX-512, two of AVX2, elsewhere
// what the compiler makes of them.
//
//     Bytes    four numbers of each row, without a sign
//     Parts    sums of their products with numbers of x: of 16 bits, two a row, with AVX2
//     Sums     whole numbers of 32 bits
//     Factors  what Parts are multiplied by
//     Floats

#pragma once

#include "row_ops.h"

namespace {

typedef uint8_t Small __attribute__((vector_size(16), may_alias));  // one byte of each row
typedef uint8_t AnySmall __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t SmallPairs __attribute__((vector_size(16), may_alias));

inline Small small_at(const uint8_t* from) { return *(const AnySmall*)from; }
// Bits that cross from one byte into the next must be masked away: there are no shifts of bytes.
inline Small right(Small x, int by) { return (Small)((SmallPairs)x >> by); }

template <class Number>
inline Number number_at(const void* from) {
    Number found;
    std::memcpy(&found, from, sizeof found);
    return found;
}
inline float half_at(const uint8_t* from) { return widen(number_at<Float16>(from)); }

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512VNNI__)

constexpr int MOST_PARTS = 4;  // that fit into registers beside what they are made of

struct Bytes {
    __m256i a, b;  // of rows 0 … 7 and 8 … 15
};
struct Parts {
    __m256i a, b;
};
struct Sums {
    __m256i a, b;
};
struct Factors {
    __m256i a, b;  // each twice, of 16 bits
};
struct Floats {
    __m256 a, b;
};

inline Bytes bytes_at(const uint8_t* from) {
    const __m256i* at = (const __m256i*)from;
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Bytes in_register(Bytes x) {
    asm("" : "+x"(x.a), "+x"(x.b));
    return x;
}
inline Bytes operator&(Bytes x, int mask) {
    __m256i by = _mm256_set1_epi8((char)mask);
    return {_mm256_and_si256(x.a, by), _mm256_and_si256(x.b, by)};
}
inline Bytes operator|(Bytes x, Bytes y) {
    return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
inline Bytes left(Bytes x, int by) {
    return {_mm256_slli_epi16(x.a, by), _mm256_slli_epi16(x.b, by)};
}
inline Bytes right(Bytes x, int by) {
    return {_mm256_srli_epi16(x.a, by), _mm256_srli_epi16(x.b, by)};
}

// −OFFSET · Σ q, of 16 × COUNT numbers of x.
template <int OFFSET, int COUNT>
inline Parts begin(const int16_t* sums) {
    __m256i x = _mm256_setzero_si256();
    if (OFFSET != 0) {
        x = _mm256_set1_epi32(number_at<int32_t>(sums));
        if (COUNT == 2) x = _mm256_add_epi16(x, _mm256_set1_epi32(number_at<int32_t>(sums + 2)));
        x = _mm256_mullo_epi16(x, _mm256_set1_epi16(-OFFSET));
    }
    return {x, x};
}
// to[n] += Σ_{i < 4} w[n, i] · x[i]: w in 0 … 63, x in −127 … 127.
inline Parts add_four(Parts to, Bytes w, const int8_t* x) {
    __m256i by = _mm256_set1_epi32(number_at<int32_t>(x));
    to.a = _mm256_add_epi16(to.a, _mm256_maddubs_epi16(w.a, by));
    to.b = _mm256_add_epi16(to.b, _mm256_maddubs_epi16(w.b, by));
    asm("" : "+x"(to.a), "+x"(to.b));  // GCC would keep all products and add them up at the end
    return to;
}
// The same of w in −128 … 127: products of 15 bits, of which two can be added up in 16.
inline Sums begin_signed(const int16_t*) {
    return {_mm256_setzero_si256(), _mm256_setzero_si256()};
}
inline Sums add_four_signed(Sums to, Bytes w, const int8_t* x) {
    __m256i by = _mm256_set1_epi32(number_at<int32_t>(x)), ones = _mm256_set1_epi16(1);
    __m256i a = _mm256_maddubs_epi16(_mm256_abs_epi8(w.a), _mm256_sign_epi8(by, w.a));
    __m256i b = _mm256_maddubs_epi16(_mm256_abs_epi8(w.b), _mm256_sign_epi8(by, w.b));
    to.a = _mm256_add_epi32(to.a, _mm256_madd_epi16(a, ones));
    to.b = _mm256_add_epi32(to.b, _mm256_madd_epi16(b, ones));
    asm("" : "+x"(to.a), "+x"(to.b));
    return to;
}
inline Sums widened(Small x) {  // bytes with a sign
    return {_mm256_cvtepi8_epi32((__m128i)x), _mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)x, 8))};
}
inline Factors factors(Sums x) {
    return {_mm256_blend_epi16(x.a, _mm256_slli_epi32(x.a, 16), 0xAA),
            _mm256_blend_epi16(x.b, _mm256_slli_epi32(x.b, 16), 0xAA)};
}
inline Factors factors(int x) { return {_mm256_set1_epi16((short)x), _mm256_set1_epi16((short)x)}; }
inline Sums operator*(Parts x, Factors y) {
    return {_mm256_madd_epi16(x.a, y.a), _mm256_madd_epi16(x.b, y.b)};
}
inline Sums operator+(Sums x, Sums y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
inline Floats to_floats(Sums x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Floats all16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats operator*(Floats x, float y) {
    return {_mm256_mul_ps(x.a, _mm256_set1_ps(y)), _mm256_mul_ps(x.b, _mm256_set1_ps(y))};
}
inline Floats operator-(Floats x) { return {-x.a, -x.b}; }
inline Floats fma16(Floats x, Floats y, Floats z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats floats_at(const float* from) {
    return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
inline void store16(float* to, Floats x) {
    _mm256_storeu_ps(to, x.a);
    _mm256_storeu_ps(to + 8, x.b);
}
inline Floats halves_at(const uint8_t* from) {  // 16 numbers of float16
    const __m128i* at = (const __m128i*)from;
    return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}

#else

constexpr int MOST_PARTS = 16;

typedef uint8_t Bytes __attribute__((vector_size(64), may_alias));
typedef uint8_t AnyBytes __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t BytePairs __attribute__((vector_size(64), may_alias));
typedef int32_t Sums __attribute__((vector_size(64), may_alias));
typedef float Floats __attribute__((vector_size(64), may_alias));
typedef float AnyFloats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int8_t SmallSigned __attribute__((vector_size(16), may_alias));
typedef Sums Parts, Factors;

inline Bytes bytes_at(const uint8_t* from) { return *(const AnyBytes*)from; }
inline Bytes in_register(Bytes x) { return x; }
inline Bytes left(Bytes x, int by) { return (Bytes)((BytePairs)x << by); }
inline Bytes right(Bytes x, int by) { return (Bytes)((BytePairs)x >> by); }

template <int OFFSET, int COUNT>
inline Parts begin(const int16_t* sums) {
    if (OFFSET == 0) return Parts{};
#if defined(__AVX512BW__)
    __m512i by = _mm512_set1_epi16(-OFFSET), x = _mm512_set1_epi32(number_at<int32_t>(sums));
    __m512i found = _mm512_madd_epi16(x, by);
    if (COUNT == 1) return (Parts)found;
    x = _mm512_set1_epi32(number_at<int32_t>(sums + 2));
    return (Parts)_mm512_add_epi32(found, _mm512_madd_epi16(x, by));
#else
    int32_t sum = 0;
    for (int i = 0; i < 2 * COUNT; ++i) sum += sums[i];
    return Parts{} - OFFSET * sum;
#endif
}
inline Parts add_four(Parts to, Bytes w, const int8_t* x) {
#if defined(__AVX512VNNI__)
    __m512i by = _mm512_set1_epi32(number_at<int32_t>(x));
    return (Parts)_mm512_dpbusd_epi32((__m512i)to, (__m512i)w, by);
#else
    for (int n = 0; n < 16; ++n)
        for (int i = 0; i < 4; ++i) to[n] += (int32_t)w[4 * n + i] * x[i];
    return to;
#endif
}
inline Sums begin_signed(const int16_t* sums) { return begin<128, 2>(sums); }
inline Sums add_four_signed(Sums to, Bytes w, const int8_t* x) { return add_four(to, w ^ 128, x); }
inline Sums widened(Small x) {
#if defined(__AVX512F__)
    return (Sums)_mm512_cvtepi8_epi32((__m128i)x);
#else
    return __builtin_convertvector((SmallSigned)x, Sums);
#endif
}
inline Factors factors(Sums x) { return x; }
inline Factors factors(int x) { return Factors{} + x; }
inline Floats to_floats(Sums x) { return __builtin_convertvector(x, Floats); }
inline Floats all16(float x) { return Floats{} + x; }
inline Floats fma16(Floats x, Floats y, Floats z) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#else
    for (int i = 0; i < 16; ++i) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    return z;
#endif
}
inline Floats floats_at(const float* from) { return *(const AnyFloats*)from; }
inline void store16(float* to, Floats x) { *(AnyFloats*)to = x; }
inline Floats halves_at(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    Floats found;
    for (int i = 0; i < 16; ++i) found[i] = half_at(from + 2 * i);
    return found;
#endif
}

#endif

}  // namespace
