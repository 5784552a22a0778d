// y = x W^T for float weights, read in their own row-major layout (no packed copy of the model in memory).
//
// Tiles of R rows of W x T tokens in registers, vectors along the columns; an output is summed per lane, then over
// the lanes in order, so it does not depend on the tile.
#pragma once
#include "linear.h"

template <int R, int T>
INLINE void float_tile(const float* x, int columns, const float* weight, int64_t row, int64_t token,
                       const LinearOutput& out) {
    vf sums[T][R] = {};
    const float* w = weight + row * columns;
    const float* a = x + token * columns;
    for (int k = 0; k < columns; k += LANES) {
        vf v[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) v[r] = load(w + (int64_t)r * columns + k);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            vf activation = load(a + (int64_t)t * columns + k);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[t][r] = fma(v[r], activation, sums[t][r]);
        }
    }
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) {
            float value = sum(sums[t][r]);
            if (out.bias) value += out.bias[row + r];
            float* y = out.y + (token + t) * out.row_stride + row + r;
            *y = out.accumulate ? *y + value : value;
        }
}

template <int R>
static void float_rows(const float* x, int columns, const float* weight, int64_t row, int64_t tokens,
                       const LinearOutput& out) {
    int64_t token = 0;
    for (; token + 4 <= tokens; token += 4) float_tile<R, 4>(x, columns, weight, row, token, out);
    for (; token < tokens; ++token) float_tile<R, 1>(x, columns, weight, row, token, out);
}

// Called by every thread of the team.
static void float_linear(const float* x, int columns, const float* weight, int64_t rows, int64_t tokens,
                         const LinearOutput& out, Work work, const Team& team) {
    int64_t chunk = rows / (team.size * 8);
    chunk = chunk < 4 ? 4 : chunk / 4 * 4;
    // A strip of 4 rows of W stays in the first-level cache while blocks of tokens pass over it.
    work.each(rows, chunk, [&](int64_t begin, int64_t end) {
        const int64_t block = 32;  // tokens whose activations stay in the second-level cache across the rows
        for (int64_t token = 0; token < tokens; token += block) {
            int64_t n = tokens - token < block ? tokens - token : block;
            LinearOutput part = out;
            part.y += token * out.row_stride;
            int64_t row = begin;
            for (; row + 4 <= end; row += 4) float_rows<4>(x + token * columns, columns, weight, row, n, part);
            for (; row < end; ++row) float_rows<1>(x + token * columns, columns, weight, row, n, part);
        }
    });
}
