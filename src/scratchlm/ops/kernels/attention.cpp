// Causal attention on a CPU in float32, forward and backward, in tiles that stay in registers.
//
//     S = Q Kᵀ / √d        P = softmax(S) over a token and its past        O = P V
//
//     δ = Σ ∂O∘O           ∂S = P ∘ (∂O Vᵀ − δ)
//     ∂Q = ∂S K / √d       ∂K = ∂Sᵀ Q / √d       ∂V = Pᵀ ∂O
//
// Every product is a tile of ROWS × PANEL sums, added up by `multiply` from a matrix A, read number
// by number, and a matrix B, packed in panels of PANEL columns. Of the future nothing is read but
// inside a tile of S on the diagonal, where it is written and never looked at: sums end, or begin,
// with a triangle (`up_to_self`, `from_self_on`). So what is wrong in the future, a NaN too, stays
// there. One thread computes a key head with all its query heads, in a fixed order: the bits do not
// depend on the number of threads.
//
// Logarithms are of base 2, so queries are multiplied by log₂e / √d as they are packed.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#ifndef __FP_FAST_FMAF
#error "without fused multiply-add, torch's own attention is faster"
#endif

// OpenMP's, where torch brought it: its threads are awake and would stand in the way of new ones.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

typedef float Vec __attribute__((vector_size(BYTES)));
typedef int32_t Ints __attribute__((vector_size(BYTES)));
typedef float AnyVec __attribute__((vector_size(BYTES), aligned(4), may_alias));  // at any address

constexpr int LANES = BYTES / 4;
constexpr int ROWS = 6;  // 6 × 2 sums, two of B and one of A fit into 16 registers
constexpr int PANEL = 2 * LANES;
constexpr int BLOCK = 96;  // queries, or keys, at a time: whole tiles and panels

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.693147180559945309f;

long round_up(long n, long to) { return (n + to - 1) / to * to; }

Vec all(float x) { return Vec{} + x; }
Vec larger(Vec a, Vec b) { return a > b ? a : b; }

float largest(Vec x) {
    float top = x[0];
    for (int i = 1; i < LANES; ++i) top = x[i] > top ? x[i] : top;
    return top;
}

float total(Vec x) {
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
    long packed() const { return panels() * PANEL; }    // a row of all channels
    long padded() const { return round_up(seq, PANEL); }
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
            copy(to + r * PANEL, from + r * stride + c, std::min<long>(PANEL, n.width - c), PANEL, by);
}

void unpack_channels(
    float* to, const float* from, long stride, long rows, long height, const Sizes& n, float by) {
    for (long c = 0; c < n.width; c += PANEL, from += height * PANEL)
        for (long r = 0; r < rows; ++r)
            copy(to + r * stride + c, from + r * PANEL, std::min<long>(PANEL, n.width - c), 0, by);
}

template <int HALF, int... I>
inline Vec zip(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (HALF * LANES / 2 + I / 2 + I % 2 * LANES)...);
}

