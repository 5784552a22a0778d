// A program: the list of operations that one step of a decoder consists of, played by a team of threads.
//
// Python builds the list once; only `Step` (how many tokens, where the block tables lie) changes from step to
// step. Every thread walks the list; within an operation work is handed out in small chunks, after it all wait.
// Field names and order are mirrored by cumulo/kernels/library.py.
#pragma once
#include "attention.h"
#include "float8_linear.h"
#include "float_linear.h"
#include "linear.h"
#include "low_rank.h"
#include "small_ops.h"

struct Step {
    int64_t tokens, sequences, outputs, table_stride;
    int64_t vocabulary, position_limit, blocks, block_size;  // what indices are checked against; 0: not used
    const int64_t *token_ids, *positions, *slots, *output_rows;
    const int32_t *query_starts, *context_lengths, *block_tables;
    Groups token_groups, output_groups;  // rows that have an adapter
};

enum Kind : int32_t {
    EMBED,      // out[token] = row token_ids[token] of the packed table
    NORM,       // x -> RMS norm with weight -> quantised (and out, if given)
    QUANTIZE,   // x -> quantised
    LINEAR,     // quantised . packed^T (+ bias) -> out, or added to out
    FLOAT_LINEAR,  // x . weight^T (+ bias) -> out, or added to out
    ROTATE,     // per-head norm (if weights are given), rotary embedding; keys and values into the cache
    ATTEND,     // query x -> out
    SILU_MUL,   // x = [gate | up] -> silu(gate) * up -> quantised (or out)
    GATHER,     // out[i] = x[output_rows[i]]
    EMBED_FLOAT, // EMBED from a float table
    SHRINK,     // A x of every row that has an adapter -> out
    EXPAND,     // B x added to the rows of out that have an adapter
    FLOAT8_LINEAR,  // FLOAT_LINEAR with 8-bit floats and scales
    KEEP,       // x -> out[slots[token]], rows of out_columns: what a draft head sees of the stream
    LIKELIEST   // x = logits -> out = [probability of the most likely token, its number as an int32]
};

struct Op {
    int32_t kind;
    int32_t over_outputs;  // rows are the step's outputs instead of its tokens
    int32_t columns;       // of x (per row)
    int32_t out_columns;
    const float* x;
    float* out;
    const float* weight;   // norm weight, or float matrix
    const float* bias;
    int32_t accumulate;
    int32_t parts;
    const PackedPart* packed;
    QuantizedRows quantized;
    // rotary embedding and attention
    uint8_t *keys, *values;  // numbers of `kv_format`
    const float *query_norm, *key_norm, *cosine, *sine;
    int64_t key_block, key_head, key_position, value_block, value_head, value_position;
    int32_t heads, kv_heads, head_dim, value_dim, block_size, window;
    int32_t interleaved, kv_format;
    float scale, eps;
    // adapters; `parts` are the sections of a fused matrix
    const int32_t *bounds, *ranks;
    int32_t rank_max;
    int32_t scale_columns;  // of a float8 matrix, whose codes are `weight`
    const float* scales;
};

INLINE int64_t rows_of(const Op& op, const Step& step) { return op.over_outputs ? step.outputs : step.tokens; }

static void norm_row(const Op& op, int64_t row, int64_t rows) {
    const float* x = op.x + row * op.columns;
    float inverse = inverse_rms(x, op.columns, op.eps);
    auto value = [&](int k) { return load(x + k) * inverse * load(op.weight + k); };
    if (op.out)
        for (int k = 0; k < op.columns; k += LANES) store(op.out + row * op.columns + k, value(k));
    if (op.quantized.codes) quantize_row(op.quantized, row, rows, op.columns, value);
}

static void silu_row(const Op& op, int64_t row, int64_t rows) {
    const float *gate = op.x + row * 2 * op.columns, *up = gate + op.columns;
    auto value = [&](int k) { return silu(load(gate + k)) * load(up + k); };
    if (op.out)
        for (int k = 0; k < op.columns; k += LANES) store(op.out + row * op.columns + k, value(k));
    if (op.quantized.codes) quantize_row(op.quantized, row, rows, op.columns, value);
}

