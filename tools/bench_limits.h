/* tools/bench_limits.h: the two limits of arithmetic, measured in the same run and on the same team as what is compared with
 * them: the rate at which memory can be read, and fused multiply-adds from registers.  Both by the widest instructions of this
 * CPU, whatever kernels are measured. */
#ifndef K3_TOOLS_BENCH_LIMITS_H
#define K3_TOOLS_BENCH_LIMITS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "ipc/err.h"
#include "k3-computed/team.h"

struct k3_span { /* memory that may be read; borrowed */
    const void *at;
    size_t len_bytes;
};

struct k3_bench_limits;
/* Chooses the fastest of the loops below over (the first 2 GB of) the spans, which should be much larger than the caches.
 * Refused where the CPU has no AVX2. */
int k3_bench_limits_open(struct k3_bench_limits **out, struct k3_team *team, const struct k3_span *spans, size_t n_spans,
                         struct k3_err *err);
void k3_bench_limits_close(struct k3_bench_limits *l); /* NULL is accepted */
/* Bytes per second: all threads read the spans once, but no more than about most_bytes. */
double k3_bench_limits_read(struct k3_bench_limits *l, uint64_t most_bytes);
/* FLOP per second, 2 for each lane of a fused multiply-add: all threads for about `seconds`. */
double k3_bench_limits_fma(struct k3_bench_limits *l, double seconds);
/* "avx512, 4 streams a thread": what reads fastest. */
const char *k3_bench_limits_text(const struct k3_bench_limits *l, char out[64]);

/* ---- bench_limits_avx2.c, bench_limits_avx512.c: one thread's part ---- */

/* Reads n bytes (a multiple of K3_BENCH_READ_UNIT) once, as so many streams side by side, each prefetched by hand so far ahead
 * (0: left to the processor).  The return value depends on every byte. */
#define K3_BENCH_READ_UNIT 4096u
#define K3_BENCH_N_READS 8
struct k3_bench_read_loop {
    uint32_t streams, ahead_bytes;
    uint64_t (*read)(const void *p, size_t n);
};
extern const struct k3_bench_read_loop k3_bench_reads_avx2[K3_BENCH_N_READS], k3_bench_reads_avx512[K3_BENCH_N_READS];
/* `rounds` rounds of independent fused multiply-adds.  *flop: 2 per lane and fma.  The return value depends on all. */
float k3_bench_fma_avx2(uint64_t rounds, uint64_t *flop);
float k3_bench_fma_avx512(uint64_t rounds, uint64_t *flop);

#endif
