/* tools/bench_limits_avx512.c: see bench_limits.h. */
#include "tools/bench_limits.h"

#include <immintrin.h>

#define CHAINS 16 /* more than latency times throughput of an fma */
#define V __m512i
#define V_FLOATS 16
#define V_ZERO _mm512_setzero_si512()
#define V_LOAD(p) _mm512_loadu_si512((const void *)(p))
#define V_XOR(a, b) _mm512_xor_si512(a, b)
#define V_STORE(p, v) _mm512_storeu_si512((void *)(p), v)
#define F __m512
#define F_SET(x) _mm512_set1_ps(x)
#define F_FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define F_STORE(p, v) _mm512_storeu_ps(p, v)
#include "tools/bench_limits_loops.h"

const struct k3_bench_read_loop k3_bench_reads_avx512[K3_BENCH_N_READS] = READ_LOOPS;

float k3_bench_fma_avx512(uint64_t rounds, uint64_t *flop)
{
    return fma_chains(rounds, flop);
}