// Turn a square: each round interleaves the rows of its halves, and log₂ LANES rounds do it.
inline void turn(Vec (&x)[LANES]) {
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
void pack_turned(float* to, const float* from, long stride, const Sizes& n) {
    for (long first = 0; first < n.padded(); first += LANES) {
        float* panel = to + first / PANEL * PANEL * n.width + first % PANEL;
        long rows = std::clamp(n.seq - first, 0L, (long)LANES), c = 0;
        for (; c + LANES <= n.width && rows == LANES; c += LANES) {
            Vec square[LANES];
            for (int r = 0; r < LANES; ++r)
                square[r] = *(const AnyVec*)(from + (first + r) * stride + c);
            turn(square);
            for (int r = 0; r < LANES; ++r) *(Vec*)(panel + (c + r) * PANEL) = square[r];
        }
        for (; c < n.width; ++c)
            for (int r = 0; r < LANES; ++r)
                panel[c * PANEL + r] = r < rows ? from[(first + r) * stride + c] : 0.0f;
    }
}

// Forward

struct Forward {
    Sizes n;
    View q, k, v, out;
    float* lse;  // (batch, heads, seq): log₂ Σ 2ˢ of every row

    long room() const { return 2 * n.padded() * n.packed() + BLOCK * (n.packed() + n.padded()); }

    void unit(long b, long key_head, float* scratch) const {
        float* keys = scratch;
        float* values = keys + n.padded() * n.packed();
        float* rest = values + n.padded() * n.packed();
        pack_turned(keys, k.of(b, key_head), k.row, n);
        pack_channels(values, v.of(b, key_head), v.row, n.seq, n.seq, n, 1.0f);
        long group = n.heads / n.key_heads;
        for (long h = key_head * group; h < (key_head + 1) * group; ++h)
            for (long first = 0; first < n.seq; first += BLOCK)
                block(b, h, first, keys, values, rest);
    }

    void block(
        long b, long h, long first, const float* keys, const float* values, float* queries) const {
        long rows = std::min<long>(BLOCK, n.seq - first), stride = n.padded();
        float* table = queries + BLOCK * n.packed();
        float inverse[BLOCK];
        float by = LOG2_E / std::sqrt((float)n.width);
        pack_rows(queries, q.of(b, h) + first * q.row, q.row, rows, n, by);
        for (long key = 0; key < first + rows; key += PANEL)
            for_tiles(std::max(0L, key - first) / ROWS * ROWS, rows, [&](long r, auto size) {
                Tile<size> sum{};
                multiply<true>(
                    sum, queries + r * n.packed(), n.packed(), keys + key * n.width, n.width);
                sum.store(table + r * stride + key, stride);
            });
        float* logs = lse + (b * n.heads + h) * n.seq + first;
        for_tiles(0, rows, [&](long r, auto size) {
            softmax<size>(table + r * stride, stride, first + r + 1, inverse + r, logs + r);
        });
        for (long p = 0; p < n.panels(); ++p)
            for_tiles(0, rows, [&](long r, auto size) {
                const float* a = table + r * stride;
                const float* panel = values + p * n.seq * PANEL;
                Tile<size> sum{};
                multiply<true>(sum, a, stride, panel, first + r);
                up_to_self(sum, a + first + r, stride, panel + (first + r) * PANEL);
                float* to = out.of(b, h) + (first + r) * out.row + p * PANEL;
                write(sum, to, inverse + r, n.width - p * PANEL);
            });
    }

    // Replace S by 2^(S − its row's largest); the first row has `count` keys, each next one more.
    template <int R>
    static void softmax(float* table, long stride, long count, float* inverse, float* logs) {
        constexpr float NONE = -std::numeric_limits<float>::infinity();
        long end = round_up(count + R - 1, LANES);
        Vec tops[R], sums[R] = {};
        for (int r = 0; r < R; ++r) {
            tops[r] = all(NONE);
            for (long k = count + r; k < end; ++k) table[r * stride + k] = NONE;
        }
        for (long k = 0; k < end; k += LANES)
            for (int r = 0; r < R; ++r) tops[r] = larger(tops[r], *(Vec*)(table + r * stride + k));
        for (int r = 0; r < R; ++r) tops[r] = all(largest(tops[r]));
        for (long k = 0; k < end; k += LANES)
            for (int r = 0; r < R; ++r) {
                Vec* at = (Vec*)(table + r * stride + k);
                sums[r] += *at = exp2(*at - tops[r]);
            }
        for (int r = 0; r < R; ++r) {
            float sum = total(sums[r]);
            inverse[r] = 1.0f / sum;
            logs[r] = tops[r][0] + std::log2(sum);
        }
    }

    template <int R>
    void write(const Tile<R>& sum, float* to, const float* by, long channels) const {
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < 2; ++c, channels -= 0) {
                Vec y = sum.at[r][c] * by[r];
                float* at = to + r * out.row + c * LANES;
                if (channels >= (c + 1) * LANES)
                    *(AnyVec*)at = y;
                else
                    for (int i = 0; i < channels - c * LANES; ++i) at[i] = y[i];
            }
    }
};

// Backward

struct Backward {
    Sizes n;
    View q, k, v, out, of_out, of_q, of_k, of_v;
    const float* lse;

    long room() const { return 5 * n.padded() * n.packed() + 5 * BLOCK * n.packed() + 2 * BLOCK * BLOCK; }

