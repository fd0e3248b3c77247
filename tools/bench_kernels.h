/* tools/bench_kernels.h: what the two halves of k3-bench kernels share. */
#ifndef K3_TOOLS_BENCH_KERNELS_H
#define K3_TOOLS_BENCH_KERNELS_H

#include "k3-computed/kernels.h"
#include "k3-computed/team.h"
#include "tools/bench.h"
#include "tools/bench_limits.h"

struct k3_bench_arith {
    const struct k3_kernels *k;
    struct k3_team *team;
    struct k3_bench_limits *limits;
    uint32_t pairs;
    uint8_t *w; /* any weights: bf16 of moderate size, any nibbles, scales near 1 */
    size_t w_bytes;
};
/* Memory in huge pages where there are some; NULL. */
void *k3_bench_memory(size_t n);
/* bench_ops.c: everything else that a pass computes, on one thread, as a share of a token of the released model. */
int k3_bench_ops(struct k3_bench_arith *b, struct k3_err *err);

#endif
