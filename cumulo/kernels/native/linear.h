// y = x W^T with W in packed affine blocks and x quantised on the fly.
//
// A panel is LANES rows of W. Its blocks follow each other along the columns, one per `span` times 32 of them:
//   codes    per 32 columns 8 vectors of (LANES rows x 4 columns); 4-bit ones hold vector j in the low, j + 4 in
//            the high half
//   scales   [1 or 2 (groups of 16)][LANES] half or float
//   minima   the same; always there for 4 bits, with 8 only if the format has them
// so the weights are read exactly once, front to back. One vector of codes and four activations feed one dot
// instruction; unpacking is shared by up to MAX_TILE tokens, and by all tokens of a prefill: there a chunk of
// panels is first expanded (codes to bytes, scales to floats) into a scratch that stays in the cache.
// The float sum of an output runs over the blocks in order, whatever the tile and whether expanded or not: the
// result for a token does not depend, in any bit, on how many others are in the call.
#pragma once
#include "dot_stream.h"
#include "quantize.h"
#include "team.h"

struct PackedPart {
    const uint8_t* data;
    int64_t rows;
    int32_t bits, halves;  // halves: 1 for groups of 32, 2 for groups of 16
    int32_t has_minimum, half_floats;
    int32_t span, unused;  // span: how many times 32 columns share a scale
    int64_t block_bytes;

    int64_t panel_bytes(int groups) const { return block_bytes * (groups / span); }
};

// How a block lies in memory. Four-bit formats always have minima; EXPANDED is 4-bit codes in bytes.
enum Format { FOUR_HALF, FOUR_FLOAT, EIGHT, EXPANDED };
constexpr bool is_four(Format format) { return format == FOUR_HALF || format == FOUR_FLOAT; }

constexpr int code_bytes(Format format) { return LANES * (is_four(format) ? 16 : 32); }  // of 32 columns

template <Format FORMAT>
INLINE vf load_scale(const PackedPart& part, int span, const uint8_t* block, int which) {  // scales, then minima
    const uint8_t* p = block + code_bytes(FORMAT) * span;
    if (FORMAT == FOUR_HALF || (FORMAT == EIGHT && part.half_floats)) return load_half(p + which * LANES * 2);
    return load((const float*)(p + which * LANES * 4));
}

template <Format FORMAT>
INLINE void load_codes(const uint8_t* block, vb w[8]) {
    if (!is_four(FORMAT)) {
        for (int j = 0; j < 8; ++j) w[j] = *(const vb_any*)(block + j * LANES * 4);
        return;
    }
    for (int j = 0; j < 4; ++j) {
        typedef uint8_t bytes __attribute__((vector_size(LANES * 4)));
        bytes both = (bytes) * (const vb_any*)(block + j * LANES * 4);
        w[j] = (vb)(both & 15);
        w[j + 4] = (vb)(both >> 4);
    }
}

template <bool NARROW, bool WIDE, int FROM>
INLINE void dot_sixteen(vi& sums, vi& low, const vb w[8], const int8_t* codes) {
    Sixteen a = load_sixteen(codes), b = load_sixteen(WIDE ? codes + 32 : codes);
#define STEP(J) \
    sums = dot<J, NARROW>(sums, w[FROM + J], a); \
    if (WIDE) low = dot<J, NARROW>(low, w[FROM + J], b);
    STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
}

// The integer part of one block and token: columns 16 * FIRST .. 16 * LAST of it.
template <Format FORMAT, bool WIDE, int FIRST, int LAST>
INLINE vi block_dot(const vb w[8], const int8_t* codes, const float* notes, int n, int t) {
    const bool NARROW = FORMAT != EIGHT;
    vi sums = fresh_zero(), low = fresh_zero();  // two chains of dependent additions rather than one twice as long
    if (FIRST == 0) dot_sixteen<NARROW, WIDE, 0>(sums, low, w, codes);
    if (LAST == 2) dot_sixteen<NARROW, WIDE, 4>(sums, low, w, codes + 16);
    if (WIDE) sums = (sums << 8) + low;
    if (FORMAT == EIGHT && WEIGHT_OFFSET) {
        int32_t offset[2] = {};
        if (FIRST == 0) memcpy(offset, notes + CODES_FIRST * n + t, 4);
        if (LAST == 2) memcpy(offset + 1, notes + CODES_SECOND * n + t, 4);
        sums -= splat(offset[0] + offset[1]);
    }
    return sums;
}

