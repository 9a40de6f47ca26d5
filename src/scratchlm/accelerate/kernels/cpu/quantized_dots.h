// Products of rows rounded to 8 bits with matrices stored in 4 to 8 bits.
//
//     y[m, n] = Σ_blocks d_w · d_x · Σ_k q_w[n, k] · q_x[m, k]     (− m_w · d_x · Σ_k q_x[m, k])
//
// The inner sums are of whole numbers, hence exact; the outer sum goes block by block, in order.
// So an output is the same whatever is computed beside it. Matrices lie in panels of 16 rows
// (`quantization/layouts.py`): each vector holds four numbers of each row, and meets four numbers
// of x, the same for all rows. For many rows of x, 256 numbers of each row are unpacked at a time.

#pragma once

#include "rounded_rows.h"
#include "rows16.h"

namespace {

constexpr long PANEL_ROWS = 16;
constexpr long AT_ONCE = 256;  // numbers of a row of a matrix
constexpr long AHEAD = 4096;   // bytes: of memory that is fetched before it is needed
constexpr int DOWN_ROWS = 4;   // of x: as many as registers allow
constexpr long FEW_ROWS = DOWN_ROWS;

enum WeightFormat { WIDE_WEIGHTS, Q8_0, Q4_0, Q4_K, Q6_K };

inline long block_size(int64_t format) { return format == Q8_0 || format == Q4_0 ? 32 : 256; }
inline long block_bytes(int64_t format) {
    return format == Q8_0 ? 34 : format == Q4_0 ? 18 : format == Q4_K ? 144 : 210;
}
inline long panel_bytes(int64_t format, long depth) {
    return PANEL_ROWS * (depth / block_size(format)) * block_bytes(format);
}

// A group of 32 numbers is summed in one pass; of q6_k in two, as each 16 have a scale of their own.
constexpr bool HAS_WHOLE_SCALES[] = {false, false, false, true, true};
constexpr int PASSES[] = {1, 1, 1, 1, 2};
constexpr int OFFSET[] = {0, 0, 8, 0, 32};  // of what is stored without a sign

// Scales s and t of sub-block j, of 6 bits each, in 12 bytes.
inline void scales_q4_k(const uint8_t* from, long j, Small& s, Small& t) {
    if (j < 4) {
        s = small_at(from + 16 * j) & 63;
        t = small_at(from + 16 * (j + 4)) & 63;
    } else {
        Small both = small_at(from + 16 * (j + 4));
        s = (both & 15) | (right(small_at(from + 16 * (j - 4)), 2) & 48);
        t = (right(both, 4) & 15) | (right(small_at(from + 16 * j), 2) & 48);
    }
}

// Groups of 32 numbers of each of 16 rows, as they lie in a panel. A group is first + i: those that
// share bytes have the same `first`, and are unrolled together, so that bytes are loaded once.
template <int FORMAT>
struct Packed {
    const uint8_t* w;
    static constexpr int TOGETHER = FORMAT == Q6_K ? 4 : FORMAT == Q4_K ? 2 : 1;
    static constexpr long SIZE = FORMAT == Q8_0 ? 16 * 34 : FORMAT == Q6_K ? 2 * 210 : 16 * 18;

    inline __attribute__((always_inline)) Bytes cell(long first, int i, int c) const {
        if constexpr (FORMAT == Q8_0) {
            return bytes_at(w + SIZE * first + 32 + 64 * c);
        } else if constexpr (FORMAT == Q6_K) {
            Bytes four = bytes_at(w + 64 * (6 * first + 3 * c + i % 2));
            Bytes two = bytes_at(w + 64 * (6 * first + 3 * c + 2));
            if (i < 2) return (four & 15) | (left(two, i == 0 ? 4 : 2) & 48);
            return (right(four, 4) & 15) | ((i == 2 ? two : right(two, 2)) & 48);
        } else {
            bool low = FORMAT == Q4_0 ? c < 4 : i == 0;
            Bytes both = bytes_at(FORMAT == Q4_0 ? w + SIZE * first + 32 + 64 * (c % 4)
                                                 : w + 256 + 64 * (4 * first + c));
            return (low ? both : right(both, 4)) & 15;
        }
    }
    Factors by(long g, int pass) const {  // s of each pass
        Small s, t;
        if (FORMAT == Q6_K)
            s = small_at(w + 16 * (192 + 2 * g + pass));
        else
            scales_q4_k(w + 64, g, s, t);
        return factors(widened(s));
    }
    Floats t(long g) const {
        Small s, t;
        scales_q4_k(w + 64, g, s, t);
        return to_floats(widened(t));
    }
    // d, m of whole super-blocks: one
    Floats d(long g) const {
        return halves_at(w + (FORMAT == Q6_K ? 16 * 208 : FORMAT == Q4_K ? 0 : SIZE * g));
    }
    Floats m() const { return halves_at(w + 32); }
};

// The same for many rows of x.
template <int FORMAT>
struct Unpacked {
    Bytes cells[8][8];
    Factors factors[8][2];
    Floats scales[8], offsets[8], offset;
    static constexpr int TOGETHER = 1;

