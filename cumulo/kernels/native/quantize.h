// Activations become int8 (or pairs of int8) on the fly, a scale per 32 columns and token.
//
// Tokens are grouped in tiles of 8, 4, 2 or 1 that the matrix product keeps in registers together. Within a
// tile everything of one 32-column group lies together, token after token:
//   codes [group][token][32]            8-bit:  x ~ scale * code
//         [group][token][high 32|low 32] 16-bit: x ~ scale * (256 * high + low), both signed bytes
//   notes [group][field][token]          what the product needs besides the codes, see Note
// Sums are taken over the float values, so the `minimum` part of the weights sees no quantisation at all.
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
    int64_t begin = row / MAX_TILE * MAX_TILE, left = rows - begin;
    int tile = MAX_TILE;
    while (left < tile) {
        tile /= 2;
        if (left >= tile && row >= begin + tile) {
            begin += tile;
            left -= tile;
        }
    }
    *first = begin;
    *size = tile;
}

// Quantise one group of 32 floats (already in registers) of token `t` in a tile of `n`.
template <bool WIDE>
INLINE void quantize_group(const vf v[32 / LANES], int8_t* codes, float* notes, int n, int t) {
    const int HALF = 16 / LANES;
    vf largest = abs(v[0]);
    for (int i = 1; i < 2 * HALF; ++i) largest = max(largest, abs(v[i]));
    float amax = max(largest);
    const float levels = WIDE ? 127 * 256 + 127 : 127;
    float scale = amax / levels, inverse = amax > 0 ? levels / amax : 0;
    vf sums[2] = {v[0], v[HALF]};
    for (int half = 0; half < 2; ++half)
        for (int i = 1; i < HALF; ++i) sums[half] += v[half * HALF + i];
    float first = sum(sums[0]), second = sum(sums[1]);
    notes[SCALE * n + t] = scale;
    notes[SUM * n + t] = first + second;
    notes[SUM_FIRST * n + t] = first;
    notes[SUM_SECOND * n + t] = second;
    vi code_sums[2] = {};
    for (int half = 0; half < 2; ++half) {
        vi q[HALF];
        for (int i = 0; i < HALF; ++i) {
            q[i] = round_to_int(v[half * HALF + i] * inverse);
            if (WEIGHT_OFFSET) code_sums[half] += q[i];
        }
        int8_t* first_byte = codes + 16 * half;
        store_bytes<WIDE>(first_byte, WIDE ? first_byte + 32 : first_byte, q);
    }
    if (WEIGHT_OFFSET)
        for (int half = 0; half < 2; ++half) {
            int32_t total = 0;
            for (int lane = 0; lane < LANES; ++lane) total += code_sums[half][lane];
            total *= WEIGHT_OFFSET;
            memcpy(notes + (CODES_FIRST + half) * n + t, &total, 4);
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