// One panel x T tokens. A single stream of weights: reading two panels at once was slower from memory. SPAN is the
// part's span, or 0 to look it up: the count of columns inside a block takes up to a tenth of the time.
template <Format FORMAT, int HALVES, bool WIDE, int SPAN, int T>
static inline void multiply_tile(const PackedPart& part, int groups, const uint8_t* block, const int8_t* codes,
                                 const float* notes, vf result[T]) {
    const int CODE_BYTES = WIDE ? 64 : 32;
    const int span = SPAN ? SPAN : part.span;
    vf sums[T] = {};
    for (int group = 0, inside = 0; group < groups; ++group) {
        vb w[8];
        load_codes<FORMAT>(block + inside * code_bytes(FORMAT), w);
        vf scale = load_scale<FORMAT>(part, span, block, 0);
        if (HALVES == 1) {
            const int FOURS = HAS_PAIR && WIDE ? T / 4 * 4 : 0, PAIRED = HAS_PAIR && WIDE ? T / 2 * 2 : 0;
#pragma GCC unroll 2
            for (int t = 0; t < FOURS; t += 4)
                dot_four(w, codes + t * CODE_BYTES, notes + SCALE * T + t, scale, sums + t);
#pragma GCC unroll 4
            for (int t = FOURS; t < PAIRED; t += 2)
                dot_pair(w, codes + t * CODE_BYTES, notes + SCALE * T + t, scale, sums[t], sums[t + 1]);
#pragma GCC unroll 8
            for (int t = PAIRED; t < T; ++t) {
                vi d = block_dot<FORMAT, WIDE, 0, 2>(w, codes + t * CODE_BYTES, notes, T, t);
                sums[t] = fma(to_float(d), scale * notes[SCALE * T + t], sums[t]);
            }
        } else {
            vf second = load_scale<FORMAT>(part, span, block, 1);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const int8_t* a = codes + t * CODE_BYTES;
                vi d0 = block_dot<FORMAT, WIDE, 0, 1>(w, a, notes, T, t);
                vi d1 = block_dot<FORMAT, WIDE, 1, 2>(w, a, notes, T, t);
                sums[t] = fma(to_float(d0), scale * notes[SCALE * T + t], sums[t]);
                sums[t] = fma(to_float(d1), second * notes[SCALE * T + t], sums[t]);
            }
        }
        if (HALVES == 1 && (FORMAT != EIGHT || part.has_minimum)) {
            vf minimum = load_scale<FORMAT>(part, span, block, 1);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) sums[t] = fma(minimum, notes[SUM * T + t], sums[t]);
        } else if (HALVES == 2 && part.has_minimum) {
            vf first = load_scale<FORMAT>(part, span, block, 2), second = load_scale<FORMAT>(part, span, block, 3);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                sums[t] = fma(first, notes[SUM_FIRST * T + t], sums[t]);
                sums[t] = fma(second, notes[SUM_SECOND * T + t], sums[t]);
            }
        }
        if (++inside == span) block += part.block_bytes, inside = 0;
        codes += T * CODE_BYTES;
        notes += T * NOTES;
    }
    for (int t = 0; t < T; ++t) result[t] = sums[t];
}

struct LinearOutput {
    float* y;           // [tokens, row_stride]
    int64_t row_stride;
    const float* bias;  // [rows] or null
    bool accumulate;    // y += instead of y =: the residual connection
};

INLINE void put(const LinearOutput& out, int64_t token, int64_t row, int64_t rows, vf value) {
    float* y = out.y + token * out.row_stride + row;
    if (row + LANES <= rows) {
        if (out.bias) value += load(out.bias + row);
        if (out.accumulate) value += load(y);
        store(y, value);
        return;
    }
    for (int lane = 0; row + lane < rows; ++lane) {
        float v = value[lane];
        if (out.bias) v += out.bias[row + lane];
        y[lane] = out.accumulate ? v + y[lane] : v;
    }
}

#if HAS_STREAM
static const int64_t STREAM_BYTES = 24576;  // of panels that stay in the first-level cache for more than MAX_STREAM tokens

