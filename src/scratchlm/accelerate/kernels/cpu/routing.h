// Which experts of a mixture each token goes to, and which tokens each expert gets.
//
//     p = softmax(R x)        the `k` largest p, renormalised over the k if wished

#pragma once

#include <limits>
#include <vector>

#include "row_ops.h"

namespace {

struct Choice {
    long expert;
    float weight;
    long row;  // among the rows of all experts, one expert after the other
};

struct ExpertRows {  // consecutive rows of one expert
    long expert, first, count;
};

// Choose the experts of one token, the likeliest first. `p` has room for whole vectors.
inline void choose_experts(float* p, long experts, long k, bool renormalize, Choice* to) {
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    long whole = round_up(experts, LANES);
    std::fill(p + experts, p + whole, NONE);
    Vec top = all(NONE), sum{};
    for (long i = 0; i < whole; i += LANES) top = larger(top, load(p + i));
    top = all(largest(top));
    for (long i = 0; i < whole; i += LANES) {
        Vec weight = exp2((load(p + i) - top) * LOG2_E);
        store(p + i, weight);
        sum += weight;
    }
    float by = 1.0f / lane_sum(sum), chosen = 0;
    for (long j = 0; j < k; ++j) {
        long best = 0;
        for (long e = 1; e < experts; ++e)
            if (p[e] > p[best]) best = e;
        to[j] = {best, p[best] * by, 0};
        chosen += to[j].weight;
        p[best] = NONE;
    }
    if (renormalize)
        for (long j = 0; j < k; ++j) to[j].weight /= chosen;
}

// Give each choice its row, and list each expert's rows, at most `most` at a time. `ends` has room
// for an expert more, `lists` for `experts` + count / `most`: a thread in a phase takes no memory.
inline void sort_by_expert(std::vector<Choice>& choices, long count, long experts, long most,
                           std::vector<long>& ends, std::vector<ExpertRows>& lists) {
    std::fill(ends.begin(), ends.end(), 0);
    for (long i = 0; i < count; ++i) ++ends[choices[i].expert + 1];
    lists.clear();
    for (long e = 0; e < experts; ++e) {
        long first = ends[e], end = first + ends[e + 1];
        for (ends[e + 1] = end; first < end; first += most)
            lists.push_back({e, first, std::min(most, end - first)});
    }
    for (long i = 0; i < count; ++i) choices[i].row = ends[choices[i].expert]++;
}

}  // namespace
