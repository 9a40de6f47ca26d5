// One step over new tokens of several requests: all layers, one call.
//
//     x = E[token] (+ position)
//     x += W_O attention(RoPE(W_QKV norm(x)));  x += W₂ act(W₁ norm(x))        for every layer
//                                     or x += Σ over a token's experts of p · W₂ act(W₁ norm(x))
//     logits = W_head norm(x)                                 for the last tokens of some requests
//
// A token's numbers do not depend on the tokens beside it: every sum has one order (`dot_tiles.h`,
// `row_ops.h`, `paged_attention.h`), and threads share out rows and columns, never a sum.

#include <cstdlib>
#include <memory>

#include "paged_attention.h"
#include "phases.h"
#include "routing.h"
#include "step_structures.h"

namespace {

constexpr int64_t LAST = -1;
constexpr long TOKENS = 64;          // rows of a product at a time
constexpr long FEW = 8;              // rows of what is done row by row
constexpr long WEIGHTS = 128 << 10;  // bytes of a matrix at a time
constexpr long MOST_COLUMNS = 64;
constexpr double WORTH_SHARING = 1 << 21;  // products of a step

struct Token {
    long id, position, slot;
};

struct Block {  // consecutive tokens of one request, and where their attention goes
    long first, count, to;
};

struct Memory {
    struct Free {
        void operator()(void* at) const { std::free(at); }
    };
    std::unique_ptr<float, Free> at;
    explicit Memory(long numbers)
        : at((float*)std::aligned_alloc(64, round_up(std::max(numbers, 1L), 16) * 4)) {}
};

class Forward {
    Model m;  // with vectors in float32
    std::vector<Layer> layers;
    std::vector<std::vector<float>> vectors;  // what was widened; weights may change between steps
    const Step& step;
    std::vector<Token> tokens;
    std::vector<long> chosen;  // tokens whose logits are asked for
    std::vector<Block> token_blocks, chosen_blocks;
    long reach = 0;            // of the highest position, and one

    long qkv_width() const { return (m.num_heads + 2 * m.num_kv_heads) * m.d_head; }
    long heads_width() const { return m.num_heads * m.d_head; }
    long group() const { return m.num_heads / m.num_kv_heads; }
    long at_once() const { return std::max(1L, QUERIES / group()); }  // tokens of a block
    // Rows of a power of two would all lie in the same few sets of the cache.
    static long padded(long width) { return width + 16; }
    long routed() const { return round_up(m.num_experts, LANES); }
    long ffn_rows() const { return std::max<long>(m.experts_per_token, 1); }  // of a token
    long score_stride() const { return round_up(reach, LANES) + 2 * LANES; }

    float *x, *x_last, *normed, *qkv, *attn_out, *hidden, *rounded;  // of all threads
    float *route_logits, *expert_in, *expert_out;
    mutable std::vector<Choice> choices;  // of a layer
    mutable std::vector<ExpertRows> expert_rows;
    mutable std::vector<long> expert_ends;
    bool quantized = false;

    struct Mine {  // of one thread
        float *sums, *gate_sums, *queries, *outputs, *scores, *widened;
    };
    long room_of_thread() const {
        return 2 * TOKENS * MOST_COLUMNS + 2 * QUERIES * round_up(m.d_head, 16) +
               QUERIES * score_stride() + m.page_size * m.d_head;
    }

  public:
    Forward(const Model& model, const Step& step)
        : m(model), layers(model.layers, model.layers + model.num_layers), step(step) {
        m.layers = layers.data();
        quantized = is_quantized(m.head);
        for (const Layer& layer : layers)
            quantized |= is_quantized(layer.q, layer.k, layer.v, layer.out, layer.router, layer.up,
                                      layer.gate, layer.down);
        if (m.dtype != FLOAT32) widen_vectors();
    }

