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


// One block for two tokens with 16-bit activations: sums += scale * token_scale * (256 * high + low) . weights.
// The only assembly here: the compiler orders these 32 dot products as long dependent chains and spills; four
// chains side by side (high and low of both tokens) keep both vector pipes busy. It rounds as multiply_tile does.
#define HAS_PAIR 1
INLINE void dot_pair(const vb w[8], const int8_t* codes, const float* token_scales, vf scale, vf& sum0, vf& sum1) {
    vi high0, high1, low0, low1;
    vb a0, a1, b0, b1;
#define STEP(W, J) \
    "sdot %[high0].4s, %[" W "].16b, %[a0].4b[" J "]\n" \
    "sdot %[high1].4s, %[" W "].16b, %[a1].4b[" J "]\n" \
    "sdot %[low0].4s, %[" W "].16b, %[b0].4b[" J "]\n" \
    "sdot %[low1].4s, %[" W "].16b, %[b1].4b[" J "]\n"
    asm("movi %[high0].4s, 0\n movi %[high1].4s, 0\n movi %[low0].4s, 0\n movi %[low1].4s, 0\n"
        "ldr %q[a0], [%[codes]]\n ldr %q[a1], [%[codes], 64]\n"
        "ldr %q[b0], [%[codes], 32]\n ldr %q[b1], [%[codes], 96]\n"
        STEP("w0", "0") STEP("w1", "1") STEP("w2", "2") STEP("w3", "3")
        "ldr %q[a0], [%[codes], 16]\n ldr %q[a1], [%[codes], 80]\n"
        "ldr %q[b0], [%[codes], 48]\n ldr %q[b1], [%[codes], 112]\n"
        STEP("w4", "0") STEP("w5", "1") STEP("w6", "2") STEP("w7", "3")
        "ldr %d[a0], [%[token_scales]]\n"
        "shl %[high0].4s, %[high0].4s, 8\n shl %[high1].4s, %[high1].4s, 8\n"
        "fmul %[a1].4s, %[scale].4s, %[a0].s[1]\n fmul %[a0].4s, %[scale].4s, %[a0].s[0]\n"
        "add %[high0].4s, %[high0].4s, %[low0].4s\n add %[high1].4s, %[high1].4s, %[low1].4s\n"
        "scvtf %[high0].4s, %[high0].4s\n scvtf %[high1].4s, %[high1].4s\n"
        "fmla %[sum0].4s, %[high0].4s, %[a0].4s\n fmla %[sum1].4s, %[high1].4s, %[a1].4s\n"
        : [high0] "=&w"(high0), [high1] "=&w"(high1), [low0] "=&w"(low0), [low1] "=&w"(low1), [a0] "=&w"(a0),
          [a1] "=&w"(a1), [b0] "=&w"(b0), [b1] "=&w"(b1), [sum0] "+w"(sum0), [sum1] "+w"(sum1)
        : [w0] "w"(w[0]), [w1] "w"(w[1]), [w2] "w"(w[2]), [w3] "w"(w[3]), [w4] "w"(w[4]), [w5] "w"(w[5]),
          [w6] "w"(w[6]), [w7] "w"(w[7]), [scale] "w"(scale), [codes] "r"(codes),
          [token_scales] "r"(token_scales), "m"(*(const int8_t(*)[128])codes),
          "m"(*(const float(*)[2])token_scales));
#undef STEP
}