// The same as multiply_panels, by the assembly loop.
template <bool FOUR_BITS, bool WIDE, int T>
static void stream_panels(const PackedPart& part, const QuantizedRows& x, int64_t token, int64_t begin, int64_t end,
                          const LinearOutput& out) {
    const int8_t* codes = x.codes + token * x.groups * x.code_bytes();
    const float* notes = x.notes + token * x.groups * NOTES;
    const int64_t panel_bytes = part.panel_bytes(x.groups), most = 16;
    int64_t batch = STREAM_BYTES / panel_bytes;
    batch = batch < 1 ? 1 : batch < most ? batch : most;
    vf result[most * MAX_STREAM];
    for (int64_t panel = begin; panel < end; panel += batch) {
        const int64_t panels = end - panel < batch ? end - panel : batch;
        auto some = [&](auto count, int first) {
            constexpr int N = decltype(count)::value;
            dot_stream<FOUR_BITS, WIDE, N>({part.data + panel * panel_bytes, panels, x.groups, codes + first * x.code_bytes(),
                                      notes + SCALE * T + first, notes + SUM * T + first, T * x.code_bytes(),
                                      T * NOTES * 4, result});
            for (int64_t i = 0; i < panels; ++i)
                for (int t = 0; t < N; ++t)
                    put(out, token + first + t, (panel + i) * LANES, part.rows, result[i * N + t]);
        };
        some(std::integral_constant<int, T < MAX_STREAM ? T : MAX_STREAM>(), 0);
        if constexpr (T > MAX_STREAM) some(std::integral_constant<int, T - MAX_STREAM>(), MAX_STREAM);
    }
}
#endif

template <Format FORMAT, int HALVES, bool WIDE, int SPAN, int T>
static void multiply_panels(const PackedPart& part, const QuantizedRows& x, int64_t token, int64_t begin,
                            int64_t end, const LinearOutput& out) {
#if HAS_STREAM
    if constexpr (HALVES == 1 && SPAN == 1 &&
                  (FORMAT == EIGHT || (FORMAT == FOUR_HALF && T <= MAX_STREAM)))
        if (FORMAT == FOUR_HALF || (part.half_floats && !part.has_minimum))
            return stream_panels<FORMAT == FOUR_HALF, WIDE, T>(part, x, token, begin, end, out);
#endif
    const int8_t* codes = x.codes + token * x.groups * x.code_bytes();
    const float* notes = x.notes + token * x.groups * NOTES;
    const int64_t panel_bytes = part.panel_bytes(x.groups);
    const uint8_t* block = part.data + begin * panel_bytes;
    for (int64_t panel = begin; panel < end; ++panel, block += panel_bytes) {
        vf result[T];
        multiply_tile<FORMAT, HALVES, WIDE, SPAN, T>(part, x.groups, block, codes, notes, result);
        for (int t = 0; t < T; ++t) put(out, token + t, panel * LANES, part.rows, result[t]);
    }
}

template <Format FORMAT, int HALVES, bool WIDE, int SPAN>
static void multiply_chunk(const PackedPart& part, const QuantizedRows& x, int64_t tokens, int64_t begin,
                           int64_t end, const LinearOutput& out) {
    for (int64_t token = 0; token < tokens;) {
        int64_t first;
        int n;
        tile_of(token, tokens, &first, &n);
#define TILE(N) \
    case N: multiply_panels<FORMAT, HALVES, WIDE, SPAN, N>(part, x, token, begin, end, out); break;
        switch (n) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) }
#undef TILE
        token += n;
    }
}

static const int EXPANDED_BLOCK = LANES * (32 + 8);
static const int64_t CHUNK_BYTES = 24576;  // of panels that stay in the first-level cache
static const int64_t EXPAND_FROM = 4 * MAX_TILE;  // tokens from which expanding pays

