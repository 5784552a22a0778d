// Attention of this step's queries over keys and values that lie in paged blocks, read in place.
//
// Online softmax (Milakov & Gimelshein 2018; Dao et al. 2022) over chunks of CHUNK positions. Chunks begin at
// multiples of CHUNK in the sequence, whatever part of it is being computed, and each score is summed in the same
// order by both ways of computing it below; so a token's output is the same, bit for bit, in a long prefill, in
// a chunk of one, or alone.
//   few rows (decode): every key is read once and multiplied with each row, vectors along the head dimension
//   many rows (prefill): a chunk of keys is transposed once, vectors along the positions
// A cache in 8 bits (kv_codes.h) is expanded chunk by chunk, in the first-level cache, and then read as floats.
#pragma once
#include "kv_codes.h"
#include "simd.h"
#include "team.h"

#include <algorithm>

static const int CHUNK = 64;
static const int MAX_ROWS = 64;   // query rows (tokens x heads of one KV head) computed together
static const int FEW_ROWS = 12;   // up to here transposing the keys does not pay
static const float MASKED = -1e30f;

struct AttentionInput {
    const float* query;
    const void *keys, *values;
    float* out;
    int64_t query_stride, out_stride;              // floats between tokens
    int64_t key_block, key_head, key_position;     // strides in numbers, each of one byte in a cache of 8 bits
    int64_t value_block, value_head, value_position;
    int32_t heads, kv_heads, key_dim, value_dim, block_size, window;  // window 0: unlimited
    KvFormat format;
    float scale;
    int64_t sequences, table_stride;
    const int32_t *query_starts, *context_lengths, *block_tables;
};

struct AttentionScratch {
    // Aligned so that a vector never straddles two cache lines.
    alignas(64) float scores[MAX_ROWS * CHUNK];
    alignas(64) float maxima[MAX_ROWS];
    alignas(64) float sums[MAX_ROWS];
    const float* key_rows[CHUNK];
    const float* value_rows[CHUNK];
    int first_visible[MAX_ROWS], last_visible[MAX_ROWS];  // positions a row may see
    float *query, *accumulator, *transposed;  // [MAX_ROWS, key_dim], [MAX_ROWS, value_dim], [key_dim, CHUNK]
    float *expanded_keys, *expanded_values;   // [CHUNK, key_dim], [CHUNK, value_dim]
    std::vector<float> storage;

    void reserve(int key_dim, int value_dim, bool expands) {
        size_t chunks = (size_t)CHUNK * (key_dim + (expands ? key_dim + value_dim : 0));
        storage.resize((size_t)MAX_ROWS * (key_dim + value_dim) + chunks);
        query = storage.data();
        accumulator = query + (size_t)MAX_ROWS * key_dim;
        transposed = accumulator + (size_t)MAX_ROWS * value_dim;
        expanded_keys = transposed + (size_t)CHUNK * key_dim;
        expanded_values = expanded_keys + (size_t)CHUNK * key_dim;
    }
};

