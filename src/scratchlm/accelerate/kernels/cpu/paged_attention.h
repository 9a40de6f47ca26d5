// Attention of new tokens over keys that lie in pages, in an order of positions alone.
//
//     S = q Kᵀ / √d        P = softmax(S) over the positions a token sees        O = P V
//
// The sum of P is by lanes: position j goes to lane j mod LANES, in order. O is summed position by
// position. So nothing depends on the pages, or on the queries that are computed together.
// Logarithms are of base 2: queries are multiplied by log₂e / √d. Of keys that no query of a block
// sees, nothing is read. Keys and values of 8 or 16 bits (`kv_rows.h`) are widened page by page.

#pragma once

#include <limits>

#include "kv_rows.h"
#include "row_ops.h"

namespace {

constexpr long QUERIES = 16;  // rows computed together: tokens, times the heads of a group
constexpr int CHUNK = 4;      // vectors of a row's output in registers

struct Kept {  // keys or values of one key head, from page 0 on
    const uint8_t* rows;
    const float* scales;
};

struct Pages {  // of one request, one layer and one key head
    const int32_t* table;
    Kept keys, values;
    long heads, page_size, width, kind;
    float* widened;  // room for the rows of a page

    long row_of(long position) const {
        return table[position / page_size] * heads * page_size + position % page_size;
    }
    const uint8_t* at(const Kept& kept, long position) const {
        return kept.rows + row_of(position) * width * kv_bytes(kind);
    }
    // Call work(first position, count, address) for each stretch of [from, to) that lies in one
    // page; its successor, which lies anywhere, is fetched meanwhile.
    template <class Work>
    void stretches(const Kept& kept, long from, long to, Work work) const {
        while (from < to) {
            long end = std::min(to, (from / page_size + 1) * page_size);
            if (end < to)
                fetch(at(kept, end), std::min(to - end, page_size) * width * kv_bytes(kind));
            const float* rows = (const float*)at(kept, from);
            if (kind != KV_FLOAT32) {
                read_rows(kind, at(kept, from), kept.scales + row_of(from), end - from, width,
                          widened);
                rows = widened;
            }
            work(from, end - from, rows);
            from = end;
        }
    }
    static void fetch(const uint8_t* from, long bytes) {
        for (long i = 0; i < std::min(bytes, 4096L * 4); i += 64) __builtin_prefetch(from + i);
    }
};

// Consecutive positions [first, last] are seen by query row r; rows ascend.
struct Seen {
    long first, last;
};

inline float* score_at(float* scores, long stride, long r, long base, long position) {
    return scores + r * stride + (position - base);
}

// Replace the scores of one row by 2^(score − largest); return the inverse of their sum.
inline float softmax_row(float* row, long base, Seen seen) {
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    long from = seen.first / LANES * LANES - base, to = round_up(seen.last + 1, LANES) - base;
    for (long i = from; i < seen.first - base; ++i) row[i] = NONE;
    for (long i = seen.last + 1 - base; i < to; ++i) row[i] = NONE;
    Vec top = all(NONE), sum{};
    for (long i = from; i < to; i += LANES) top = larger(top, load(row + i));
    top = all(largest(top));
    for (long i = from; i < to; i += LANES) {
        Vec weight = exp2(load(row + i) - top);
        store(row + i, weight);
        sum += weight;
    }
    return 1.0f / lane_sum(sum);
}

// out[r, d] += Σ_j weight[r, j] · value[j, d] for a stretch of positions, V vectors of d at a time.
template <int R, int V>
inline __attribute__((always_inline)) void add_values(float* out, long width, const float* weights,
                                                      long stride, const float* values,
                                                      long count) {
    Vec sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = load(out + r * width + v * LANES);
    for (long j = 0; j < count; ++j) {
        Vec value[V];
        for (int v = 0; v < V; ++v) value[v] = load(values + j * width + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            Vec weight = in_register(all(weights[r * stride + j]));
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(out + r * width + v * LANES, sum[r][v]);
}

template <int R>
inline void add_values(float* out, long width, const float* weights, long stride,
                       const float* values, long count) {
    long d = 0;
    for (; d + CHUNK * LANES <= width; d += CHUNK * LANES)
        add_values<R, CHUNK>(out + d, width, weights, stride, values + d, count);
    for (; d + 2 * LANES <= width; d += 2 * LANES)
        add_values<R, 2>(out + d, width, weights, stride, values + d, count);
    for (; d + LANES <= width; d += LANES)
        add_values<R, 1>(out + d, width, weights, stride, values + d, count);
    if (d == width) return;
    for (int r = 0; r < R; ++r) {
        Vec sum = load(out + r * width + d, width - d);
        for (long j = 0; j < count; ++j)
            sum = fma(all(weights[r * stride + j]), load(values + j * width + d, width - d), sum);
        store(out + r * width + d, sum, width - d);
    }
}

struct Attend {
    const Pages& pages;
    float* scores;  // (rows, stride), from position `base` on
    long stride, base;

    template <int R>
    void values(float* out, long r, long from, long to) const {
        pages.stretches(pages.values, from, to, [&](long position, long count, const float* at) {
            add_values<R>(out + r * pages.width, pages.width,
                          score_at(scores, stride, r, base, position), stride, at, count);
        });
    }

    // Rows r … r + R − 1: what only some of them see, one by one; what all see, together.
    template <int R>
    void values_of(float* out, long r, const Seen* seen) const {
        long from = seen[r + R - 1].first, to = std::max(from, seen[r].last + 1);
        for (int i = 0; i < R; ++i)
            values<1>(out, r + i, seen[r + i].first, std::min(from, seen[r + i].last + 1));
        if (from < to) values<R>(out, r, from, to);
        for (int i = 0; i < R; ++i) values<1>(out, r + i, to, seen[r + i].last + 1);
    }
};

// The outputs of `rows` queries (rows, width); scores has room for (rows, stride).
inline void attend(const Pages& pages, const float* queries, const Seen* seen, long rows,
                   float* scores, long stride, float* out) {
    long base = seen[0].first / LANES * LANES, width = pages.width;
    pages.stretches(pages.keys, seen[0].first, seen[rows - 1].last + 1,
                    [&](long position, long count, const float* at) {
                        dots(queries, width, rows, at, width, count, width,
                             score_at(scores, stride, 0, base, position), stride);
                    });
    float by[QUERIES];
    for (long r = 0; r < rows; ++r) by[r] = softmax_row(scores + r * stride, base, seen[r]);
    std::fill(out, out + rows * width, 0.0f);
    Attend attend{pages, scores, stride, base};
    long r = 0;
    for (; r + 4 <= rows; r += 4) attend.values_of<4>(out, r, seen);
    for (; r < rows; ++r) attend.values_of<1>(out, r, seen);
    for (r = 0; r < rows; ++r)
        for (long d = 0; d < width; ++d) out[r * width + d] *= by[r];
}

}  // namespace
