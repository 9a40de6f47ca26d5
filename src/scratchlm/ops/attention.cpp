// Causal attention on a CPU in float32, forward and backward, in tiles that stay in registers.
//
//     S = Q Kᵀ / √d        P = softmax(S) over a token and its past        O = P V
//
//     δ = Σ ∂O∘O           ∂S = P ∘ (∂O Vᵀ − δ)
//     ∂Q = ∂S K / √d       ∂K = ∂Sᵀ Q / √d       ∂V = Pᵀ ∂O
//
// Every product is in tiles (`cpu_tiles.h`). Of the future nothing is read but inside a tile of S on
// the diagonal, where it is computed and never looked at: sums end, or begin, with a triangle. So
// what is wrong in the future, a NaN too, stays there. Sums are never shared among threads: the bits
// do not depend on how many there are.
//
// Logarithms are of base 2, so queries are multiplied by log₂e / √d as they are packed.

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "cpu_threads.h"
#include "cpu_tiles.h"

namespace {

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.693147180559945309f;

// Forward

struct Forward {
    Sizes n;
    View q, k, v, out;
    float* lse;  // (batch, heads, seq): log₂ Σ 2ˢ of every row

    long room() const { return 2 * n.padded() * n.packed() + BLOCK * (n.packed() + n.padded()); }

    // Blocks of queries do not need each other: few heads are shared out among many threads.
    long shares(int threads) const {
        long wanted = round_up(2 * threads, n.batch * n.key_heads) / (n.batch * n.key_heads);
        return n.batch * n.key_heads >= threads ? 1 : std::min(wanted, blocks());
    }
    long blocks() const { return n.heads / n.key_heads * (round_up(n.seq, BLOCK) / BLOCK); }

    void unit(long b, long key_head, long share, long of, float* scratch) const {
        float* keys = scratch;
        float* values = keys + n.padded() * n.packed();
        float* rest = values + n.padded() * n.packed();
        pack_transposed(keys, k.of(b, key_head), k.row, n);
        pack_channels(values, v.of(b, key_head), v.row, n.seq, n.seq, n, 1.0f);
        long group = n.heads / n.key_heads;
        for (long i = share; i < blocks(); i += of)  // later blocks are longer: each takes of all
            block(b, key_head * group + i % group, i / group * BLOCK, keys, values, rest);
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
                write(sum, to, inverse + r, n.of_panel(p * PANEL));
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
        for (int r = 0; r < R; ++r) {
            alignas(BYTES) float row[PANEL];
            for (int c = 0; c < 2; ++c) *(Vec*)(row + c * LANES) = sum.at[r][c] * by[r];
            copy(to + r * out.row, row, channels, 0, 1.0f);
        }
    }
};

// Backward

struct Backward {
    Sizes n;
    View q, k, v, out, of_out, of_q, of_k, of_v;
    const float* lse;

    long room() const { return 5 * (n.padded() + BLOCK) * n.packed() + 2 * BLOCK * BLOCK; }

    struct Keys {  // of a head, packed once
        float *transposed, *values_transposed, *channels, *of_keys, *of_values;
    };
    struct Queries {  // of a block: as A (rows) and as B (channels), and the tables P and ∂S
        float *rows, *channels, *out_rows, *out_channels, *of_rows, *table, *of_table;
        float lse[BLOCK], delta[BLOCK];
        long first, count;
    };

    long shares(int) const { return 1; }  // ∂K and ∂V are sums over all queries

    void unit(long b, long key_head, long, long, float* scratch) const {
        long whole = n.padded() * n.packed(), part = BLOCK * n.packed();
        Keys keys{scratch, scratch + whole, scratch + 2 * whole, scratch + 3 * whole,
                  scratch + 4 * whole};
        float* rest = scratch + 5 * whole;
        Queries block{rest, rest + part, rest + 2 * part, rest + 3 * part, rest + 4 * part,
                      rest + 5 * part, rest + 5 * part + BLOCK * BLOCK, {}, {}, 0, 0};
        pack_transposed(keys.transposed, k.of(b, key_head), k.row, n);
        pack_transposed(keys.values_transposed, v.of(b, key_head), v.row, n);
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
            scores(block.table + key, block.rows, keys.transposed + panel, from, block.count);
            scores(block.of_table + key, block.out_rows, keys.values_transposed + panel, from,
                   block.count);
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

    // S, or ∂O Vᵀ: the products of rows with a panel of keys or values.
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

// Do all key heads of the batch, as threads find time. 0, or 1 where memory is short.
template <class Work>
int share_out(const Work& work, int threads) {
    long heads = work.n.batch * work.n.key_heads;
    if (heads == 0) return 0;
    long shares = work.shares(threads), units = heads * shares;
    threads = (int)std::min<long>(threads, units);
    size_t room = round_up(work.room(), 16);
    float* scratch = (float*)std::aligned_alloc(64, threads * room * sizeof(float));
    if (scratch == nullptr) return 1;
    std::atomic<long> next{0}, seats{0};
    auto run = [&] {
        float* mine = scratch + seats++ * room;
        for (long u; (u = next++) < units;) {
            long head = u / shares;
            work.unit(head / work.n.key_heads, head % work.n.key_heads, u % shares, shares, mine);
        }
    };
    if (threads > 1)
        on_threads(run, threads);
    else
        run();
    std::free(scratch);
    return 0;
}

}  // namespace

extern "C" int attend(const Sizes* n, const View* q, const View* k, const View* v, const View* out,
                      float* lse, int threads) {
    return share_out(Forward{*n, *q, *k, *v, *out, lse}, threads);
}

extern "C" int attend_back(const Sizes* n, const View* q, const View* k, const View* v,
                           const View* out, const float* lse, const View* of_out, const View* of_q,
                           const View* of_k, const View* of_v, int threads) {
    return share_out(Backward{*n, *q, *k, *v, *out, *of_out, *of_q, *of_k, *of_v, lse}, threads);
}