// scores[r][p] for few rows: NR rows x LANES positions at a time.
template <int NR>
INLINE void scores_by_key(const float* __restrict query, const float* const* key_rows, float* __restrict scores,
                          int dim, int positions) {
    for (int p = 0; p < positions; p += LANES) {
        vf partial[NR][LANES] = {};
        const float* key[LANES];
        for (int i = 0; i < LANES; ++i) key[i] = key_rows[p + i];
        for (int d = 0; d < dim; d += LANES) {
            vf k[LANES];
#pragma GCC unroll 8
            for (int i = 0; i < LANES; ++i) k[i] = load(key[i] + d);
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r) {
                vf q = load(query + r * dim + d);
#pragma GCC unroll 8
                for (int i = 0; i < LANES; ++i) partial[r][i] = fma(q, k[i], partial[r][i]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r) {
            transpose(partial[r]);
            vf total = partial[r][0];
            for (int lane = 1; lane < LANES; ++lane) total += partial[r][lane];
            store(scores + r * CHUNK + p, total);
        }
    }
}

// scores[r][p] for 4 rows x 16 positions from transposed keys, in scores_by_key's order of summation: one sum
// per lane of the head dimension, then the lanes one after another.
INLINE void scores_by_chunk(const float* __restrict query, const float* __restrict transposed,
                            float* __restrict scores, int dim) {
    const int V = 16 / LANES;
    for (int lane = 0; lane < LANES; ++lane) {
        vf partial[4][V] = {};
        const float* keys = transposed + lane * CHUNK;
        const float *q0 = query + lane, *q1 = q0 + dim, *q2 = q1 + dim, *q3 = q2 + dim;
        for (int d = 0; d < dim; d += LANES, keys += LANES * CHUNK) {
            const float q[4] = {q0[d], q1[d], q2[d], q3[d]};
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                vf k = load(keys + v * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < 4; ++r) partial[r][v] = fma(k, q[r], partial[r][v]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                float* at = scores + r * CHUNK + v * LANES;
                store(at, lane ? load(at) + partial[r][v] : partial[r][v]);
            }
    }
}

// Turn a row's scores into weights exp(score - max), update its running maximum and sum, and return the factor
// by which what was accumulated before must shrink. `begin` is the position of scores[0].
static float softmax_row(AttentionScratch& s, int row, int begin, int positions) {
    float* scores = s.scores + row * CHUNK;
    int low = s.first_visible[row] - begin, high = s.last_visible[row] - begin;  // visible: low..high
    int padded = (positions + LANES - 1) / LANES * LANES;
    for (int p = 0; p < low && p < padded; ++p) scores[p] = MASKED;
    for (int p = high < 0 ? 0 : high + 1; p < padded; ++p) scores[p] = MASKED;
    vf largest = load(scores);
    for (int p = LANES; p < padded; p += LANES) largest = max(largest, load(scores + p));
    float before = s.maxima[row], now = max(largest);
    now = now <= before ? before : now;  // NaN stays NaN: it must reach whoever checks the logits
    if (now <= MASKED) {  // nothing visible yet
        for (int p = 0; p < padded; p += LANES) store(scores + p, vf{});
        return 1;
    }
    vf total = {};
    int p = 0;
    for (; p + 4 * LANES <= padded; p += 4 * LANES) {  // four at a time: an exponential is a long chain
        vf weight[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) weight[i] = exp(load(scores + p + i * LANES) - now);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            store(scores + p + i * LANES, weight[i]);
            total += weight[i];
        }
    }
    for (; p < padded; p += LANES) {
        vf weight = exp(load(scores + p) - now);
        store(scores + p, weight);
        total += weight;
    }
    float factor = before <= MASKED ? 0 : before == now ? 1 : exp(splat(before - now))[0];
    s.maxima[row] = now;
    s.sums[row] = s.sums[row] * factor + sum(total);
    return factor;
}

// accumulator = accumulator * factor + weights . values for NR rows, V vectors of columns at a time.
template <int NR, int V>
INLINE void add_values(const float* __restrict weights, const float* const* value_rows, int column,
                       float* __restrict accumulator, int dim, const float* factor, int positions) {
    vf total[NR][V];
#pragma GCC unroll 4
    for (int r = 0; r < NR; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) total[r][v] = load(accumulator + r * dim + v * LANES) * factor[r];
    for (int p = 0; p < positions; ++p) {
        const float* value = value_rows[p] + column;
        float w[NR];
#pragma GCC unroll 4
        for (int r = 0; r < NR; ++r) w[r] = weights[r * CHUNK + p];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            vf x = load(value + v * LANES);
#pragma GCC unroll 4
            for (int r = 0; r < NR; ++r) total[r][v] = fma(x, w[r], total[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < NR; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) store(accumulator + r * dim + v * LANES, total[r][v]);
}

template <int NR>
static void rows_times_values(AttentionScratch& s, int dim, int row, const float* factor, int positions) {
    const float* weights = s.scores + row * CHUNK;
    float* accumulator = s.accumulator + row * dim;
    const int V = 16 / LANES;
    int c = 0;
    if (NR == 1)  // a whole row of values at once, as it lies in memory
        for (; c + 16 * LANES <= dim; c += 16 * LANES)
            add_values<NR, 16>(weights, s.value_rows, c, accumulator + c, dim, factor, positions);
    for (; c + 16 <= dim; c += 16)
        add_values<NR, V>(weights, s.value_rows, c, accumulator + c, dim, factor, positions);
    for (; c < dim; c += LANES)
        add_values<NR, 1>(weights, s.value_rows, c, accumulator + c, dim, factor, positions);
}

// Where the keys (and values) of positions [begin, begin + count) lie. The last key fills up the last vector.
INLINE void locate(const AttentionInput& in, const int32_t* table, int kv_head, int begin, int count,
                   const float** key_rows, const float** value_rows) {
    int index = begin / in.block_size, offset = begin % in.block_size;
    const int64_t size = number_bytes(in.format);
    const uint8_t *keys = (const uint8_t*)in.keys, *values = (const uint8_t*)in.values;
    for (int p = 0; p < count; ++index, offset = 0) {
        int64_t block = table[index];
        const uint8_t* key = keys + (block * in.key_block + kv_head * in.key_head) * size;
        const uint8_t* value = values + (block * in.value_block + kv_head * in.value_head) * size;
        for (; offset < in.block_size && p < count; ++offset, ++p) {
            key_rows[p] = (const float*)(key + offset * in.key_position * size);
            if (value_rows) value_rows[p] = (const float*)(value + offset * in.value_position * size);
        }
    }
    for (int p = count; p % LANES; ++p) key_rows[p] = key_rows[count - 1];
}
INLINE void prefetch_row(const float* row, int bytes) {
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch((const uint8_t*)row + b);
}

// Rows that were located in a cache of 8 bits become rows of floats.
static void expand_rows(const AttentionInput& in, AttentionScratch& s, int positions) {
    for (int p = 0; p < positions; ++p) {
        float *key = s.expanded_keys + (size_t)p * in.key_dim, *value = s.expanded_values + (size_t)p * in.value_dim;
        read_codes(in.format, (const uint8_t*)s.key_rows[p], in.key_dim, key);
        read_codes(in.format, (const uint8_t*)s.value_rows[p], in.value_dim, value);
        s.key_rows[p] = key, s.value_rows[p] = value;
    }
    for (int p = positions; p % LANES; ++p) s.key_rows[p] = s.key_rows[positions - 1];
}

// Tokens [token, token + tokens) of one sequence, the first at position `position`; `heads` query heads from
// `head`, all of KV head `kv_head`.
static __attribute__((noinline)) void attend(const AttentionInput& in, AttentionScratch& s, const int32_t* table, int64_t token, int tokens,
                   int position, int head, int heads, int kv_head) {
    const int D = in.key_dim, E = in.value_dim, rows = tokens * heads;
    const int padded_rows = (rows + 3) / 4 * 4;  // tiles of 4 rows read (and ignore) what follows
    s.reserve(D, E, in.format != KV_FLOAT);
    std::fill_n(s.accumulator, (size_t)padded_rows * E, 0.0f);
    for (int r = 0; r < rows; ++r) {
        int t = r / heads;
        const float* q = in.query + (token + t) * in.query_stride + (int64_t)(head + r % heads) * D;
        for (int d = 0; d < D; d += LANES) store(s.query + r * D + d, load(q + d) * in.scale);
        s.maxima[r] = MASKED;
        s.sums[r] = 0;
        s.last_visible[r] = position + t;
        s.first_visible[r] = in.window && position + t + 1 > in.window ? position + t + 1 - in.window : 0;
    }
    for (int r = rows; r < padded_rows; ++r) {
        std::fill_n(s.query + r * D, D, 0.0f);
        s.last_visible[r] = s.last_visible[rows - 1];
        s.first_visible[r] = s.first_visible[rows - 1];
        s.maxima[r] = MASKED;
        s.sums[r] = 0;
    }
    const int end = s.last_visible[rows - 1] + 1;
    const bool few = rows <= FEW_ROWS;
    const int size = number_bytes(in.format);
    for (int begin = s.first_visible[0] / CHUNK * CHUNK; begin < end; begin += CHUNK) {
        int positions = end - begin < CHUNK ? end - begin : CHUNK;
        locate(in, table, kv_head, begin, positions, s.key_rows, s.value_rows);
        // Decoding waits for memory: fetch the values while the scores are computed, ...
        if (few)
            for (int p = 0; p < positions; ++p) prefetch_row(s.value_rows[p], E * size);
        if (in.format != KV_FLOAT) expand_rows(in, s, positions);
        if (few) {
            int row = 0;
            for (; row + 3 <= rows; row += 3)
                scores_by_key<3>(s.query + row * D, s.key_rows, s.scores + row * CHUNK, D, positions);
            for (; row < rows; ++row)
                scores_by_key<1>(s.query + row * D, s.key_rows, s.scores + row * CHUNK, D, positions);
            int next = end - begin - CHUNK < CHUNK ? end - begin - CHUNK : CHUNK;
            if (next > 0) {  // ... and the next chunk's keys while these values are used.
                locate(in, table, kv_head, begin + CHUNK, next, s.key_rows, nullptr);
                for (int p = 0; p < next; ++p) prefetch_row(s.key_rows[p], D * size);
            }
        } else {
            for (int p = 0; p < CHUNK; p += LANES) {
                if (p >= positions) break;
                for (int d = 0; d < D; d += LANES) {
                    vf block[LANES];
                    for (int i = 0; i < LANES; ++i)
                        block[i] = p + i < positions ? load(s.key_rows[p + i] + d) : vf{};
                    transpose(block);
                    for (int i = 0; i < LANES; ++i) store(s.transposed + (d + i) * CHUNK + p, block[i]);
                }
            }
            for (int row = 0; row < rows; row += 4) {
                int last = s.last_visible[row + 3] - begin;  // later rows see more
                for (int p = 0; p < positions && p <= last; p += 16)
                    scores_by_chunk(s.query + row * D, s.transposed + p, s.scores + row * CHUNK + p, D);
            }
        }
        for (int row = 0; row < rows;) {
            int n = few ? (rows - row >= 3 ? 3 : 1) : 4;
            float factor[4];
            for (int r = 0; r < n; ++r) factor[r] = softmax_row(s, row + r, begin, positions);
            int visible = s.last_visible[row + n - 1] - begin + 1;
            visible = visible < 0 ? 0 : visible < positions ? visible : positions;
            if (n == 4) rows_times_values<4>(s, E, row, factor, visible);
            else if (n == 3) rows_times_values<3>(s, E, row, factor, visible);
            else rows_times_values<1>(s, E, row, factor, visible);
            row += n;
        }
    }
    for (int r = 0; r < rows; ++r) {
        float* out = in.out + (token + r / heads) * in.out_stride + (int64_t)(head + r % heads) * E;
        float inverse = 1.0f / s.sums[r];
        for (int e = 0; e < E; e += LANES) store(out + e, load(s.accumulator + r * E + e) * inverse);
    }
}

// Called by every thread of the team. Work is dealt out in units of (tile of tokens, group of heads).
static void attention(const AttentionInput& in, Work work, const Team& team) {
    static thread_local AttentionScratch own;
    AttentionScratch& scratch = own;  // looked up once: thread-local access is a call
    const int per_kv = in.heads / in.kv_heads;
    // With few sequences and no prefill there are fewer KV heads than threads can share evenly: split further.
    int64_t tokens = in.query_starts[in.sequences];
    bool split_heads = team.size > 1 && tokens == in.sequences && in.sequences * in.kv_heads < 4 * team.size;
    const int most_heads = split_heads ? 1 : per_kv < MAX_ROWS ? per_kv : MAX_ROWS;
    const int head_groups = (per_kv + most_heads - 1) / most_heads;
    const int tile = MAX_ROWS / most_heads > 0 ? MAX_ROWS / most_heads : 1;
    int64_t units = 0;
    for (int64_t s = 0; s < in.sequences; ++s)
        units += (in.query_starts[s + 1] - in.query_starts[s] + tile - 1) / tile;
    const int64_t per_tile = (int64_t)in.kv_heads * head_groups;
    int64_t sequence = 0, first_unit = 0;  // units are handed out in order, so this only moves forward
    work.each(units * per_tile, 1, [&](int64_t unit, int64_t) {
        int64_t tile_index = unit / per_tile;
        int kv_head = (int)(unit % per_tile / head_groups), group = (int)(unit % head_groups);
        auto tiles_of = [&](int64_t s) {
            return (in.query_starts[s + 1] - in.query_starts[s] + tile - 1) / tile;
        };
        while (tile_index >= first_unit + tiles_of(sequence)) first_unit += tiles_of(sequence++);
        // Long tiles first: the last ones of a prefill see the most positions.
        int64_t in_sequence = tiles_of(sequence) - 1 - (tile_index - first_unit);
        int64_t start = in.query_starts[sequence], count = in.query_starts[sequence + 1] - start;
        int64_t from = in_sequence * tile, left = count - from;
        int n = (int)(left < tile ? left : tile);
        int position = in.context_lengths[sequence] - (int)count + (int)from;
        int head = kv_head * per_kv + group * most_heads, rest = per_kv - group * most_heads;
        attend(in, scratch, in.block_tables + sequence * in.table_stride, start + from, n, position, head,
               rest < most_heads ? rest : most_heads, kv_head);
    });
}
