/* tools/bench_limits_avx2.c: see bench_limits.h. */
#include "tools/bench_limits.h"

#include <immintrin.h>

#define CHAINS 12 /* more than latency times throughput of an fma; with x and y they are 14 of 16 registers */
#define V __m256i
#define V_FLOATS 8
#define V_ZERO _mm256_setzero_si256()
#define V_LOAD(p) _mm256_loadu_si256((const void *)(p))
#define V_XOR(a, b) _mm256_xor_si256(a, b)
#define V_STORE(p, v) _mm256_storeu_si256((void *)(p), v)
#define F __m256
#define F_SET(x) _mm256_set1_ps(x)
#define F_FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define F_STORE(p, v) _mm256_storeu_ps(p, v)
#include "tools/bench_limits_loops.h"

const struct k3_bench_read_loop k3_bench_reads_avx2[K3_BENCH_N_READS] = READ_LOOPS;

float k3_bench_fma_avx2(uint64_t rounds, uint64_t *flop)
{
    return fma_chains(rounds, flop);
}