    Unpacked(const Packed<FORMAT>& from, long groups) {
        constexpr bool SUPER = HAS_WHOLE_SCALES[FORMAT];
        constexpr int TOGETHER = Packed<FORMAT>::TOGETHER;
        for (long first = 0; first < groups; first += TOGETHER)
#pragma GCC unroll 8
            for (int c = 0; c < 8; ++c)
#pragma GCC unroll 4
                for (int i = 0; i < TOGETHER; ++i) cells[first + i][c] = from.cell(first, i, c);
        for (long g = 0; g < groups; ++g) {
            if (!SUPER || g == 0) scales[g] = from.d(g);
            if (FORMAT == Q4_K) offsets[g] = from.t(g);
            if (SUPER)
                for (int pass = 0; pass < PASSES[FORMAT]; ++pass)
                    factors[g][pass] = from.by(g, pass);
        }
        if (FORMAT == Q4_K) offset = from.m();
    }
    Bytes cell(long first, int, int c) const { return cells[first][c]; }
    Factors by(long g, int pass) const { return factors[g][pass]; }
    Floats t(long g) const { return offsets[g]; }
    Floats d(long g) const { return scales[g]; }
    Floats m() const { return offset; }
};

// R rows of x with weights, packed or not, from number k on: to[r] += Σ.
template <int FORMAT, int R>
struct Tile16 {
    const int8_t* q[R];
    const float *scale[R], *scaled[R];
    const int16_t* sums[R];

    Tile16(const Rounded& x, long first, long k) {
        for (int r = 0; r < R; ++r) {
            q[r] = x.q_at(first + r) + k;
            scale[r] = x.scale_at(first + r) + k / 32;
            scaled[r] = x.scaled_at(first + r) + k / 32;
            sums[r] = x.sums_at(first + r) + k / 8;
        }
    }

    // COUNT groups that share bytes, cell by cell, so that bytes are loaded once.
    template <int PASS, int COUNT, class Weights>
    inline __attribute__((always_inline)) void pass(const Weights& w, long first, int i,
                                                    Sums (*to)[R]) const {
        constexpr int CELLS = 8 / PASSES[FORMAT], FIRST = CELLS * PASS;
        long g = first + i;
        Parts parts[COUNT][R];
#pragma GCC unroll 4
        for (int j = 0; j < COUNT; ++j)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                parts[j][r] =
                    begin<OFFSET[FORMAT], CELLS / 4>(sums[r] + 4 * (g + j) + FIRST / 2);
#pragma GCC unroll 8
        for (int c = FIRST; c < FIRST + CELLS; ++c)
#pragma GCC unroll 4
            for (int j = 0; j < COUNT; ++j) {
                Bytes four = in_register(w.cell(first, i + j, c));
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
                    parts[j][r] = add_four(parts[j][r], four, q[r] + 32 * (g + j) + 4 * c);
            }
#pragma GCC unroll 4
        for (int j = 0; j < COUNT; ++j) {
            Factors by = HAS_WHOLE_SCALES[FORMAT] ? w.by(g + j, PASS) : factors(1);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                to[j][r] = PASS == 0 ? parts[j][r] * by : to[j][r] + parts[j][r] * by;
        }
    }

    template <class Weights>
    inline __attribute__((always_inline)) void signed_bytes(const Weights& w, long g,
                                                            Sums* to) const {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) to[r] = begin_signed(sums[r] + 4 * g);
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) {
            Bytes four = in_register(w.cell(g, 0, c));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
                to[r] = add_four_signed(to[r], four, q[r] + 32 * g + 4 * c);
        }
    }

    template <class Weights>
    inline __attribute__((always_inline)) void add(const Weights& w, long groups, float* to,
                                                   long stride) const {
        constexpr bool SUPER = HAS_WHOLE_SCALES[FORMAT];
        Floats total[R], least[R];
        for (int r = 0; r < R; ++r) {
            total[r] = SUPER ? all16(0.0f) : floats_at(to + r * stride);
            least[r] = all16(0.0f);
        }
        constexpr int COUNT = R * Weights::TOGETHER <= MOST_PARTS ? Weights::TOGETHER : 1;
        for (long first = 0; first < groups; first += Weights::TOGETHER)
#pragma GCC unroll 4
            for (int i = 0; i < Weights::TOGETHER; i += COUNT) {
                Sums found[COUNT][R];
                if constexpr (FORMAT == Q8_0) {
                    signed_bytes(w, first, found[0]);
                } else {
                    pass<0, COUNT>(w, first, i, found);
                    if constexpr (PASSES[FORMAT] == 2) pass<1, COUNT>(w, first, i, found);
                }
#pragma GCC unroll 4
                for (int j = 0; j < COUNT; ++j)
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        long g = first + i + j;
                        Floats y = to_floats(found[j][r]);
                        if (SUPER)
                            total[r] = fma16(y, all16(scale[r][g]), total[r]);
                        else
                            total[r] = fma16(y * scale[r][g], w.d(g), total[r]);
                        if (FORMAT == Q4_K) least[r] = fma16(w.t(g), all16(scaled[r][g]), least[r]);
                    }
            }
        for (int r = 0; r < R; ++r) {
            float* at = to + r * stride;
            if (SUPER) total[r] = fma16(w.d(0), total[r], floats_at(at));
            if (FORMAT == Q4_K) total[r] = fma16(-w.m(), least[r], total[r]);
            store16(at, total[r]);
        }
    }
};

