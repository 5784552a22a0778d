// What Python calls (through ctypes): everything is played as a program of one or more operations.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "program.h"

extern "C" {

// Version of the structures below; a mismatch means Python and this source disagree.
int64_t cumulo_struct_sizes() {
    return (int64_t)sizeof(Op) | (int64_t)sizeof(Step) << 16 | (int64_t)sizeof(PackedPart) << 32;
}
int32_t cumulo_lanes() { return LANES; }
int32_t cumulo_has_half() { return HAS_HALF; }
int32_t cumulo_weight_offset() { return WEIGHT_OFFSET; }
int32_t cumulo_notes() { return NOTES; }
const char* cumulo_dot_name() { return DOT_NAME; }

void cumulo_use_threads_of(ParallelRegion parallel, IntFunction thread_index, IntFunction team_size) {
    thread_library = {parallel, thread_index, team_size};
}

int32_t cumulo_play(const Op* ops, int32_t count, const Step* step, int32_t threads) {
    int problem = check(*step);
    if (!problem) play(ops, count, *step, threads);
    return problem;
}

// Rows of a packed matrix as floats.
void cumulo_dequantize_rows(const PackedPart* parts, int32_t count, const int64_t* indices, int64_t rows,
                            int32_t columns, float* out) {
    Op op{};
    op.parts = count, op.packed = parts, op.columns = columns;
    for (int64_t i = 0; i < rows; ++i) embed_row(op, indices[i], out + i * columns);
}

// Ceilings for the benchmark: bytes read, and dot products on data in registers and first-level cache.
float cumulo_read_bytes(const float* data, int64_t floats, int32_t threads) {
    std::atomic<int64_t> next{0};
    std::atomic<float> result{0};
    run_team(threads, [&](int, Team&) {
        vf total[8] = {};
        Work{next}.each(floats / 8192, 1, [&](int64_t chunk, int64_t) {
            for (int64_t i = chunk * 8192; i < (chunk + 1) * 8192; i += 8 * LANES)
                for (int j = 0; j < 8; ++j) total[j] = max(total[j], load(data + i + j * LANES));
        });
        float largest = 0;
        for (int j = 0; j < 8; ++j) largest = std::max(largest, max(total[j]));
        if (largest > 1e30f) result.store(largest);
    });
    return result.load();
}

int32_t cumulo_dot_peak(int64_t repeats, int32_t threads) {
    std::atomic<int32_t> result{0};
    run_team(threads, [&](int index, Team&) {
        alignas(64) int8_t bytes[16];
        for (int i = 0; i < 16; ++i) bytes[i] = (int8_t)(i + index);
        vb w = {};
        // Different beginnings: the compiler would make one of equal sums.
        vi a = splat(1), b = splat(2), c = splat(3), d = splat(4), e = splat(5), f = splat(6), g = splat(7), h = splat(8);
        for (int64_t i = 0; i < repeats; ++i) {  // 8 independent sums; the barrier stops hoisting
            asm volatile("" ::: "memory");
            Sixteen x = load_sixteen(bytes);
            a = dot<0, true>(a, w, x), b = dot<1, true>(b, w, x), c = dot<2, true>(c, w, x);
            d = dot<3, true>(d, w, x), e = dot<0, true>(e, w, x), f = dot<1, true>(f, w, x);
            g = dot<2, true>(g, w, x), h = dot<3, true>(h, w, x);
        }
        vi total = a + b + c + d + e + f + g + h;
        result.fetch_add(total[0]);
    });
    return result.load();
}
}