// The same for four tokens: each has one chain of sums, first of its high bytes, shifted, then of its low ones, which
// saves an addition; four such chains keep both pipes busy.
INLINE void dot_four(const vb w[8], const int8_t* codes, const float* token_scales, vf scale, vf sums[4]) {
    vi d0, d1, d2, d3;
    vb a0, a1, a2, a3;
#define STEP(W, J) \
    "sdot %[d0].4s, %[" W "].16b, %[a0].4b[" J "]\n" \
    "sdot %[d1].4s, %[" W "].16b, %[a1].4b[" J "]\n" \
    "sdot %[d2].4s, %[" W "].16b, %[a2].4b[" J "]\n" \
    "sdot %[d3].4s, %[" W "].16b, %[a3].4b[" J "]\n"
#define LOAD(A, B, C, D) \
    "ldr %q[a0], [%[codes], " A "]\n ldr %q[a1], [%[codes], " B "]\n" \
    "ldr %q[a2], [%[codes], " C "]\n ldr %q[a3], [%[codes], " D "]\n"
#define FIRST STEP("w0", "0") STEP("w1", "1") STEP("w2", "2") STEP("w3", "3")
#define SECOND STEP("w4", "0") STEP("w5", "1") STEP("w6", "2") STEP("w7", "3")
    asm("movi %[d0].4s, 0\n movi %[d1].4s, 0\n movi %[d2].4s, 0\n movi %[d3].4s, 0\n"
        LOAD("0", "64", "128", "192") FIRST LOAD("16", "80", "144", "208") SECOND
        "shl %[d0].4s, %[d0].4s, 8\n shl %[d1].4s, %[d1].4s, 8\n"
        "shl %[d2].4s, %[d2].4s, 8\n shl %[d3].4s, %[d3].4s, 8\n"
        LOAD("32", "96", "160", "224") FIRST LOAD("48", "112", "176", "240") SECOND
        "ldr %q[a3], [%[token_scales]]\n"
        "fmul %[a0].4s, %[scale].4s, %[a3].s[0]\n fmul %[a1].4s, %[scale].4s, %[a3].s[1]\n"
        "fmul %[a2].4s, %[scale].4s, %[a3].s[2]\n fmul %[a3].4s, %[scale].4s, %[a3].s[3]\n"
        "scvtf %[d0].4s, %[d0].4s\n scvtf %[d1].4s, %[d1].4s\n"
        "scvtf %[d2].4s, %[d2].4s\n scvtf %[d3].4s, %[d3].4s\n"
        "fmla %[sum0].4s, %[d0].4s, %[a0].4s\n fmla %[sum1].4s, %[d1].4s, %[a1].4s\n"
        "fmla %[sum2].4s, %[d2].4s, %[a2].4s\n fmla %[sum3].4s, %[d3].4s, %[a3].4s\n"
        : [d0] "=&w"(d0), [d1] "=&w"(d1), [d2] "=&w"(d2), [d3] "=&w"(d3), [a0] "=&w"(a0), [a1] "=&w"(a1),
          [a2] "=&w"(a2), [a3] "=&w"(a3), [sum0] "+w"(sums[0]), [sum1] "+w"(sums[1]), [sum2] "+w"(sums[2]),
          [sum3] "+w"(sums[3])
        : [w0] "w"(w[0]), [w1] "w"(w[1]), [w2] "w"(w[2]), [w3] "w"(w[3]), [w4] "w"(w[4]), [w5] "w"(w[5]),
          [w6] "w"(w[6]), [w7] "w"(w[7]), [scale] "w"(scale), [codes] "r"(codes),
          [token_scales] "r"(token_scales), "m"(*(const int8_t(*)[256])codes),
          "m"(*(const float(*)[4])token_scales));
#undef STEP
#undef LOAD
#undef FIRST
#undef SECOND
}

#elif LANES == 8 && ((defined(__AVX512VNNI__) && defined(__AVX512VL__)) || defined(__AVXVNNI__))
#define DOT_NAME "vpdpbusd"
#define WEIGHT_OFFSET 128
typedef const int8_t* Sixteen;
INLINE Sixteen load_sixteen(const int8_t* p) { return p; }
template <int J, bool NARROW>
INLINE vi dot(vi sums, vb weights, Sixteen a) {
    int32_t four;
    memcpy(&four, a + 4 * J, 4);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return (vi)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(four));
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(four));
#endif
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

#if !defined(HAS_PAIR)
#define HAS_PAIR 0
INLINE void dot_pair(const vb*, const int8_t*, const float*, vf, vf&, vf&) {}
INLINE void dot_four(const vb*, const int8_t*, const float*, vf, vf*) {}
#endif
