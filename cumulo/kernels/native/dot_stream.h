// Panels x 1 to 4 tokens on CPUs with sdot: the inner loop of decoding, in assembly.
//
// The two vector pipes are the limit. To keep both busy
// - the next block is unpacked between the products of this one, each vector behind the last product that needs its
//   register, from codes that were loaded one block earlier still; panels follow each other without a gap.
// - sums become floats without a conversion, which would take one of the pipes for two cycles. Sums of high and of low
//   bytes begin at the bits of 1.5 * 2^31 and 1.5 * 2^23, floats whose last bits are worth 256 and 1. Read as floats
//   they are 1.5 * 2^31 + 256 * high and 1.5 * 2^23 + low (|high|, |low| < 2^22), and (the first - FIRST - SECOND) + the
//   second is 256 * high + low: the difference is exact, the sum rounded once, as a conversion rounds.
// So results are those of multiply_tile, bit for bit.
//
// Up to two blocks behind the last one are read, and not used: the packer leaves room for them.
#pragma once
#include <type_traits>

#include "quantize.h"

#if defined(__ARM_FEATURE_DOTPROD)
#define HAS_STREAM 1
static const int MAX_STREAM = 4;  // tokens

// What one call computes: panels from `block` on, all of `groups` blocks, times T tokens of a tile of any size.
struct Stream {
    const uint8_t* block;
    int64_t panels, groups;
    const int8_t* codes;                // of the first of the tokens
    const float *scales, *sums;         // its notes
    int64_t codes_step, notes_step;     // bytes from one group to the next
    vf* result;                         // [panels][T]
};

// Registers: v0-7 weights of this block, v8-11 codes of the next, v12-19 activations, v20-23 integer sums, v24-27
// float sums, v28 scale, v29 minimum, v30 FIRST + SECOND, v31 the mask of four bits.
#define DOT(SUM, W, A, J) "sdot v" #SUM ".4s, v" #W ".16b, v" #A ".4b[" #J "]\n"
#define LOWER(W, CODES) "and v" #W ".16b, v" #CODES ".16b, v31.16b\n"
#define UPPER(W, CODES) "ushr v" #W ".16b, v" #CODES ".16b, 4\n"

// A format: its block's bytes, how the first block comes into v0-7, how vector J of the next one does, its scales.
#define FOUR_BYTES "80"
#define FOUR_BEGIN \
    "ldp q8, q9, [%[block]]\n ldp q10, q11, [%[block], 32]\n" \
    LOWER(0, 8) LOWER(1, 9) LOWER(2, 10) LOWER(3, 11) UPPER(4, 8) UPPER(5, 9) UPPER(6, 10) UPPER(7, 11) \
    "ldp q8, q9, [%[block], 80]\n ldp q10, q11, [%[block], 112]\n"
#define FOUR_0 LOWER(0, 8)
#define FOUR_1 LOWER(1, 9)
#define FOUR_2 LOWER(2, 10)
#define FOUR_3 LOWER(3, 11)
#define FOUR_4 UPPER(4, 8) "ldr q8, [%[block], 160]\n"
#define FOUR_5 UPPER(5, 9) "ldr q9, [%[block], 176]\n"
#define FOUR_6 UPPER(6, 10) "ldr q10, [%[block], 192]\n"
#define FOUR_7 UPPER(7, 11) "ldr q11, [%[block], 208]\n"
#define FOUR_NUMBERS "ldr q29, [%[block], 64]\n"
#define FOUR_MINIMUM "fcvtl2 v29.4s, v29.8h\n"
#define FOUR_ADD(SUM, NOTE, J) "fmla v" #SUM ".4s, v29.4s, v" #NOTE ".s[" #J "]\n"
#define EIGHT_BYTES "136"
#define EIGHT_BEGIN \
    "ldp q0, q1, [%[block]]\n ldp q2, q3, [%[block], 32]\n ldp q4, q5, [%[block], 64]\n ldp q6, q7, [%[block], 96]\n"
#define EIGHT_0 "ldur q0, [%[block], 136]\n"
#define EIGHT_1 "ldur q1, [%[block], 152]\n"
#define EIGHT_2 "ldur q2, [%[block], 168]\n"
#define EIGHT_3 "ldur q3, [%[block], 184]\n"
#define EIGHT_4 "ldur q4, [%[block], 200]\n"
#define EIGHT_5 "ldur q5, [%[block], 216]\n"
#define EIGHT_6 "ldur q6, [%[block], 232]\n"
#define EIGHT_7 "ldur q7, [%[block], 248]\n"
#define EIGHT_NUMBERS "ldr d29, [%[block], 128]\n"
#define EIGHT_MINIMUM
#define EIGHT_ADD(SUM, NOTE, J)
#define SAME_0
#define SAME_1
#define SAME_2
#define SAME_3
#define SAME_4
#define SAME_5
#define SAME_6
#define SAME_7