    Result check() {
        const int64_t* id = step.tokens;
        for (long r = 0; r < step.rows; ++r) {
            long start = step.starts[r], stop = start + step.counts[r], slot = step.slots[r];
            if (slot < 0 || slot >= step.num_slots) return WRONG_SLOT;
            if (start < 0 || stop <= start || stop > m.context) return WRONG_POSITION;
            if (stop > step.max_pages * m.page_size) return WRONG_PAGE;
            for (long p = start; p < stop; ++p, ++id) {
                long token = *id == LAST ? step.last[slot] : *id;
                if (token < 0 || token >= m.vocab) return WRONG_TOKEN;
                tokens.push_back({token, p, slot});
            }
            for (long page = first_seen(start) / m.page_size; page * m.page_size < stop; ++page) {
                int32_t at = table(slot)[page];
                if (at < 0 || at >= m.num_pages) return WRONG_PAGE;
            }
            long end = (long)tokens.size();
            for (long first = end - step.counts[r]; first < end; first += at_once())
                token_blocks.push_back({first, std::min(at_once(), end - first), first});
            long wanted = step.num_logits[r];
            if (wanted < 0 || wanted > step.counts[r]) return WRONG_POSITION;
            for (long first = end - wanted; first < end; first += at_once())
                chosen_blocks.push_back({first, std::min(at_once(), end - first),
                                         (long)chosen.size() + first - (end - wanted)});
            for (long t = end - wanted; t < end; ++t) chosen.push_back(t);
            reach = std::max(reach, stop);
        }
        return DONE;
    }

    Result run(int threads) {
        long count = (long)tokens.size(), some = (long)chosen.size();
        if (count == 0) return DONE;
        double work = (double)count * m.num_layers * m.d_model *
                          (qkv_width() + 2 * m.d_ff * ffn_rows()) +
                      (double)some * m.vocab * m.d_model;
        if (work < WORTH_SHARING) threads = 1;
        long widths = m.d_model + padded(m.d_model) + qkv_width() + padded(heads_width()) +
                      padded(m.d_ff) * ffn_rows();
        if (m.num_experts)
            widths += routed() + (padded(m.d_model) + m.d_model) * m.experts_per_token;
        choices.resize(count * m.experts_per_token);
        expert_rows.reserve(most_expert_lists(count * m.experts_per_token));
        expert_ends.resize(m.num_experts + 1);
        long widest = std::max({m.d_model, heads_width(), m.d_ff});
        long room_of_rounded = quantized ? Rounded::numbers(count * ffn_rows(), widest) : 0;
        Memory shared(count * widths + round_up(some * m.d_model, 16) + room_of_rounded);
        long room = round_up(room_of_thread(), 16);
        Memory own(threads * room);
        if (shared.at == nullptr || own.at == nullptr) return NO_MEMORY;
        x = shared.at.get();
        normed = x + count * m.d_model;
        qkv = normed + count * padded(m.d_model);
        attn_out = qkv + count * qkv_width();
        hidden = attn_out + count * padded(heads_width());
        route_logits = hidden + count * padded(m.d_ff) * ffn_rows();
        expert_in = route_logits + (m.num_experts ? count * routed() : 0);
        expert_out = expert_in + count * padded(m.d_model) * m.experts_per_token;
        x_last = expert_out + count * m.d_model * m.experts_per_token;
        rounded = x_last + round_up(some * m.d_model, 16);
        std::vector<Progress> progress(threads > 1 ? 16 * m.num_layers + 3 : 0);
        std::atomic<long> seats{0};
        auto go = [&] {
            float* at = own.at.get() + seats++ * room;
            Mine mine{at, at + TOKENS * MOST_COLUMNS, at + 2 * TOKENS * MOST_COLUMNS, nullptr,
                      nullptr, nullptr};
            mine.outputs = mine.queries + QUERIES * round_up(m.d_head, 16);
            mine.scores = mine.outputs + QUERIES * round_up(m.d_head, 16);
            mine.widened = mine.scores + QUERIES * score_stride();
            forward(Phases(progress.data(), threads), mine);
        };
        if (threads > 1)
            on_threads(go, threads);
        else
            go();
        return DONE;
    }

  private:
    // Norms and biases of a model in 16 bits

