// What every generated kernel includes: number types, functions of lanes, a matrix product of tiles, the launch.
// Functions of lanes are without branches, so that the compiler turns a loop that calls them into vectors.
#pragma once
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES _Pragma("omp simd")

// -- number types --------------------------------------------------------------------------------------------------
struct f16_t { uint16_t bits; };
struct bf16_t { uint16_t bits; };
template <int MANTISSA, int BIAS> struct f8_t { uint8_t bits; };
typedef f8_t<3, 7> f8e4m3_t;
typedef f8_t<2, 15> f8e5m2_t;

template <class T> struct Unsigned { typedef T type; };
template <> struct Unsigned<bool> { typedef uint8_t type; };
template <> struct Unsigned<int8_t> { typedef uint8_t type; };
template <> struct Unsigned<int16_t> { typedef uint16_t type; };
template <> struct Unsigned<int32_t> { typedef uint32_t type; };
template <> struct Unsigned<int64_t> { typedef uint64_t type; };
template <class T> using unsigned_of = typename Unsigned<T>::type;

template <class T, class S> INLINE T same_bits(S value) {
    static_assert(sizeof(T) == sizeof(S), "a bitcast keeps the size");
    T result;
    memcpy(&result, &value, sizeof(T));
    return result;
}
INLINE float float_of(uint32_t bits) { return same_bits<float>(bits); }
INLINE uint32_t bits_of(float value) { return same_bits<uint32_t>(value); }
INLINE float power_of_2(int exponent) { return float_of((uint32_t)(exponent + 127) << 23); }

template <class T> INLINE T get(T value) { return value; }
INLINE bool get(uint8_t value) { return value != 0; }
INLINE float get(bf16_t value) { return float_of((uint32_t)value.bits << 16); }
INLINE float get(f16_t value) {
    uint32_t magnitude = (uint32_t)(value.bits & 0x7fff) << 13;
    uint32_t bits = bits_of(float_of(magnitude) * float_of(0x77800000));  // * 2^112 moves the exponent, subnormals too
    bits = magnitude >= 0x0f800000 ? (magnitude | 0x7f800000) : bits;
    return float_of(bits | (uint32_t)(value.bits & 0x8000) << 16);
}
template <int M, int BIAS> INLINE float get(f8_t<M, BIAS> value) {
    int exponent = (value.bits & 0x7f) >> M, mantissa = value.bits & ((1 << M) - 1);
    float size = exponent ? (mantissa + (1 << M)) * power_of_2(exponent - BIAS - M) : mantissa * power_of_2(1 - BIAS - M);
    if (M == 3) size = (value.bits & 0x7f) == 0x7f ? NAN : size;
    else size = exponent == 31 ? (mantissa ? NAN : INFINITY) : size;
    return value.bits & 0x80 ? -size : size;
}

template <class T> struct Stored {
    template <class S> INLINE T of(S value) { return (T)value; }
};
template <> struct Stored<bf16_t> {
    INLINE bf16_t of(float value) {
        uint32_t bits = bits_of(value);
        uint32_t near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to the nearest, ties to even
        return {(uint16_t)(value != value ? (bits >> 16) | 0x40 : near)};
    }
};
template <> struct Stored<f16_t> {
    INLINE f16_t of(float value) {
        uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
        uint32_t normal = (size + 0xc8000fff + ((size >> 13) & 1)) >> 13;
        uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3f000000;
        uint32_t half = size < 0x38800000 ? small : normal;
        half = size >= 0x47800000 ? (size > 0x7f800000 ? 0x7e00 : 0x7c00) : half;
        return {(uint16_t)(half | ((bits >> 16) & 0x8000))};
    }
};
template <int M, int BIAS> struct Stored<f8_t<M, BIAS>> {  // what is too large becomes the largest, as on GPUs
    INLINE f8_t<M, BIAS> of(float value) {
        const float largest = M == 3 ? 448.0f : 57344.0f;
        float size = fabsf(value) < largest ? fabsf(value) : largest;
        int exponent = (int)(bits_of(size) >> 23) - 127;
        exponent = exponent < 1 - BIAS ? 1 - BIAS : exponent;
        int count = (int)nearbyintf(size * power_of_2(M - exponent));  // of the last place
        int code = ((exponent + BIAS - 1) << M) + count;  // a count of 2^M carries into the exponent
        code = value != value ? 0x7f : code;
        return {(uint8_t)(code | (bits_of(value) >> 24 & 0x80))};
    }
};
template <class T, class S> INLINE T stored(S value) { return Stored<T>::of(value); }
template <class T> INLINE float rounded(float value) { return get(stored<T>(value)); }