// Two tokens, or one, times the block in v0-7, while NEXT brings in the next one (SAME: it is needed again). HIGH and
// LOW load the first 16 columns of the tokens; the other 16 are there, and THEN loads those of what comes next.
// NUMBERS, SCALE and MINIMUM bring the block's numbers into v28 and v29, if that is not done; NOTES those of the tokens.
#define TWO(W, A, B, C, D, J) DOT(20, W, A, J) DOT(21, W, B, J) DOT(22, W, C, J) DOT(23, W, D, J)
#define PAIR(CODES, NEXT, NUMBERS, SCALE, MINIMUM, NOTES, THEN) \
    CODES "ldp q20, q21, [%[begin]]\n ldp q22, q23, [%[begin], 32]\n" \
    TWO(0, 12, 13, 14, 15, 0) NEXT##_0 NUMBERS \
    TWO(1, 12, 13, 14, 15, 1) NEXT##_1 SCALE \
    TWO(2, 12, 13, 14, 15, 2) NEXT##_2 \
    TWO(3, 12, 13, 14, 15, 3) NEXT##_3 NOTES \
    TWO(4, 16, 17, 18, 19, 0) NEXT##_4 MINIMUM \
    TWO(5, 16, 17, 18, 19, 1) NEXT##_5 "fmul v14.4s, v28.4s, v12.s[0]\n" \
    TWO(6, 16, 17, 18, 19, 2) NEXT##_6 "fmul v15.4s, v28.4s, v12.s[1]\n" \
    TWO(7, 16, 17, 18, 19, 3) NEXT##_7 THEN \
    "fsub v20.4s, v20.4s, v30.4s\n fsub v21.4s, v21.4s, v30.4s\n" \
    "fadd v20.4s, v20.4s, v22.4s\n fadd v21.4s, v21.4s, v23.4s\n"
#define ONE(W, A, C, J) DOT(20, W, A, J) DOT(22, W, C, J)
#define SINGLE(CODES, NEXT, NUMBERS, SCALE, MINIMUM, NOTES, THEN) \
    CODES "ldp q20, q22, [%[begin], 16]\n" \
    ONE(0, 12, 14, 0) NEXT##_0 NUMBERS \
    ONE(1, 12, 14, 1) NEXT##_1 SCALE \
    ONE(2, 12, 14, 2) NEXT##_2 \
    ONE(3, 12, 14, 3) NEXT##_3 NOTES \
    ONE(4, 16, 18, 0) NEXT##_4 MINIMUM \
    ONE(5, 16, 18, 1) NEXT##_5 \
    ONE(6, 16, 18, 2) NEXT##_6 "fmul v14.4s, v28.4s, v12.s[0]\n" \
    ONE(7, 16, 18, 3) NEXT##_7 THEN \
    "fsub v20.4s, v20.4s, v30.4s\n" \
    "fadd v20.4s, v20.4s, v22.4s\n"
#define FIRST(HIGH, LOW) "ldr q12, [%[codes], " #HIGH "]\n ldr q14, [%[codes], " #LOW "]\n"
#define FIRST_TWO(A, B, C, D) FIRST(A, B) "ldr q13, [%[codes], " #C "]\n ldr q15, [%[codes], " #D "]\n"
#define SECOND(P, HIGH, LOW) "ldr q16, [%[" #P "], " #HIGH "]\n ldr q18, [%[" #P "], " #LOW "]\n"
#define SECOND_TWO(P, A, B, C, D) SECOND(P, A, B) \
    "ldr q17, [%[" #P "], " #C "]\n ldr q19, [%[" #P "], " #D "]\n"
#define SCALE "fcvtl v28.4s, v29.4h\n"
#define ADD(SUM, V, BY) "fmla v" #SUM ".4s, v" #V ".4s, v" #BY ".4s\n"

#define LOAD_1 SECOND(first_codes, 16, 48)
#define BODY_1(F) \
    SINGLE(FIRST(0, 32), F, F##_NUMBERS, SCALE, F##_MINIMUM, "ldr s12, [%[scales]]\n ldr s13, [%[sums]]\n", \
           SECOND(after, 16, 48)) \
    ADD(24, 20, 14) F##_ADD(24, 13, 0)
