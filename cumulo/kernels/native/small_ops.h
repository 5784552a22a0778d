// The row-wise operations between the matrix products; each takes one row (one token).
#pragma once
#include <cmath>

#include "simd.h"

// 1 / sqrt(mean of squares + eps) (Zhang & Sennrich 2019). `columns` is a multiple of LANES.
INLINE float inverse_rms(const float* x, int columns, float eps) {
    vf squares[2] = {};
    int k = 0;
    for (; k + 2 * LANES <= columns; k += 2 * LANES) {
        vf a = load(x + k), b = load(x + k + LANES);
        squares[0] = fma(a, a, squares[0]);
        squares[1] = fma(b, b, squares[1]);
    }
    if (k < columns) squares[0] = fma(load(x + k), load(x + k), squares[0]);
    return 1.0f / std::sqrt(sum(squares[0] + squares[1]) / (float)columns + eps);
}

// The first of the largest of `columns` numbers, and its share of the sum of all exponentials.
INLINE int32_t likeliest(const float* x, int columns, float* chance) {
    vf best = splat(-INFINITY);
    vi at = {}, index = {}, step = splat(LANES);
    for (int lane = 0; lane < LANES; ++lane) index[lane] = lane;
    int k = 0;
    for (; k + LANES <= columns; k += LANES, index += step) {
        vf v = load(x + k);
        vi larger = v > best;
        best = larger ? v : best;
        at = larger ? index : at;
    }
    int32_t token = 0;
    float most = -INFINITY;
    for (int lane = 0; lane < LANES; ++lane)
        if (best[lane] > most || (best[lane] == most && at[lane] < token)) most = best[lane], token = at[lane];
    for (; k < columns; ++k)
        if (x[k] > most) most = x[k], token = k;
    vf total[2] = {};
    for (k = 0; k + 2 * LANES <= columns; k += 2 * LANES) {
        total[0] += exp(load(x + k) - most);
        total[1] += exp(load(x + k + LANES) - most);
    }
    float whole = sum(total[0] + total[1]);
    for (; k < columns; ++k) whole += std::exp(x[k] - most);
    *chance = 1.0f / whole;
    return token;
}

INLINE vf silu(vf x) { return x / (1.0f + exp(-x)); }

// Rotate one head in place. Tables hold cos and sin of the head's half dimensions at this position.
INLINE void rotate_head(float* x, int dim, const float* cosine, const float* sine, bool interleaved) {
    int half = dim / 2;
    if (interleaved || half % LANES) {
        for (int i = 0; i < half; ++i) {
            float* first = x + (interleaved ? 2 * i : i);
            float* second = interleaved ? first + 1 : first + half;
            float a = *first, b = *second;
            *first = a * cosine[i] - b * sine[i];
            *second = b * cosine[i] + a * sine[i];
        }
        return;
    }
    for (int i = 0; i < half; i += LANES) {
        vf a = load(x + i), b = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(x + i, a * c - b * s);
        store(x + half + i, b * c + a * s);
    }
}
