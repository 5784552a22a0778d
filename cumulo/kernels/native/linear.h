// y = x W^T with W in packed affine blocks and x quantised on the fly.
//
// A panel is LANES rows of W. Its blocks follow each other along the columns, one per 32 of them:
//   codes    8 vectors of (LANES rows x 4 columns); 4-bit ones hold vector j in the low, j + 4 in the high half
//   scales   [1 or 2 (groups of 16)][LANES] half or float
//   minima   the same, if the format has them
// so the weights are read exactly once, front to back. One vector of codes and four activations feed one dot
// instruction; unpacking is shared by up to MAX_TILE tokens. The float sum of an output runs over the blocks in
// order, whatever the tile: the result for a token does not depend on how many others are in the call.
#pragma once
#include "dot.h"
#include "quantize.h"
#include "team.h"

struct PackedPart {
    const uint8_t* data;
    int64_t rows;
    int32_t bits, halves;  // halves: 1 for groups of 32, 2 for groups of 16
    int32_t has_minimum, half_floats;
    int64_t block_bytes;
};

template <int BITS, int HALVES>
INLINE vf load_scale(const PackedPart& part, const uint8_t* block, int which) {  // scales, then minima
    const uint8_t* p = block + LANES * 4 * BITS;
    return part.half_floats ? load_half(p + which * LANES * 2) : load((const float*)(p + which * LANES * 4));
}

template <int BITS>
INLINE void load_codes(const uint8_t* block, vb w[8]) {
    if (BITS == 8) {
        for (int j = 0; j < 8; ++j) w[j] = *(const vb_any*)(block + j * LANES * 4);
    } else {
        for (int j = 0; j < 4; ++j) {
            typedef uint8_t bytes __attribute__((vector_size(LANES * 4)));
            bytes both = (bytes) * (const vb_any*)(block + j * LANES * 4);
            w[j] = (vb)(both & 15);
            w[j + 4] = (vb)(both >> 4);
        }
    }
}

template <bool NARROW, int FROM>
INLINE vi dot_sixteen(vi sums, const vb w[8], const int8_t* codes) {
    Sixteen a = load_sixteen(codes);
    sums = dot<0, NARROW>(sums, w[FROM], a);
    sums = dot<1, NARROW>(sums, w[FROM + 1], a);
    sums = dot<2, NARROW>(sums, w[FROM + 2], a);
    return dot<3, NARROW>(sums, w[FROM + 3], a);
}

// The integer part of one block and token: columns 16 * FIRST .. 16 * LAST of it.
template <int BITS, bool WIDE, int FIRST, int LAST>
INLINE vi block_dot(const vb w[8], const int8_t* codes, const float* notes, int n, int t) {
    const bool NARROW = BITS == 4;
    vi sums = {};
    if (FIRST == 0) sums = dot_sixteen<NARROW, 0>(sums, w, codes);
    if (LAST == 2) sums = dot_sixteen<NARROW, 4>(sums, w, codes + 16);
    if (WIDE) {
        sums <<= 8;
        if (FIRST == 0) sums = dot_sixteen<NARROW, 0>(sums, w, codes + 32);
        if (LAST == 2) sums = dot_sixteen<NARROW, 4>(sums, w, codes + 48);
    }
    if (BITS == 8 && WEIGHT_OFFSET) {
        int32_t offset[2] = {};
        if (FIRST == 0) memcpy(offset, notes + CODES_FIRST * n + t, 4);
        if (LAST == 2) memcpy(offset + 1, notes + CODES_SECOND * n + t, 4);
        sums -= splat(offset[0] + offset[1]);
    }
    return sums;
}

