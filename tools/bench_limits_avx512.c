/* tools/bench_limits_avx512.c: see bench_limits.h. */
#include "tools/bench_limits.h"

#include <immintrin.h>

#define CHAINS 16 /* more than latency times throughput of an fma */

uint64_t k3_bench_read_avx512(const void *p, size_t n)
{
    const char *at = p;
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    uint64_t out[sizeof(__m512i) / sizeof(uint64_t)], sum = 0;

    for (size_t i = 0; i < n; i += 4 * sizeof(__m512i), at += 4 * sizeof(__m512i)) {
        _mm_prefetch(at + 4096, _MM_HINT_T0);
        a = _mm512_xor_si512(a, _mm512_loadu_si512((const void *)at));
        b = _mm512_xor_si512(b, _mm512_loadu_si512((const void *)(at + sizeof(__m512i))));
        c = _mm512_xor_si512(c, _mm512_loadu_si512((const void *)(at + 2 * sizeof(__m512i))));
        d = _mm512_xor_si512(d, _mm512_loadu_si512((const void *)(at + 3 * sizeof(__m512i))));
    }
    _mm512_storeu_si512((void *)out, _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
    for (size_t i = 0; i < sizeof(out) / sizeof(*out); i++)
        sum ^= out[i];
    return sum;
}

float k3_bench_fma_avx512(uint64_t rounds, uint64_t *flop)
{
    __m512 acc[CHAINS], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);
    float out[sizeof(__m512) / sizeof(float)], sum = 0;

#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++)
        acc[i] = _mm512_set1_ps((float)i);
    for (uint64_t r = 0; r < rounds; r++)
#pragma GCC unroll 16 /* else the chains lie in memory and not in registers */
        for (int i = 0; i < CHAINS; i++)
            acc[i] = _mm512_fmadd_ps(acc[i], x, y);
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) {
        _mm512_storeu_ps(out, acc[i]);
        for (size_t l = 0; l < sizeof(out) / sizeof(*out); l++)
            sum += out[l];
    }
    *flop = rounds * CHAINS * 2 * (sizeof(__m512) / sizeof(float));
    return sum;
}
