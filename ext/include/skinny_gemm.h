// Products of few rows with a weight [outputs, inputs]: weights are read once, where they lie.
//
//     rows [m, k]   r0 ------            a tile: up to 8 rows by OUTPUTS[rows] outputs, whose sums stay in registers;
//                   r1 ------            w0 w1 w2 are fetched from memory once, r0 r1 from the first-level cache
//     weight        w0 ------ w1 ------ w2 ------
//
// A sum has LANES partial sums, each over every LANES-th product in order, that are added up in pairs: the same bits for a
// row beside any others, in any tile, by any number of threads.

#pragma once

#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SKINNY_GEMM 1
#include <immintrin.h>
#include "omp_threads.h"
#endif

namespace skinny {

struct Task {
    const float *rows, *weight, *bias, *base;  // bias and base: or none
    float* out;                                // base + scale * (rows x weight + bias)
    int64_t count, outputs, inputs;
    float scale;
};

constexpr int64_t MOST_ROWS = 32;

#ifdef SKINNY_GEMM

#define SKINNY_INLINE __attribute__((always_inline)) static inline

SKINNY_INLINE void store(const Task& task, int64_t row, int64_t output, float sum) {
    const int64_t at = row * task.outputs + output;
    if (task.bias) sum += task.bias[output];
    task.out[at] = task.base ? task.base[at] + task.scale * sum : sum;
}

// The products behind the last whole vector.
__attribute__((noinline)) static float add_rest(const float* a, const float* b, int64_t count) {
    float sum = 0;
    for (int64_t at = 0; at < count; at++) sum += a[at] * b[at];
    return sum;
}

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace narrow {
typedef __m256 Lanes;
constexpr int64_t LANES = 8;
constexpr int OUTPUTS[] = {0, 8, 4, 3, 3};  // of 16 registers
SKINNY_INLINE Lanes zeros() { return _mm256_setzero_ps(); }
SKINNY_INLINE Lanes load(const float* from) { return _mm256_loadu_ps(from); }
SKINNY_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return _mm256_fmadd_ps(a, b, sum); }
SKINNY_INLINE float add_up(Lanes given) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(given), _mm256_extractf128_ps(given, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
#include "skinny_tile.h"
}  // namespace narrow
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx2,fma")
namespace wide {
typedef __m512 Lanes;
constexpr int64_t LANES = 16;
constexpr int OUTPUTS[] = {0, 8, 8, 6, 6, 4, 4, 3, 3};  // of 32 registers
SKINNY_INLINE Lanes zeros() { return _mm512_setzero_ps(); }
SKINNY_INLINE Lanes load(const float* from) { return _mm512_loadu_ps(from); }
SKINNY_INLINE Lanes multiply_add(Lanes a, Lanes b, Lanes sum) { return _mm512_fmadd_ps(a, b, sum); }
SKINNY_INLINE float add_up(Lanes given) {
    // The plain intrinsics warn of GCC 12's own undefined operand; vector shuffles came with GCC 12.
    const __m256d lower = _mm512_maskz_extractf64x4_pd(0xf, _mm512_castps_pd(given), 0);
    const __m256d upper = _mm512_maskz_extractf64x4_pd(0xf, _mm512_castps_pd(given), 1);
    return narrow::add_up(_mm256_add_ps(_mm256_castpd_ps(lower), _mm256_castpd_ps(upper)));
}
#include "skinny_tile.h"
}  // namespace wide
#pragma GCC pop_options

typedef void Compute(const Task& task, int64_t begin, int64_t end);

// The widest form that the CPU has; `lanes` bounds it (0: not). None: no such form.
static Compute* find_form(int lanes) {
    __builtin_cpu_init();
    const bool has_narrow = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_wide = has_narrow && __builtin_cpu_supports("avx512f");
    if (has_wide && (lanes == 0 || lanes == 16)) return wide::compute;
    return has_narrow && (lanes == 0 || lanes == 8) ? narrow::compute : nullptr;
}

static bool has_threads() { return omp_threads::are_there(); }

struct Shared {
    const Task& task;
    Compute* form;
};

// Outputs are shared out in whole cache lines of the result.
static void run_share(void* given) {
    const Shared& shared = *(const Shared*)given;
    const int64_t lines = (shared.task.outputs + 15) / 16, number = omp_threads::number(), count = omp_threads::count();
    const int64_t begin = lines * number / count * 16, end = lines * (number + 1) / count * 16;
    shared.form(shared.task, begin, end < shared.task.outputs ? end : shared.task.outputs);
}

static void run(const Task& task, Compute* form, unsigned threads) {
    if (threads < 2 || !has_threads()) return form(task, 0, task.outputs);
    Shared shared{task, form};
    omp_threads::parallel(run_share, &shared, threads, 0);
}

#else

typedef void Compute(const Task& task, int64_t begin, int64_t end);
static Compute* find_form(int) { return nullptr; }
static bool has_threads() { return false; }
static void run(const Task&, Compute*, unsigned) {}

#endif

}  // namespace skinny
