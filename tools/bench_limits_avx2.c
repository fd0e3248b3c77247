/* tools/bench_limits_avx2.c: see bench_limits.h. */
#include "tools/bench_limits.h"

#include <immintrin.h>

#define CHAINS 12 /* more than latency times throughput of an fma */

uint64_t k3_bench_read_avx2(const void *p, size_t n)
{
    const char *at = p;
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    uint64_t out[sizeof(__m256i) / sizeof(uint64_t)], sum = 0;

    for (size_t i = 0; i < n; i += 4 * sizeof(__m256i), at += 4 * sizeof(__m256i)) {
        _mm_prefetch(at + 4096, _MM_HINT_T0);
        a = _mm256_xor_si256(a, _mm256_loadu_si256((const void *)at));
        b = _mm256_xor_si256(b, _mm256_loadu_si256((const void *)(at + sizeof(__m256i))));
        c = _mm256_xor_si256(c, _mm256_loadu_si256((const void *)(at + 2 * sizeof(__m256i))));
        d = _mm256_xor_si256(d, _mm256_loadu_si256((const void *)(at + 3 * sizeof(__m256i))));
    }
    _mm256_storeu_si256((void *)out, _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)));
    for (size_t i = 0; i < sizeof(out) / sizeof(*out); i++)
        sum ^= out[i];
    return sum;
}

float k3_bench_fma_avx2(uint64_t rounds, uint64_t *flop)
{
    __m256 acc[CHAINS], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
    float out[sizeof(__m256) / sizeof(float)], sum = 0;

#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++)
        acc[i] = _mm256_set1_ps((float)i);
    for (uint64_t r = 0; r < rounds; r++)
#pragma GCC unroll 16 /* else the chains lie in memory and not in registers */
        for (int i = 0; i < CHAINS; i++)
            acc[i] = _mm256_fmadd_ps(acc[i], x, y);
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) {
        _mm256_storeu_ps(out, acc[i]);
        for (size_t l = 0; l < sizeof(out) / sizeof(*out); l++)
            sum += out[l];
    }
    *flop = rounds * CHAINS * 2 * (sizeof(__m256) / sizeof(float));
    return sum;
}
