// Activations become int8 (or pairs of int8) on the fly, a scale per 32 columns and token.
//
// Tokens are grouped in tiles of 1 to 8 that the matrix product keeps in registers together. Within a
// tile everything of one 32-column group lies together, token after token:
//   codes [group][token][32]            8-bit:  x ~ scale * code
//         [group][token][high 32|low 32] 16-bit: x ~ scale * (256 * high + low), both signed bytes
//   notes [group][field][token]          what the product needs besides the codes, see Note
// Sums are taken over the rounded values: with the codes' products they then give exactly (weight . rounded x),
// whose error is smaller than if the codes, which are not centred, saw rounded and the minima exact activations.
#pragma once
#include "dot.h"

#if defined(__AVX2__) && !defined(__AVX512VL__)
static const int MAX_TILE = 4;  // 16 registers hold no more
#else
static const int MAX_TILE = 8;
#endif

enum Note { SCALE, SUM, SUM_FIRST, SUM_SECOND, CODES_FIRST, CODES_SECOND, NOTES };

struct QuantizedRows {
    int8_t* codes;
    float* notes;  // CODES_* are int32 in float's clothing: 128 * sum of codes over 16 columns
    int groups;    // of 32 columns
    int wide;      // 0: 8 bits, 1: 16 bits

    int code_bytes() const { return 32 << wide; }
};

// The tile that token `row` of `rows` belongs to: its first row and its size.
INLINE void tile_of(int64_t row, int64_t rows, int64_t* first, int* size) {
    *first = row / MAX_TILE * MAX_TILE;
    int64_t left = rows - *first;
    *size = left < MAX_TILE ? (int)left : MAX_TILE;
}

// Quantise one group of 32 floats (already in registers) of token `t` in a tile of `n`.
template <bool WIDE>
INLINE void quantize_group(const vf v[32 / LANES], int8_t* codes, float* notes, int n, int t) {
    const int HALF = 16 / LANES;
    // Compared as integers, the sign bit cleared: that order puts NaN on top, so it ends in the scale and every
    // output of this token is NaN rather than a plausible number.
    vi largest = {};
    for (int i = 0; i < 2 * HALF; ++i) {
        vi size = (vi)v[i] & 0x7fffffff;
        largest = size > largest ? size : largest;
    }
    int32_t most = largest[0];
    for (int lane = 1; lane < LANES; ++lane) most = largest[lane] > most ? largest[lane] : most;
    float amax;
    memcpy(&amax, &most, 4);
    const float levels = WIDE ? 127 * 256 + 127 : 127;
    float scale = amax / levels, inverse = amax > 0 ? levels / amax : 0;
    int32_t totals[2];
    for (int half = 0; half < 2; ++half) {
        vi q[HALF], total = {};
        for (int i = 0; i < HALF; ++i) total += q[i] = round_to_int(v[half * HALF + i] * inverse);
        int8_t* bytes = codes + 16 * half;
        store_bytes<WIDE>(bytes, WIDE ? bytes + 32 : bytes, q);
        totals[half] = sum(total);
    }
    notes[SCALE * n + t] = scale;
    notes[SUM * n + t] = scale * (float)(totals[0] + totals[1]);
    notes[SUM_FIRST * n + t] = scale * (float)totals[0];
    notes[SUM_SECOND * n + t] = scale * (float)totals[1];
    for (int half = 0; WEIGHT_OFFSET && half < 2; ++half) {
        int32_t offset = WEIGHT_OFFSET * totals[half];
        memcpy(notes + (CODES_FIRST + half) * n + t, &offset, 4);
    }
}

// Quantise row `row` of `rows`; value(i) yields columns [i, i + LANES) and may only be asked below `columns`,
// which is a multiple of LANES. Columns up to the next multiple of 32 are zero.
template <class Value>
INLINE void quantize_row(const QuantizedRows& out, int64_t row, int64_t rows, int columns, Value value) {
    int64_t first;
    int n;
    tile_of(row, rows, &first, &n);
    int t = (int)(row - first);
    int8_t* codes = out.codes + first * out.groups * out.code_bytes() + t * out.code_bytes();
    float* notes = out.notes + first * out.groups * NOTES;
    for (int group = 0; group < out.groups; ++group) {
        vf v[32 / LANES];
        for (int i = 0; i < 32 / LANES; ++i) {
            int column = group * 32 + i * LANES;
            v[i] = column < columns ? value(column) : vf{};
        }
        if (out.wide) quantize_group<true>(v, codes, notes, n, t);
        else quantize_group<false>(v, codes, notes, n, t);
        codes += n * out.code_bytes();
        notes += n * NOTES;
    }
}