    void widen_vector(const float*& vector, long count) {
        if (vector == nullptr) return;
        vectors.emplace_back(count);
        with_numbers(m.dtype, vector,
                     [&](auto* from) { widen_row(from, count, vectors.back().data()); });
        vector = vectors.back().data();
    }
    void widen_vectors() {
        for (Layer& layer : layers) {
            for (Norm* norm : {&layer.norm1, &layer.norm2}) widen_norm(*norm, m.d_model);
            for (Norm* norm : {&layer.q_norm, &layer.k_norm}) widen_norm(*norm, m.d_head);
            widen_vector(layer.q.bias, heads_width());
            for (Linear* linear : {&layer.k, &layer.v})
                widen_vector(linear->bias, m.num_kv_heads * m.d_head);
            for (Linear* linear : {&layer.out, &layer.down}) widen_vector(linear->bias, m.d_model);
            for (Linear* linear : {&layer.up, &layer.gate}) widen_vector(linear->bias, m.d_ff);
        }
        widen_norm(m.norm, m.d_model);
        widen_vector(m.head.bias, m.vocab);
    }
    void widen_norm(Norm& norm, long count) {
        widen_vector(norm.weight, count);
        widen_vector(norm.bias, count);
    }

    const int32_t* table(long slot) const { return step.tables + slot * step.table_stride; }

    long first_seen(long position) const {  // by the layer that sees farthest
        long first = position;
        for (long i = 0; i < m.num_layers; ++i)
            first = std::min(first, seen(m.layers[i], position).first);
        return first;
    }
    static Seen seen(const Layer& layer, long position) {
        if (layer.window == 0 || layer.window > position) return {0, position};
        return {position - layer.window + 1, position};
    }

    void forward(Phases phases, const Mine& mine) const {
        long count = (long)tokens.size(), some = (long)chosen.size();
        const Layer& first = m.layers[0];
        for_rows(phases, count, [&](long t) {
            embed(t);
            norm_row(first.norm1, x, t, rounds_for_attention(first));
        });
        for (long i = 0; i < m.num_layers; ++i) {
            const Layer& layer = m.layers[i];
            bool ends = i + 1 == m.num_layers;  // then only what is chosen goes on
            project_qkv(phases, layer, mine);
            if (ends && some == 0) return;
            attention(phases, layer, mine, ends);
            float* stream = ends ? x_last : x;
            long rows = ends ? some : count;
            add_product(phases, layer.out, attn_out, heads_width(), stream, rows, mine,
                        [&](long r) { norm_row(layer.norm2, stream, r, rounds_for_ffn(layer)); });
            auto next = [&](long r) {
                if (ends)
                    norm_row(m.norm, stream, r, is_quantized(m.head));
                else
                    norm_row(m.layers[i + 1].norm1, stream, r,
                             rounds_for_attention(m.layers[i + 1]));
            };
            if (m.num_experts != 0) {
                add_experts(phases, layer, stream, rows, mine, next);
                continue;
            }
            feed_forward(phases, layer, rows, mine);
            add_product(phases, layer.down, hidden, m.d_ff, stream, rows, mine, next);
        }
        product(phases, m.head, normed, m.d_model, m.vocab, some, mine,
                [&](long r, long n, long columns, const float* sums) {
                    float* to = step.logits + r * m.vocab + n;
                    each(sums, bias_at(m.head, n), columns,
                         [&](long c, Vec y, long left) { store(to + c, y, left); });
                },
                [&](long r) { choose(r); });
    }

    // Rows in blocks

    static long blocks(long count, long size) { return (count + size - 1) / size; }

    template <class Work>
    static void for_rows(Phases& phases, long count, Work work) {
        phases.run(blocks(count, FEW), [&](long block) {
            for (long r = block * FEW; r < std::min(count, (block + 1) * FEW); ++r) work(r);
        });
    }
    // Units, and what then is done row by row: of few rows not worth a phase of its own.
    template <class Work, class Then>
    static void run_then_rows(Phases& phases, long units, Work work, long count, Then then) {
        phases.run(units, work, [&] {
            for (long r = 0; r < count && count <= FEW; ++r) then(r);
        });
        if (count > FEW) for_rows(phases, count, then);
    }

    void embed(long t) const {
        float* to = x + t * m.d_model;
        if (m.embeddings.format == WIDE_WEIGHTS)
            with_numbers(m.dtype, m.embeddings.weight, [&](auto* table) {
                widen_row(table + tokens[t].id * m.d_model, m.d_model, to);
            });
        else
            dequantize_row(m.embeddings.format, (const uint8_t*)m.embeddings.weight, tokens[t].id,
                           m.d_model, to);
        if (m.positions == nullptr) return;
        with_numbers(m.positions_dtype, m.positions, [&](auto* table) {
            auto* add = table + tokens[t].position * m.d_model;
            for (long i = 0; i < m.d_model; ++i) to[i] += widen(add[i]);
        });
    }