// PANELS panels x T tokens.
template <int BITS, int HALVES, bool WIDE, int T, int PANELS>
static inline void multiply_tile(const PackedPart& part, int groups, const uint8_t* panel, const int8_t* codes,
                                 const float* notes, vf result[PANELS][T]) {
    const int CODE_BYTES = WIDE ? 64 : 32;
    const int64_t panel_bytes = part.block_bytes * groups;
    vf sums[PANELS][T] = {};
    for (int group = 0; group < groups; ++group) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) {
            const uint8_t* block = panel + p * panel_bytes;
            __builtin_prefetch(block + 640);
            vb w[8];
            load_codes<BITS>(block, w);
            if (HALVES == 1) {
                vf scale = load_scale<BITS, HALVES>(part, block, 0);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    vi d = block_dot<BITS, WIDE, 0, 2>(w, codes + t * CODE_BYTES, notes, T, t);
                    sums[p][t] = fma(to_float(d), scale * notes[SCALE * T + t], sums[p][t]);
                }
                if (part.has_minimum) {
                    vf minimum = load_scale<BITS, HALVES>(part, block, 1);
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) sums[p][t] = fma(minimum, notes[SUM * T + t], sums[p][t]);
                }
            } else {
                vf first = load_scale<BITS, HALVES>(part, block, 0);
                vf second = load_scale<BITS, HALVES>(part, block, 1);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const int8_t* a = codes + t * CODE_BYTES;
                    vi d0 = block_dot<BITS, WIDE, 0, 1>(w, a, notes, T, t);
                    vi d1 = block_dot<BITS, WIDE, 1, 2>(w, a, notes, T, t);
                    sums[p][t] = fma(to_float(d0), first * notes[SCALE * T + t], sums[p][t]);
                    sums[p][t] = fma(to_float(d1), second * notes[SCALE * T + t], sums[p][t]);
                }
                if (part.has_minimum) {
                    first = load_scale<BITS, HALVES>(part, block, 2);
                    second = load_scale<BITS, HALVES>(part, block, 3);
#pragma GCC unroll 8
                    for (int t = 0; t < T; ++t) {
                        sums[p][t] = fma(first, notes[SUM_FIRST * T + t], sums[p][t]);
                        sums[p][t] = fma(second, notes[SUM_SECOND * T + t], sums[p][t]);
                    }
                }
            }
        }
        panel += part.block_bytes;
        codes += T * CODE_BYTES;
        notes += T * NOTES;
    }
    for (int p = 0; p < PANELS; ++p)
        for (int t = 0; t < T; ++t) result[p][t] = sums[p][t];
}

struct LinearOutput {
    float* y;           // [tokens, row_stride]
    int64_t row_stride;
    const float* bias;  // [rows] or null
    bool accumulate;    // y += instead of y =: the residual connection
};

INLINE void put(const LinearOutput& out, int64_t token, int64_t row, int64_t rows, vf value) {
    float* y = out.y + token * out.row_stride + row;
    if (row + LANES <= rows) {
        if (out.bias) value += load(out.bias + row);
        if (out.accumulate) value += load(y);
        store(y, value);
        return;
    }
    for (int lane = 0; row + lane < rows; ++lane) {
        float v = value[lane];
        if (out.bias) v += out.bias[row + lane];
        y[lane] = out.accumulate ? v + y[lane] : v;
    }
}

template <int BITS, int HALVES, bool WIDE, int T>
static void multiply_panels(const PackedPart& part, const QuantizedRows& x, int64_t token, int64_t begin,
                            int64_t end, const LinearOutput& out) {
    // One token leaves the dot units waiting for loads; two panels at a time keep them fed.
    const int PANELS = T == 1 ? 2 : 1;
    const int8_t* codes = x.codes + token * x.groups * x.code_bytes();
    const float* notes = x.notes + token * x.groups * NOTES;
    const int64_t panel_bytes = part.block_bytes * x.groups;
    int64_t panel = begin;
    for (; panel + PANELS <= end; panel += PANELS) {
        vf result[PANELS][T];
        multiply_tile<BITS, HALVES, WIDE, T, PANELS>(part, x.groups, part.data + panel * panel_bytes, codes,
                                                     notes, result);
        for (int p = 0; p < PANELS; ++p)
            for (int t = 0; t < T; ++t) put(out, token + t, (panel + p) * LANES, part.rows, result[p][t]);
    }
    if (PANELS > 1)
        for (; panel < end; ++panel) {
            vf result[1][T];
            multiply_tile<BITS, HALVES, WIDE, T, 1>(part, x.groups, part.data + panel * panel_bytes, codes,
                                                    notes, result);
            for (int t = 0; t < T; ++t) put(out, token + t, panel * LANES, part.rows, result[0][t]);
        }
}

