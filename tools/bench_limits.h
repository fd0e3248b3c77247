/* tools/bench_limits.h: the two limits of arithmetic that k3-bench measures in the same run: reading memory and fused
 * multiply-add from registers.  One worker's share each; the caller times and divides. */
#ifndef K3_TOOLS_BENCH_LIMITS_H
#define K3_TOOLS_BENCH_LIMITS_H

#include <stddef.h>
#include <stdint.h>

/* Reads n bytes (a multiple of 512) once; the return value depends on all of them. */
uint64_t k3_bench_read_avx2(const void *p, size_t n);
uint64_t k3_bench_read_avx512(const void *p, size_t n);
/* `rounds` rounds of independent fused multiply-adds.  *flop: 2 per lane and fma.  The return value depends on all. */
float k3_bench_fma_avx2(uint64_t rounds, uint64_t *flop);
float k3_bench_fma_avx512(uint64_t rounds, uint64_t *flop);

#endif