    // `rounds`: whether a product follows that takes rows in 8 bits
    void norm_row(const Norm& norm, const float* from, long r, bool rounds) const {
        float* to = normed + r * padded(m.d_model);
        apply_norm(m.norm_kind, norm, from + r * m.d_model, to, m.d_model);
        if (rounds) of_width(m.d_model).round_row(to, r);
    }
    static bool rounds_for_attention(const Layer& layer) {
        return is_quantized(layer.q, layer.k, layer.v);
    }
    bool rounds_for_ffn(const Layer& layer) const {
        return m.num_experts ? is_quantized(layer.router) : is_quantized(layer.up, layer.gate);
    }
    void round_row(const Linear& linear, const float* from, long depth, long r) const {
        if (is_quantized(linear)) of_width(depth).round_row(from + r * padded(depth), r);
    }
    Rounded of_width(long depth) const {
        return Rounded(rounded, (long)tokens.size() * ffn_rows(), depth);
    }

    // Norm and rotate a token's queries and keys; write its keys and values to their page.
    void place(const Layer& layer, long t) const {
        long width = m.d_head, position = tokens[t].position, half = width / 2;
        float* at = qkv + t * qkv_width();
        for (long h = 0; h < m.num_heads + m.num_kv_heads; ++h) {
            const Norm& norm = h < m.num_heads ? layer.q_norm : layer.k_norm;
            float* head = at + h * width;
            if (norm.weight != nullptr) rms_norm(norm, head, head, width);
            if (m.rope != NO_ROPE)
                rotate(m.rope, head, m.cos + position * half, m.sin + position * half, half);
        }
        long page = table(tokens[t].slot)[position / m.page_size];
        const float* keys = at + heads_width();
        const float* values = keys + m.num_kv_heads * width;
        for (long h = 0; h < m.num_kv_heads; ++h) {
            long row = (page * m.num_kv_heads + h) * m.page_size + position % m.page_size;
            keep(keys + h * width, row, layer.keys, layer.key_scales);
            keep(values + h * width, row, layer.values, layer.value_scales);
        }
    }
    void keep(const float* from, long row, uint8_t* rows, float* scales) const {
        write_row(m.kv_kind, from, m.d_head, rows + row * m.d_head * kv_bytes(m.kv_kind),
                  scales + row);
    }

    // Products

    template <class... Linears>
    static bool is_quantized(const Linears&... linears) {
        return ((linears.format != WIDE_WEIGHTS) || ...);
    }
    long columns_at_once(long depth) const {
        if (quantized) return MOST_COLUMNS;  // whole panels
        long row = depth * (m.dtype == FLOAT32 ? 4 : 2);
        return std::clamp<long>(WEIGHTS / row / WIDE * WIDE, WIDE, MOST_COLUMNS);
    }
    static const float* bias_at(const Linear& linear, long n) {
        return linear.bias == nullptr ? nullptr : linear.bias + n;
    }

    // Call work(column, sums + bias, columns left) for vectors of a row.
    template <class Work>
    static void each(const float* sums, const float* bias, long columns, Work work) {
        for (long c = 0; c < columns; c += LANES) {
            Vec y = load(sums + c, columns - c);
            if (bias != nullptr) y += load(bias + c, columns - c);
            work(c, y, columns - c);
        }
    }

    // Call done(row, first column, columns, sums) for all of `rows` × `width`; then `then` by row.
    template <class Done, class Then>
    void product(Phases& phases, const Linear& linear, const float* from, long depth, long width,
                 long rows, const Mine& mine, Done done, Then then) const {
        long across = columns_at_once(depth), down = blocks(rows, TOKENS);
        run_then_rows(
            phases, blocks(width, across) * down,
            [&](long u) {
                unit(linear, from, depth, width, rows, u / down * across, u % down, across, mine,
                     done);
            },
            rows, then);
    }

    // to[r, c] for rows from `first` on and columns from n on: sums, without the bias.
    void multiply(const Linear& linear, const float* from, long depth, long first, long rows,
                  long n, long columns, float* to, long stride) const {
        if (linear.format == WIDE_WEIGHTS)
            return with_numbers(m.dtype, linear.weight, [&](auto* weight) {
                dots(from + first * padded(depth), padded(depth), rows, weight + n * depth, depth,
                     columns, depth, to, stride);
            });
        const uint8_t* panels = (const uint8_t*)linear.weight;
        multiply_panels(linear.format,
                        panels + n / PANEL_ROWS * panel_bytes(linear.format, depth),
                        of_width(depth), first, rows, blocks(columns, PANEL_ROWS), to, stride);
    }

