// The int8 dot product: every lane adds the product of its row's 4 weights with 4 activations.
//
// `Sixteen` holds 16 activations of one token; dot<J> uses the J-th four of them for all LANES rows at once.
// Weights of 4 bits are unsigned (0..15), of 8 bits signed; x86 has only unsigned x signed products, so there
// signed weights are stored with 128 added (`stored_code`) and 128 * (sum of activations) is taken off again.
#pragma once
#include "simd.h"

#if defined(__ARM_FEATURE_DOTPROD)
#define DOT_NAME "sdot"
#define WEIGHT_OFFSET 0
typedef int8x16_t Sixteen;
INLINE Sixteen load_sixteen(const int8_t* p) { return vld1q_s8(p); }
template <int J, bool NARROW>
INLINE vi dot(vi sums, vb weights, Sixteen a) {
    return (vi)vdotq_laneq_s32((int32x4_t)sums, (int8x16_t)weights, a, J);
}

#elif LANES == 8 && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DOT_NAME "vpdpbusd"
#define WEIGHT_OFFSET 128
typedef const int8_t* Sixteen;
INLINE Sixteen load_sixteen(const int8_t* p) { return p; }
template <int J, bool NARROW>
INLINE vi dot(vi sums, vb weights, Sixteen a) {
    int32_t four;
    memcpy(&four, a + 4 * J, 4);
    return (vi)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(four));
}

#elif LANES == 8
#define DOT_NAME "vpmaddubsw"
#define WEIGHT_OFFSET 128
typedef const int8_t* Sixteen;
INLINE Sixteen load_sixteen(const int8_t* p) { return p; }
template <int J, bool NARROW>
INLINE vi dot(vi sums, vb weights, Sixteen a) {
    int32_t four;
    memcpy(&four, a + 4 * J, 4);
    __m256i activations = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
    if (NARROW) {  // 15 * 128 * 2 fits the 16-bit intermediate sum
        __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, activations);
        return (vi)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, ones));
    }
    // 255 * 128 * 2 does not: even and odd columns are multiplied apart.
    const __m256i even = _mm256_set1_epi16(0x00ff);
    __m256i w_even = _mm256_and_si256((__m256i)weights, even);
    __m256i w_odd = _mm256_srli_epi16((__m256i)weights, 8);
    __m256i a_even = _mm256_srai_epi16(_mm256_slli_epi16(activations, 8), 8);
    __m256i a_odd = _mm256_srai_epi16(activations, 8);
    __m256i total = _mm256_add_epi32(_mm256_madd_epi16(w_even, a_even), _mm256_madd_epi16(w_odd, a_odd));
    return (vi)_mm256_add_epi32((__m256i)sums, total);
}

#else
#define DOT_NAME "portable"
#define WEIGHT_OFFSET 0
typedef const int8_t* Sixteen;
INLINE Sixteen load_sixteen(const int8_t* p) { return p; }
template <int J, bool NARROW>
INLINE vi dot(vi sums, vb weights, Sixteen a) {
    for (int lane = 0; lane < LANES; ++lane)
        for (int k = 0; k < 4; ++k) sums[lane] += (int32_t)weights[4 * lane + k] * a[4 * J + k];
    return sums;
}
#endif
