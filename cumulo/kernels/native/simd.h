// The few vector operations everything else is written in; one vector is LANES floats.
//
// GCC vector extensions carry most of the arithmetic, so one source serves NEON, AVX2 and plain C. Only what
// they cannot say (fused multiply-add, half floats, narrowing, the int8 dot product) has a branch per CPU.
// Contraction is switched off when compiling and every fused operation is written out: two instantiations of
// one template then round alike, which is what makes a row's result independent of its neighbours.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__ARM_NEON)
#include <arm_neon.h>
#define LANES 4
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef int8_t vb __attribute__((vector_size(LANES * 4)));  // LANES rows x 4 columns of int8
typedef float vf_any __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int8_t vb_any __attribute__((vector_size(LANES * 4), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE void store(float* p, vf v) { *(vf_any*)p = v; }
INLINE vf splat(float x) { return x - vf{}; }  // x - 0 keeps the sign of a negative zero
INLINE vi splat(int32_t x) { return x - vi{}; }

// A zero that may be overwritten: made anew it is free, copied from a kept zero it costs a vector operation.
INLINE vi fresh_zero() {
#if defined(__ARM_NEON)
    vi zero;
    asm volatile("movi %0.4s, 0" : "=w"(zero));
    return zero;
#else
    return vi{};
#endif
}
INLINE vf fma(vf a, vf b, vf c) {  // a * b + c
#if defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
INLINE vf fma(vf a, float b, vf c) {
#if defined(__ARM_NEON)
    return (vf)vfmaq_n_f32((float32x4_t)c, (float32x4_t)a, b);
#else
    return fma(a, splat(b), c);
#endif
}
INLINE vf max(vf a, vf b) { return a > b ? a : b; }

INLINE float sum(vf v) {  // lanes in order, so that every caller rounds alike
    float total = v[0];
    for (int lane = 1; lane < LANES; ++lane) total += v[lane];
    return total;
}
INLINE int32_t sum(vi v) {
    int32_t total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += v[lane];
    return total;
}
INLINE float max(vf v) {
    float best = v[0];
    for (int lane = 1; lane < LANES; ++lane) best = v[lane] > best ? v[lane] : best;
    return best;
}

// Round to nearest even: adding 1.5 * 2^23 leaves no room for a fraction. |v| < 2^22.
INLINE vi round_to_int(vf v) {
    const float magic = 12582912.0f;
    return __builtin_convertvector((v + magic) - magic, vi);
}
INLINE vf to_float(vi v) {
#if defined(__ARM_NEON)
    return (vf)vcvtq_f32_s32((int32x4_t)v);
#else
    return __builtin_convertvector(v, vf);
#endif
}

// LANES half floats; only called when the packer was told the CPU can convert them (HAS_HALF).
#if defined(__ARM_NEON)
#define HAS_HALF 1
INLINE vf load_half(const uint8_t* p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
#elif LANES == 8 && defined(__F16C__)
#define HAS_HALF 1
INLINE vf load_half(const uint8_t* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
#else
#define HAS_HALF 0
INLINE vf load_half(const uint8_t*) { return vf{}; }
#endif

// 16 integers as bytes: the low byte of each, and for WIDE before it the byte above, rounded so that
// 256 * high + low (both signed) is the integer again. |q| <= 127 * 256 + 127.
template <bool WIDE>
INLINE void store_bytes(int8_t* high, int8_t* low, const vi q[16 / LANES]) {
#if defined(__ARM_NEON)
    int16x8_t a = vuzp1q_s16((int16x8_t)q[0], (int16x8_t)q[1]), b = vuzp1q_s16((int16x8_t)q[2], (int16x8_t)q[3]);
    vst1q_s8(low, vuzp1q_s8((int8x16_t)a, (int8x16_t)b));
    if (WIDE) {
        const int16x8_t half = vdupq_n_s16(128);
        a = vshrq_n_s16(vaddq_s16(a, half), 8), b = vshrq_n_s16(vaddq_s16(b, half), 8);
        vst1q_s8(high, vuzp1q_s8((int8x16_t)a, (int8x16_t)b));
    }
#else
    for (int i = 0; i < 16 / LANES; ++i)
        for (int lane = 0; lane < LANES; ++lane) {
            low[i * LANES + lane] = (int8_t)q[i][lane];
            if (WIDE) high[i * LANES + lane] = (int8_t)((q[i][lane] + 128) >> 8);
        }
#endif
}

// e^x. x = n ln 2 + r with |r| <= ln 2 / 2, then the Taylor series of e^r to degree 6 (the next term is 1.2e-7),
// added up in pairs to keep the chain of dependent operations short. Very negative x (the mask) gives 0.
INLINE vf exp(vf x) {
    const vf lowest = splat(-87.0f), highest = splat(88.0f), magic = splat(12582912.0f);
    vi underflow = x < lowest;
    x = underflow ? lowest : x;  // written so that NaN stays NaN
    x = x > highest ? highest : x;
    vf shifted = fma(x, splat(1.44269504088896341f), magic);  // n sits in the low bits of this
    vf n = shifted - magic;
    vf r = fma(n, splat(-0.693359375f), x);  // ln 2 in two parts: the first product is exact
    r = fma(n, splat(2.12194440e-4f), r);
    vf r2 = r * r;
    vf low = fma(fma(splat(1.0f / 6), r, splat(0.5f)), r2, r + 1.0f);
    vf high = fma(splat(1.0f / 720), r2, fma(splat(1.0f / 120), r, splat(1.0f / 24)));
    vf power = (vf)(((vi)shifted << 23) + (127 << 23));
    return (vf)((vi)(fma(high, r2 * r2, low) * power) & ~underflow);
}

// Turn LANES vectors of LANES floats around their diagonal.
INLINE void transpose(vf v[LANES]) {
#if defined(__ARM_NEON)
    float32x4_t a = (float32x4_t)v[0], b = (float32x4_t)v[1], c = (float32x4_t)v[2], d = (float32x4_t)v[3];
    float32x4_t ac0 = vzip1q_f32(a, c), ac1 = vzip2q_f32(a, c);
    float32x4_t bd0 = vzip1q_f32(b, d), bd1 = vzip2q_f32(b, d);
    v[0] = (vf)vzip1q_f32(ac0, bd0);
    v[1] = (vf)vzip2q_f32(ac0, bd0);
    v[2] = (vf)vzip1q_f32(ac1, bd1);
    v[3] = (vf)vzip2q_f32(ac1, bd1);
#elif LANES == 8
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        v[i] = (vf)_mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        v[i + 4] = (vf)_mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
#else
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < i; ++j) {
            float swap = v[i][j];
            v[i][j] = v[j][i];
            v[j][i] = swap;
        }
#endif
}