    template <class Done>
    void unit(const Linear& linear, const float* from, long depth, long width, long rows, long n,
              long block, long across, const Mine& mine, Done done) const {
        long first = block * TOKENS, count = std::min(TOKENS, rows - first);
        long columns = std::min(across, width - n);
        multiply(linear, from, depth, first, count, n, columns, mine.sums, across);
        for (long r = 0; r < count; ++r) done(first + r, n, columns, mine.sums + r * across);
    }

    void project_qkv(Phases& phases, const Layer& layer, const Mine& mine) const {
        long count = (long)tokens.size(), keys = m.num_kv_heads * m.d_head;
        long widths[] = {heads_width(), keys, keys};
        const Linear* linears[] = {&layer.q, &layer.k, &layer.v};
        long across = columns_at_once(m.d_model), down = blocks(count, TOKENS);
        long of_q = blocks(widths[0], across) * down, of_k = blocks(keys, across) * down;
        auto project = [&](long u) {
            int which = u < of_q ? 0 : u < of_q + of_k ? 1 : 2;
            long begin = which == 0 ? 0 : which == 1 ? of_q : of_q + of_k;
            long offset = which == 0 ? 0 : heads_width() + (which - 1) * keys;
            const Linear& linear = *linears[which];
            unit(linear, normed, m.d_model, widths[which], count, (u - begin) / down * across,
                 (u - begin) % down, across, mine,
                 [&](long r, long n, long columns, const float* sums) {
                     float* to = qkv + r * qkv_width() + offset + n;
                     each(sums, bias_at(linear, n), columns,
                          [&](long c, Vec y, long left) { store(to + c, y, left); });
                 });
        };
        run_then_rows(phases, of_q + 2 * of_k, project, count, [&](long t) { place(layer, t); });
    }

    // stream += W from + b
    template <class Then>
    void add_product(Phases& phases, const Linear& linear, const float* from, long depth,
                     float* stream, long rows, const Mine& mine, Then then) const {
        product(phases, linear, from, depth, m.d_model, rows, mine,
                [&](long r, long n, long columns, const float* sums) {
                    float* to = stream + r * m.d_model + n;
                    each(sums, bias_at(linear, n), columns, [&](long c, Vec y, long left) {
                        store(to + c, load(to + c, left) + y, left);
                    });
                },
                then);
    }

    // act(W₁ x), or act(W₁ x) ⊙ W₃ x
    void feed_forward(Phases& phases, const Layer& layer, long rows, const Mine& mine) const {
        bool gated = layer.gate.weight != nullptr;
        long depth = m.d_model, across = columns_at_once(depth);
        product(phases, layer.up, normed, depth, m.d_ff, rows, mine,
                [&](long r, long n, long columns, const float* sums) {
                    if (gated && r % TOKENS == 0)  // the block's first row
                        multiply(layer.gate, normed, depth, r, std::min(TOKENS, rows - r), n,
                                 columns, mine.gate_sums, across);
                    const float* gates = gated ? mine.gate_sums + r % TOKENS * across : nullptr;
                    store_hidden(layer, r, n, columns, sums, gates);
                },
                [&](long r) { round_row(layer.down, hidden, m.d_ff, r); });
    }
    // act(W₁ x), or with gates act(W₁ x) ⊙ W₃ x, of row r from column n on
    void store_hidden(const Layer& layer, long r, long n, long columns, const float* sums,
                      const float* gates) const {
        float* to = hidden + r * padded(m.d_ff) + n;
        const float* bias = bias_at(layer.gate, n);
        each(sums, bias_at(layer.up, n), columns, [&](long c, Vec y, long left) {
            y = activate(m.activation, y);
            if (gates != nullptr) {
                Vec gate = load(gates + c, left);
                y *= bias == nullptr ? gate : gate + load(bias + c, left);
            }
            store(to + c, y, left);
        });
    }

    // A mixture of experts