// -- functions of lanes --------------------------------------------------------------------------------------------
template <class T> INLINE T divided(T a, T b) {
    if (b == 0) return 0;
    return (T)-1 < (T)0 && b == (T)-1 ? (T)(0 - (unsigned_of<T>)a) : (T)(a / b);
}
template <class T> INLINE T remainder_of(T a, T b) {
    if (b == 0 || ((T)-1 < (T)0 && b == (T)-1)) return 0;
    return (T)(a % b);
}
INLINE int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }
template <class T, class A, class B> INLINE T shifted_left(A a, B b) {
    return (T)((uint64_t)(T)b < 8 * sizeof(T) ? (T)((T)a << (b & (8 * sizeof(T) - 1))) : 0);
}
template <class T, class A, class B> INLINE T shifted_right(A a, B b) {
    T value = (T)a;
    T amount = (uint64_t)(T)b < 8 * sizeof(T) ? (T)b : (T)(8 * sizeof(T) - 1);
    return (uint64_t)(T)b < 8 * sizeof(T) || value < 0 ? (T)(value >> amount) : (T)0;
}
INLINE uint32_t high_product(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
INLINE uint64_t high_product(uint64_t a, uint64_t b) { return (uint64_t)((unsigned __int128)a * b >> 64); }
template <class T> INLINE T larger(T a, T b) { return a > b ? a : b; }
template <class T> INLINE T smaller(T a, T b) { return a < b ? a : b; }
template <class T> INLINE T larger_or_nan(T a, T b) { return a > b || a != a ? a : b; }
template <class T> INLINE T smaller_or_nan(T a, T b) { return a < b || a != a ? a : b; }
template <class T> INLINE T larger_number(T a, T b) { return a > b || b != b ? a : b; }
template <class T> INLINE T smaller_number(T a, T b) { return a < b || b != b ? a : b; }
template <class T> INLINE T clamped(T x, T low, T high) { return x < low ? low : (x > high ? high : x); }
template <class T> INLINE T fused(T a, T b, T c) { return a * b + c; }
INLINE float abs_of(float x) { return __builtin_fabsf(x); }
INLINE float sqrt_of(float x) { return __builtin_sqrtf(x); }
INLINE float floor_of(float x) { return __builtin_floorf(x); }
INLINE float ceil_of(float x) { return __builtin_ceilf(x); }
INLINE float sin_of(float x) { return __builtin_sinf(x); }
INLINE float cos_of(float x) { return __builtin_cosf(x); }

// e^r for |r| <= ln(2)/2, times 2^n in two steps, so that neither leaves the range of floats too early.
INLINE float scaled_exp(float r, float n) {
    float p = 1.990792739e-04f;
    p = p * r + 1.393388320e-03f;
    p = p * r + 8.333285517e-03f;
    p = p * r + 4.166646281e-02f;
    p = p * r + 1.666666676e-01f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    int whole = (int)n, half = whole >> 1;
    return p * power_of_2(half) * power_of_2(whole - half);
}
INLINE float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23 has no fraction bits
INLINE float exp_of(float x) {
    float c = x > 89.0f ? 89.0f : x;
    c = c < -104.0f ? -104.0f : c;
    float n = nearest(c * 1.44269504f);
    float y = scaled_exp((c - n * 0.693359375f) + n * 2.12194440e-4f, n);
    return x != x ? x : y;
}
INLINE float exp2_of(float x) {
    float c = x > 129.0f ? 129.0f : x;
    c = c < -151.0f ? -151.0f : c;
    float n = nearest(c);
    float y = scaled_exp((c - n) * 0.693147181f, n);
    return x != x ? x : y;
}
// log(1 + z) - z for the mantissa 1 + z of x in [sqrt(1/2), sqrt(2)); the exponent in n.
INLINE float log_rest(float x, float& z, float& n) {
    bool tiny = x < 1.17549435e-38f;
    int32_t bits = (int32_t)bits_of(tiny ? x * 8388608.0f : x) - 0x3f3504f3;
    n = (float)((bits >> 23) - (tiny ? 23 : 0));
    z = float_of((uint32_t)((bits & 0x7fffff) + 0x3f3504f3)) - 1.0f;
    float p = 6.931657076e-02f;
    p = p * z - 1.179297170e-01f;
    p = p * z + 1.186712127e-01f;
    p = p * z - 1.238377506e-01f;
    p = p * z + 1.421954378e-01f;
    p = p * z - 1.666929322e-01f;
    p = p * z + 2.000217043e-01f;
    p = p * z - 2.499998547e-01f;
    p = p * z + 3.333331161e-01f;
    return p * z * z * z - 0.5f * z * z;
}
INLINE float log_edges(float x, float y) {
    y = x == 0.0f ? -INFINITY : y;
    y = x == INFINITY ? INFINITY : y;
    return x < 0.0f || x != x ? NAN : y;
}
INLINE float log_of(float x) {
    float z, n, rest = log_rest(x, z, n);
    return log_edges(x, ((rest - n * 2.12194440e-4f) + z) + n * 0.693359375f);
}
INLINE float log2_of(float x) {
    float z, n, rest = log_rest(x, z, n);
    return log_edges(x, (rest * 1.44269504f + z * 0.44269504f) + z + n);
}
INLINE float tanh_of(float x) {
    float size = abs_of(x), s = x * x;
    float p = 2.275911907e-03f;
    p = p * s - 8.329609316e-03f;
    p = p * s + 2.176475616e-02f;
    p = p * s - 5.395878457e-02f;
    p = p * s + 1.333330177e-01f;
    p = p * s - 3.333333316e-01f;
    float large = 1.0f - 2.0f / (exp_of(2.0f * size) + 1.0f);
    return size < 0.625f ? p * s * x + x : (x < 0.0f ? -large : large) + (x != x ? x : 0.0f);
}
INLINE float erf_of(float x) {
    float size = abs_of(x), s = x * x, t = size > 4.0f ? 4.0f : size;
    float p = -9.680139038e-06f;
    p = p * s + 1.127054540e-04f;
    p = p * s - 8.484711573e-04f;
    p = p * s + 5.221074886e-03f;
    p = p * s - 2.686544582e-02f;
    p = p * s + 1.128378275e-01f;
    p = p * s - 3.761263848e-01f;
    p = p * s + 1.283791671e-01f;  // 2 / sqrt(pi) - 1
    float q = -1.262588380e-06f;  // -log(1 - erf(t))
    q = q * t + 3.955537781e-05f;
    q = q * t - 5.490875808e-04f;
    q = q * t + 4.566337399e-03f;
    q = q * t - 2.594846333e-02f;
    q = q * t + 1.093644471e-01f;
    q = q * t + 6.324819997e-01f;
    q = q * t + 1.129900068e+00f;
    q = q * t - 2.480833843e-04f;
    float large = 1.0f - exp_of(-q);
    return size < 1.0f ? p * x + x : (x < 0.0f ? -large : large) + (x != x ? x : 0.0f);
}
#define DOUBLE(name) INLINE double name##_of(double x) { return name(x); }
DOUBLE(exp) DOUBLE(exp2) DOUBLE(log) DOUBLE(log2) DOUBLE(sin) DOUBLE(cos) DOUBLE(tanh) DOUBLE(erf)
INLINE double abs_of(double x) { return __builtin_fabs(x); }
INLINE double sqrt_of(double x) { return __builtin_sqrt(x); }
INLINE double floor_of(double x) { return __builtin_floor(x); }
INLINE double ceil_of(double x) { return __builtin_ceil(x); }

// May a loop that stores `count` neighbours from s on load those from l on, lane by lane? Yes if they do not overlap,
// or if what is overwritten was loaded before.
template <class S, class L> INLINE bool may_share_a_loop(const S* s, const L* l, int64_t count) {
    int64_t ahead = (const char*)s - (const char*)l;
    if (ahead >= count * (int64_t)sizeof(L)) return true;
    return sizeof(S) == sizeof(L) ? ahead <= 0 : -ahead >= count * (int64_t)sizeof(S);
}

// -- atomics -------------------------------------------------------------------------------------------------------
// `change(old)` is what the memory shall hold; what it held comes back.
template <class T, class Change> INLINE auto atomically(T* place, Change change) -> decltype(get(*place)) {
    T old;
    __atomic_load(place, &old, __ATOMIC_RELAXED);
    for (;;) {
        T wanted = stored<T>(change(get(old)));
        if (__atomic_compare_exchange(place, &old, &wanted, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return get(old);
    }
}
template <class T, class V> INLINE auto compare_and_swap(T* place, V expected, V wanted) -> decltype(get(*place)) {
    T old = stored<T>(expected), next = stored<T>(wanted);
    __atomic_compare_exchange(place, &old, &next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return get(old);
}

// -- matrix product of tiles ---------------------------------------------------------------------------------------
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#define TILE_ROWS 4
#define TILE_VECTORS 4
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#define TILE_ROWS 4
#define TILE_VECTORS 2
#else  // NEON and others: 32 registers of 16 bytes
#define VECTOR_BYTES 16
#define TILE_ROWS 4
#define TILE_VECTORS 4
#endif
typedef float vector_t __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
enum { VECTOR = VECTOR_BYTES / 4 };

// A tile of c stays in registers while its row of a and its columns of b pass by.
template <int ROWS, int VECTORS, int K>
INLINE void dot_tile(const float* a, int64_t am, int64_t ak, const float* b, int64_t bk, float* c, int64_t cm) {
    vector_t sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n) sum[m][n] = *(const vector_t*)(c + m * cm + n * VECTOR);
    for (int k = 0; k < K; ++k) {
        vector_t column[VECTORS];
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n) column[n] = *(const vector_t*)(b + k * bk + n * VECTOR);
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
            float left = a[m * am + k * ak];
#pragma GCC unroll 8
            for (int n = 0; n < VECTORS; ++n) sum[m][n] += left * column[n];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n) *(vector_t*)(c + m * cm + n * VECTOR) = sum[m][n];
}
// c[M, N] += a[M, K] b[K, N]; the columns of b and c are neighbours in memory, a may lie in any way.
template <int M, int N, int K, class A, class B, class C>
static void dot(const A* a, int64_t am, int64_t ak, const B* b, int64_t bk, C* c, int64_t cm) {
    for (int m = 0; m < M; ++m)
        for (int k = 0; k < K; ++k) {
            C left = (C)a[m * am + k * ak];
            LANES for (int n = 0; n < N; ++n) c[m * cm + n] += left * (C)b[k * bk + n];
        }
}
template <int M, int N, int K>
static void dot(const float* a, int64_t am, int64_t ak, const float* b, int64_t bk, float* c, int64_t cm) {
    if (N % VECTOR) return dot<M, N, K, float, float, float>(a, am, ak, b, bk, c, cm);
    constexpr int whole = N / VECTOR > 0 ? N / VECTOR : 1;
    constexpr int vectors = whole < TILE_VECTORS ? whole : TILE_VECTORS, rows = M < TILE_ROWS ? M : TILE_ROWS;
    for (int n = 0; n < N; n += vectors * VECTOR)
        for (int m = 0; m < M; m += rows)
            dot_tile<rows, vectors, K>(a + m * am, am, ak, b + n, bk, c + m * cm + n, cm);
}
template <class T>
static void copy_matrix(T* to, const T* from, int rows, int columns, int64_t row_stride, int64_t column_stride) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) to[i * columns + j] = from[i * row_stride + j * column_stride];
}

// -- the launch ----------------------------------------------------------------------------------------------------
struct Grid {
    int size[3];
    int64_t programs, chunk;
    const void* arguments;
    int64_t next;
};
static const char* volatile problem;  // a failed tl.device_assert of this launch

typedef void (*Parallel)(void (*body)(void*), void* argument, unsigned threads, unsigned flags);

// All threads take part; programs are handed out in order to whichever is free. `parallel`: the parallel region of
// the OpenMP library that torch has loaded, so that there is one pool; without it threads are started here.
static void play(Grid& grid, int threads, Parallel parallel, void (*body)(void*)) {
    if (grid.programs < threads) threads = (int)grid.programs;
    if (threads <= 1) return body(&grid);
    if (parallel) return parallel(body, &grid, (unsigned)threads, 0);
    pthread_t others[256];
    int started = 0;
    auto start = [](void* pair) -> void* {
        ((void (*)(void*))((void**)pair)[0])(((void**)pair)[1]);
        return nullptr;
    };
    void* pair[2] = {(void*)body, &grid};
    while (started < threads - 1 && started < 256 && !pthread_create(&others[started], nullptr, start, pair)) ++started;
    body(&grid);
    while (started) pthread_join(others[--started], nullptr);
}