// x and out are the fused [query | key | value] row.
static void rotate_row(const Op& op, const Step& step, int64_t token) {
    const int D = op.head_dim, half = D / 2;
    float* row = op.out + token * op.columns;
    const float *cosine = op.cosine + step.positions[token] * half, *sine = op.sine + step.positions[token] * half;
    int64_t block = step.slots[token] / op.block_size, offset = step.slots[token] % op.block_size;
    const KvFormat format = (KvFormat)op.kv_format;
    const int64_t size = number_bytes(format);
    for (int head = 0; head < op.heads + op.kv_heads; ++head) {
        float* x = row + (int64_t)head * D;
        const float* weight = head < op.heads ? op.query_norm : op.key_norm;
        if (weight) {
            float inverse = inverse_rms(x, D, op.eps);
            for (int d = 0; d < D; d += LANES) store(x + d, load(x + d) * inverse * load(weight + d));
        }
        rotate_head(x, D, cosine, sine, op.interleaved);
        if (head < op.heads) continue;
        int kv = head - op.heads;
        int64_t key = block * op.key_block + kv * op.key_head + offset * op.key_position;
        int64_t value = block * op.value_block + kv * op.value_head + offset * op.value_position;
        write_codes(format, x, D, op.keys + key * size);
        write_codes(format, x + (int64_t)op.kv_heads * D, D, op.values + value * size);
    }
}

static void linear(const Op& op, int64_t rows, std::atomic<int64_t>* counters, Team& team) {
    LinearOutput out{op.out, op.out_columns, op.bias, op.accumulate != 0};
    for (int part = 0; part < op.parts; ++part) {
        multiply(op.packed[part], op.quantized, rows, out, Work{counters[part]}, team);
        out.y += op.packed[part].rows;
        if (out.bias) out.bias += op.packed[part].rows;
    }
}

static void embed_row(const Op& op, int64_t id, float* out) {
    for (int part = 0; part < op.parts; ++part) {
        if (id < op.packed[part].rows) return dequantize_row(op.packed[part], id, op.columns, out);
        id -= op.packed[part].rows;
    }
}

static AttentionInput attention_input(const Op& op, const Step& step) {
    AttentionInput in;
    in.query = op.x, in.keys = op.keys, in.values = op.values, in.out = op.out;
    in.query_stride = op.columns, in.out_stride = op.out_columns;
    in.key_block = op.key_block, in.key_head = op.key_head, in.key_position = op.key_position;
    in.value_block = op.value_block, in.value_head = op.value_head, in.value_position = op.value_position;
    in.heads = op.heads, in.kv_heads = op.kv_heads, in.key_dim = op.head_dim, in.value_dim = op.value_dim;
    in.block_size = op.block_size, in.window = op.window, in.scale = op.scale;
    in.format = (KvFormat)op.kv_format;
    in.sequences = step.sequences, in.table_stride = step.table_stride;
    in.query_starts = step.query_starts, in.context_lengths = step.context_lengths;
    in.block_tables = step.block_tables;
    return in;
}

static LowRank low_rank(const Op& op) {
    return {op.x, op.weight, op.out, op.columns, op.out_columns, op.bounds, op.ranks, op.parts, op.rank_max};
}

static const int MAX_PARTS = 8;  // counters per operation