// Panels [begin, end) of a 4-bit part as the same part in EXPANDED form.
template <Format FORMAT>
static PackedPart expand(const PackedPart& part, int groups, int64_t begin, int64_t end, uint8_t* to) {
    PackedPart expanded = part;
    expanded.block_bytes = EXPANDED_BLOCK, expanded.span = 1;
    expanded.data = to - begin * groups * EXPANDED_BLOCK;  // so that panel numbers stay the same
    const uint8_t* block = part.data + begin * part.panel_bytes(groups);
    for (int64_t i = 0, inside = 0; i < (end - begin) * groups; ++i, to += EXPANDED_BLOCK) {
        vb w[8];
        load_codes<FORMAT>(block + inside * code_bytes(FORMAT), w);
        for (int j = 0; j < 8; ++j) *(vb_any*)(to + j * LANES * 4) = w[j];
        for (int which = 0; which < 2; ++which)
            store((float*)(to + LANES * (32 + 4 * which)), load_scale<FORMAT>(part, part.span, block, which));
        if (++inside == part.span) block += part.block_bytes, inside = 0;
    }
    return expanded;
}

// Called by every thread of the team.
static void multiply(const PackedPart& part, const QuantizedRows& x, int64_t tokens, const LinearOutput& out,
                     Work work, const Team& team) {
    static thread_local std::vector<uint8_t> own_scratch;
    std::vector<uint8_t>& scratch = own_scratch;  // looked up once: thread-local access is a call
    const bool expanding = part.bits == 4 && tokens >= EXPAND_FROM;
    int64_t panels = (part.rows + LANES - 1) / LANES;
    // A chunk of panels stays in the first-level cache while all tiles of tokens pass over it, but every thread
    // should get several chunks: cores are rarely equally fast.
    const int64_t panel_bytes = expanding ? EXPANDED_BLOCK * x.groups : part.panel_bytes(x.groups);
    int64_t chunk = CHUNK_BYTES / panel_bytes, share = panels / (team.size * 6);
    chunk = tokens <= MAX_TILE ? share : (chunk < share ? chunk : share);
    chunk = chunk < 1 ? 1 : chunk;
    work.each(panels, chunk, [&](int64_t begin, int64_t end) {
#define CASE(PART, FORMAT, HALVES, SPAN) \
    (x.wide ? multiply_chunk<FORMAT, HALVES, true, SPAN>(PART, x, tokens, begin, end, out) \
            : multiply_chunk<FORMAT, HALVES, false, SPAN>(PART, x, tokens, begin, end, out))
#define SPANNED(FORMAT) (part.span == 1 ? CASE(part, FORMAT, 1, 1) : CASE(part, FORMAT, 1, 0))
        if (expanding) {
            scratch.resize((size_t)(chunk * panel_bytes));
            auto expander = part.half_floats ? expand<FOUR_HALF> : expand<FOUR_FLOAT>;
            CASE(expander(part, x.groups, begin, end, scratch.data()), EXPANDED, 1, 1);
        } else if (part.bits == 4) {
            part.half_floats ? SPANNED(FOUR_HALF) : SPANNED(FOUR_FLOAT);
        } else {
            part.halves == 1 ? SPANNED(EIGHT) : CASE(part, EIGHT, 2, 1);
        }
#undef SPANNED
#undef CASE
    });
}

// Row `row` as floats: the look-up of a tied embedding table.
static void dequantize_row(const PackedPart& part, int64_t row, int columns, float* out) {
    int groups = (columns + 31) / 32, lane = (int)(row % LANES), per_scale = 32 / part.halves;
    const uint8_t* block = part.data + row / LANES * part.panel_bytes(groups);
    auto scale_at = [&](int which) {
        const uint8_t* p = block + LANES * 4 * part.bits * part.span;
        vf v = part.half_floats ? load_half(p + which * LANES * 2) : load((const float*)(p + which * LANES * 4));
        return v[lane];
    };
    for (int group = 0, inside = 0; group < groups; ++group) {
        const uint8_t* codes = block + inside * LANES * 4 * part.bits;
        for (int k = 0; k < 32 && group * 32 + k < columns; ++k) {
            int quad = k / 4, half = k / per_scale;
            float code;
            if (part.bits == 8) {
                uint8_t stored = codes[(quad * LANES + lane) * 4 + k % 4];
                code = WEIGHT_OFFSET ? (float)stored - WEIGHT_OFFSET : (float)(int8_t)stored;
            } else {
                uint8_t both = codes[(quad % 4 * LANES + lane) * 4 + k % 4];
                code = (float)(quad < 4 ? both & 15 : both >> 4);
            }
            float value = scale_at(half) * code;
            out[group * 32 + k] = part.has_minimum ? value + scale_at(part.halves + half) : value;
        }
        if (++inside == part.span) block += part.block_bytes, inside = 0;
    }
}