#define LOAD_2 SECOND_TWO(first_codes, 16, 48, 80, 112)
#define TWO_OF(F, NEXT, THEN) \
    PAIR(FIRST_TWO(0, 32, 64, 96), NEXT, F##_NUMBERS, SCALE, F##_MINIMUM, \
         "ldr d12, [%[scales]]\n ldr d13, [%[sums]]\n", THEN) \
    ADD(24, 20, 14) ADD(25, 21, 15) F##_ADD(24, 13, 0) F##_ADD(25, 13, 1)
#define BODY_2(F) TWO_OF(F, F, SECOND_TWO(after, 16, 48, 80, 112))
// The same for 4 bits, the most frequent of all, in an order that was found by trying: 3% less time. Activations are
// loaded one block ahead, too.
#define LOAD_2_FOUR LOAD_2 "ldr q12, [%[first_codes]]\n ldr q13, [%[first_codes], 64]\n" \
    "ldr q14, [%[first_codes], 32]\n ldr q15, [%[first_codes], 96]\n"
#define BODY_2_FOUR \
    "ldr q21, [%[begin], 0]\n ldr q22, [%[begin], 32]\n ldr q20, [%[begin], 0]\n ldr q23, [%[begin], 32]\n" \
    "sdot v20.4s, v0.16b, v12.4b[0]\n sdot v21.4s, v0.16b, v13.4b[0]\n sdot v22.4s, v0.16b, v14.4b[0]\n" \
    "sdot v23.4s, v0.16b, v15.4b[0]\n and v0.16b, v8.16b, v31.16b\n ldr q29, [%[block], 64]\n" \
    "sdot v20.4s, v1.16b, v12.4b[1]\n sdot v22.4s, v1.16b, v14.4b[1]\n sdot v23.4s, v1.16b, v15.4b[1]\n" \
    "sdot v21.4s, v1.16b, v13.4b[1]\n and v1.16b, v9.16b, v31.16b\n fcvtl v28.4s, v29.4h\n" \
    "sdot v21.4s, v2.16b, v13.4b[2]\n sdot v22.4s, v2.16b, v14.4b[2]\n ldr d27, [%[sums]]\n" \
    "sdot v23.4s, v2.16b, v15.4b[2]\n sdot v21.4s, v3.16b, v13.4b[3]\n sdot v23.4s, v3.16b, v15.4b[3]\n" \
    "sdot v20.4s, v2.16b, v12.4b[2]\n and v2.16b, v10.16b, v31.16b\n sdot v20.4s, v3.16b, v12.4b[3]\n" \
    "ldr q13, [%[after], 64]\n sdot v22.4s, v3.16b, v14.4b[3]\n and v3.16b, v11.16b, v31.16b\n" \
    "ldr q14, [%[after], 32]\n ldr q15, [%[after], 96]\n ldr q12, [%[after], 0]\n ldr d26, [%[scales]]\n" \
    "sdot v20.4s, v4.16b, v16.4b[0]\n sdot v21.4s, v4.16b, v17.4b[0]\n sdot v23.4s, v4.16b, v19.4b[0]\n" \
    "sdot v22.4s, v4.16b, v18.4b[0]\n ushr v4.16b, v8.16b, 4\n ldr q8, [%[block], 160]\n" \
    "fcvtl2 v29.4s, v29.8h\n sdot v20.4s, v5.16b, v16.4b[1]\n sdot v21.4s, v5.16b, v17.4b[1]\n" \
    "sdot v22.4s, v5.16b, v18.4b[1]\n sdot v23.4s, v5.16b, v19.4b[1]\n ushr v5.16b, v9.16b, 4\n" \
    "ldr q9, [%[block], 176]\n sdot v20.4s, v6.16b, v16.4b[2]\n sdot v21.4s, v6.16b, v17.4b[2]\n" \
    "sdot v22.4s, v6.16b, v18.4b[2]\n sdot v21.4s, v7.16b, v17.4b[3]\n ldr q17, [%[after], 80]\n" \
    "sdot v23.4s, v6.16b, v19.4b[2]\n fmul v30.4s, v28.4s, v26.s[1]\n ushr v6.16b, v10.16b, 4\n" \
    "ldr q10, [%[block], 192]\n fmul v28.4s, v28.4s, v26.s[0]\n sdot v20.4s, v7.16b, v16.4b[3]\n" \
    "sdot v22.4s, v7.16b, v18.4b[3]\n sdot v23.4s, v7.16b, v19.4b[3]\n ldr q16, [%[after], 16]\n" \
    "ushr v7.16b, v11.16b, 4\n ldr q11, [%[block], 208]\n ldr q19, [%[after], 112]\n" \
    "ldr q18, [%[after], 48]\n ldr q26, [%[begin], 64]\n fsub v20.4s, v20.4s, v26.4s\n" \
    "fsub v21.4s, v21.4s, v26.4s\n fadd v20.4s, v20.4s, v22.4s\n fadd v21.4s, v21.4s, v23.4s\n" \
    "fmla v24.4s, v20.4s, v28.4s\n fmla v25.4s, v21.4s, v30.4s\n fmla v24.4s, v29.4s, v27.s[0]\n" \
    "fmla v25.4s, v29.4s, v27.s[1]\n"