    // stream += Σ over a token's experts, the likeliest first, of p · W₂ (silu(W₁ x) ⊙ W₃ x)
    template <class Then>
    void add_experts(Phases& phases, const Layer& layer, float* stream, long rows, const Mine& mine,
                     Then then) const {
        long k = m.experts_per_token, all_rows = rows * k;
        product(phases, layer.router, normed, m.d_model, m.num_experts, rows, mine,
                [&](long r, long n, long columns, const float* sums) {
                    std::memcpy(route_logits + r * routed() + n, sums, columns * sizeof(float));
                },
                [&](long r) {
                    choose_experts(route_logits + r * routed(), m.num_experts, k, m.renormalize,
                                   choices.data() + r * k);
                });
        phases.run(1, [&](long) {
            sort_by_expert(choices, all_rows, m.num_experts, TOKENS, expert_ends, expert_rows);
        });
        for_rows(phases, all_rows, [&](long i) {
            const float* from = normed + i / k * padded(m.d_model);
            std::memcpy(expert_in + choices[i].row * padded(m.d_model), from,
                        m.d_model * sizeof(float));
            if (is_quantized(layer.up, layer.gate))
                of_width(m.d_model).round_row(from, choices[i].row);
        });
        for_experts(phases, m.d_model, m.d_ff, all_rows,
                    [&](const ExpertRows& of, long n, long columns, long across) {
            multiply(of_expert(layer.up, of, m.d_ff, m.d_model), expert_in, m.d_model, of.first,
                     of.count, n, columns, mine.sums, across);
            multiply(of_expert(layer.gate, of, m.d_ff, m.d_model), expert_in, m.d_model, of.first,
                     of.count, n, columns, mine.gate_sums, across);
            for (long r = 0; r < of.count; ++r)
                store_hidden(layer, of.first + r, n, columns, mine.sums + r * across,
                             mine.gate_sums + r * across);
        });
        for_rows(phases, all_rows, [&](long r) { round_row(layer.down, hidden, m.d_ff, r); });
        for_experts(phases, m.d_ff, m.d_model, all_rows,
                    [&](const ExpertRows& of, long n, long columns, long) {
            multiply(of_expert(layer.down, of, m.d_model, m.d_ff), hidden, m.d_ff, of.first,
                     of.count, n, columns, expert_out + of.first * m.d_model + n, m.d_model);
        });
        for_rows(phases, rows, [&](long r) {
            add_chosen(r, stream + r * m.d_model);
            then(r);
        });
    }
    void add_chosen(long r, float* to) const {
        const Choice* of = choices.data() + r * m.experts_per_token;
        for (long i = 0; i < m.d_model; i += LANES) {
            Vec sum{};
            for (long j = 0; j < m.experts_per_token; ++j) {
                const float* from = expert_out + of[j].row * m.d_model + i;
                sum = fma(all(of[j].weight), load(from, m.d_model - i), sum);
            }
            store(to + i, load(to + i, m.d_model - i) + sum, m.d_model - i);
        }
    }
    long most_expert_lists(long all_rows) const {
        return std::min<long>(m.num_experts, all_rows) + all_rows / TOKENS;
    }
    // Call work(rows, first column, columns, stride) for the outputs of all experts.
    template <class Work>
    void for_experts(Phases& phases, long depth, long width, long all_rows, Work work) const {
        long across = columns_at_once(depth), units = blocks(width, across);
        phases.run(most_expert_lists(all_rows) * units, [&](long u) {
            if (u / units >= (long)expert_rows.size()) return;
            long n = u % units * across;
            work(expert_rows[u / units], n, std::min(across, width - n), across);
        });
    }
    Linear of_expert(const Linear& all, const ExpertRows& of, long width, long depth) const {
        long bytes = is_quantized(all) ? width / PANEL_ROWS * panel_bytes(all.format, depth)
                                       : width * depth * (m.dtype == FLOAT32 ? 4 : 2);
        return {(const uint8_t*)all.weight + of.expert * bytes, nullptr, all.format};
    }

    // Attention: a unit is a block of tokens and the query heads of one key head

