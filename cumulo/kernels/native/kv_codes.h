// Keys and values in 8 bits: written once by the step that computes them, expanded by every step that reads them.
//   KV_INT8  codes of one head and position, then their scale as a float: x ~ scale * code, |code| <= 127
//   KV_FP8   e4m3 without a scale: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; the largest number is 448
// Mirrored by cumulo/kernels/cpu/paged_attention.py.
#pragma once
#include <cmath>

#include "simd.h"

enum KvFormat : int32_t { KV_FLOAT, KV_INT8, KV_FP8 };

INLINE int number_bytes(KvFormat format) { return format == KV_FLOAT ? 4 : 1; }

INLINE uint8_t to_e4m3(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint8_t sign = (uint8_t)(bits >> 31 << 7);
    float size = std::fabs(x);
    if (!(size == size)) return sign | 0x7f;
    if (size >= 448.0f) return sign | 0x7e;
    if (size < 0.015625f) return sign | (uint8_t)std::lrint(size * 512.0f);  // below 2^-6: multiples of 2^-9
    bits &= 0x7fffffff;
    bits += 0x7ffff + (bits >> 20 & 1);  // to the nearest, ties to even
    return sign | (uint8_t)((bits >> 20) - (120 << 3));
}

INLINE float from_e4m3(uint8_t code) {
    if ((code & 0x7f) == 0x7f) return NAN;
    // The same bits as a float whose exponent is too small by 120, made up for by a product that is exact.
    uint32_t bits = (uint32_t)(code & 0x7f) << 20 | (uint32_t)(code >> 7) << 31;
    float x;
    memcpy(&x, &bits, 4);
    return x * 0x1p120f;
}

// `count` is a multiple of LANES.
static void write_codes(KvFormat format, const float* x, int count, uint8_t* to) {
    if (format == KV_FLOAT) {
        memcpy(to, x, sizeof(float) * count);
    } else if (format == KV_FP8) {
        for (int i = 0; i < count; ++i) to[i] = to_e4m3(x[i]);
    } else {
        float largest = 0;
        for (int i = 0; i < count; ++i) {
            float size = std::fabs(x[i]);
            largest = size <= largest ? largest : size;  // NaN stays: it must reach whoever checks the logits
        }
        const float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
        for (int i = 0; i < count; ++i) ((int8_t*)to)[i] = (int8_t)std::lrint(x[i] * inverse);
        memcpy(to + count, &scale, 4);
    }
}

static void read_codes(KvFormat format, const uint8_t* codes, int count, float* __restrict out) {
    if (format == KV_FP8) {
#if defined(__ARM_NEON)
        const float32x4_t power = vdupq_n_f32(256.0f);  // a half's exponent is 8 larger
        int i = 0;
        for (; i + 8 <= count; i += 8) {
            uint16x8_t wide = vmovl_u8(vld1_u8(codes + i));
            uint16x8_t bits = vorrq_u16(vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(0x80)), 8),
                                        vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(0x7f)), 7));
            // 0x7f is NaN here and a number there: all bits of its exponent are set.
            uint16x8_t nan = vceqq_u16(vandq_u16(wide, vdupq_n_u16(0x7f)), vdupq_n_u16(0x7f));
            float16x8_t half = vreinterpretq_f16_u16(vorrq_u16(bits, vandq_u16(nan, vdupq_n_u16(0x7e00))));
            vst1q_f32(out + i, vmulq_f32(vcvt_f32_f16(vget_low_f16(half)), power));
            vst1q_f32(out + i + 4, vmulq_f32(vcvt_f32_f16(vget_high_f16(half)), power));
        }
        for (; i < count; ++i) out[i] = from_e4m3(codes[i]);
#else
        for (int i = 0; i < count; ++i) out[i] = from_e4m3(codes[i]);
#endif
        return;
    }
    float scale;
    memcpy(&scale, codes + count, 4);
    for (int i = 0; i < count; ++i) out[i] = scale * (float)((const int8_t*)codes)[i];
}
