// The row of W whose product with x is the largest: all that a greedy draw wants to know of a model's output matrix.
//
// Products with 8-bit activations take half the instructions of those with 16 bits, and tell which rows can be the
// one: |W_r . x - W_r . x8| <= |W_r| |x - x8| (Cauchy-Schwarz), plus what floats round. Only rows that this does
// not rule out, mostly a handful, are multiplied with 16 bits. So the result is that of the whole product with 16 bits,
// bit for bit, for a token alone or among others. For 8-bit codes without minima.
#pragma once
#include <cmath>

#include "linear.h"

// One panel x row `token` of `tokens`, as multiply_tile computes it.
static vf panel_product(const PackedPart& part, const QuantizedRows& x, int64_t token, int64_t tokens, int64_t panel) {
    int64_t first;
    int n;
    tile_of(token, tokens, &first, &n);
    const int t = (int)(token - first);
    const int8_t* codes = x.codes + (first * x.groups + t) * x.code_bytes();
    const float* notes = x.notes + first * x.groups * NOTES;
    const uint8_t* block = part.data + panel * part.panel_bytes(x.groups);
    vf sum = {};
    for (int group = 0, inside = 0; group < x.groups; ++group) {
        vb w[8];
        load_codes<EIGHT>(block + inside * code_bytes(EIGHT), w);
        vi d = block_dot<EIGHT, true, 0, 2>(w, codes, notes, n, t);
        sum = fma(to_float(d), load_scale<EIGHT>(part, part.span, block, 0) * notes[SCALE * n + t], sum);
        if (++inside == part.span) block += part.block_bytes, inside = 0;
        codes += n * x.code_bytes();
        notes += n * NOTES;
    }
    return sum;
}

// |x - x8| and |x| of row `token`, both rows as their codes say.
static void distance(const QuantizedRows& x, const QuantizedRows& rough, int64_t token, int64_t tokens, double* apart,
                     double* size) {
    int64_t first;
    int n;
    tile_of(token, tokens, &first, &n);
    const int64_t t = token - first;
    double squares = 0, whole = 0;
    for (int64_t group = 0; group < x.groups; ++group) {
        const int64_t at = first * x.groups + group * n;  // rows of codes and notes ahead of this group's
        const int8_t *codes = x.codes + (at + t) * 64, *rough_codes = rough.codes + (at + t) * 32;
        const double scale = x.notes[at * NOTES + SCALE * n + t], rough_scale = rough.notes[at * NOTES + SCALE * n + t];
        for (int k = 0; k < 32; ++k) {
            double value = scale * (256 * codes[k] + codes[32 + k]), error = value - rough_scale * rough_codes[k];
            squares += error * error;
            whole += value * value;
        }
    }
    *apart = std::sqrt(squares), *size = std::sqrt(whole);
}

// `estimates`: products with x8. `norms`: |W_r|, not less. out = [the largest product, its row as an int32].
static void best_row(const PackedPart& part, const QuantizedRows& x, const QuantizedRows& rough, const float* estimates,
                     const float* norms, int64_t token, int64_t tokens, float* out) {
    double apart, size;
    distance(x, rough, token, tokens, &apart, &size);
    // Each of the two products is a sum of `groups` terms, of a few roundings each; their sizes add up to |W_r| |x|.
    const float reach = (float)(1.0001 * apart + 0x1p-22 * (x.groups + 8) * size);
    int32_t best = -1;
    float most = NAN;
    if (size < 1e18) {  // not if x is not finite, or its products might not be: they are NaN
        const int64_t whole = part.rows / LANES * LANES;
        vf lower = splat(-INFINITY);
        for (int64_t row = 0; row < whole; row += LANES)
            lower = max(lower, load(estimates + row) - load(norms + row) * reach);
        float least = max(lower);
        for (int64_t row = whole; row < part.rows; ++row) {
            float value = estimates[row] - norms[row] * reach;
            least = value > least ? value : least;
        }
        for (int64_t row = 0; row < part.rows; row += LANES) {
            const int lanes = (int)(part.rows - row < LANES ? part.rows - row : LANES);
            if (lanes == LANES && max(load(estimates + row) + load(norms + row) * reach) < least) continue;
            vf values = panel_product(part, x, token, tokens, row / LANES);
            for (int lane = 0; lane < lanes; ++lane)
                if (best < 0 || values[lane] > most) most = values[lane], best = (int32_t)(row + lane);
        }
    }
    out[0] = most;
    memcpy(out + 1, &best, 4);
}

// |W_r| of panels [begin, end), rounded up.
static void row_norms(const PackedPart& part, int columns, int64_t begin, int64_t end, float* norms) {
    const int groups = (columns + 31) / 32;
    for (int64_t panel = begin; panel < end; ++panel) {
        const uint8_t* block = part.data + panel * part.panel_bytes(groups);
        double squares[LANES] = {};
        for (int group = 0, inside = 0; group < groups; ++group) {
            const uint8_t* codes = block + inside * code_bytes(EIGHT);
            int32_t sums[LANES] = {};
            for (int quad = 0; quad < 8; ++quad)
                for (int lane = 0; lane < LANES; ++lane)
                    for (int k = 0; k < 4; ++k) {
                        uint8_t stored = codes[(quad * LANES + lane) * 4 + k];
                        int32_t code = WEIGHT_OFFSET ? (int32_t)stored - WEIGHT_OFFSET : (int32_t)(int8_t)stored;
                        sums[lane] += code * code;
                    }
            vf scale = load_scale<EIGHT>(part, part.span, block, 0);
            for (int lane = 0; lane < LANES; ++lane) squares[lane] += (double)scale[lane] * scale[lane] * sums[lane];
            if (++inside == part.span) block += part.block_bytes, inside = 0;
        }
        for (int lane = 0; lane < LANES && panel * LANES + lane < part.rows; ++lane)
            norms[panel * LANES + lane] = (float)(std::sqrt(squares[lane]) * 1.000001);
    }
}