    void attention(Phases& phases, const Layer& layer, const Mine& mine, bool ends) const {
        const std::vector<Block>& of = ends ? chosen_blocks : token_blocks;
        long pieces = blocks(group(), QUERIES), units = m.num_kv_heads * pieces;
        auto attend_unit = [&](long u) {
            const Block& block = of[u / units];
            long kv = u % units / pieces, first = u % pieces * QUERIES;
            attend_block(layer, block, kv, kv * group() + first, std::min(QUERIES, group() - first),
                         mine);
            if (ends && u % units == 0)
                std::memcpy(x_last + block.to * m.d_model, x + block.first * m.d_model,
                            block.count * m.d_model * sizeof(float));
        };
        run_then_rows(phases, (long)of.size() * units, attend_unit,
                      (long)(ends ? chosen.size() : tokens.size()),
                      [&](long r) { round_row(layer.out, attn_out, heads_width(), r); });
    }

    // What comes next: the likeliest token, the lowest of several, or NOTHING.
    void choose(long r) const {
        if (step.greedy == nullptr) return;
        long token = argmax(step.logits + r * m.vocab, m.vocab);
        step.greedy[r] = token;
        step.last[tokens[chosen[r]].slot] = std::max(token, 0L);
    }

    void attend_block(const Layer& layer, const Block& block, long kv, long head, long heads,
                      const Mine& mine) const {
        long width = m.d_head, rows = block.count * heads;
        float by = LOG2_E / std::sqrt((float)width);
        Seen sees[QUERIES];
        for (long r = 0; r < rows; ++r) {
            long t = block.first + r / heads;
            sees[r] = seen(layer, tokens[t].position);
            const float* q = qkv + t * qkv_width() + (head + r % heads) * width;
            for (long d = 0; d < width; ++d) mine.queries[r * width + d] = q[d] * by;
        }
        long before = kv * m.page_size, bytes = before * width * kv_bytes(m.kv_kind);
        Pages pages{table(tokens[block.first].slot),
                    {layer.keys + bytes, layer.key_scales + before},
                    {layer.values + bytes, layer.value_scales + before},
                    m.num_kv_heads,
                    m.page_size,
                    width,
                    m.kv_kind,
                    mine.widened};
        attend(pages, mine.queries, sees, rows, mine.scores, score_stride(), mine.outputs);
        for (long r = 0; r < rows; ++r) {
            float* to = attn_out + (block.to + r / heads) * padded(heads_width());
            std::memcpy(to + (head + r % heads) * width, mine.outputs + r * width,
                        width * sizeof(float));
        }
    }
};

}  // namespace

extern "C" int run_step(const Model* model, const Step* step, int threads) try {
    Forward forward(*model, *step);
    Result wrong = forward.check();
    return wrong != DONE ? wrong : forward.run(threads);
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}

// y = Ŵ x̂ for rows of x: one product by itself.
extern "C" int run_product(const float* x, int64_t rows, int64_t depth, const uint8_t* weight,
                           int64_t format, int64_t width, float* y, int threads) try {
    Memory room(Rounded::numbers(rows, depth) + threads * TOKENS * MOST_COLUMNS);
    if (room.at == nullptr) return NO_MEMORY;
    Rounded rounded(room.at.get() + threads * TOKENS * MOST_COLUMNS, rows, depth);
    std::vector<Progress> progress(threads > 1 ? 2 : 0);
    std::atomic<long> seats{0};
    long across = (width + MOST_COLUMNS - 1) / MOST_COLUMNS, down = (rows + TOKENS - 1) / TOKENS;
    auto go = [&] {
        float* sums = room.at.get() + seats++ * TOKENS * MOST_COLUMNS;
        Phases phases(progress.data(), threads);
        phases.run(rows, [&](long r) { rounded.round_row(x + r * depth, r); });
        phases.run(across * down, [&](long u) {
            long n = u / down * MOST_COLUMNS, first = u % down * TOKENS;
            long columns = std::min<long>(MOST_COLUMNS, width - n);
            long count = std::min<long>(TOKENS, rows - first);
            multiply_panels(format, weight + n / PANEL_ROWS * panel_bytes(format, depth), rounded,
                            first, count, (columns + PANEL_ROWS - 1) / PANEL_ROWS, sums,
                            MOST_COLUMNS);
            for (long r = 0; r < count; ++r)
                std::memcpy(y + (first + r) * width + n, sums + r * MOST_COLUMNS,
                            columns * sizeof(float));
        });
    };
    if (threads > 1)
        on_threads(go, threads);
    else
        go();
    return DONE;
} catch (const std::bad_alloc&) {
    return NO_MEMORY;
}