    // The queries of a block, as A and as B; the keys of a head are packed once.
    struct Keys {
        float *turned, *values_turned, *channels, *of_keys, *of_values;
    };
    struct Queries {
        float *rows, *channels, *out_rows, *out_channels, *of_rows, *table, *of_table;
        float lse[BLOCK], delta[BLOCK];
        long first, count;
    };

    void unit(long b, long key_head, float* scratch) const {
        long whole = n.padded() * n.packed(), part = BLOCK * n.packed();
        Keys keys{scratch, scratch + whole, scratch + 2 * whole, scratch + 3 * whole,
                  scratch + 4 * whole};
        float* rest = scratch + 5 * whole;
        Queries block{rest, rest + part, rest + 2 * part, rest + 3 * part, rest + 4 * part,
                      rest + 5 * part, rest + 5 * part + BLOCK * BLOCK, {}, {}, 0, 0};
        pack_turned(keys.turned, k.of(b, key_head), k.row, n);
        pack_turned(keys.values_turned, v.of(b, key_head), v.row, n);
        pack_channels(keys.channels, k.of(b, key_head), k.row, n.seq, n.seq, n, 1.0f);
        std::fill(keys.of_keys, keys.of_keys + 2 * whole, 0.0f);
        long group = n.heads / n.key_heads;
        for (long h = key_head * group; h < (key_head + 1) * group; ++h)
            for (long first = 0; first < n.seq; first += BLOCK) {
                take(block, b, h, first);
                for (long key = 0; key <= first; key += BLOCK) against(block, keys, key);
                unpack_channels(of_q.of(b, h) + first * of_q.row, block.of_rows, of_q.row,
                                block.count, BLOCK, n, 1.0f / std::sqrt((float)n.width));
            }
        unpack_channels(of_k.of(b, key_head), keys.of_keys, of_k.row, n.seq, n.seq, n, LN_2);
        unpack_channels(of_v.of(b, key_head), keys.of_values, of_v.row, n.seq, n.seq, n, 1.0f);
    }

    void take(Queries& block, long b, long h, long first) const {
        long rows = std::min<long>(BLOCK, n.seq - first);
        block.first = first, block.count = rows;
        const float* from = q.of(b, h) + first * q.row;
        const float* above = of_out.of(b, h) + first * of_out.row;
        const float* y = out.of(b, h) + first * out.row;
        float by = LOG2_E / std::sqrt((float)n.width);
        pack_rows(block.rows, from, q.row, rows, n, by);
        pack_channels(block.channels, from, q.row, rows, BLOCK, n, by);
        pack_rows(block.out_rows, above, of_out.row, rows, n, 1.0f);
        pack_channels(block.out_channels, above, of_out.row, rows, BLOCK, n, 1.0f);
        std::fill(block.of_rows, block.of_rows + BLOCK * n.packed(), 0.0f);
        for (long r = 0; r < rows; ++r) {
            block.delta[r] = dot(above + r * of_out.row, y + r * out.row, n.width);
            block.lse[r] = lse[(b * n.heads + h) * n.seq + first + r];
        }
    }

    // Add what a block of queries and a block of keys give each other.
    void against(Queries& block, Keys& keys, long first_key) const {
        bool on_diagonal = first_key == block.first;
        long count = std::min<long>(BLOCK, n.seq - first_key);
        for (long key = 0; key < count; key += PANEL) {
            long from = on_diagonal ? key / ROWS * ROWS : 0, panel = (first_key + key) * n.width;
            scores(block.table + key, block.rows, keys.turned + panel, from, block.count);
            scores(block.of_table + key, block.out_rows, keys.values_turned + panel, from, block.count);
        }
        weigh(block, count, on_diagonal);
        for (long p = 0; p < n.panels(); ++p) {
            long panel = (p * n.seq + first_key) * PANEL;
            sum_over_keys(block, keys.channels + panel, p, count, on_diagonal);
            sum_over_queries(block.table, block.out_channels + p * BLOCK * PANEL,
                             keys.of_values + panel, block.count, count, on_diagonal);
            sum_over_queries(block.of_table, block.channels + p * BLOCK * PANEL,
                             keys.of_keys + panel, block.count, count, on_diagonal);
        }
    }