template <int BITS, int HALVES, bool WIDE>
static void multiply_chunk(const PackedPart& part, const QuantizedRows& x, int64_t tokens, int64_t begin,
                           int64_t end, const LinearOutput& out) {
    for (int64_t token = 0; token < tokens;) {
        int64_t first;
        int n;
        tile_of(token, tokens, &first, &n);
        if (n == 8) multiply_panels<BITS, HALVES, WIDE, 8>(part, x, token, begin, end, out);
        else if (n == 4) multiply_panels<BITS, HALVES, WIDE, 4>(part, x, token, begin, end, out);
        else if (n == 2) multiply_panels<BITS, HALVES, WIDE, 2>(part, x, token, begin, end, out);
        else multiply_panels<BITS, HALVES, WIDE, 1>(part, x, token, begin, end, out);
        token += n;
    }
}

// Called by every thread of the team.
static void multiply(const PackedPart& part, const QuantizedRows& x, int64_t tokens, const LinearOutput& out,
                     Work work, const Team& team) {
    int64_t panels = (part.rows + LANES - 1) / LANES;
    // A chunk of panels stays in the first-level cache while all tiles of tokens pass over it (about 24 KiB),
    // but every thread should get several chunks: cores are rarely equally fast.
    int64_t chunk = 24576 / (part.block_bytes * x.groups), share = panels / (team.size * 6);
    chunk = tokens <= MAX_TILE ? share : (chunk < share ? chunk : share);
    chunk = chunk < 2 ? 2 : chunk / 2 * 2;
    work.each(panels, chunk, [&](int64_t begin, int64_t end) {
#define CASE(BITS, HALVES, WIDE) multiply_chunk<BITS, HALVES, WIDE>(part, x, tokens, begin, end, out)
        if (part.bits == 4) x.wide ? CASE(4, 1, true) : CASE(4, 1, false);
        else if (part.halves == 1) x.wide ? CASE(8, 1, true) : CASE(8, 1, false);
        else x.wide ? CASE(8, 2, true) : CASE(8, 2, false);
#undef CASE
    });
}

// Row `row` as floats: the look-up of a tied embedding table.
static void dequantize_row(const PackedPart& part, int64_t row, int columns, float* out) {
    int groups = (columns + 31) / 32, lane = (int)(row % LANES), per_scale = 32 / part.halves;
    const uint8_t* block = part.data + row / LANES * part.block_bytes * groups;
    auto scale_at = [&](int which) {
        const uint8_t* p = block + LANES * 4 * part.bits;
        vf v = part.half_floats ? load_half(p + which * LANES * 2) : load((const float*)(p + which * LANES * 4));
        return v[lane];
    };
    for (int group = 0; group < groups; ++group, block += part.block_bytes)
        for (int k = 0; k < 32 && group * 32 + k < columns; ++k) {
            int quad = k / 4, half = k / per_scale;
            float code;
            if (part.bits == 8) {
                uint8_t stored = block[(quad * LANES + lane) * 4 + k % 4];
                code = WEIGHT_OFFSET ? (float)stored - WEIGHT_OFFSET : (float)(int8_t)stored;
            } else {
                uint8_t both = block[(quad % 4 * LANES + lane) * 4 + k % 4];
                code = (float)(quad < 4 ? both & 15 : both >> 4);
            }
            float value = scale_at(half) * code;
            out[group * 32 + k] = part.has_minimum ? value + scale_at(part.halves + half) : value;
        }
}
