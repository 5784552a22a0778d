// y = x W^T for weights in 8-bit floats (e4m3) with a scale for every `scale_columns` columns of a row.
//
// An e4m3 float is a float32 with most bits missing: sign, exponent and mantissa are shifted into place and the
// exponent's bias is made up for by one multiplication, subnormal numbers included. Tiles and sums as in
// float_linear.h, so an output does not depend on how many tokens are in the call.
#pragma once
#include "linear.h"

INLINE vf load_float8(const uint8_t* p) {
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes stored;
    memcpy(&stored, p, LANES);
    vi w = __builtin_convertvector(stored, vi);
    return (vf)(((w & 0x80) << 24) | ((w & 0x7f) << 20)) * 0x1p120f;
}

struct Float8Matrix {
    const uint8_t* codes;  // [rows, columns]
    const float* scales;   // [rows, ceil(columns / scale_columns)]
    int columns, scale_columns;
};

template <int R, int T>
INLINE void float8_tile(const float* x, const Float8Matrix& m, int64_t row, int64_t token, const LinearOutput& out) {
    const int columns = m.columns, blocks = (columns + m.scale_columns - 1) / m.scale_columns;
    float totals[T][R] = {};
    const uint8_t* w = m.codes + row * columns;
    const float* a = x + token * columns;
    for (int block = 0; block < blocks; ++block) {
        vf sums[T][R] = {};
        int end = (block + 1) * m.scale_columns;
        end = end < columns ? end : columns;
        for (int k = block * m.scale_columns; k < end; k += LANES) {
            vf v[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) v[r] = load_float8(w + (int64_t)r * columns + k);
#pragma GCC unroll 4
            for (int t = 0; t < T; ++t) {
                vf activation = load(a + (int64_t)t * columns + k);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) sums[t][r] = fma(v[r], activation, sums[t][r]);
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) totals[t][r] += sum(sums[t][r]) * m.scales[(row + r) * blocks + block];
    }
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) {
            float value = totals[t][r];
            if (out.bias) value += out.bias[row + r];
            float* y = out.y + (token + t) * out.row_stride + row + r;
            *y = out.accumulate ? *y + value : value;
        }
}

// Called by every thread of the team.
static void float8_linear(const float* x, const Float8Matrix& m, int64_t rows, int64_t tokens,
                          const LinearOutput& out, Work work, const Team& team) {
    int64_t chunk = rows / (team.size * 8);
    chunk = chunk < 8 ? 8 : chunk / 8 * 8;
    work.each(rows, chunk, [&](int64_t begin, int64_t end) {
        int64_t token = 0;
        for (; token + 4 <= tokens; token += 4) {
            int64_t row = begin;
            for (; row + 4 <= end; row += 4) float8_tile<4, 4>(x, m, row, token, out);
            for (; row < end; ++row) float8_tile<1, 4>(x, m, row, token, out);
        }
        for (; token < tokens; ++token) {
            int64_t row = begin;
            for (; row + 8 <= end; row += 8) float8_tile<8, 1>(x, m, row, token, out);
            for (; row < end; ++row) float8_tile<1, 1>(x, m, row, token, out);
        }
    });
}