template <int FORMAT, int R, class Weights>
__attribute__((noinline)) void tile16(const Weights& w, const Rounded& x, long first, long k,
                                      long groups, float* to, long stride) {
    Tile16<FORMAT, R>(x, first, k).add(w, groups, to, stride);
}

template <int FORMAT, int R, class Weights>
inline void tiles16(const Weights& w, const Rounded& x, long first, long rows, long k, long groups,
                    float* to, long stride) {
    long r = 0;
    for (; r + R <= rows; r += R)
        tile16<FORMAT, R>(w, x, first + r, k, groups, to + r * stride, stride);
    if constexpr (R > 1)
        if (r < rows)
            tiles16<FORMAT, R / 2>(w, x, first + r, rows - r, k, groups, to + r * stride, stride);
}

// Few rows of x meet the bytes as they lie: what unpacks them costs less than to write them down.
template <int FORMAT>
void multiply_panel(const uint8_t* bytes, const Rounded& x, long first, long rows, float* to,
                    long stride) {
    for (long r = 0; r < rows; ++r) store16(to + r * stride, all16(0.0f));
    for (long k = 0; k < x.depth; k += AT_ONCE) {
        long numbers = std::min(AT_ONCE, x.depth - k), groups = numbers / GROUP;
        Packed<FORMAT> w{bytes};
        long size = panel_bytes(FORMAT, numbers);
        for (long at = 0; at < size; at += 64) __builtin_prefetch(bytes + size + AHEAD + at);
        bytes += size;
        if (FORMAT == Q8_0 || rows <= FEW_ROWS) {
            tiles16<FORMAT, DOWN_ROWS>(w, x, first, rows, k, groups, to, stride);
        } else {
            Unpacked<FORMAT> unpacked(w, groups);
            tiles16<FORMAT, DOWN_ROWS>(unpacked, x, first, rows, k, groups, to, stride);
        }
    }
}

// to[r, c] for `rows` rows of x from `first` on, and `panels` panels of a matrix.
inline void multiply_panels(int64_t format, const uint8_t* w, const Rounded& x, long first,
                            long rows, long panels, float* to, long stride) {
    auto multiply = format == Q8_0   ? multiply_panel<Q8_0>
                    : format == Q4_0 ? multiply_panel<Q4_0>
                    : format == Q4_K ? multiply_panel<Q4_K>
                                     : multiply_panel<Q6_K>;
    for (long p = 0; p < panels; ++p, w += panel_bytes(format, x.depth), to += PANEL_ROWS)
        multiply(w, x, first, rows, to, stride);
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
                to[i] = half_at(w + 2 * row) * (int8_t)cell_byte(w, 2, 4, 2 + i, row);
            } else if (format == Q4_0) {
                int both = cell_byte(w, 2, 4, 2 + i % 16, row);
                to[i] = half_at(w + 2 * row) * ((i < 16 ? both & 15 : both >> 4) - 8);
            } else if (format == Q4_K) {
                Small s, t;
                scales_q4_k(w + 64, i / 32, s, t);
                int both = cell_byte(w, 16, 4, 16 + i / 64 * 32 + i % 32, row);
                int q = i % 64 < 32 ? both & 15 : both >> 4;
                float by = half_at(w + 2 * row) * s[row], less = half_at(w + 32 + 2 * row) * t[row];
                float product = by * (float)q;
                to[i] = product - less;
            } else {
                long half = i / 128, quarter = i % 128 / 32, at = i % 32;
                const uint8_t* cells = w + 64 * (24 * half + 3 * (at / 4)) + 4 * row + at % 4;
                int low = cells[64 * (quarter % 2)], two = cells[128] >> 2 * quarter & 3;
                int q = (quarter < 2 ? low & 15 : low >> 4) | two << 4;
                float by = half_at(w + 16 * 208 + 2 * row) *
                           (int8_t)cell_byte(w, 192, 1, 192 + i / 16, row);
                to[i] = by * (float)(q - 32);
            }
        }
}

}  // namespace
