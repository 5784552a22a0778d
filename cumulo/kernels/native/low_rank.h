// y += B (A x) for rows with different adapters: rows come in groups of one adapter, found by its slot.
//
// Two operations, since all of A x must be there before B reads it. Vectors run along the columns of A and along the
// outputs of B, which is stored transposed; a row's sums do not depend on which rows are in its group.
#pragma once
#include "simd.h"
#include "team.h"

struct Groups {  // AdapterGroups of kernels/low_rank.py
    const int32_t *rows, *starts, *slots;
    int64_t count;
};

struct LowRank {
    const float *x, *weight;
    float* out;
    int64_t columns, out_columns;  // of x and of out
    const int32_t *bounds, *ranks;  // parts + 1 outputs; [slots][parts]
    int parts, rank_max;
};

template <int R, int T>
INLINE void shrink_tile(const float* const* x, int64_t columns, const float* a, float* const* out) {
    vf sums[T][R] = {};
    for (int64_t k = 0; k < columns; k += LANES) {
        vf v[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) v[r] = load(a + r * columns + k);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            vf activation = load(x[t] + k);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[t][r] = fma(v[r], activation, sums[t][r]);
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) out[t][r] = sum(sums[t][r]);
}

// out[i] = A x[rows[i]] for every row i of the groups, in their order. Called by every thread of the team.
static void shrink(const LowRank& op, const Groups& groups, Work work) {
    work.each(groups.count * op.parts, 1, [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
            int64_t group = unit / op.parts, part = unit % op.parts, slot = groups.slots[group];
            int rank = op.ranks[slot * op.parts + part];
            const float* a = op.weight + (slot * op.parts + part) * op.rank_max * op.columns;
            int last = groups.starts[group + 1];
            for (int i = groups.starts[group]; i < last;) {
                int count = last - i < 4 ? 1 : 4;
                const float* x[4];
                float* out[4];
                for (int r = 0; r < rank;) {
                    for (int t = 0; t < count; ++t) {
                        x[t] = op.x + groups.rows[i + t] * op.columns;
                        out[t] = op.out + (i + t) * op.out_columns + part * op.rank_max + r;
                    }
                    const float* own = a + (int64_t)r * op.columns;
                    if (count == 4 && rank - r >= 4) shrink_tile<4, 4>(x, op.columns, own, out), r += 4;
                    else if (count == 4) shrink_tile<1, 4>(x, op.columns, own, out), r += 1;
                    else if (rank - r >= 8) shrink_tile<8, 1>(x, op.columns, own, out), r += 8;
                    else shrink_tile<1, 1>(x, op.columns, own, out), r += 1;
                }
                i += count;
            }
        }
    });
}

template <int V, int T>
INLINE void expand_tile(const float* const* low, int rank, const float* b, int64_t stride, float* const* y) {
    vf sums[T][V];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[t][v] = load(y[t] + v * LANES);
    for (int r = 0; r < rank; ++r) {
        vf weight[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) weight[v] = load(b + r * stride + v * LANES);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[t][v] = fma(weight[v], low[t][r], sums[t][v]);
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(y[t] + v * LANES, sums[t][v]);
}

static const int EXPAND_COLUMNS = 128;  // of a unit of work

// out[rows[i]] += B x[i]. Called by every thread of the team.
static void expand(const LowRank& op, const Groups& groups, Work work) {
    int64_t chunks = (op.out_columns + EXPAND_COLUMNS - 1) / EXPAND_COLUMNS;
    work.each(groups.count * chunks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
            int64_t group = unit / chunks, slot = groups.slots[group];
            int64_t from = unit % chunks * EXPAND_COLUMNS, to = from + EXPAND_COLUMNS;
            const float* b = op.weight + slot * op.rank_max * op.out_columns;
            for (int part = 0; part < op.parts; ++part) {
                int rank = op.ranks[slot * op.parts + part];
                int64_t first = from > op.bounds[part] ? from : op.bounds[part];
                int64_t last = to < op.bounds[part + 1] ? to : op.bounds[part + 1];
                if (!rank || first >= last) continue;
                int end_row = groups.starts[group + 1];
                for (int i = groups.starts[group]; i < end_row;) {
                    int count = end_row - i < 4 ? 1 : 4;
                    const float* low[4];
                    float* y[4];
                    for (int t = 0; t < count; ++t) low[t] = op.x + (i + t) * op.columns + part * op.rank_max;
                    for (int64_t column = first; column < last;) {
                        for (int t = 0; t < count; ++t)
                            y[t] = op.out + groups.rows[i + t] * op.out_columns + column;
                        bool wide = last - column >= 4 * LANES;
                        const float* own = b + column;
                        if (count == 4 && wide) expand_tile<4, 4>(low, rank, own, op.out_columns, y);
                        else if (count == 4) expand_tile<1, 4>(low, rank, own, op.out_columns, y);
                        else if (wide) expand_tile<4, 1>(low, rank, own, op.out_columns, y);
                        else expand_tile<1, 1>(low, rank, own, op.out_columns, y);
                        column += wide ? 4 * LANES : LANES;
                    }
                    i += count;
                }
            }
        }
    });
}