    // sum over channels, rows × PANEL: S and ∂O Vᵀ before anything is done to them.
    void scores(float* table, const float* rows, const float* panel, long first, long count) const {
        for_tiles(first, count, [&](long r, auto size) {
            Tile<size> sum{};
            multiply<true>(sum, rows + r * n.packed(), n.packed(), panel, n.width);
            sum.store(table + r * BLOCK, BLOCK);
        });
    }

    // P = 2^(S − lse) and ∂S = P ∘ (∂O Vᵀ − δ), in place.
    static void weigh(Queries& block, long keys, bool on_diagonal) {
        for (long r = 0; r < block.count; ++r) {
            Vec* p = (Vec*)(block.table + r * BLOCK);
            Vec* ds = (Vec*)(block.of_table + r * BLOCK);
            long vectors = round_up(on_diagonal ? r + 1 : keys, LANES) / LANES;
            for (long k = 0; k < vectors; ++k) {
                p[k] = exp2(p[k] - block.lse[r]);
                ds[k] = p[k] * (ds[k] - block.delta[r]);
            }
        }
    }

    // ∂Q += ∂S K.
    void sum_over_keys(
        Queries& block, const float* panel, long p, long keys, bool on_diagonal) const {
        for_tiles(0, block.count, [&](long r, auto size) {
            const float* a = block.of_table + r * BLOCK;
            float* to = block.of_rows + (p * BLOCK + r) * PANEL;
            Tile<size> sum;
            sum.load(to, PANEL);
            multiply<true>(sum, a, BLOCK, panel, on_diagonal ? r : keys);
            if (on_diagonal) up_to_self(sum, a + r, BLOCK, panel + r * PANEL);
            sum.store(to, PANEL);
        });
    }

    // ∂V += Pᵀ ∂O, and ∂K += ∂Sᵀ Q.
    static void sum_over_queries(const float* table, const float* panel, float* to, long queries,
                                 long keys, bool on_diagonal) {
        for_tiles(0, keys, [&](long r, auto size) {
            Tile<size> sum;
            sum.load(to + r * PANEL, PANEL);
            long from = on_diagonal ? r + size : 0;
            if (on_diagonal) from_self_on(sum, table + r * BLOCK + r, BLOCK, panel + r * PANEL);
            multiply<false>(
                sum, table + from * BLOCK + r, BLOCK, panel + from * PANEL, queries - from);
            sum.store(to + r * PANEL, PANEL);
        });
    }
};

// Call run() on as many threads as there are to be had, at most `threads`.
template <class Run>
void on_threads(Run& run, int threads) {
    if (GOMP_parallel != nullptr)
        return GOMP_parallel([](void* of) { (*(Run*)of)(); }, &run, threads, 0);
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < threads; ++i) others.emplace_back(std::ref(run));
    } catch (const std::exception&) {  // no more threads: those that are there do it
    }
    run();
    for (std::thread& other : others) other.join();
}

// Do all key heads of the batch, as threads find time. 0, or 1 where memory is short.
template <class Work>
int share_out(const Work& work, int threads) {
    long units = work.n.batch * work.n.key_heads;
    size_t room = round_up(work.room(), 16);
    float* scratch = (float*)std::aligned_alloc(64, threads * room * sizeof(float));
    if (scratch == nullptr) return 1;
    std::atomic<long> next{0}, seats{0};
    auto run = [&] {
        float* mine = scratch + seats++ * room;
        for (long u; (u = next++) < units;)
            work.unit(u / work.n.key_heads, u % work.n.key_heads, mine);
    };
    if (threads > 1)
        on_threads(run, threads);
    else
        run();
    std::free(scratch);
    return 0;
}

}  // namespace

extern "C" int attend(
    const Sizes* n, const View* q, const View* k, const View* v, const View* out, float* lse, int threads) {
    return share_out(Forward{*n, *q, *k, *v, *out, lse}, threads);
}

extern "C" int attend_back(
    const Sizes* n, const View* q, const View* k, const View* v, const View* out, const float* lse,
    const View* of_out, const View* of_q, const View* of_k, const View* of_v, int threads) {
    return share_out(
        Backward{*n, *q, *k, *v, *out, *of_out, *of_q, *of_k, *of_v, lse}, threads);
}