#define LOAD_3 LOAD_2
#define BODY_3(F) TWO_OF(F, SAME, SECOND(codes, 144, 176)) \
    SINGLE(FIRST(128, 160), F, , , , "ldr s12, [%[scales], 8]\n ldr s13, [%[sums], 8]\n", \
           SECOND_TWO(after, 16, 48, 80, 112)) \
    ADD(26, 20, 14) F##_ADD(26, 13, 0)
#define LOAD_4 LOAD_2
#define BODY_4(F) TWO_OF(F, SAME, SECOND_TWO(codes, 144, 176, 208, 240)) \
    PAIR(FIRST_TWO(128, 160, 192, 224), F, , , , "ldr d12, [%[scales], 8]\n ldr d13, [%[sums], 8]\n", \
         SECOND_TWO(after, 16, 48, 80, 112)) \
    ADD(26, 20, 14) ADD(27, 21, 15) F##_ADD(26, 13, 0) F##_ADD(27, 13, 1)
// With 8-bit activations a token has one sum, and its codes are half as long.
#define DOTS_1(W, A, B, C, D, J) DOT(20, W, A, J)
#define DOTS_2(W, A, B, C, D, J) DOTS_1(W, A, B, C, D, J) DOT(21, W, B, J)
#define DOTS_3(W, A, B, C, D, J) DOTS_2(W, A, B, C, D, J) DOT(22, W, C, J)
#define DOTS_4(W, A, B, C, D, J) DOTS_3(W, A, B, C, D, J) DOT(23, W, D, J)
#define TOKENS_1 "ldr q12, [%[codes]]\n ldr q16, [%[codes], 16]\n"
#define TOKENS_2 TOKENS_1 "ldr q13, [%[codes], 32]\n ldr q17, [%[codes], 48]\n"
#define TOKENS_3 TOKENS_2 "ldr q14, [%[codes], 64]\n ldr q18, [%[codes], 80]\n"
#define TOKENS_4 TOKENS_3 "ldr q15, [%[codes], 96]\n ldr q19, [%[codes], 112]\n"
#define SCALED(V, J) "fmul v" #V ".4s, v28.4s, v12.s[" #J "]\n"
#define LESS(V) "fsub v" #V ".4s, v" #V ".4s, v30.4s\n"
#define ENDS_1(F) LESS(20) ADD(24, 20, 14) F##_ADD(24, 13, 0)
#define ENDS_2(F) LESS(20) LESS(21) ADD(24, 20, 14) ADD(25, 21, 15) F##_ADD(24, 13, 0) F##_ADD(25, 13, 1)
#define ENDS_3(F) SCALED(16, 2) LESS(22) ENDS_2(F) ADD(26, 22, 16) F##_ADD(26, 13, 2)
#define ENDS_4(F) SCALED(17, 3) LESS(23) ENDS_3(F) ADD(27, 23, 17) F##_ADD(27, 13, 3)
#define NARROW(F, T) \
    TOKENS_##T "ldp q20, q21, [%[begin], 32]\n ldp q22, q23, [%[begin], 32]\n" \
    DOTS_##T(0, 12, 13, 14, 15, 0) F##_0 F##_NUMBERS \
    DOTS_##T(1, 12, 13, 14, 15, 1) F##_1 SCALE \
    DOTS_##T(2, 12, 13, 14, 15, 2) F##_2 \
    DOTS_##T(3, 12, 13, 14, 15, 3) F##_3 "ldr q12, [%[scales]]\n ldr q13, [%[sums]]\n" \
    DOTS_##T(4, 16, 17, 18, 19, 0) F##_4 F##_MINIMUM \
    DOTS_##T(5, 16, 17, 18, 19, 1) F##_5 SCALED(14, 0) \
    DOTS_##T(6, 16, 17, 18, 19, 2) F##_6 SCALED(15, 1) \
    DOTS_##T(7, 16, 17, 18, 19, 3) F##_7 \
    ENDS_##T(F)
