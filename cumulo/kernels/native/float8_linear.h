// y = x W^T for weights in 8-bit floats (e4m3) with a scale for every `scale_columns` columns of a row.
//
// An e4m3 float is a half float with most bits missing: shifted into place it is 256 times too small, subnormal
// numbers included, and the scale makes up for that. Tiles and sums as in float_linear.h, so an output does not
// depend on how many tokens are in the call.
#pragma once
#include "linear.h"

static const int FLOAT8_RUN = 16;  // columns that are expanded together
#if HAS_HALF
static const float FLOAT8_UNIT = 256;
#else
static const float FLOAT8_UNIT = 1;
#endif

INLINE void load_float8(const uint8_t* p, vf v[FLOAT8_RUN / LANES]) {
#if defined(__ARM_NEON)
    uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t no_copied_sign = vdupq_n_u16(0xbfff);
    for (int half = 0; half < 2; ++half) {
        uint16x8_t wide = half ? vshll_high_n_u8(bytes, 8) : vshll_n_u8(vget_low_u8(bytes), 8);
        wide = vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(wide), 1)), no_copied_sign);
        float16x8_t halves = vreinterpretq_f16_u16(wide);
        v[2 * half] = (vf)vcvt_f32_f16(vget_low_f16(halves));
        v[2 * half + 1] = (vf)vcvt_high_f32_f16(halves);
    }
#elif LANES == 8 && HAS_HALF
    for (int half = 0; half < 2; ++half) {
        __m128i wide = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)(p + 8 * half))), 8);
        wide = _mm_and_si128(_mm_srai_epi16(wide, 1), _mm_set1_epi16((short)0xbfff));
        v[half] = (vf)_mm256_cvtph_ps(wide);
    }
#else
    for (int i = 0; i < FLOAT8_RUN; ++i) {
        uint32_t bits = (uint32_t)(p[i] & 0x80) << 24 | (uint32_t)(p[i] & 0x7f) << 20;
        float value;
        memcpy(&value, &bits, 4);
        v[i / LANES][i % LANES] = value * 0x1p120f;
    }
#endif
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
        for (int k = block * m.scale_columns; k < end; k += FLOAT8_RUN) {
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                vf v[FLOAT8_RUN / LANES];
                load_float8(w + (int64_t)r * columns + k, v);
#pragma GCC unroll 4
                for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                    for (int j = 0; j < FLOAT8_RUN / LANES; ++j)
                        sums[t][r] = fma(v[j], load(a + (int64_t)t * columns + k + j * LANES), sums[t][r]);
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) totals[t][r] += sum(sums[t][r]) * (FLOAT8_UNIT * m.scales[(row + r) * blocks + block]);
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