static void play_op(const Op& op, const Step& step, std::atomic<int64_t>* counters, Team& team) {
    Work work{counters[0]};
    int64_t rows = rows_of(op, step);
    auto each_row = [&](auto body) {
        work.each(rows, rows > 64 ? 4 : 1, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) body(row);
        });
    };
    switch (op.kind) {
        case EMBED:
            each_row([&](int64_t row) { embed_row(op, step.token_ids[row], op.out + row * op.columns); });
            break;
        case EMBED_FLOAT:
            each_row([&](int64_t row) {
                memcpy(op.out + row * op.columns, op.weight + step.token_ids[row] * op.columns,
                       sizeof(float) * op.columns);
            });
            break;
        case NORM: each_row([&](int64_t row) { norm_row(op, row, rows); }); break;
        case QUANTIZE:
            each_row([&](int64_t row) {
                const float* x = op.x + row * op.columns;
                quantize_row(op.quantized, row, rows, op.columns, [&](int k) { return load(x + k); });
            });
            break;
        case LINEAR: linear(op, rows, counters, team); break;
        case FLOAT_LINEAR: float_linear(op.x, op.columns, op.weight, op.out_columns, rows,
                                        {op.out, op.out_columns, op.bias, op.accumulate != 0}, work, team);
            break;
        case FLOAT8_LINEAR:
            float8_linear(op.x, {(const uint8_t*)op.weight, op.scales, op.columns, op.scale_columns},
                          op.out_columns, rows, {op.out, op.out_columns, op.bias, op.accumulate != 0}, work, team);
            break;
        case ROTATE: each_row([&](int64_t row) { rotate_row(op, step, row); }); break;
        case ATTEND: attention(attention_input(op, step), work, team); break;
        case SILU_MUL: each_row([&](int64_t row) { silu_row(op, row, rows); }); break;
        case SHRINK: shrink(low_rank(op), op.over_outputs ? step.output_groups : step.token_groups, work); break;
        case EXPAND: expand(low_rank(op), op.over_outputs ? step.output_groups : step.token_groups, work); break;
        case KEEP:
            each_row([&](int64_t row) {
                memcpy(op.out + step.slots[row] * op.out_columns, op.x + row * op.columns,
                       sizeof(float) * op.columns);
            });
            break;
        case LIKELIEST:
            each_row([&](int64_t row) {
                float chance;
                int32_t token = likeliest(op.x + row * op.columns, op.columns, &chance);
                op.out[2 * row] = chance;
                memcpy(op.out + 2 * row + 1, &token, 4);
            });
            break;
        case GATHER:
            each_row([&](int64_t row) {
                memcpy(op.out + row * op.columns, op.x + step.output_rows[row] * op.columns,
                       sizeof(float) * op.columns);
            });
            break;
    }
}

// Indices come from another language: one out of range is reported instead of read. 0: all is well.
static int check(const Step& step) {
    auto outside = [](const int64_t* values, int64_t count, int64_t limit) {
        for (int64_t i = 0; values && limit && i < count; ++i)
            if (values[i] < 0 || values[i] >= limit) return true;
        return false;
    };
    if (outside(step.token_ids, step.tokens, step.vocabulary)) return 1;
    if (outside(step.positions, step.tokens, step.position_limit)) return 2;
    if (outside(step.slots, step.tokens, step.blocks * step.block_size)) return 3;
    if (outside(step.output_rows, step.outputs, step.tokens)) return 4;
    for (auto [groups, rows] : {std::pair{step.token_groups, step.tokens}, {step.output_groups, step.outputs}})
        for (int64_t i = 0; groups.count && i < groups.starts[groups.count]; ++i)
            if (groups.rows[i] < 0 || groups.rows[i] >= rows) return 7;
    if (!step.query_starts || !step.blocks) return 0;
    if (step.query_starts[0] != 0 || step.query_starts[step.sequences] != step.tokens) return 5;
    for (int64_t s = 0; s < step.sequences; ++s) {
        int64_t count = step.query_starts[s + 1] - step.query_starts[s], length = step.context_lengths[s];
        int64_t used = (length + step.block_size - 1) / step.block_size;
        if (count < 0 || count > length || used > step.table_stride) return 5;
        for (int64_t i = 0; i < used; ++i) {
            int64_t block = step.block_tables[s * step.table_stride + i];
            if (block < 0 || block >= step.blocks) return 6;
        }
    }
    return 0;
}

static void play(const Op* ops, int count, const Step& step, int threads) {
    std::vector<std::atomic<int64_t>> counters((size_t)count * MAX_PARTS);
    for (auto& counter : counters) counter.store(0, std::memory_order_relaxed);
    run_team(threads, [&](int, Team& team) {
        for (int i = 0; i < count; ++i) {
            play_op(ops[i], step, &counters[(size_t)i * MAX_PARTS], team);
            team.barrier();
        }
    });
}
