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
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) v[r] = load(w + (int64_t)r * columns + k);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            vf activation = load(a + (int64_t)t * columns + k);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[t][r] = fma(v[r], activation, sums[t][r]);
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)  // unrolled, or the compiler keeps the sums in memory
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            float value = sum(sums[t][r]);
            if (out.bias) value += out.bias[row + r];
            float* y = out.y + (token + t) * out.row_stride + row + r;
            *y = out.accumulate ? *y + value : value;
        }
}

// Called by every thread of the team.
static void float_linear(const float* x, int columns, const float* weight, int64_t rows, int64_t tokens,
                         const LinearOutput& out, Work work, const Team& team) {
    int64_t chunk = rows / (team.size * 8);
    chunk = chunk < 8 ? 8 : chunk / 8 * 8;
    work.each(rows, chunk, [&](int64_t begin, int64_t end) {
        int64_t token = 0;
        for (; token + 4 <= tokens; token += 4) {  // these activations stay in the first-level cache
            int64_t row = begin;
            for (; row + 4 <= end; row += 4) float_tile<4, 4>(x, columns, weight, row, token, out);
            for (; row < end; ++row) float_tile<1, 4>(x, columns, weight, row, token, out);
        }
        for (; token < tokens; ++token) {
            int64_t row = begin;
            for (; row + 8 <= end; row += 8) float_tile<8, 1>(x, columns, weight, row, token, out);
            for (; row < end; ++row) float_tile<1, 1>(x, columns, weight, row, token, out);
        }
    });
}