#define STORE_1 "str q24, [%[result]], 16\n"
#define STORE_2 "stp q24, q25, [%[result]], 32\n"
#define STORE_3 "str q26, [%[result], 32]\n stp q24, q25, [%[result]], 48\n"
#define STORE_4 "stp q26, q27, [%[result], 32]\n stp q24, q25, [%[result]], 64\n"
#define PLAY(F, T, TAKEN_OFF, LOAD, BODY) \
    asm volatile( \
        "movi v31.16b, 15\n ldr q30, [%[begin], " #TAKEN_OFF "]\n" F##_BEGIN LOAD \
        "1:\n" \
        "mov %[codes], %[first_codes]\n mov %[scales], %[first_scales]\n mov %[sums], %[first_sums]\n" \
        "mov %[left], %[groups]\n" \
        "movi v24.4s, 0\n movi v25.4s, 0\n movi v26.4s, 0\n movi v27.4s, 0\n" \
        ".p2align 6\n2:\n" \
        "add %[after], %[codes], %[codes_step]\n cmp %[left], 1\n" \
        "csel %[after], %[first_codes], %[after], eq\n" \
        BODY \
        "add %[block], %[block], " F##_BYTES "\n mov %[codes], %[after]\n" \
        "add %[scales], %[scales], %[notes_step]\n add %[sums], %[sums], %[notes_step]\n" \
        "subs %[left], %[left], 1\n b.ne 2b\n" \
        STORE_##T \
        "subs %[panels], %[panels], 1\n b.ne 1b\n" \
        : [block] "+r"(s.block), [panels] "+r"(s.panels), [result] "+r"(s.result), [codes] "=&r"(codes), \
          [after] "=&r"(after), \
          [scales] "=&r"(scales), [sums] "=&r"(sums), [left] "=&r"(left) \
        : [groups] "r"(s.groups), [first_codes] "r"(s.codes), [first_scales] "r"(s.scales), \
          [first_sums] "r"(s.sums), [codes_step] "r"(s.codes_step), [notes_step] "r"(s.notes_step), \
          [begin] "r"(STREAM_BEGIN) \
        : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", \
          "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", \
          "v29", "v30", "v31")

alignas(64) static const float STREAM_BEGIN[5][4] = {
    {0x1.8p31f, 0x1.8p31f, 0x1.8p31f, 0x1.8p31f}, {0x1.8p31f, 0x1.8p31f, 0x1.8p31f, 0x1.8p31f},
    {0x1.8p23f, 0x1.8p23f, 0x1.8p23f, 0x1.8p23f}, {0x1.8p23f, 0x1.8p23f, 0x1.8p23f, 0x1.8p23f},
    {0x1.8p31f + 0x1.8p23f, 0x1.8p31f + 0x1.8p23f, 0x1.8p31f + 0x1.8p23f, 0x1.8p31f + 0x1.8p23f}};

// FOUR_BITS: 4-bit codes, scales and minima in half floats; else 8-bit codes and scales in half floats.
template <bool FOUR_BITS, bool WIDE, int T>
static void dot_stream(Stream s) {
    static_assert(1 <= T && T <= MAX_STREAM);
    const int8_t *codes, *after;
    const float *scales, *sums;
    int64_t left;
#define EITHER(N) \
    if (FOUR_BITS && WIDE && N == 2) PLAY(FOUR, 2, 64, LOAD_2_FOUR, BODY_2_FOUR); \
    if (FOUR_BITS && WIDE && N != 2) PLAY(FOUR, N, 64, LOAD_##N, BODY_##N(FOUR)); \
    if (!FOUR_BITS && WIDE) PLAY(EIGHT, N, 64, LOAD_##N, BODY_##N(EIGHT)); \
    if (FOUR_BITS && !WIDE) PLAY(FOUR, N, 32, "", NARROW(FOUR, N)); \
    if (!FOUR_BITS && !WIDE) PLAY(EIGHT, N, 32, "", NARROW(EIGHT, N))
    if (T == 1) { EITHER(1); }
    if (T == 2) { EITHER(2); }
    if (T == 3) { EITHER(3); }
    if (T == 4) { EITHER(4); }
#undef EITHER
}
#undef DOT
#undef LOWER
#undef UPPER
#undef TWO
#undef ONE
#undef PAIR
#undef SINGLE
#undef ADD
#undef NARROW
#undef SCALED
#undef LESS
#undef TWO_OF
#undef SCALE
#undef SECOND_TWO
#undef SECOND
#undef FIRST_TWO
#undef FIRST
#undef PLAY

#else
#define HAS_STREAM 0
#endif
